"""Ends a run of several processes when one of them stands still, and says in every process what it waits for.

A process that is stuck or stopped hangs all others for ever, in silence (https://github.com/jax-ml/jax/issues/38503). So each tells the
first one every second that it lives and how far it is; the first one ends the run when one says nothing, or gets no further, and the others
end when it says so, or says nothing itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from ..meshes import ProcessGroup
from ..schedules import Schedule, Task

SILENT_SECONDS = 20.0
"""After how long without a word a process counts as stopped."""

LATE_FACTOR, LATE_WINDOWS, LATE_SECONDS, FIRST_SECONDS = 20, 2, 60.0, 600.0
"""A task is late after `LATE_FACTOR` times what it and the wait before it are scheduled to take, at the pace of the slowest step so far; at
least after `LATE_WINDOWS` times the steps that are scheduled together, because costs may be far from the truth and it may wait for any
other task of them; and at least after `LATE_SECONDS`. In the first two steps, when programs run for the first time and the data is
opened, after `FIRST_SECONDS`. Where nothing is issued and no step ends, `LATE_FACTOR` times the slowest step counts."""

EXIT_CODE = 70
_BEAT_SECONDS = 1.0

Replica = tuple[str, int]
"""(section, number of the replica)."""


@dataclasses.dataclass
class Standing:
    """Where a process stands, for people, and whether it gets on.

    Args:
        steps: steps that have ended.
        issued: the task that each replica was given last.
        waiting: what the dispatching thread waits for; empty when it does not.
        preparing: what is being made ready for later steps; empty when nothing is.
        unfinished: returns the tasks that each replica was given and that have not ended, oldest first.
        moved: when something was issued or ended last, in seconds of `time.monotonic`.
        slowest: seconds of the slowest step but the first.
        slowness: seconds for each scheduled nanosecond in the slowest step by that measure.
        paused: whether nothing has to move: before training, and while files are written.
    """

    steps: int = 0
    issued: dict[Replica, Task] = dataclasses.field(default_factory=dict)
    waiting: str = ""
    preparing: str = ""
    unfinished: Callable[[], dict[Replica, list[Task]]] = dict
    moved: float = dataclasses.field(default_factory=time.monotonic)
    slowest: float = 0.0
    slowness: float = 0.0
    paused: bool = True
    _began: float = dataclasses.field(default_factory=time.monotonic)
    _scheduled: float = 0.0
    _steps: int = 1
    _tasks: tuple[Task, ...] = ()
    _oldest: dict[Replica, tuple[Task, float]] = dataclasses.field(default_factory=dict)

    def begin(self) -> None:
        """From now on, things have to move."""
        self.paused, self.moved, self._began = False, time.monotonic(), time.monotonic()
        self._oldest.clear()

    def window(self, schedule: Schedule, steps: int) -> None:
        """Notes that the tasks of some steps are about to be issued."""
        self._tasks, self._scheduled, self._steps = schedule.tasks, schedule.makespan / steps, steps

    def start(self, task: Task) -> None:
        """Notes that a task is issued."""
        self.issued[task.section, task.replica] = task
        self.moved = time.monotonic()

    def step_ended(self) -> None:
        """Notes that a step has ended on this process's devices."""
        now = time.monotonic()
        if self.steps:
            self.slowest = max(self.slowest, now - self._began)
            self.slowness = max(self.slowness, (now - self._began) / max(self._scheduled, 1.0))
        self.steps, self.moved, self._began = self.steps + 1, now, now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """While this lasts, nothing has to move: files are written, which may take long."""
        self.paused = True
        try:
            yield
        finally:
            self.begin()

    def late(self) -> str:
        """Says which task is late, or that nothing moves; empty while all is well. To be asked every second or so, by one thread."""
        if self.paused:
            return ""
        now = time.monotonic()
        for key, tasks in self.unfinished().items():
            task, since = self._oldest.get(key, (None, now))
            if not tasks or task is not tasks[0]:
                self._oldest.pop(key, None)
                since = now
            if tasks:
                self._oldest[key] = tasks[0], since
                of_task = LATE_FACTOR * self.slowness * self._span(tasks[0])
                limit = self._limit(max(of_task, LATE_WINDOWS * self._steps * self.slowest))
                if now - since > limit:
                    return f"{_told(tasks[0])} of {key[0]} replica {key[1]} is late: {now - since:.0f} s, limit {limit:.0f} s"
        limit = self._limit(LATE_FACTOR * self.slowest)
        return f"nothing was issued and no step ended for {now - self.moved:.0f} s, limit {limit:.0f} s" if now - self.moved > limit else ""

    def _span(self, task: Task) -> int:
        """Scheduled nanoseconds of a task and of the wait before it; 0 for one of an earlier window."""
        before = 0
        for other in self._tasks:
            if other is task:
                return task.end - before
            if (other.section, other.replica) == (task.section, task.replica):
                before = other.end
        return 0

    def _limit(self, seconds: float) -> float:
        return max(LATE_SECONDS, seconds) if self.steps > 1 else FIRST_SECONDS

    def describe(self) -> str:
        """Several lines."""
        lines = [f"{self.steps} steps have ended; waits for {self.waiting or 'nothing'}"]
        lines += [f"  beside it: {self.preparing}"] if self.preparing else []
        unfinished = self.unfinished()
        for key, task in sorted(self.issued.items()):
            tasks = unfinished.get(key, [])
            oldest = f", the oldest is {_told(tasks[0])}" if tasks else ""
            lines.append(f"  {key[0]} replica {key[1]}: last issued {_told(task)}; {len(tasks)} unfinished{oldest}")
        return "\n".join(lines)


