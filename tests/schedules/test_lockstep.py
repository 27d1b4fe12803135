"""The lockstep policy: valid everywhere, and the replicas of a section start together."""

from __future__ import annotations

import pytest
import workload_support as support
from hypothesis import given, settings
from workload_support import judged, section, work

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import Cost, InOrder, Lockstep, Schedule, Workload


def rounds(schedule: Schedule, name: str, kind: str) -> list[list[int]]:
    """Starts of each replica's tasks of one kind."""
    replicas = sorted({t.replica for t in schedule.tasks if t.section == name})
    return [[t.start for t in schedule.tasks if (t.section, t.kind, t.replica) == (name, kind, r)] for r in replicas]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(workload=support.workloads())
def test_schedules_of_random_workloads_are_valid(workload: Workload) -> None:
    judged(workload, Lockstep().schedule(workload))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(workload=support.workloads(tight=True))
def test_never_stuck_where_in_order_is_not(workload: Workload) -> None:
    try:
        InOrder().schedule(workload)
    except ScheduleError:
        return
    judged(workload, Lockstep().schedule(workload))


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_replicas_start_their_micro_batches_together(kind: str) -> None:
    sections = {
        "a": section(replicas=2, buckets=(16,), forward=Cost(per_unit_squared=100), backward=Cost(per_unit_squared=100)),
        "b": section(),
    }
    items = [{"a": (n,), "b": (8,)} for n in (16, 9, 9, 16, 12, 16)]
    first, second = rounds(Lockstep().schedule(work(sections, ["a b"], items)), "a", kind)
    assert len(first) == 3
    assert first == second


def test_a_replica_waits_for_the_slower_one() -> None:
    sections = {"a": section(replicas=2, buckets=(16,), trainable=False, forward=Cost(per_unit_squared=1000))}
    items = [{"a": (n,)} for n in (16, 9, 9, 16)]
    workload = work(sections, [], items)
    assert [(t.replica, t.start) for t in Lockstep().schedule(workload).tasks] == [(0, 0), (1, 0), (0, 256), (1, 256)]


def test_replicas_on_one_device_take_turns() -> None:
    sections = {"a": section(replicas=2, buckets=(8,), devices=((0,), (0,)))}
    workload = work(sections, [], [{"a": (8,)}] * 4)
    judged(workload, Lockstep().schedule(workload))
