"""Head-of-line stalls: counted where a later task could have run, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from workload_support import section, work

from maestro_jax.schedules import Cost, Schedule, SectionWork, Task, Workload
from maestro_jax.schedules.stalls import Stalls, stalls_of

NONE = Stalls()


def pair(**consumer: object) -> Workload:
    """Producer a and consumer b of two samples."""
    a: SectionWork = section(buckets=(8,), replicas=2, trainable=False, forward=Cost(fixed=10))
    return work(
        {"a": a, "b": section(buckets=(8,), trainable=False, forward=Cost(fixed=10), **consumer)}, ["a b"], [{"a": (8,), "b": (8,)}] * 2
    )


def task(name: str, sample: int, start: int, end: int, replica: int = 0) -> Task:
    return Task(section=name, replica=replica, kind="forward", step=0, bucket=8, items=((sample, 0),), start=start, end=end)


def found(workload: Workload, tasks: Sequence[Task], issued: Sequence[int]) -> Stalls:
    everything = stalls_of(workload, Schedule(tasks=tuple(tasks)), issued)
    assert everything["a"] == NONE
    return everything["b"]


LATE = (task("a", 0, 0, 100), task("a", 1, 0, 30, replica=1))
"""The first sample's producer ends at 100, the second's at 30."""


def test_a_later_task_that_could_run_makes_a_stall() -> None:
    tasks = (*LATE, task("b", 0, 100, 110), task("b", 1, 110, 120))
    assert found(pair(), tasks, (0, 0, 0, 0)) == Stalls(count=1, nanoseconds=70)


def test_a_stall_begins_when_the_task_is_in_the_queue() -> None:
    tasks = (*LATE, task("b", 0, 100, 110), task("b", 1, 110, 120))
    assert found(pair(), tasks, (0, 0, 80, 80)) == Stalls(count=1, nanoseconds=20)


def test_a_later_task_that_waits_as_long_makes_none() -> None:
    tasks = (task("a", 0, 0, 100), task("a", 1, 0, 100, replica=1), task("b", 0, 100, 110), task("b", 1, 110, 120))
    assert found(pair(), tasks, (0, 0, 0, 0)) == NONE


def test_the_other_order_makes_none() -> None:
    tasks = (*LATE, task("b", 1, 30, 40), task("b", 0, 100, 110))
    assert found(pair(), tasks, (0, 0, 0, 0)) == NONE


def test_a_task_on_another_replica_makes_none() -> None:
    tasks = (*LATE, task("b", 0, 100, 110), task("b", 1, 30, 40, replica=1))
    assert found(pair(replicas=2), tasks, (0, 0, 0, 0)) == NONE


def test_a_task_without_room_in_memory_makes_none() -> None:
    tasks = (*LATE, task("b", 0, 100, 110), task("b", 1, 110, 120))
    assert found(pair(max_inflight=8), tasks, (0, 0, 0, 0)) == NONE


@pytest.mark.parametrize(("trainable", "stall"), [(True, NONE), (False, Stalls(count=1, nanoseconds=70))])
def test_a_task_whose_parameters_change_in_between_makes_none(trainable: bool, stall: Stalls) -> None:
    a = section(buckets=(8,), replicas=2, trainable=False, forward=Cost(fixed=10))
    b = section(buckets=(8,), trainable=trainable, forward=Cost(fixed=10), backward=Cost(), update=0)
    workload = work({"a": a, "b": b}, ["a b"], [{"a": (8,), "b": (8,)}], [{"a": (8,), "b": (8,)}])
    kind = "forward_backward" if trainable else "forward"
    tasks = [*LATE[:1], Task(section="a", replica=1, kind="forward", step=1, bucket=8, items=((1, 0),), end=30)]
    tasks += [Task(section="b", replica=0, kind=kind, step=0, bucket=8, items=((0, 0),), start=100, end=110)]
    updates = [Task(section="b", replica=0, kind="update", step=step, start=110 + 10 * step, end=110 + 10 * step) for step in (0, 1)]
    later = Task(section="b", replica=0, kind=kind, step=1, bucket=8, items=((1, 0),), start=110, end=120)
    tasks += [updates[0], later, updates[1]] if trainable else [later]
    assert found(workload, tasks, [0] * len(tasks)) == stall
