"""Starts processes in tests, by the launcher of the package or without it; nothing that was started outlives a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDERS = os.pathsep.join(str(folder) for folder in (Path(__file__).parent, Path(__file__).parent.parent))
SECONDS = 600

_HURRIED = (
    "import sys; from maestro_jax import children, launch; "
    "children.SETTLE_SECONDS, children.GRACE_SECONDS = 0.2, 1.0; sys.exit(launch.main(sys.argv[1:]))"
)


def environment(**more: str) -> dict[str, str]:
    """What `conftest.py` sets for the tests' own process, and more."""
    own = {"PYTHONPATH": FOLDERS, "JAX_DEFAULT_MATMUL_PRECISION": "highest", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return {**os.environ, **own, "JAX_PLATFORMS": "cpu", **more}


@contextlib.contextmanager
def started(
    folder: Path, module: str, arguments: Sequence[str], *flags: str, variables: Mapping[str, str] | None = None, hurried: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the launcher, with two processes unless a flag says otherwise.

    Args:
        folder: for "output" and "errors", which are the launcher's, and for "logs" of the processes.
        module: what each process runs.
        arguments: of the module.
        flags: of the launcher.
        variables: of the environment.
        hurried: with less patience when one of the processes has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = ["-c", _HURRIED] if hurried else ["-m", "maestro_jax.launch"]
    command = [sys.executable, *start, f"--module={module}", f"--log_dir={folder / 'logs'}", *flags, "--", *arguments]
    with (folder / "output").open("wb") as output, (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(command, env=environment(**(variables or {})), stdout=output, stderr=errors, process_group=0)
    try:
        yield process
    finally:
        # Its processes end with it.
        process.kill()
        process.wait()


def said(folder: Path) -> str:
    """The ends of all that the launcher and its processes wrote."""
    paths = [folder / "output", folder / "errors", *sorted(folder.glob("logs/*.log"))]
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


def run_processes(folder: Path, processes: int, devices: int, function: str, *arguments: str) -> list[Any]:
    """Calls a function in every process, and returns what each returned.

    Args:
        folder: for results and logs.
        processes: how many.
        devices: CPU devices of each.
        function: its module and name; it is called with the group of processes and the arguments.
        arguments: texts.
    """
    flags = f"--processes={processes}", f"--devices_per_process={devices}"
    with started(folder, "process_program", [str(folder), function, *arguments], *flags) as process:
        code = process.wait(SECONDS)
    assert code == 0, said(folder)
    return [json.loads((folder / f"returned-{n}").read_text()) for n in range(processes)]


def launcher(folder: Path, code: str, *flags: str, **variables: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Starts the launcher with processes that run a few lines."""
    return started(folder, "process_program", [str(folder), "code", code], *flags, variables=variables, hurried=True)


def launched(folder: Path, code: str, *flags: str, **variables: str) -> tuple[int, str, str]:
    """Runs the launcher; returns its exit code, and what it wrote to the screen and to the error output."""
    with launcher(folder, code, *flags, **variables) as process:
        return process.wait(SECONDS), (folder / "output").read_text(), (folder / "errors").read_text()


@contextlib.contextmanager
def processes(code: str, folder: Path, variables: Sequence[Mapping[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts processes that run a few lines as a cluster would, each with variables of its own."""
    command = [sys.executable, "-u", "-m", "process_program", str(folder), "code", code]
    found: list[subprocess.Popen[str]] = []
    try:
        for own in variables:
            output = subprocess.PIPE
            found.append(subprocess.Popen(command, env=environment(**own), stdout=output, stderr=subprocess.STDOUT, text=True))
        yield found
    finally:
        for process in found:
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


def children(parent: int) -> list[int]:
    """The processes that a process has started and that still run."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def descendants(parent: int) -> list[int]:
    """Those, the ones that they have started, and so on."""
    return [each for child in children(parent) for each in (child, *descendants(child))]


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
