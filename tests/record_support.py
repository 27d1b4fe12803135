"""Records that no device made: what is measured is what is scheduled, times a factor and later."""

from __future__ import annotations

import dataclasses

from workload_support import section, work

from maestro_jax.record import Record
from maestro_jax.schedules import EdgeWork, InOrder, Schedule, Workload

FACTOR, LATER = 4, 1000


def workload() -> Workload:
    """Two steps of a frozen `eye` of two replicas, an `ear` and a `mind`; one sample has no image, one has two."""
    sections = {
        "mind": section(buckets=(16, 32)),
        "eye": section(replicas=2, trainable=False, buckets=(8,)),
        "ear": section(buckets=(8, 16)),
    }
    edges = (EdgeWork(producer="eye", consumer="mind", delay=2), EdgeWork(producer="ear", consumer="mind"))
    step = [{"eye": (5,), "ear": (7,), "mind": (14,)}, {"mind": (16,)}, {"eye": (5, 3), "ear": (12,), "mind": (20,)}]
    return work(sections, edges, step, step[::-1])


def record(first_step: int = 9, nominal: bool = False) -> Record:
    made = workload()
    scheduled = InOrder().schedule(made)
    tasks = [dataclasses.replace(t, start=t.start * FACTOR + LATER, end=t.end * FACTOR + LATER) for t in scheduled.tasks]
    issued = tuple(task.start * FACTOR for task in scheduled.tasks)
    measured = Schedule(tasks=tuple(tasks))
    return Record(first_step=first_step, workload=made, scheduled=scheduled, measured=measured, issued=issued, nominal=nominal)
