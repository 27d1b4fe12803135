"""Where a schedule's time beyond the lower bound goes, seen from the section whose replicas have most to do."""

from __future__ import annotations

import dataclasses

from .bounds import load_of, lower_bound
from .ledger import Ledger
from .tasks import Schedule
from .workload import Workload


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
    ledger = Ledger(workload, schedule)
    loads = {name: sum(load_of(workload, name, samples) for samples in workload.steps) for name in workload.order}
    name = max(loads, key=lambda each: loads[each])
    sums = dict.fromkeys((*PARTS, "work"), 0)
    section = workload.sections[name]
    for replica in range(section.replicas):
        for cause, spent in ledger.replica(name, replica).items():
            # What the bound does not count of the work comes to padding below, more micro-batches than the fewest included.
            sums[{"sharing": "imbalance", "useful": "work", "padding": "work", "late": "work"}.get(cause, cause)] += spent
    mean = {part: spent // section.replicas for part, spent in sums.items()}
    # Whole nanoseconds: what the divisions dropped is less than one for each part.
    mean["imbalance"] += schedule.makespan - sum(mean.values())
    load, work = loads[name], mean.pop("work")
    mean["padding"] += max(0, work - load)
    counted = lower_bound(workload) - min(load, work)
    if counted < 0:
        mean["padding"] -= counted
    for part in ("update", "fill", "drain", "imbalance", "memory", "padding"):
        taken = min(max(counted, 0), mean[part])
        mean[part] -= taken
        counted -= taken
    return Gap(**mean)
