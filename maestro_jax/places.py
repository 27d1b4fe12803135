"""Which process of which run this is, as the environment says it; loads no JAX where it need not.

`maestro_jax.launch` says it in variables of ours, which a user's own script can set as well. Otherwise it is what JAX reads
(JAX_COORDINATOR_ADDRESS) or what a scheduler says. JAX by itself would also start in a shell of an allocation, where nobody else comes, and
would give every process of a Slurm step one GPU, also where it has the node alone: both are decided here.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import re
from collections.abc import Mapping

from .errors import ClusterError

COORDINATOR, COUNT, INDEX = "MAESTRO_COORDINATOR", "MAESTRO_PROCESSES", "MAESTRO_PROCESS"
"""Address of the first process, how many there are, and number of this one."""
DEVICES = "MAESTRO_DEVICES_PER_PROCESS"
"""CPU devices of a process, where there is no accelerator."""
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"

_OF_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_MPI = {
    # name of JAX's class: size, rank, processes of this node, number of this one on its node
    "ompi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpi4py": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """This process among those of a run.

    Args:
        coordinator: "host:port" of the first process.
        count: processes.
        index: number of this one.
        accelerators: numbers of those on this node that this process takes; None takes all that it sees.
    """

    coordinator: str
    count: int
    index: int
    accelerators: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _Told:
    """What a scheduler says: its name in JAX, processes, number of this one, and the same on this node (0 where unknown)."""

    name: str
    count: int
    index: int
    here: int = 0
    index_here: int = 0
    own_gpus: int = 0


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Reads from the environment which process of which run this is; None where there is one process.

    Args:
        environment: `os.environ`.

    Raises:
        ClusterError: variables are missing or make no sense.
    """
    if any(name in environment for name in (COORDINATOR, COUNT, INDEX)):
        names, told = (COORDINATOR, COUNT, INDEX), None
    else:
        names, told = _OF_JAX, _scheduler(environment)
        if told is None and not any(name in environment for name in names):
            return None
    address = environment.get(names[0], "")
    count = told.count if told and names[1] not in environment else number(environment, names[1])
    if count == 1:
        return None
    index = told.index if told and names[2] not in environment else number(environment, names[2])
    if not address and told:
        address = _coordinator(told)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise incomplete(f"{names[0]} as HOST:PORT of the first process, the same in all", repr(address) if address else "nothing")
    if not index < count:
        raise incomplete(f"{names[2]} below {names[1]}", f"{index} of {count}")
    return Place(address, count, index, _accelerators(environment, told))


def gpus(environment: Mapping[str, str]) -> int:
    """How many NVIDIA GPUs JAX would find; 0 where it has been told or installed not to look for them."""
    platforms = environment.get("JAX_PLATFORMS", "")
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if (platforms and "cuda" not in platforms and "gpu" not in platforms) or not any(map(importlib.util.find_spec, plugins)):
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return 0 if visible in ("-1", "NoDevFiles") else len([each for each in visible.split(",") if each])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def number(environment: Mapping[str, str], name: str) -> int:
    """Reads a whole number.

    Raises:
        ClusterError: it is missing or is none.
    """
    text = environment.get(name, "")
    if not text.isdecimal():
        raise incomplete(f"{name} as a whole number", repr(text) if name in environment else "nothing")
    return int(text)


def incomplete(wanted: str, have: str, fix: str = "") -> ClusterError:
    """Makes the error for an environment that leaves something open.

    Args:
        wanted: the variable and what it should say.
        have: what it says.
        fix: what to do; the usual where it is empty.
    """
    return ClusterError(
        "the environment does not say which process of which run this is.",
        wanted=wanted,
        have=have,
        set_by="the environment of this process",
        fix=fix or "start with srun, mpirun, a JobSet or python -m maestro_jax.launch (docs/cluster.md), or remove these variables",
        anchor="cluster-environment",
    )


def _scheduler(environment: Mapping[str, str]) -> _Told | None:
    """What started this process as one of several, if anything did."""
    for name, (size, rank, here, rank_here) in _MPI.items():
        # Slurm's own PMI sets the same names as other MPIs do (those of Open MPI it never sets), and says the same.
        of_slurm = name == "mpi4py" and environment.get(size) == environment.get("SLURM_STEP_NUM_TASKS")
        if _more_than_one(environment, size) and not of_slurm:
            local = (number(environment, each) if each in environment else 0 for each in (here, rank_here))
            return _Told(name, number(environment, size), number(environment, rank), *local)
    # The shell of an allocation is no step, or one of one task; SLURM_NTASKS would speak of the allocation.
    if _more_than_one(environment, "SLURM_STEP_NUM_TASKS"):
        return _slurm(environment)
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment and "JAX_NUM_PROCESSES" not in environment:
        return _Told("k8s", _of_kubernetes(), number(environment, "JOB_COMPLETION_INDEX"))
    return None


