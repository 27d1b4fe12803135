"""Starts the ways of training and lets them take turns on the two cores."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from maestro_jax.launch import LOOPBACK
from maestro_jax.places import COORDINATOR, COUNT, DEVICES, INDEX

ROOT = Path(__file__).resolve().parents[2]
CORES = 2
IDLE_SECONDS = 2.0
"""How long processes that wait are watched."""

Answers = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A window of one way.

    Args:
        seconds: from the beginning in the first process to the end in the last one.
        busy: of these, in which each process computed, all its threads together.
        losses: of each step.
        facts: what the first process told besides.
    """

    seconds: float
    busy: tuple[float, ...]
    losses: tuple[float, ...]
    facts: Mapping[str, Any]


class WayFailed(Exception):
    """A process of a way has ended; the text holds the last lines of its log."""


class Processes:
    """The processes of one way; as a context, it ends them.

    Args:
        spec: what `worker` is told, but for the cores.
        logs: folder for what they print.
        together: one process on all cores, instead of one on each.
        python: interpreter that runs them.
        module: what it runs.
    """

    def __init__(
        self, spec: Mapping[str, Any], logs: Path, *, together: bool = False, python: str = sys.executable, module: str | None = None
    ) -> None:
        self.name = f"{spec['case']}-{spec['way']}"
        cores = sorted(os.sched_getaffinity(0))[:CORES]
        self._cores = [cores] if together else [[core] for core in cores]
        self._spec, self._python, self._module = spec, python, module or f"{__package__}.worker"
        self.logs = [logs / f"{self.name}-{index}.log" for index in range(len(self._cores))]
        self._processes: list[subprocess.Popen[str]] = []
        self._port: socket.socket | None = None

    def __enter__(self) -> Processes:
        # Bound but not listening: the first process listens on the same port, and nobody else is given it meanwhile.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port.bind((LOOPBACK, 0))
        for index, cores in enumerate(self._cores):
            with self.logs[index].open("w") as log:
                command = [self._python, "-m", self._module, json.dumps({**self._spec, "cores": cores})]
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment(index)
                )
            self._processes.append(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + (0 if error is not None else 10)
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._port is not None:
            self._port.close()

    def _environment(self, index: int) -> dict[str, str]:
        # Transfers in both directions hang where a process thinks that it has one core; programs are as fast with more threads as with one.
        found = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PJRT_NPROC": "16"}
        if self._spec["quick"]:
            # Nobody looks at the speed, and compiling takes longer than all else.
            found["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        if len(self._cores) > 1:
            port = self._port.getsockname()[1] if self._port is not None else 0
            found |= {COORDINATOR: f"{LOOPBACK}:{port}", COUNT: str(len(self._cores)), INDEX: str(index), DEVICES: "1"}
        return found

    def ready(self) -> None:
        """Waits until all have compiled and warmed up."""
        self._answers()

    def window(self) -> Measured:
        """Lets them train a window.

        Raises:
            WayFailed: one has ended instead.
        """
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write("go\n")
                process.stdin.flush()
        found = self._answers()
        return Measured(
            seconds=max(each["end"] for each in found) - min(each["begin"] for each in found),
            busy=tuple(each["busy"] for each in found),
            losses=tuple(found[0]["losses"]),
            facts=found[0],
        )

    def computed(self) -> float:
        """Seconds for which the processes have computed since they started."""
        ticks = 0
        for process in self._processes:
            # The name, in brackets, may hold spaces; behind it, user and system time are the 12th and 13th field.
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _answers(self) -> Answers:
        found = []
        for process, log in zip(self._processes, self.logs, strict=True):
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise WayFailed(f"{self.name} has ended:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
            found.append(json.loads(line))
        return found


def idle_share(ways: Sequence[Processes], seconds: float = IDLE_SECONDS) -> float:
    """What share of a core the processes that wait use, all together."""
    before = sum(each.computed() for each in ways)
    time.sleep(seconds)
    return (sum(each.computed() for each in ways) - before) / seconds


def take_turns(ways: Mapping[str, Processes], rounds: int, say: Callable[[str], None]) -> dict[str, list[Measured]]:
    """Lets each way train a window in each round; another one begins each round."""
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(ways[name].window())
            say(f"round {number + 1}: {name} {found[name][-1].seconds:.2f} s")
    return found
