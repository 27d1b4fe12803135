"""Runs several processes of one run on this machine.

    python -m maestro_jax.launch --processes=2 --devices_per_process=4 -- --gin_file=configs/omni_tiny.gin

What the first process writes is on the screen, and in `LOG_DIR/process-N.log` is what each process writes. When one ends with an error, or
is killed, the others are ended; none outlives this command, however it ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .children import Children
from .errors import ConfigError, MaestroError
from .places import COORDINATOR, COUNT, DEVICES, INDEX, LOCAL_DEVICES, gpus

LOOPBACK = "127.0.0.1"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: arguments without the command's name; None takes those of the process.

    Returns:
        0 when all processes ended well, else the exit code of the first one that failed by itself (128 + n for signal n); 75 after
        SIGTERM; 2 for wrong flags.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    args, unknown = _parser().parse_known_args(given[:end])
    try:
        _check(args, unknown)
        with tempfile.TemporaryDirectory(prefix="maestro_jax-logs-") as temporary:
            return _run(args, given[end + 1 :], Path(args.log_dir or temporary))
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, arguments: Sequence[str], logs: Path) -> int:
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "process-0.log").touch()
    except OSError as error:
        raise _wrong("log_dir", "a folder that can be made and written", f"{args.log_dir!r}: {error}") from error
    with socket.socket() as reserved:
        # Bound but not listening: the first process listens on the same port, and nobody else is given it meanwhile.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((LOOPBACK, 0))
        coordinator = f"{LOOPBACK}:{reserved.getsockname()[1]}"
        environments = [_environment(args, index, coordinator) for index in range(args.processes)]
        command = [sys.executable, "-u", "-m", args.module, *arguments]
        with Children(command, environments, logs, _cores(args.processes, args.cpus)) as children:
            return children.wait()


def _environment(args: argparse.Namespace, index: int, coordinator: str) -> dict[str, str]:
    # Where a coordinator on the loopback would listen is no question.
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COORDINATOR_BIND_ADDRESS"}
    own = {
        COORDINATOR: coordinator,
        COUNT: str(args.processes),
        INDEX: str(index),
        DEVICES: str(args.devices_per_process),
        # Two-way transfers between processes that share few CPU cores hang without it.
        "PJRT_NPROC": "16",
    }
    if gpus(os.environ):
        first = index * args.devices_per_process
        own[LOCAL_DEVICES] = ",".join(map(str, range(first, first + args.devices_per_process)))
    return {**inherited, **own}


def _cores(processes: int, each: int) -> list[set[int]]:
    """The cores of each process, round robin; none where they are not bound."""
    cores = sorted(os.sched_getaffinity(0))
    return [{cores[(index * each + n) % len(cores)] for n in range(each)} for index in range(processes)] if each else []


def _check(args: argparse.Namespace, unknown: Sequence[str]) -> None:
    if unknown:
        raise _wrong("", "flags of the launcher, then --, then those of what it runs", " ".join(unknown), "put -- before them")
    for flag in ("processes", "devices_per_process"):
        if getattr(args, flag) < 1:
            raise _wrong(flag, "a whole number from 1", str(getattr(args, flag)))
    cores = len(os.sched_getaffinity(0))
    if not 0 <= args.cpus <= cores:
        raise _wrong("cpus", f"from 1 to the {cores} cores of this machine", str(args.cpus))
    there, wanted = gpus(os.environ), args.processes * args.devices_per_process
    if 0 < there < wanted:
        fix = "lower --processes or --devices_per_process, or set JAX_PLATFORMS=cpu to use CPU devices"
        raise _wrong("devices_per_process", f"at most the {there} GPUs of this machine in all processes", str(wanted), fix)
    try:
        found = importlib.util.find_spec(args.module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise _wrong("module", "a module that `python -m` finds", repr(args.module))


def _wrong(flag: str, wanted: str, have: str, fix: str = "") -> ConfigError:
    return ConfigError(
        f"--{flag} is wrong." if flag else "these flags are not the launcher's.",
        wanted=wanted,
        have=have,
        set_by=f"command line  --{flag}" if flag else "command line",
        fix=fix or f"correct --{flag}; python -m maestro_jax.launch --help",
        anchor="launch-flags",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maestro_jax.launch",
        description="Runs several processes of one run on this machine.",
        usage="%(prog)s [flags] -- [flags of the module]",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="how many; default 2")
    devices = "devices of each: GPUs in order, or CPU devices where there are none; default 1"
    parser.add_argument("--devices_per_process", type=int, default=1, metavar="N", help=devices)
    logs = "where process-N.log of each process goes; without it, the first one's output is shown, and of another one how it failed"
    parser.add_argument("--log_dir", metavar="DIR", help=logs)
    cpus = "bind each process to N CPU cores (1 if N is not given), round robin"
    parser.add_argument("--cpus", type=int, nargs="?", const=1, default=0, metavar="N", help=cpus)
    parser.add_argument("--module", default="maestro_jax.train", metavar="NAME", help="what each runs; default maestro_jax.train")
    return parser


if __name__ == "__main__":
    sys.exit(main())
