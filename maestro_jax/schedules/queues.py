"""What a schedule takes on devices whose tasks last as long as they last, not as long as was scheduled.

As in the runtime, a host thread gives tasks to devices, and a queue of each replica does the waiting: by default in the order of the
schedule, without waiting for inputs; adaptively, only what has its inputs.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable

from .cutting import microbatches_of
from .loop import DEVICES, Progress, run
from .policies import adaptive, replay
from .tasks import Schedule, Task
from .workload import Workload

Lasts = Callable[[Task], int]
"""Nanoseconds that a task really takes."""

IN_FLIGHT = 8
"""Most unfinished tasks that a replica is given, where nothing else is said; docs/scheduling.md says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """What came out of a schedule.

    Args:
        scheduled: its tasks in the order in which they were issued.
        measured: the same tasks with their real times.
        issued: nanoseconds at which each was given to its devices.
    """

    scheduled: Schedule
    measured: Schedule
    issued: tuple[int, ...]


class Queues:
    """An executor whose replicas take tasks from queues, first in, first out.

    Args:
        progress: what is run.
        lasts: what tasks really take; None: what the workload's costs say.
        depth: most tasks that a replica has been given and has not ended.
        waits: whether a task ends for the policy when it really ends; else as soon as it has been issued.
        call: nanoseconds of the host for each task.
    """

    def __init__(self, progress: Progress, lasts: Lasts | None, depth: int, waits: bool, call: int = 0) -> None:
        self._progress, self._lasts, self._depth, self._waits, self._call = progress, lasts, depth, waits, call
        self._host = 0
        # As with real devices: whatever was issued counts as available, unless it has to end first.
        self.now = 0 if waits else DEVICES
        self._free: dict[object, int] = defaultdict(int)
        self._ends: dict[tuple[str, int], deque[int]] = defaultdict(deque)
        self._running: list[tuple[int, int, Task]] = []
        self.measured: list[Task] = []
        self.issued: list[int] = []

    def start(self, task: Task) -> int:
        """Puts a task into the queue of its replica; returns when it will end."""
        self._pass(self._host + self._call)
        section = self._progress.workload.sections[task.section]
        devices = section.devices[task.replica] if section.devices else [(task.section, task.replica)]
        # What it waits for has been issued before it, so its times are known.
        node = self._progress.nodes[self._progress.key_of(task)]
        start = max(self._host, node.available, *(self._free[device] for device in devices))
        real = dataclasses.replace(task, start=start, end=start + (self._lasts(task) if self._lasts else node.duration))
        self._free |= dict.fromkeys(devices, real.end)
        self.issued.append(self._host)
        self.measured.append(real)
        heapq.heappush(self._running, (real.end, len(self.measured), real))
        ends = self._ends[task.section, task.replica]
        ends.append(real.end)
        if len(ends) > self._depth:
            self._pass(ends.popleft())
        return real.end

    def wait(self, until: int | None) -> list[Task]:
        """Returns what was issued, or lets time pass until something ends."""
        if not self._waits:
            found, self._running = [task for _, _, task in self._running], []
            return found
        times = [self._running[0][0]] if self._running else []
        self._pass(min(times if until is None else [*times, until], default=0))
        ended = []
        while self._running and self._running[0][0] <= self._host:
            ended.append(heapq.heappop(self._running)[2])
        return ended

    def _pass(self, until: int) -> None:
        """The time of the host goes on."""
        self._host = max(self._host, until)
        self.now = self._host if self._waits else DEVICES


def execute(
    workload: Workload, schedule: Schedule, lasts: Lasts | None = None, depth: int = IN_FLIGHT, in_order: bool = True, call: int = 0
) -> Execution:
    """Runs a schedule on simulated queues.

    Args:
        workload: what is done.
        schedule: a valid schedule of it.
        lasts: what tasks really take, in nanoseconds; None: what the workload's costs say, which need not be those of the schedule.
        depth: most tasks that a replica has been given and has not ended.
        in_order: whether tasks are issued as scheduled; else each replica takes its first one that has its inputs.
        call: nanoseconds of the host for each task.

    Raises:
        ScheduleError: when the schedule is not one of this workload.
    """
    progress = Progress(workload, microbatches_of(workload, schedule.tasks))
    queues = Queues(progress, lasts, depth, waits=not in_order, call=call)
    chooser = replay(progress, schedule) if in_order else adaptive(progress, schedule, depth)
    issued = Schedule(tasks=tuple(run(progress, chooser, queues)))
    return Execution(scheduled=issued, measured=Schedule(tasks=tuple(queues.measured)), issued=tuple(queues.issued))


def perturbed(schedule: Schedule, noise: float, seed: int = 0) -> Lasts:
    """Durations that differ from the scheduled ones by chance, by the same factors for every rule and depth.

    Args:
        schedule: whose tasks are perturbed.
        noise: standard deviation of the logarithm of the factors, whose mean is 1; 0.1 is about 10 %.
        seed: of the factors.
    """
    chance = random.Random(seed)
    factors = {_name(t): chance.lognormvariate(-noise * noise / 2, noise) for t in schedule.tasks}
    return lambda task: round((task.end - task.start) * factors[_name(task)])


def _name(task: Task) -> tuple[object, ...]:
    return task.section, task.replica, task.kind, task.step, task.items
