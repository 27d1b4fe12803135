"""Connects the processes of a run: `jax.distributed`, started where there is more than one process and nowhere else.

All ports listen on one interface: the loopback in a local launch, otherwise the one that reaches the first process, or the one that
MAESTRO_INTERFACE names.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

import jax

from .errors import ClusterError
from .meshes import ProcessGroup, process_group
from .meshes.processes import ADDRESS, LOOPBACK
from .places import DEVICES, Place, find_place, number

INTERFACE = "MAESTRO_INTERFACE"
"""Environment variable: name of the interface, such as ib0, on which arrays arrive."""

CONNECT_SECONDS, SAY_SECONDS = 300.0, 15.0
"""How long a process waits for the others, and how often it says so."""

HEARTBEAT_SECONDS, SHUTDOWN_SECONDS = 45, 30
"""After how long a process that is gone ends the others, and how long a process waits for the others at its end."""

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_SOMEWHERE = "203.0.113.1"  # An address that is kept for documentation: nothing is sent there.
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_PAST_PROXIES = "no_grpc_proxy"


def connect(seconds: float = CONNECT_SECONDS) -> ProcessGroup:
    """Connects this process with the others of its run, where there are any; before anything uses devices.

    Args:
        seconds: how long to wait for the others.

    Raises:
        ClusterError: the environment is incomplete, or the first process cannot be reached.
    """
    if jax.distributed.is_initialized():
        return process_group()
    place = find_place(os.environ)
    if DEVICES in os.environ:
        jax.config.update("jax_num_cpu_devices", number(os.environ, DEVICES))
    if place is None:
        return process_group()
    host, _, port = place.coordinator.rpartition(":")
    host = host.strip("[]")
    if not _is_loopback(host) and _resolved(host).startswith("127."):
        # Some systems give a machine's own name an address on the loopback: this is the first machine, which others know by another.
        host = own_address(host)
    _past_proxies(host)
    # Its handler would take the place of ours for SIGTERM, and swallow the signal until training begins.
    jax.config.update("jax_enable_preemption_service", False)
    if place.index:
        _wait_for_first(place, host, int(port), seconds)
    else:
        _check_free(place, host, int(port))
    # Once it is there: the way to it says which interface to use.
    address = os.environ[ADDRESS] = own_address(host)
    with _giving_up(place, seconds):
        try:
            jax.distributed.initialize(
                f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
                place.count,
                place.index,
                local_device_ids=place.accelerators,
                # JAX would take one GPU of the node for a process of a Slurm step; `place` knows better.
                cluster_detection_method="deactivate",
                coordinator_bind_address=_bind_address(host, port, address),
                # It ends the process itself then, and says less.
                initialization_timeout=int(seconds) + 30,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise _unconnected(place, f"{type(error).__name__}: {error}") from error
    _collectives_on(address)
    sys.excepthook = _end_at_once
    process_group().agreed("processes", place.count, "how many they are")
    return process_group()


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code.

    Where there are several and this one has failed, at once: an orderly end would wait for the others, which wait for this one.
    """
    group = process_group()
    if group.count > 1 and code not in (0, os.EX_TEMPFAIL):
        sys.stdout.flush()
        sys.stderr.flush()
        if group.first:
            # The others die with the first process, and may be about to say what is wrong.
            time.sleep(2)
        os._exit(code)
    # It waits for the others now. A starter that sees one of them end may send SIGTERM, which would change the code or leave a traceback.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


def own_address(coordinator: str) -> str:
    """The address of the interface on which this process listens for arrays: of one interface, never of all.

    Args:
        coordinator: host of the first process. On the loopback, all is.

    Raises:
        ClusterError: the interface that was named does not exist, or none can be found.
    """
    if _is_loopback(coordinator):
        return LOOPBACK
    if INTERFACE in os.environ:
        return _address_of(os.environ[INTERFACE])
    named = os.environ.get(ADDRESS)
    if named is not None:
        with contextlib.suppress(OSError, ValueError), socket.socket() as probe:
            # Python binds "" and "0" to all interfaces, and a name to whatever it stands for.
            found = ipaddress.IPv4Address(named)
            probe.bind((named, 0))
            if not found.is_unspecified:
                return named
        raise _no_interface(f"{ADDRESS} as an IPv4 address of this machine, which the others can reach", repr(named))
    ways = (_source_towards(coordinator), _resolved(socket.gethostname()), _source_towards(_SOMEWHERE))
    for found in ways:
        if found and not found.startswith("127."):
            return found
    raise _no_interface("a network interface with an IPv4 address", f"none that reaches {coordinator!r}")


