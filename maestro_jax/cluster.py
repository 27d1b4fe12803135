"""How the processes of a run find each other: by what Slurm, Open MPI, Kubernetes or `maestro_jax.launch` say in the environment.

`jax.distributed` is the engine. It is started where there is more than one process, and nowhere else: not in a plain shell, not in a
notebook inside an allocation. All ports listen on one interface: the loopback in a local launch, otherwise the one that reaches the first
process, or the one that MAESTRO_INTERFACE names.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

from .errors import ClusterError
from .meshes import ProcessGroup, process_group
from .meshes.processes import ADDRESS, LOOPBACK

COORDINATOR, COUNT, INDEX, DEVICES = "MAESTRO_COORDINATOR", "MAESTRO_PROCESSES", "MAESTRO_PROCESS", "MAESTRO_DEVICES_PER_PROCESS"
"""Environment variables by which `maestro_jax.launch`, or a user's own script, says who takes part; devices are those of a CPU process."""

INTERFACE = "MAESTRO_INTERFACE"

HEARTBEAT_SECONDS, SHUTDOWN_SECONDS = 45, 30
"""After how long a process that is gone ends the others, and how long a process waits for the others at its end."""

_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclasses.dataclass(frozen=True)
class Place:
    """This process among those of a run.

    Args:
        coordinator: "host:port" of the first process.
        count: processes.
        index: number of this one.
    """

    coordinator: str
    count: int
    index: int


def connect() -> ProcessGroup:
    """Connects this process with the others of its run, where there are any; before anything uses devices.

    Raises:
        ClusterError: the environment is incomplete, or the first process cannot be reached.
    """
    import jax  # here, so that the environment can still be set by what imports this module

    if jax.distributed.is_initialized():
        return process_group()
    place = find_place(os.environ)
    if DEVICES in os.environ:
        jax.config.update("jax_num_cpu_devices", _number(os.environ, DEVICES))
    if place is None:
        return process_group()
    host, _, port = place.coordinator.rpartition(":")
    try:
        address = os.environ[ADDRESS] = _address(host, int(port))
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            coordinator_bind_address=f"{address}:{port}",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"process {place.index} of {place.count} cannot connect with the others.",
            wanted=f"the first process at {place.coordinator}",
            have=f"{type(error).__name__}: {error}",
            set_by="the environment of this process",
            fix="look whether the first process runs and its port is open to the others; MAESTRO_INTERFACE names another interface",
            anchor="cluster-connect",
        ) from error
    return process_group()


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Reads from the environment which process of which run this is; None where there is one process.

    Args:
        environment: `os.environ`.

    Raises:
        ClusterError: variables are missing or make no sense.
    """
    ours = [name for name in (COORDINATOR, COUNT, INDEX) if name in environment]
    if ours:
        if len(ours) < 3:
            raise _incomplete(f"all of {COORDINATOR}, {COUNT} and {INDEX}", f"only {', '.join(ours)}")
        place = Place(environment[COORDINATOR], _number(environment, COUNT), _number(environment, INDEX))
        if not place.index < place.count or ":" not in place.coordinator:
            raise _incomplete("a host and port, and a number of this process below that of all", repr(place))
        return place if place.count > 1 else None
    if not _in_cluster(environment):
        return None
    from jax._src.clusters import ClusterEnv  # a private name: what jax.distributed.initialize itself asks

    try:
        found: Any = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, None)
        return Place(*found[:3])
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise _incomplete("what JAX needs to know of a cluster's processes", f"{type(error).__name__}: {error}") from error


def _in_cluster(environment: Mapping[str, str]) -> bool:
    """Whether a scheduler started this process as one of several."""
    several = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    if any(environment.get(name, "1").isdecimal() and int(environment.get(name, "1")) > 1 for name in several):
        return True
    return "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment


def _address(host: str, port: int) -> str:
    """The address of the interface on which this process listens."""
    name = os.environ.get(INTERFACE)
    if ADDRESS in os.environ and name is None:
        return os.environ[ADDRESS]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name is not None:
            found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(found[20:24])
        # Sends nothing: it only asks the system by which interface the first process would be reached.
        probe.connect((host.strip("[]") or LOOPBACK, port))
        return str(probe.getsockname()[0])


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise _incomplete(f"{name} as a whole number", repr(text))
    return int(text)


def _incomplete(wanted: str, have: str) -> ClusterError:
    return ClusterError(
        "the environment does not say which process of which run this is.",
        wanted=wanted,
        have=have,
        set_by="the environment of this process",
        fix="start with srun, mpirun, a JobSet or python -m maestro_jax.launch (docs/cluster.md), or remove these variables",
        anchor="cluster-environment",
    )
