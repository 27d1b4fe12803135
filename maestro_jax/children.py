"""Processes of one run on this machine: started together, ended together, and none outlives the process that started them."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

SETTLE_SECONDS, GRACE_SECONDS = 3.0, 15.0
"""When one has failed: how long the others have to end by themselves, and then, after SIGTERM, until they are killed."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ORDERLY = (0, os.EX_TEMPFAIL)  # Done, or stopped by SIGTERM with a checkpoint: then the others are about to end too.
_ABORTED = 128 + signal.SIGABRT
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_POLL_SECONDS = 0.02


class Children:
    """Several processes; as a context, it ends those that still run.

    Args:
        command: what each runs.
        environments: of each, in their order.
        logs: folder for `process-N.log`.
        cores: CPU cores of each; empty leaves it all of them.
    """

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Path, cores: Sequence[set[int]] = ()
    ) -> None:
        self._command, self._environments, self._cores = command, environments, cores
        self.logs = [logs / f"process-{index}.log" for index in range(len(environments))]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        self._told: list[int] = []
        self._before: dict[int, object] = {}
        self._screen: threading.Thread | None = None

    def __enter__(self) -> Children:
        for number in _PASSED_ON:
            self._before[number] = signal.signal(number, self._pass_on)
        try:
            self._start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        for number in self._told:
            self._send(number)
        self._screen = threading.Thread(target=_show, args=(self._processes[0].stdout, self.logs[0]), daemon=True)
        self._screen.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            _kill(process)
            process.wait()
        if self._screen is not None:
            # What has left the group of a killed process may hold its output open.
            self._screen.join(timeout=5)
        for number, before in self._before.items():
            signal.signal(number, before)  # pyright: ignore[reportArgumentType]

    def _start(self) -> None:
        for index, environment in enumerate(self._environments):
            with self.logs[index].open("wb") as log:
                process = subprocess.Popen(
                    self._command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    # The first one's output goes to the screen too.
                    stdout=log if index else subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    # A group of its own: a terminal's Ctrl-C comes once, from here, and the group is ended with what it has started.
                    process_group=0,
                    preexec_fn=_prepare(os.getpid(), self._cores[index] if self._cores else None),
                )
            self._processes.append(process)

    def wait(self) -> int:
        """Waits for all; once one has failed, the others are ended.

        Returns:
            0 when all ended well, else the exit code of the first one that failed by itself; 128 + n for signal n.
        """
        while not (ended := self._ended()) and self._running:
            if os.EX_TEMPFAIL in self._codes.values() and signal.SIGTERM not in self._told:
                # One was stopped by somebody else: the others cannot go on without it.
                self._pass_on(signal.SIGTERM, None)
            time.sleep(_POLL_SECONDS)
        if not ended:
            return max(self._codes.values(), default=0)
        # When several have ended at a time, one that was aborted was probably so because of another.
        index, code = min(ended.items(), key=lambda each: (each[1] == _ABORTED, each[0]))
        self._say(index, code)
        self._wait_for_all(SETTLE_SECONDS)
        self._send(signal.SIGTERM)
        self._wait_for_all(GRACE_SECONDS)
        return code

    @property
    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for index, process in enumerate(self._processes) if index not in self._codes]

    def _ended(self) -> dict[int, int]:
        """Notes who has ended since the last call, and returns the codes of those that failed."""
        failed = {}
        for index, process in enumerate(self._processes):
            if index in self._codes or process.poll() is None:
                continue
            returned = process.returncode
            code = 128 - returned if returned < 0 else returned
            if code == 128 + signal.SIGTERM and signal.SIGTERM in self._told:
                code = os.EX_TEMPFAIL  # Stopped before it took SIGTERM itself: there was nothing to save.
            if code == _ABORTED and os.EX_TEMPFAIL in self._codes.values():
                code = os.EX_TEMPFAIL  # JAX ends it so when one is gone that was stopped.
            self._codes[index] = code
            # What it started, such as readers of data, ends with it.
            _kill(process)
            # A stop that was asked for is no failure: others may be writing what is to be kept.
            if code not in _ORDERLY and not (code == 128 + signal.SIGINT and signal.SIGINT in self._told):
                failed[index] = code
        return failed

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self._ended()

    def _say(self, index: int, code: int) -> None:
        text = self.logs[index].read_text(encoding="utf-8", errors="replace") if index else ""
        last = "".join(f"  {line}\n" for line in text.splitlines()[-20:])
        print(f"process {index} ended with code {code}; the others are ended\n{last}", end="", file=sys.stderr, flush=True)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._told.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._running:
            process.send_signal(number)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _show(stream: IO[bytes], log: Path) -> None:
    """Copies what the first process writes to its log and to the screen."""
    decoder, seen = codecs.getincrementaldecoder("utf-8")("replace"), True
    with stream, log.open("wb") as file:
        while chunk := os.read(stream.fileno(), 65536):
            file.write(chunk)
            file.flush()
            try:
                if seen:
                    sys.stdout.write(decoder.decode(chunk))
                    sys.stdout.flush()
            except OSError:
                seen = False  # Who read the screen, such as `head`, has gone.


def _prepare(parent: int, cores: set[int] | None) -> Callable[[], None]:
    """What a new process does before it becomes the command."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        # The system kills it when its parent dies, however that happens.
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        # Until the run takes it itself, asking where it stands would end it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare
