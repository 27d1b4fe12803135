"""Notes when the tasks of a window end, without holding up the thread that issues them.

Devices do not tell when they begin or end a task. They tell when an array is ready, to whoever waits for it, so a thread for each replica
waits for what its tasks need and for their markers, one after the other, while the dispatcher goes on. Recording begins with idle devices,
as a schedule does: a recorded window costs the gap before it, and nothing is watched in the others.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from ..record import Record
from ..schedules import Schedule, Task, Workload
from .feeds import Window
from .plan import Plan


@dataclasses.dataclass(frozen=True)
class Times:
    """What is known of a task, in nanoseconds of one clock.

    Args:
        issued: it was given to its devices.
        arrived: the last of what it needs was on its devices; 0 where nothing was waited for.
        ended: it had run.
    """

    issued: int
    arrived: int
    ended: int


class Completions:
    """Watches the tasks of one window on this process's devices.

    Args:
        plan: where sections run.
        window: what is recorded. Every process of the run records it.
    """

    def __init__(self, plan: Plan, window: Window) -> None:
        self._plan, self._window, self._tasks = plan, window, window.schedule.tasks
        counts = collections.Counter((task.section, task.replica) for task in self._tasks)
        self._watchers = {place: _Watcher(place, count) for place, count in counts.items() if plan.is_local(*place)}
        self._zero = 0

    def open(self) -> None:
        """Starts the threads and, with several processes, the clock that they share; called when this process's devices are idle."""
        self._plan.group.all_gather("timeline begins", None)
        # Clocks of different machines have nothing in common but this moment, when all processes have said that they are here.
        self._zero = time.monotonic_ns()
        for watcher in self._watchers.values():
            watcher.start()

    def watch(self, task: Task, issued: int, needs: Any, marker: jax.Array) -> None:
        """Hands over a task that was issued.

        Args:
            task: as scheduled.
            issued: when, in nanoseconds of `time.monotonic_ns`.
            needs: arrays from elsewhere that it takes; not donated to it.
            marker: ready when it has run.
        """
        self._watchers[task.section, task.replica].tasks.put((task, issued, needs, marker))

    def watch_update(self, section: str, step: int, issued: int, squares: Mapping[str, jax.Array], marker: jax.Array) -> None:
        """Hands over the update of a section on all of its replicas, which is one program.

        Args:
            section: its name.
            step: number of the step in the window.
            issued: when, in nanoseconds of `time.monotonic_ns`.
            squares: section -> sum of squares; those of the others are what the update waits for.
            marker: ready when it has run.
        """
        needs = [square for name, square in squares.items() if name != section]
        for task in self._tasks:
            if task.kind == "update" and (task.section, task.step) == (section, step) and (section, task.replica) in self._watchers:
                self.watch(task, issued, needs, marker)

    def close(self) -> None:
        """Says that no more tasks come, although some are missing where the window was broken off."""
        for watcher in self._watchers.values():
            watcher.tasks.put(None)

    def record(self) -> Record:
        """Waits until the window has run, and returns what every process measured of it.

        Raises:
            jax.errors.JaxRuntimeError: a task failed on its devices.
        """
        found: dict[Task, Times] = {}
        for watcher in self._watchers.values():
            found |= watcher.result()
        numbers = [[n, *_since(self._zero, found[task])] for n, task in enumerate(self._tasks) if task in found]
        times: dict[Task, Times] = {}
        for n, *values in (each for part in self._plan.group.all_gather("timeline", numbers) for each in part):
            task, new = self._tasks[n], Times(*values)
            # A replica of several processes has run a task when the last of them has.
            times[task] = _latest(times[task], new) if task in times else new
        begins = min((each.issued for each in times.values()), default=0)
        workload = self._window.workload
        return Record(
            first_step=self._window.steps[0].step + 1,
            workload=workload,
            scheduled=self._window.schedule,
            measured=Schedule(tasks=measured(self._tasks, times, _devices(workload, self._tasks), begins)),
            issued=tuple(times[task].issued - begins for task in self._tasks),
        )


def measured(tasks: Sequence[Task], times: Mapping[Task, Times], devices: Mapping[Task, Iterable[Any]], begins: int) -> tuple[Task, ...]:
    """Makes measured tasks of what is known of each.

    A task has its devices for itself, so it began when the one that ended before it there had ended, or later: when it had been issued and
    what it needs was there.

    Args:
        tasks: in the order in which they were issued.
        times: of each.
        devices: of each.
        begins: nanoseconds that become 0.

    Returns:
        The same tasks in the same order, with other starts and ends; on no device do two of them overlap.
    """
    free: dict[Any, int] = {}
    found: dict[Task, Task] = {}
    for task in sorted(tasks, key=lambda task: times[task].ended):
        known = times[task]
        start = max(known.issued, known.arrived, *(free.get(device, 0) for device in devices[task]))
        # Each thread wakes a little later than what it waits for, so what is needed can seem to arrive after the end.
        found[task] = dataclasses.replace(task, start=min(start, known.ended) - begins, end=known.ended - begins)
        free |= dict.fromkeys(devices[task], known.ended)
    return tuple(found[task] for task in tasks)


class _Watcher(threading.Thread):
    """Waits for the tasks of one replica in the order in which they were issued."""

    def __init__(self, place: tuple[str, int], count: int) -> None:
        super().__init__(name=f"completions {place[0]} {place[1]}", daemon=True)
        self._count = count
        # Handed over from the thread that issues, which never waits here: the queue has no limit.
        self.tasks: queue.SimpleQueue[tuple[Task, int, Any, jax.Array] | None] = queue.SimpleQueue()
        self._times: dict[Task, Times] = {}
        self._error: Exception | None = None

    def run(self) -> None:
        """Ends with the last task of the window; waiting releases the interpreter."""
        for _ in range(self._count):
            handed = self.tasks.get()
            if handed is None:
                return
            if self._error is None:
                try:
                    self._wait(*handed)
                except Exception as error:  # raised by `result`
                    self._error = error
            # Or the arrays would stay on the devices until the next task comes.
            del handed

    def _wait(self, task: Task, issued: int, needs: Any, marker: jax.Array) -> None:
        arrived = 0
        if not all(array.is_ready() for array in jax.tree.leaves(needs)):
            jax.block_until_ready(needs)
            arrived = time.monotonic_ns()
        marker.block_until_ready()
        self._times[task] = Times(issued, arrived, time.monotonic_ns())

    def result(self) -> dict[Task, Times]:
        """Waits for the last task, and returns the times of all."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._times


def _since(zero: int, times: Times) -> tuple[int, int, int]:
    return times.issued - zero, max(0, times.arrived - zero), times.ended - zero


def _latest(one: Times, other: Times) -> Times:
    return Times(max(one.issued, other.issued), max(one.arrived, other.arrived), max(one.ended, other.ended))


def _devices(workload: Workload, tasks: Iterable[Task]) -> dict[Task, Sequence[Any]]:
    """The devices of each task; where the workload does not number them, each replica has its own."""
    numbered = {name: section.devices for name, section in workload.sections.items()}
    return {task: found[task.replica] if (found := numbered[task.section]) else [(task.section, task.replica)] for task in tasks}
