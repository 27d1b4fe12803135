"""Runs several processes of one run on this machine.

    python -m maestro_jax.launch --processes=2 --devices_per_process=4 -- --gin_file=configs/omni_tiny.gin

What the first process writes is on the screen, and in `LOG_DIR/process-N.log` is what each process writes. When one ends with an error, or
is killed, the others are ended; none outlives this command, however it ends.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from .cluster import COORDINATOR, COUNT, DEVICES, INDEX
from .errors import ClusterError, MaestroError
from .meshes.processes import ADDRESS, LOOPBACK

GRACE_SECONDS = 20.0
"""How long processes have to end by themselves when one has failed, before they are killed."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: arguments without the command's name; None takes those of the process.

    Returns:
        0 when all processes ended well, else the exit code of the first one that failed (128 + n for signal n).
    """
    parser = _parser()
    args = parser.parse_args(argv)
    rest = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    try:
        if args.processes < 1 or args.devices_per_process < 1:
            raise _wrong(f"--processes={args.processes} --devices_per_process={args.devices_per_process}")
        with tempfile.TemporaryDirectory(prefix="maestro_jax-logs-") as temporary:
            return _run(args, rest, Path(args.log_dir or temporary))
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, arguments: Sequence[str], logs: Path) -> int:
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _wrong(f"--log_dir={args.log_dir} ({error})") from error
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    port, shown = _free_port(), []
    try:
        for index in range(args.processes):
            with (logs / f"process-{index}.log").open("wb") as log:
                # The first one's output goes to the screen too.
                output = subprocess.PIPE if index == 0 else log
                command = [sys.executable, "-u", "-m", args.module, *arguments]
                process = subprocess.Popen(
                    command,
                    env=_environment(args, index, port),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=_die_with(os.getpid(), index if args.cpus else None),
                )
                processes.append(process)
            if process.stdout is not None:
                shown.append(threading.Thread(target=_show, args=(process.stdout, logs / "process-0.log"), daemon=True))
                shown[-1].start()
        code = _wait(processes, logs if args.log_dir else None)
        for thread in shown:
            thread.join(timeout=5)
        return code
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Path | None) -> int:
    """Waits for all; once one has failed, the others have some seconds left."""
    code, deadline = 0, math.inf
    while any(process.poll() is None for process in processes):
        failed = next((n for n, process in enumerate(processes) if process.poll() not in (None, 0)), None)
        if failed is not None and not code:
            code = _code(processes[failed].returncode)
            where = f"; its log is {logs / f'process-{failed}.log'}" if logs is not None else ""
            print(f"process {failed} ended with code {code}; the others are ended{where}", file=sys.stderr)
            deadline = time.monotonic() + GRACE_SECONDS
            for process in processes:
                if process.poll() is None:
                    process.terminate()
        if time.monotonic() > deadline:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        time.sleep(0.05)
    return code or next((_code(process.returncode) for process in processes if process.returncode), 0)


def _code(returned: int) -> int:
    return 128 - returned if returned < 0 else returned


def _environment(args: argparse.Namespace, index: int, port: int) -> dict[str, str]:
    own = {
        COORDINATOR: f"{LOOPBACK}:{port}",
        COUNT: str(args.processes),
        INDEX: str(index),
        DEVICES: str(args.devices_per_process),
        ADDRESS: LOOPBACK,
        # Processes that share CPU cores hang without it in two-way transfers.
        "PJRT_NPROC": "16",
    }
    return {**os.environ, **own}


def _show(stream: IO[bytes], log: Path) -> None:
    with log.open("wb") as file:
        for line in stream:
            file.write(line)
            file.flush()
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()


def _die_with(parent: int, core: int | None) -> Callable[[], None]:
    """What a new process does before it becomes the command: it asks the system to be killed when its parent dies."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        # A group of its own: a terminal's Ctrl-C comes once, from the parent.
        os.setpgid(0, 0)
        if core is not None:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[core % len(cores)]})
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _wrong(have: str) -> ClusterError:
    return ClusterError(
        "the processes cannot be started.",
        wanted="--processes and --devices_per_process of at least 1, and a folder for logs that can be written",
        have=have,
        set_by="the command line",
        fix="correct the flag; python -m maestro_jax.launch --help",
        anchor="launch-flags",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m maestro_jax.launch", description="Runs several processes of one run on this machine.")
    parser.add_argument("--processes", type=int, default=2, help="how many; default 2")
    parser.add_argument("--devices_per_process", type=int, default=1, help="CPU devices of each, where there is no accelerator; default 1")
    parser.add_argument("--log_dir", help="where process-N.log of each process goes; without it, only the first one's output is seen")
    parser.add_argument("--cpus", action="store_true", help="bind each process to one CPU core, round robin")
    parser.add_argument("--module", default="maestro_jax.train", help="what each process runs; default maestro_jax.train")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="after --, the arguments of what is run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
