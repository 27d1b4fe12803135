"""Head-of-line stalls: the first task in a replica's queue waits for data while a later one has all that it needs."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from .ledger import FORWARD, Ledger
from .tasks import Schedule, Task
from .workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stalls:
    """Stalls of one section.

    Args:
        count: tasks that held up a later one.
        nanoseconds: in which they did, over all replicas.
    """

    count: int = 0
    nanoseconds: int = 0


def stalls_of(workload: Workload, measured: Schedule, issued: Sequence[int]) -> dict[str, Stalls]:
    """Counts the head-of-line stalls of each section.

    A stall begins when its task is at the head of the queue of its devices and a later one of the same queue, issued or not, has its
    inputs, up-to-date parameters and room in memory besides all that it would overtake. It ends when the task's own inputs have arrived.

    Args:
        workload: what was done.
        measured: its tasks with the times at which they ran; of those issued at the same time, the first one first.
        issued: nanoseconds at which each was given to its devices.
    """
    ledger = Ledger(workload, measured, issued)
    queues: dict[frozenset[object], list[Task]] = defaultdict(list)
    for task in sorted(measured.tasks, key=ledger.issued):
        queues[ledger.devices(task.section, task.replica)].append(task)
    found: dict[str, list[int]] = {name: [] for name in workload.order}
    for queue in queues.values():
        arrivals, free = [ledger.arrival(task) for task in queue], 0
        for position, task in enumerate(queue):
            at_head, until = max(free, ledger.issued(task)), min(arrivals[position], task.start)
            if at_head < until and task.kind != "update":
                since = until
                for number in range(position + 1, len(queue)):
                    # Most have come later than one that was there already.
                    if arrivals[number] < since:
                        since = min(since, max(at_head, _ready(ledger, queue[number], arrivals[number], queue[position:number])))
                    if since == at_head:
                        break
                found[task.section] += [until - since] if since < until else []
            free = max(free, task.end)
    return {name: Stalls(count=len(each), nanoseconds=sum(each)) for name, each in found.items()}


def _ready(ledger: Ledger, task: Task, arrival: int, overtaken: Sequence[Task]) -> int:
    """When a task had all that it needed to run before others."""
    if task.kind not in FORWARD:
        return arrival
    same = [t for t in overtaken if (t.section, t.replica) == (task.section, task.replica)]
    # Its parameters change between the two.
    if ledger.workload.sections[task.section].trainable and any(t.kind == "update" for t in same):
        return task.start
    return ledger.room(task, arrival, [t for t in same if t.kind in FORWARD])
