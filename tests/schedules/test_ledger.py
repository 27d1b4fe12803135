"""Every nanosecond of a replica has one cause, the right one; schedules and measured times are treated alike."""

from __future__ import annotations

import dataclasses

import pytest
import workload_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_support import section, work

from maestro_jax.schedules import Cost, InOrder, Schedule, Task, Workload
from maestro_jax.schedules.ledger import Ledger
from maestro_jax.schedules.queues import execute, perturbed


def spent(ledger: Ledger, name: str, replica: int = 0) -> dict[str, int]:
    return {cause: nanoseconds for cause, nanoseconds in ledger.replica(name, replica).items() if nanoseconds}


@settings(derandomize=True, deadline=None, max_examples=100)
@given(workload=support.workloads(), noise=st.sampled_from([0.0, 0.3]), call=st.sampled_from([0, 7]))
def test_causes_add_up_to_the_makespan_for_every_replica(workload: Workload, noise: float, call: int) -> None:
    schedule = InOrder().schedule(workload)
    run = execute(workload, schedule, perturbed(schedule, noise), depth=2, call=call)
    ledger = Ledger(workload, run.measured, run.issued)
    for name, each in workload.sections.items():
        for replica in range(each.replicas):
            found = ledger.replica(name, replica)
            assert sum(found.values()) == run.measured.makespan
            assert min(found.values(), default=0) >= 0


def chain() -> Workload:
    """A producer of 10 ns a unit and a consumer of 20 + 20, with one sample of 6 units in buckets of 8."""
    a = section(buckets=(8,), trainable=False, forward=Cost(per_unit=10), update=0)
    b = section(buckets=(8,), forward=Cost(per_unit=20), backward=Cost(per_unit=20), update=30)
    return work({"a": a, "b": b}, ["a b"], [{"a": (6,), "b": (6,)}])


def test_a_schedule_by_hand() -> None:
    workload = chain()
    ledger = Ledger(workload, InOrder().schedule(workload))
    # a: 0 to 80; b: 80 to 400, its update to 430.
    assert spent(ledger, "a") == {"useful": 60, "padding": 20, "drain": 350}
    assert spent(ledger, "b") == {"fill": 80, "useful": 240, "padding": 80, "update": 30}


def test_tasks_that_last_longer_or_begin_later_are_late() -> None:
    workload = chain()
    a, b, update = InOrder().schedule(workload).tasks
    measured = (
        dataclasses.replace(a, start=0, end=100),
        dataclasses.replace(b, start=150, end=470),
        dataclasses.replace(update, start=470, end=500),
    )
    ledger = Ledger(workload, Schedule(tasks=measured), issued=(0, 140, 140))
    assert spent(ledger, "a") == {"useful": 60, "padding": 20, "late": 20, "drain": 400}
    # Its input was there at 100, it was issued at 140 and began at 150.
    assert spent(ledger, "b") == {"fill": 100, "late": 50, "useful": 240, "padding": 80, "update": 30}


def test_a_faster_task_has_less_padding() -> None:
    workload = chain()
    a, b, update = InOrder().schedule(workload).tasks
    ledger = Ledger(workload, Schedule(tasks=(dataclasses.replace(a, end=40), b, update)), issued=(0, 0, 0))
    assert spent(ledger, "a") == {"useful": 30, "padding": 10, "drain": 390}


def test_devices_that_run_another_section_are_shared() -> None:
    a = section(buckets=(8,), trainable=False, forward=Cost(fixed=50), devices=((0,),))
    b = section(buckets=(8,), trainable=False, forward=Cost(fixed=20), devices=((0,),))
    workload = work({"a": a, "b": b}, [], [{"a": (8,), "b": (8,)}])
    ledger = Ledger(workload, InOrder().schedule(workload))
    assert spent(ledger, "a") == {"useful": 50, "sharing": 20}
    assert spent(ledger, "b") == {"useful": 20, "sharing": 50}


def test_a_replica_without_work_waits_for_the_others() -> None:
    a = section(buckets=(8,), replicas=2, trainable=False, forward=Cost(fixed=50))
    b = section(buckets=(8,), trainable=False, forward=Cost(fixed=10))
    workload = work({"a": a, "b": b}, ["a b"], [{"a": (8,), "b": (8,)}])
    ledger = Ledger(workload, InOrder().schedule(workload))
    assert spent(ledger, "a", 1) == {"imbalance": 50, "drain": 10}


def test_memory_is_what_room_says() -> None:
    a = section(buckets=(8,), trainable=False, max_inflight=16, forward=Cost(fixed=10))
    b = section(buckets=(8,), trainable=False, forward=Cost(fixed=100))
    workload = work({"a": a, "b": b}, ["a b"], [{"a": (8,), "b": (8,)}] * 4)
    schedule = InOrder().schedule(workload)
    ledger = Ledger(workload, schedule)
    forwards = [task for task in schedule.tasks if task.section == "a"]
    # Two micro-batches fit; each further one waits until the consumer of an earlier one has ended.
    assert [task.start for task in forwards] == [0, 10, 110, 210]
    assert spent(ledger, "a")["memory"] == 90 + 90
    assert [ledger.room(task, 0) for task in forwards] == [0, 0, 110, 210]
    assert ledger.room(forwards[2], 0, beside=[forwards[3]]) == 210


@pytest.mark.parametrize("kind", ["forward_backward", "update"])
def test_an_update_waits_for_replicas_then_for_others_then_for_the_barrier(kind: str) -> None:
    b = section(buckets=(8,), replicas=2, forward=Cost(fixed=5), backward=Cost(fixed=5), update=3)
    workload = work({"b": b}, [], [{"b": (8,)}] * 3)
    schedule = InOrder().schedule(workload)
    found = spent(Ledger(workload, schedule), "b", 1)
    if kind == "update":
        assert found["update"] == 3
    else:
        assert (found["useful"], found["imbalance"]) == (10, 10)


def test_items_of_a_task_are_told_apart() -> None:
    tasks = (
        Task(section="a", replica=0, kind="forward", step=0, bucket=8, items=((0, 0),), end=10),
        Task(section="a", replica=0, kind="forward", step=0, bucket=8, items=((1, 0),), start=10, end=20),
    )
    ledger = Ledger(work({"a": section(trainable=False)}, [], [{"a": (8,)}] * 2), Schedule(tasks=tasks), issued=(1, 2))
    assert [ledger.issued(task) for task in tasks] == [1, 2]