def _told(task: Task) -> str:
    return f"{task.kind} of step {task.step} in its window ({len(task.items)} items, bucket {task.bucket})"


class Watchdog:
    """Watches over a run while it is open.

    Args:
        group: the processes.
        standing: of this one.
        end: what ends this process; by default at once, because whatever hangs cannot be asked.
    """

    def __init__(self, group: ProcessGroup, standing: Standing, end: Callable[[int], Any] = os._exit) -> None:
        self._group, self._standing, self._end = group, standing, end
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._pipe: tuple[int, int] = (-1, -1)
        self._before: Any = None
        self._heard: dict[int, tuple[str, float]] = {}
        self._answered, self._late = time.monotonic(), ""
        self._threads = [threading.Thread(target=work, name="watchdog", daemon=True) for work in (self._talk, self._watch, self._show)]

    def __enter__(self) -> Watchdog:
        self._listen()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * _BEAT_SECONDS)
        if self._before is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGUSR1, self._before)
        for descriptor in self._pipe:
            os.close(descriptor)

    def _listen(self) -> None:
        """Takes SIGUSR1. The system writes into a pipe when it comes: the main thread may be inside a call that does not return."""
        self._pipe, self._before = os.pipe(), None
        for descriptor in self._pipe:
            os.set_blocking(descriptor, False)
        if threading.current_thread() is not threading.main_thread():
            return
        other = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if other != -1:
            # A notebook's event loop has it.
            signal.set_wakeup_fd(other)
            return
        self._before = signal.signal(signal.SIGUSR1, lambda number, frame: None)

    def _talk(self) -> None:
        """Says that this process lives, and reads what the others say; a call may hang when the first process does."""
        number = 0
        while not self._closed.wait(_BEAT_SECONDS) and self._group.count > 1:
            number += 1
            self._late = self._standing.late()
            self._group.say("alive", json.dumps([number, self._late]))
            for process in range(1, self._group.count) if self._group.first else (0,):
                told = self._group.heard("alive", process)
                if told != self._heard.get(process, ("", 0.0))[0]:
                    self._heard[process] = told, time.monotonic()
            verdict = self._group.heard("verdict", 0)
            self._answered = time.monotonic()
            if verdict:
                self._stop(verdict)

    def _watch(self) -> None:
        """Judges by what was heard."""
        begun = time.monotonic()
        while not self._closed.wait(_BEAT_SECONDS) and self._group.count > 1:
            now = time.monotonic()
            if now - self._answered > SILENT_SECONDS:
                self._stop(f"process 0 has said nothing for {SILENT_SECONDS:.0f} s")
            for process in range(1, self._group.count) if self._group.first else ():
                told, at = self._heard.get(process, ("", begun))
                if now - at > SILENT_SECONDS:
                    self._judge(f"process {process} has said nothing for {SILENT_SECONDS:.0f} s")
                elif told and json.loads(told)[1]:
                    self._judge(f"process {process} gets no further: {json.loads(told)[1]}")
            if self._group.first and self._late:
                self._judge(f"process 0 gets no further: {self._late}")

    def _judge(self, text: str) -> None:
        """The first process tells all, and gives them time to say what they wait for."""
        self._group.say("verdict", text)
        self._stop(text)

    def _stop(self, text: str) -> None:
        if self._closed.is_set() or not self._ending.acquire(blocking=False):
            return
        print(f"watchdog: {text}\n{self._here()}", file=sys.stderr, flush=True)
        time.sleep(3 * _BEAT_SECONDS if self._group.first else 0)
        self._end(EXIT_CODE)

    def _show(self) -> None:
        """Prints where this process stands whenever SIGUSR1 comes."""
        while not self._closed.is_set():
            ready, _, _ = select.select([self._pipe[0]], [], [], _BEAT_SECONDS)
            if ready and signal.SIGUSR1 in os.read(self._pipe[0], 4096):
                print(self._here(), file=sys.stderr, flush=True)

    def _here(self) -> str:
        among = f" and for {self._group.waiting}" if self._group.waiting else ""
        return f"process {self._group.index} stands here{among}: {self._standing.describe()}"