def _slurm(environment: Mapping[str, str]) -> _Told:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST"):
        if name not in environment:
            raise incomplete(f"{name}, as srun sets it", "nothing")
    index, here = number(environment, "SLURM_PROCID"), number(environment, "SLURM_LOCALID")
    # "h100:2" from --gpus-per-task, "cpu=4,gres/gpu:h100=2" from --tres-per-task.
    said = environment.get("SLURM_GPUS_PER_TASK") or environment.get("SLURM_TRES_PER_TASK", "").partition("gres/gpu")[2].partition(",")[0]
    own = re.split("[:=]", said)[-1]
    # "2(x3),1": tasks of each node, in their order.
    tasks: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        size, _, times = part.rstrip(")").partition("(x")
        tasks += [int(size)] * int(times or 1) if size.isdecimal() else []
    node = environment.get("SLURM_NODEID", "")
    on_node = tasks[int(node)] if node.isdecimal() and int(node) < len(tasks) else 0
    return _Told("slurm", number(environment, "SLURM_STEP_NUM_TASKS"), index, on_node, here, int(own) if own.isdecimal() else 0)


def _accelerators(environment: Mapping[str, str], told: _Told | None) -> tuple[int, ...] | None:
    """An equal share of the GPUs of a node for each of its processes, where the scheduler has not given each its own."""
    if LOCAL_DEVICES in environment:
        numbers = environment[LOCAL_DEVICES].split(",")
        if not all(each.strip().isdecimal() for each in numbers):
            raise incomplete(f"{LOCAL_DEVICES} as whole numbers with commas", repr(environment[LOCAL_DEVICES]))
        return tuple(map(int, numbers))
    seen = gpus(environment)
    if told is None or told.here <= 1 or seen <= 1 or seen == told.own_gpus:
        return None
    if seen % told.here:
        wanted = f"as many GPUs for each of the {told.here} processes of this node"
        raise incomplete(wanted, f"{seen} GPUs", f"start another number of processes, or name those of each in {LOCAL_DEVICES}")
    share = seen // told.here
    return tuple(range(told.index_here * share, (told.index_here + 1) * share))


def _coordinator(told: _Told) -> str:
    """Where the first process listens, as JAX reads it from the scheduler's variables; the same in every process."""
    import os

    from jax._src import clusters  # a private name: what jax.distributed.initialize itself asks (0.10.2 and 0.12 were tried)

    kinds = {"ompi": clusters.OmpiCluster, "slurm": clusters.SlurmCluster, "k8s": clusters.K8sCluster, "mpi4py": clusters.Mpi4pyCluster}
    kind = kinds[told.name]
    if told.name == "ompi" and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        # Open MPI 5 no longer says where it was started.
        kind = kinds["mpi4py"]
    if kind is kinds["mpi4py"] and not kind.is_env_present():
        wanted = f"{_OF_JAX[0]}=HOST:PORT of rank 0, or the package mpi4py, which asks rank 0"
        raise incomplete(wanted, "neither", f"mpirun -x {_OF_JAX[0]}=HOST:PORT ..., or pip install mpi4py")
    try:
        return kind.get_coordinator_address(timeout_secs=60, override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"))
    except (RuntimeError, KeyError, ValueError, OSError) as error:
        wanted = f"{_OF_JAX[0]}, or what JAX needs to work it out ({kind.__name__})"
        raise incomplete(wanted, f"{type(error).__name__}: {error}") from error


def _of_kubernetes() -> int:
    """How many pods the job of this one has; the cluster has to be asked."""
    from jax._src.clusters import K8sCluster

    fix = f"set {', '.join(_OF_JAX)} as deploy/jobset.yaml does; JAX_NUM_PROCESSES=1 for a single pod"
    if importlib.util.find_spec("kubernetes") is None:
        wanted = f"{', '.join(_OF_JAX)}, or the package kubernetes, which asks the cluster"
        raise incomplete(wanted, "neither, in a pod of an indexed job", fix)
    try:
        K8sCluster.is_env_present()  # It opens the connection too.
        return int(K8sCluster.get_process_count())
    except Exception as error:  # the client of Kubernetes has errors of many kinds
        raise incomplete("an answer of the cluster about this pod's job", f"{type(error).__name__}: {error}", fix) from error


def _more_than_one(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "1")
    return text.isdecimal() and int(text) > 1
