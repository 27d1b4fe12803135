"""Starts the launcher, or processes without it, with a program of a few lines; nothing that was started outlives a test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

FOLDERS = os.pathsep.join(str(folder) for folder in (Path(__file__).parent, Path(__file__).parent.parent))
SECONDS = 120

# The launcher with less patience.
_LAUNCH = (
    "import sys; from maestro_jax import children, launch; "
    "children.SETTLE_SECONDS, children.GRACE_SECONDS = 0.2, 1.0; sys.exit(launch.main(sys.argv[1:]))"
)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": FOLDERS, "JAX_PLATFORMS": "cpu", **more}


@contextlib.contextmanager
def launcher(folder: Path, code: str, *flags: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Starts the launcher with two processes that run `code`."""
    command = [sys.executable, "-c", _LAUNCH, "--module=launch_program", f"--log_dir={folder / 'logs'}", *flags, "--", code, str(folder)]
    process = subprocess.Popen(
        command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def launched(folder: Path, code: str, *flags: str, **variables: str) -> tuple[int, str, str]:
    """Runs the launcher; returns its exit code, and what it wrote to the screen and to the error output."""
    with launcher(folder, code, *flags, **variables) as process:
        out, errors = process.communicate(timeout=SECONDS)
        return process.returncode, out, errors


@contextlib.contextmanager
def processes(code: str, folder: Path, variables: list[Mapping[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts processes that run `code` as a cluster would, each with variables of its own."""
    started: list[subprocess.Popen[str]] = []
    try:
        for own in variables:
            command = [sys.executable, "-u", "-m", "launch_program", code, str(folder)]
            output = subprocess.PIPE
            started.append(subprocess.Popen(command, env=environment(**own), stdout=output, stderr=subprocess.STDOUT, text=True))
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def waited(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits until something is so; returns whether it came to be."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def lives(number: int) -> bool:
    """Whether a process runs; one that has ended and was not asked about by its parent does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end(numbers: list[int]) -> None:
    """Kills what a failed test may have left."""
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
