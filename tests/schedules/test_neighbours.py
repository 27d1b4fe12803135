"""Plans that are one change away: each is there, is a valid workload, and keeps what the change does not concern."""

from __future__ import annotations

from typing import Any

import pytest
import workload_support as support
from hypothesis import given, settings
from workload_support import section, work

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import EdgeWork, InOrder, Workload
from maestro_jax.schedules.neighbours import neighbours


def possible(workload: Workload) -> dict[str, Workload]:
    return {n.change: n.workload for n in neighbours(workload) if n.workload is not None}


def refused(workload: Workload) -> dict[str, str]:
    return {n.change: n.reason for n in neighbours(workload) if n.workload is None}


def two(a: dict[str, Any], b: dict[str, Any], units: int = 8) -> Workload:
    return work({"a": section(**a), "b": section(**b)}, ["a b"], [{"a": (units,), "b": (units,)}])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(workload=support.workloads())
def test_devices_are_kept_and_every_change_is_judged_or_reasoned(workload: Workload) -> None:
    moves = len(workload.order) * (len(workload.order) - 1)
    ladders = sum(3 + (len(s.buckets) if len(s.buckets) > 1 else 0) for s in workload.sections.values())
    found = neighbours(workload)
    assert len(found) == len({n.change for n in found}) == moves + ladders
    for each in found:
        assert (each.workload is None) == bool(each.reason)
        if each.workload is not None and each.change.startswith("move"):
            before, after = (sum(s.replicas for s in w.sections.values()) for w in (workload, each.workload))
            assert after == before or "makes" in each.change or "replicas from" in each.change
        if each.workload is not None:
            try:
                schedule = InOrder().schedule(each.workload)
            except ScheduleError:
                continue  # fan limits or memory, which the caller is told
            support.judged(each.workload, schedule)


def test_a_replica_moves_with_its_devices() -> None:
    found = possible(two({"replicas": 3}, {"replicas": 1}))["move a replica from a to b"]
    assert {name: (s.replicas, s.devices) for name, s in found.sections.items()} == {
        "a": (2, ((0,), (1,))),
        "b": (2, ((3,), (2,))),
    }


def test_a_wide_replica_makes_several_narrow_ones_and_the_other_way() -> None:
    workload = two({"replicas": 2, "devices": ((0, 1), (2, 3))}, {"replicas": 3, "devices": ((4,), (5,), (6,))})
    found = possible(workload)
    assert found["move a replica from a to b, where it makes 2"].sections["b"].devices == ((4,), (5,), (6,), (2,), (3,))
    assert found["move 2 replicas from b to a"].sections["a"].devices == ((0, 1), (2, 3), (5, 6))
    assert found["move 2 replicas from b to a"].sections["b"].devices == ((4,),)


def test_moves_that_are_not_possible_say_why() -> None:
    assert refused(two({}, {"replicas": 2}))["move a replica from a to b"] == "a has 1 and needs one itself"
    odd = two({"replicas": 2, "devices": ((0, 1), (2, 3))}, {"devices": ((4, 5, 6),)})
    assert refused(odd)["move a replica from a to b"] == "replicas of 2 devices do not make up replicas of 3"
    shared = two({"replicas": 2, "devices": ((0,), (1,))}, {"replicas": 2, "devices": ((0,), (1,))})
    assert refused(shared)["move a replica from a to b"] == "its devices also run b"


def test_ladders_are_halved_doubled_extended_and_shortened() -> None:
    found = [n.workload.sections["a"].buckets for n in neighbours(work({"a": section()}, [], [{"a": (5,)}])) if n.workload]
    assert found == [(4, 8), (16, 32), (4, 8, 16), (16,), (8,)]


@pytest.mark.parametrize(
    ("fields", "change", "reason"),
    [
        ({"buckets": (8, 16), "row_length": 8}, "halve the buckets of a: 8, 16 to 4, 8", "a row has 8 units"),
        ({"buckets": (8, 16)}, "drop 16 from the buckets of a: 8, 16 to 8", "an item has 12 units"),
        ({"buckets": (15,)}, "halve the buckets of a: 15 to 7", "not all are even"),
        (
            {"buckets": (16,), "bucket_bytes": (100,), "max_bytes": 150},
            "double the buckets of a: 16 to 32",
            "a micro-batch would take more than 150 bytes (max_bytes)",
        ),
    ],
)
def test_ladders_that_are_not_possible_say_why(fields: dict[str, Any], change: str, reason: str) -> None:
    units = 8 if "row_length" in fields else 12
    assert refused(work({"a": section(**fields)}, [], [{"a": (units,)}]))[change] == reason


def test_bytes_of_new_sizes_are_in_proportion() -> None:
    found = possible(work({"a": section(bucket_bytes=(100, 180))}, [], [{"a": (4,)}]))
    assert found["halve the buckets of a: 8, 16 to 4, 8"].sections["a"].bucket_bytes == (50, 100)
    assert found["double the buckets of a: 8, 16 to 16, 32"].sections["a"].bucket_bytes == (180, 360)


def test_fan_limits_are_those_that_a_plan_would_have() -> None:
    """One more than sizes need: 16 to 16 units need 1, 8 to 16 need 2."""
    edge = EdgeWork(producer="a", consumer="b", fan_in=2, fan_out=2)
    workload = work({"a": section(buckets=(16,)), "b": section(buckets=(16,))}, [edge], [{"a": (4,), "b": (4,)}])
    found = possible(workload)
    limits = {change: (w.edges[0].fan_in, w.edges[0].fan_out) for change, w in found.items()}
    assert limits == {
        "halve the buckets of a: 16 to 8": (3, 2),
        "double the buckets of a: 16 to 32": (2, 3),
        "add 8 to the buckets of a: 16 to 8, 16": (2, 2),
        "halve the buckets of b: 16 to 8": (2, 3),
        "double the buckets of b: 16 to 32": (3, 2),
        "add 8 to the buckets of b: 16 to 8, 16": (2, 2),
    }