def _bind_address(coordinator: str, port: str, address: str) -> str:
    """Where the coordination service listens: on the address by which the others know the first process, where that is one of its own."""
    if _BIND in os.environ:
        return os.environ[_BIND]
    known = _resolved(coordinator)
    if known and (_is_loopback(coordinator) or not known.startswith("127.")):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((known, 0))
            return f"{known}:{port}"
    return f"{address}:{port}"


def _check_free(place: Place, host: str, port: int) -> None:
    """Refuses a port on which something else listens: JAX says no more than that it failed."""
    with contextlib.suppress(ConnectionError, TimeoutError, socket.gaierror), socket.create_connection((host, port), timeout=1.0):
        raise _unconnected(place, f"another program listens there: choose another port, or end that program ({host}:{port})")


def _wait_for_first(place: Place, host: str, port: int, seconds: float) -> None:
    """Waits until the first process listens, whose name may not even be known yet. JAX would abort when it does not come."""
    begun = time.monotonic()
    deadline, say, last = begun + seconds, begun + SAY_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=min(5.0, max(0.1, deadline - time.monotonic()))):
                return
        except OSError as error:
            last = f"{type(error).__name__}: {error}"
            if time.monotonic() > say:
                say += SAY_SECONDS
                print(
                    f"process {place.index} of {place.count} waits for the first one at {place.coordinator}: {last}",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(0.1)
    raise _unconnected(place, f"no answer in {seconds:.0f} s: {last}")


@contextlib.contextmanager
def _giving_up(place: Place, seconds: float) -> Iterator[None]:
    """Ends this process with our error when the others do not come: JAX would abort it, and catching that is impossible."""

    def give_up() -> None:
        print(f"ClusterError: {_unconnected(place, f'not all of them after {seconds:.0f} s')}", file=sys.stderr, flush=True)
        os._exit(2)

    def say() -> None:
        begun = time.monotonic()
        while not connected.wait(SAY_SECONDS):
            waited = time.monotonic() - begun
            print(f"process {place.index} of {place.count} waits for the others to connect, {waited:.0f} s", file=sys.stderr, flush=True)

    connected, timer = threading.Event(), threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        timer.cancel()
        connected.set()


def _past_proxies(host: str) -> None:
    """Connections between processes go past the proxies that a machine has for the outer world; gRPC would use them, and hang."""
    before = os.environ.get(_PAST_PROXIES) or os.environ.get("no_proxy", "")
    os.environ[_PAST_PROXIES] = ",".join([*filter(None, [before]), host])
    jax.config.update("jax_check_proxy_envs", False)


def _collectives_on(address: str) -> None:
    """Collectives of CPU programs would listen on whatever address this machine's name has."""
    from jax._src import config, distributed, xla_bridge  # private names; JAX has no setting for this (0.10.2 and 0.12 were tried)
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    if config.cpu_collectives_implementation.value != "gloo":
        return

    def client() -> Any:
        made = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=address)
        return xla_bridge.make_cpu_client(made)

    xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def _end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traceback.print_exception(kind, error, trace)
    leave(1)


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            wanted = f"{INTERFACE} as the name of an interface with an IPv4 address"
            raise _no_interface(wanted, f"{interface!r}; there are {names}") from error
        return socket.inet_ntoa(found[20:24])


def _source_towards(host: str) -> str:
    """The own address from which a host would be reached; nothing is sent. Empty where there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])
    return ""


def _resolved(host: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host)
    return ""


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _unconnected(place: Place, have: str) -> ClusterError:
    return ClusterError(
        f"process {place.index} of {place.count} cannot connect with the others.",
        wanted=f"all {place.count} processes, and the first one at {place.coordinator}",
        have=have,
        set_by="the environment of this process",
        fix="look whether all processes run, whether the first one's port is open to the others, and into the log of each",
        anchor="cluster-connect",
    )


def _no_interface(wanted: str, have: str) -> ClusterError:
    return ClusterError(
        "this process does not know on which network interface to listen.",
        wanted=wanted,
        have=have,
        set_by="the environment of this process",
        fix=f"set {INTERFACE} to one of those that `ip address` shows",
        anchor="cluster-interface",
    )
