"""The parts of the gap add up to it, none is negative, and each shows up where its cause is planted."""

from __future__ import annotations

import pytest
import workload_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_support import section, work

from maestro_jax.schedules import Cost, EdgeWork, InOrder, Lockstep, Policy, Sequential, Workload, gap_of, lower_bound

SINGLE = Cost(fixed=10)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(workload=support.workloads(), policy=st.sampled_from([InOrder(), Sequential(), Lockstep()]))
def test_parts_add_up_to_makespan_minus_bound(workload: Workload, policy: Policy) -> None:
    schedule = policy.schedule(workload)
    found = gap_of(workload, schedule)
    assert found.total == schedule.makespan - lower_bound(workload)
    assert min(found.fill, found.drain, found.padding, found.imbalance, found.memory, found.update) >= 0


@pytest.mark.quick
@pytest.mark.parametrize("name", support.FILES)
def test_parts_add_up_on_a_shared_workload(name: str) -> None:
    workload = Workload.from_json(support.raw_file(name))
    schedule = InOrder().schedule(workload)
    assert gap_of(workload, schedule).total == schedule.makespan - lower_bound(workload)


def largest(workload: Workload, policy: Policy | None = None) -> str:
    """The name of the largest part."""
    found = gap_of(workload, (policy or InOrder()).schedule(workload))
    return max(("fill", "drain", "padding", "imbalance", "memory", "update"), key=lambda part: getattr(found, part))


def test_half_empty_buckets_are_padding() -> None:
    sections = {"a": section(buckets=(16,), trainable=False, forward=Cost(per_unit=1))}
    workload = work(sections, [], [{"a": (9,)}] * 6)
    found = gap_of(workload, InOrder().schedule(workload))
    assert (found.padding, found.total) == (6 * 16 - 6 * 9, 6 * 16 - 6 * 9)


def test_one_replica_with_more_to_do_is_imbalance() -> None:
    sections = {"a": section(buckets=(8,), replicas=2, forward=SINGLE, backward=Cost(), update=0)}
    assert largest(work(sections, [], [{"a": (8,)}] * 3)) == "imbalance"


def test_a_late_producer_is_fill() -> None:
    sections = {"a": section(trainable=False, buckets=(8, 64), forward=Cost(per_unit=1)), "b": section(buckets=(8,), forward=SINGLE)}
    assert largest(work(sections, ["a b"], [{"a": (8,), "b": (8,)}] * 8)) == "fill"


def test_a_late_consumer_is_drain() -> None:
    late = section(buckets=(64,), forward=Cost(fixed=150), backward=Cost(fixed=150))
    sections = {"a": section(buckets=(8,), forward=Cost(fixed=50), backward=Cost(fixed=50)), "b": late}
    edge = EdgeWork(producer="a", consumer="b", delay=100)
    assert largest(work(sections, [edge], [{"a": (8,), "b": (8,)}] * 4)) == "drain"


def test_waiting_for_room_is_memory() -> None:
    a = section(buckets=(8,), trainable=False, max_inflight=8, forward=Cost(fixed=50))
    b = section(buckets=(8,), forward=Cost(fixed=10), backward=Cost(fixed=10))
    edge = EdgeWork(producer="a", consumer="b", delay=20)
    assert largest(work({"a": a, "b": b}, [edge], [{"a": (8,), "b": (8,)}] * 5)) == "memory"


def test_the_update_of_a_step_is_update() -> None:
    sections = {"a": section(buckets=(8,), forward=SINGLE), "b": section(buckets=(8,), update=500, forward=Cost(fixed=1), backward=Cost())}
    samples = [{"a": (8,)}]
    assert largest(work(sections, [], samples, samples, samples)) == "update"
