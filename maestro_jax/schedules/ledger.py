"""Where the time of a section's replicas goes: every nanosecond has one cause. Serves schedules and what was measured of them alike."""

from __future__ import annotations

import bisect
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .tasks import Schedule, Task
from .workload import Cost, Workload

Ends = Mapping[tuple[str, int, int | None], int]
"""(section, sample, item, or None for all items of the sample) -> nanoseconds."""

FORWARD, BACKWARD = ("forward", "forward_backward"), ("backward", "forward_backward")
"""Kinds of task that run forward, and that run backward."""


class Ledger:
    """What replicas wait for, and what their tasks' time is spent on.

    Args:
        workload: what was to be done.
        schedule: its tasks, scheduled or measured, from time 0 on.
        issued: when each of the schedule's tasks was given to its devices; None: they never wait for that, as in a schedule.
    """

    def __init__(self, workload: Workload, schedule: Schedule, issued: Sequence[int] | None = None) -> None:
        self.workload, self.schedule = workload, schedule
        samples = [s for step in workload.steps for s in step]
        self._lengths = {(n, (s.id, i)): u for s in samples for n, units in s.items.items() for i, u in enumerate(units)}
        self._issued = dict(zip(map(_key, schedule.tasks), issued, strict=True)) if issued is not None else {}
        self._forward: dict[tuple[str, int, int | None], int] = defaultdict(int)
        self._backward: dict[tuple[str, int, int | None], int] = defaultdict(int)
        self._of: dict[tuple[str, int], list[Task]] = defaultdict(list)
        # Per step: the last backward of each section.
        self._last: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for task in sorted(schedule.tasks, key=lambda t: (t.start, t.end)):
            self._of[task.section, task.replica].append(task)
            for ends, kinds in ((self._forward, FORWARD), (self._backward, BACKWARD)):
                for sample, item in task.items if task.kind in kinds else ():
                    for key in ((task.section, sample, item), (task.section, sample, None)):
                        ends[key] = max(ends[key], task.end)
            if task.kind in BACKWARD:
                self._last[task.step][task.section] = max(self._last[task.step][task.section], task.end)

    def replica(self, section: str, replica: int) -> dict[str, int]:
        """Nanoseconds of one replica by cause; they add up to the makespan.

        Causes are the parts of `Gap` and

        - "useful": tasks, as far as their units are items;
        - "sharing": other tasks have the devices;
        - "late": tasks that take longer than by the workload's costs, or begin later than they could.
        """
        spent: dict[str, int] = defaultdict(int)
        now, others = 0, self._others(section, replica)
        for task in self._of[section, replica]:
            for cause, until in [*self._waits(task), ("late" if self._issued else "imbalance", task.start)]:
                now = _spend(spent, cause, now, min(until, task.start), others)
            for cause, nanoseconds in self._work(task, task.end - now):
                spent[cause] += nanoseconds
            now = task.end
        # The section has nothing left to do: others have updates, or backwards, that it has not.
        tasks = [t for r in range(self.workload.sections[section].replicas) for t in self._of[section, r]]
        last = max((t.end for t in tasks if t.kind != "update"), default=0)
        updates = any(t.kind == "update" for t in tasks)
        for cause, until in (("imbalance", last), ("update" if updates else "drain", self.schedule.makespan)):
            now = _spend(spent, cause, now, until, others)
        return spent

    def arrival(self, task: Task) -> int:
        """When everything that a task needs from other tasks had arrived."""
        if task.kind == "update":
            return max(self._last[task.step].values(), default=0)
        if task.kind == "backward":
            own = max(self._forward[task.section, s, i] for s, i in task.items)
            return max(own, self._from_others(task, self._backward, forward=False))
        return self._from_others(task, self._forward, forward=True)

    def room(self, task: Task, since: int, beside: Iterable[Task] = ()) -> int:
        """When a replica has room for a forward, at the earliest at `since`.

        Args:
            task: the forward.
            since: nanoseconds.
            beside: forwards of the replica that have not begun and need room as well.
        """
        section, kept = self.workload.sections[task.section], [task, *beside]
        if section.max_bytes is None and self._units_of_all[task.section] <= section.max_inflight:
            return since
        before = [t for t in self._of[task.section, task.replica] if t.kind in FORWARD and t.start < task.start and t not in kept]
        holding = sorted((self._release(t), self._units(t), section.bytes_of(t.bucket)) for t in before)
        holding = [entry for entry in holding if entry[0] > since]
        units = sum(map(self._units, kept)) + sum(u for _, u, _ in holding)
        size = sum(section.bytes_of(t.bucket) for t in kept) + sum(b for _, _, b in holding)
        room = since
        for release, freed, bytes_freed in [*holding, (task.start, 0, 0)]:
            if units <= section.max_inflight and (section.max_bytes is None or size <= section.max_bytes):
                break
            # At last: without those beside it, there was room when it began.
            room, units, size = max(room, release), units - freed, size - bytes_freed
        return room

    def _work(self, task: Task, taken: int) -> list[tuple[str, int]]:
        """What the time of a task is spent on."""
        if task.kind == "update":
            return [("update", taken)]
        section = self.workload.sections[task.section]
        units = [self._lengths[task.section, piece] for piece in task.items]
        costs: list[Cost] = [section.forward] if task.kind in FORWARD else []
        costs += [section.backward] if task.kind in BACKWARD else []
        expected = sum(c.of(task.bucket, units) for c in costs)
        empty = sum(c.per_unit for c in costs) * (task.bucket - sum(units))
        late = max(0, taken - expected)
        # A task that was faster than expected was so with all of its units.
        padding = (taken - late) * empty // expected if expected else 0
        return [("useful", taken - late - padding), ("padding", padding), ("late", late)]

    def issued(self, task: Task) -> int:
        """When a task was given to its devices; 0 where that is not known."""
        return self._issued.get(_key(task), 0)

    def devices(self, section: str, replica: int) -> frozenset[object]:
        """The devices of a replica."""
        devices = self.workload.sections[section].devices
        return frozenset(devices[replica] if devices else [(section, replica)])

    def _waits(self, task: Task) -> list[tuple[str, int]]:
        """What a replica waits for before a task, in turn: the cause, and the time at which it is over."""
        if task.kind == "update":
            return [("imbalance", self._last[task.step][task.section]), ("drain", self.arrival(task)), ("update", task.start)]
        arrival = self.arrival(task)
        if task.kind == "backward":
            return [("drain", arrival), ("late", self.issued(task))]
        return [("fill", arrival), ("memory", self.room(task, arrival)), ("late", self.issued(task))]

    def _from_others(self, task: Task, ends: Ends, forward: bool) -> int:
        found = 0
        for edge in self.workload.edges:
            here, there = (edge.consumer, edge.producer) if forward else (edge.producer, edge.consumer)
            if here == task.section:
                for sample, item in task.items:
                    end = ends.get((there, sample, item if edge.paired else None))
                    found = max(found, end + edge.delay) if end is not None else found
        return found

    def _others(self, section: str, replica: int) -> list[tuple[int, int]]:
        """When the devices of a replica run something else: spans in order of time, disjoint."""
        mine, spans = self.devices(section, replica), []
        for other, tasks in self._of.items():
            if other != (section, replica) and not mine.isdisjoint(self.devices(*other)):
                spans += [(t.start, t.end) for t in tasks]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            else:
                merged.append((start, end))
        return merged

    @functools.cached_property
    def _units_of_all(self) -> Mapping[str, int]:
        found = dict.fromkeys(self.workload.order, 0)
        for (section, _), units in self._lengths.items():
            found[section] += units
        return found

    def _units(self, task: Task) -> int:
        return sum(self._lengths[task.section, piece] for piece in task.items)

    def _release(self, task: Task) -> int:
        """When a micro-batch gives back what it holds."""
        if self.workload.runs_backward[task.section]:
            return max(self._backward[task.section, s, i] for s, i in task.items)
        ends = [task.end]
        for edge in self.workload.edges:
            if edge.producer == task.section:
                ends += [self._forward[edge.consumer, s, i if edge.paired else None] for s, i in task.items]
        return max(ends)


def _key(task: Task) -> tuple[object, ...]:
    return task.section, task.replica, task.kind, task.step, task.items


def _spend(spent: dict[str, int], cause: str, now: int, until: int, others: Sequence[tuple[int, int]]) -> int:
    """Gives the time from now on to a cause, except what the devices spent on something else; returns where it ends."""
    if until <= now:
        return now
    shared = 0
    for start, end in others[max(0, bisect.bisect(others, (now, now)) - 1) :]:
        if start >= until:
            break
        shared += max(0, min(end, until) - max(start, now))
    spent["sharing"] += shared
    spent[cause] += until - now - shared
    return until
