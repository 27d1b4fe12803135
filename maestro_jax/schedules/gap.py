"""Where a schedule's time beyond the lower bound goes, seen from the section whose replicas have most to do."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from .bounds import load_of, lower_bound
from .tasks import Schedule, Task
from .workload import Workload

Ends = Mapping[tuple[str, int, int | None], int]
"""(section, sample, item, or None for all items of the sample) -> nanoseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """Makespan minus lower bound in nanoseconds, by cause; the parts add up to it exactly.

    Args:
        fill: waiting for forwards upstream.
        drain: waiting for backwards downstream, and for those upstream at the end of a step.
        padding: buckets that are not full, and more micro-batches than the fewest that hold everything.
        imbalance: waiting for another replica of the section, or for a section that shares its devices.
        memory: waiting until units or bytes are given back.
        update: updates, and waiting for those of others.
    """

    fill: int
    drain: int
    padding: int
    imbalance: int
    memory: int
    update: int

    @property
    def total(self) -> int:
        """Makespan minus lower bound."""
        return sum(dataclasses.asdict(self).values())


PARTS = tuple(field.name for field in dataclasses.fields(Gap))


def utilization_of(workload: Workload, schedule: Schedule) -> dict[str, float]:
    """Section -> share of the makespan in which a replica of it has a task, as a mean over its replicas."""
    busy = dict.fromkeys(workload.order, 0)
    for task in schedule.tasks:
        busy[task.section] += task.end - task.start
    makespan = schedule.makespan
    return {name: busy[name] / (s.replicas * makespan) if makespan else 0.0 for name, s in workload.sections.items()}


def gap_of(workload: Workload, schedule: Schedule) -> Gap:
    """Says where the gap between a schedule and the lower bound of its workload comes from.

    Every nanosecond of every replica of one section, the one with most work for each replica, is given to one cause, or to the work
    that the bound counts as well. The mean over its replicas is taken. What the bound counts besides work (the first
    forward upstream, the last backward, updates) is taken off update, fill and drain, in this order.

    Args:
        workload: what was scheduled.
        schedule: a valid schedule of it.
    """
    ledger = _Ledger(workload, schedule)
    sums = dict.fromkeys((*PARTS, "work"), 0)
    section = workload.sections[ledger.name]
    for replica in range(section.replicas):
        for part, spent in ledger.replica(replica).items():
            sums[part] += spent
    mean = {part: spent // section.replicas for part, spent in sums.items()}
    # Whole nanoseconds: what the divisions dropped is less than one for each part.
    mean["imbalance"] += schedule.makespan - sum(mean.values())
    load = sum(load_of(workload, ledger.name, samples) for samples in workload.steps)
    work = mean.pop("work")
    mean["padding"] += max(0, work - load)
    counted = lower_bound(workload) - min(load, work)
    if counted < 0:
        mean["padding"] -= counted
    for part in ("update", "fill", "drain", "imbalance", "memory", "padding"):
        taken = min(max(counted, 0), mean[part])
        mean[part] -= taken
        counted -= taken
    return Gap(**mean)


class _Ledger:
    """The time of one section's replicas, by cause."""

    def __init__(self, workload: Workload, schedule: Schedule) -> None:
        self.workload, self.schedule = workload, schedule
        samples = [s for step in workload.steps for s in step]
        self._lengths = {(n, (s.id, i)): u for s in samples for n, units in s.items.items() for i, u in enumerate(units)}
        self.forward: dict[tuple[str, int, int | None], int] = defaultdict(int)
        self.backward: dict[tuple[str, int, int | None], int] = defaultdict(int)
        for task in schedule.tasks:
            for ends, kinds in ((self.forward, ("forward", "forward_backward")), (self.backward, ("backward", "forward_backward"))):
                for sample, item in task.items if task.kind in kinds else ():
                    for key in ((task.section, sample, item), (task.section, sample, None)):
                        ends[key] = max(ends[key], task.end)
        self.name = max(workload.order, key=lambda n: sum(load_of(workload, n, samples) for samples in workload.steps))
        self.tasks = [t for t in schedule.tasks if t.section == self.name]
        # Per step: the last backward of the section, and of any section.
        self.own_last: dict[int, int] = defaultdict(int)
        self.last: dict[int, int] = defaultdict(int)
        for task in schedule.tasks:
            if task.kind in ("backward", "forward_backward"):
                self.last[task.step] = max(self.last[task.step], task.end)
                if task.section == self.name:
                    self.own_last[task.step] = max(self.own_last[task.step], task.end)

    def replica(self, replica: int) -> dict[str, int]:
        """Nanoseconds of one replica by cause; they add up to the makespan."""
        spent: dict[str, int] = defaultdict(int)
        now = 0
        for task in sorted((t for t in self.tasks if t.replica == replica), key=lambda t: (t.start, t.end)):
            for part, until in self._waits(task):
                spent[part] += max(0, min(until, task.start) - now)
                now = max(now, min(until, task.start))
            spent["imbalance"] += task.start - now
            spent["update" if task.kind == "update" else "work"] += task.end - task.start
            now = task.end
        # The section's last task is behind: others have updates, or backwards, that it has not.
        updates = any(t.kind == "update" for t in self.tasks)
        spent["update" if updates else "drain"] += self.schedule.makespan - now
        return spent

    def _waits(self, task: Task) -> list[tuple[str, int]]:
        """What a replica waits for before a task, in turn: the cause, and the time at which it is over."""
        if task.kind == "update":
            return [("imbalance", self.own_last[task.step]), ("drain", self.last[task.step]), ("update", task.start)]
        if task.kind == "backward":
            return [("drain", self._arrival(task, self.backward, forward=False))]
        arrival = self._arrival(task, self.forward, forward=True)
        return [("fill", arrival), ("memory", self._room(task, arrival))]

    def _arrival(self, task: Task, ends: Ends, forward: bool) -> int:
        """When everything that a task needs from other sections has arrived."""
        found = 0
        for edge in self.workload.edges:
            here, there = (edge.consumer, edge.producer) if forward else (edge.producer, edge.consumer)
            if here == task.section:
                for sample, item in task.items:
                    end = ends.get((there, sample, item if edge.paired else None))
                    found = max(found, end + edge.delay) if end is not None else found
        return found

    def _room(self, task: Task, since: int) -> int:
        """When a replica has room for a task, at the earliest at `since`."""
        section = self.workload.sections[task.section]
        before = [
            t for t in self.tasks if t.replica == task.replica and t.kind != "update" and t.kind != "backward" and t.start < task.start
        ]
        holding = sorted((self._release(t), self._units(t), section.bytes_of(t.bucket)) for t in before)
        holding = [entry for entry in holding if entry[0] > since]
        units = self._units(task) + sum(u for _, u, _ in holding)
        size = section.bytes_of(task.bucket) + sum(b for _, _, b in holding)
        room = since
        for release, freed, bytes_freed in holding:
            if units <= section.max_inflight and (section.max_bytes is None or size <= section.max_bytes):
                break
            room, units, size = release, units - freed, size - bytes_freed
        return room

    def _units(self, task: Task) -> int:
        return sum(self._lengths[task.section, piece] for piece in task.items)

    def _release(self, task: Task) -> int:
        """When a micro-batch gives back what it holds."""
        if self.workload.runs_backward[task.section]:
            return max(self.backward[task.section, s, i] for s, i in task.items)
        ends = [task.end]
        for edge in self.workload.edges:
            if edge.producer == task.section:
                ends += [self.forward[edge.consumer, s, i if edge.paired else None] for s, i in task.items]
        return max(ends)
