"""The cut keeps order, sizes, rows and fan limits, and loses no item."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import workload_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_support import section, work

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import EdgeWork, Microbatch, Workload, cut, place
from maestro_jax.schedules.placement import in_turn


def of(microbatches: list[Microbatch], name: str) -> list[Microbatch]:
    return [m for m in microbatches if m.section == name]


def units_of(microbatches: list[Microbatch], name: str) -> list[tuple[int, ...]]:
    return [m.units for m in of(microbatches, name)]


def fans(workload: Workload, microbatches: list[Microbatch], edge: EdgeWork) -> tuple[int, int]:
    """The widest (fan in, fan out) of an edge."""
    feeds, fed = defaultdict(set), defaultdict(set)
    for p in of(microbatches, edge.producer):
        for c in of(microbatches, edge.consumer):
            if {s for s, _ in p.items} & {s for s, _ in c.items}:
                feeds[p.number].add(c.number)
                fed[c.number].add(p.number)
    return max(map(len, fed.values()), default=0), max(map(len, feeds.values()), default=0)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(workload=support.workloads())
def test_every_item_is_in_one_microbatch_in_arrival_order(workload: Workload) -> None:
    for name in workload.sections:
        wanted = [
            (t, (sample.id, n)) for t, step in enumerate(workload.steps) for sample in step for n in range(len(sample.items.get(name, ())))
        ]
        assert [(m.step, piece) for m in of(cut(workload), name) for piece in m.items] == wanted


@settings(derandomize=True, deadline=None, max_examples=40)
@given(workload=support.workloads())
def test_bucket_is_the_smallest_that_holds_the_items(workload: Workload) -> None:
    for m in cut(workload):
        assert m.bucket == next(b for b in workload.sections[m.section].buckets if b >= sum(m.units))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(workload=support.workloads(), rows=st.integers(2, 3))
def test_items_of_a_microbatch_fit_its_rows(workload: Workload, rows: int) -> None:
    sections = {
        n: dataclasses.replace(s, buckets=(s.buckets[-1], s.buckets[-1] * rows), row_length=s.buckets[-1])
        for n, s in workload.sections.items()
    }
    for m in cut(dataclasses.replace(workload, sections=sections)):
        row_length = sections[m.section].row_length
        assert place(m.units, m.bucket, row_length) is not None


@pytest.mark.quick
def test_largest_bucket_is_filled_greedily() -> None:
    workload = work({"a": section()}, [], [{"a": (n,)} for n in (9, 7, 1, 15, 2)])
    assert units_of(cut(workload), "a") == [(9, 7), (1, 15), (2,)]


def test_rows_close_a_microbatch_earlier_than_units_would() -> None:
    samples = [{"a": (n,)} for n in (3, 3, 2, 4)]
    assert units_of(cut(work({"a": section(buckets=(8, 16))}, [], samples)), "a") == [(3, 3, 2, 4)]
    assert units_of(cut(work({"a": section(buckets=(4, 8), row_length=4)}, [], samples)), "a") == [(3, 3), (2, 4)]


def test_microbatches_stay_in_their_step() -> None:
    microbatches = cut(work({"a": section()}, [], [{"a": (2,)}], [{"a": (3,)}]))
    assert [(m.step, m.number, m.units) for m in microbatches] == [(0, 0, (2,)), (1, 1, (3,))]


@settings(derandomize=True, deadline=None)
@given(workload=support.workloads(fans=True, most_items=1))
def test_fan_limits_are_kept(workload: Workload) -> None:
    microbatches = cut(workload)
    for edge in workload.edges:
        widest = fans(workload, microbatches, edge)
        assert all(limit is None or found <= limit for found, limit in zip(widest, (edge.fan_in, edge.fan_out), strict=True))


def test_fan_in_closes_the_consumer_early() -> None:
    samples = [{"a": (16,), "b": (4,)}] * 4
    sections = {"a": section(), "b": section()}
    assert units_of(cut(work(sections, ["a b"], samples)), "b") == [(4, 4, 4, 4)]
    limited = work(sections, [EdgeWork(producer="a", consumer="b", fan_in=2)], samples)
    assert units_of(cut(limited), "b") == [(4, 4), (4, 4)]


def test_fan_out_closes_the_producer_early() -> None:
    samples = [{"a": (4,), "b": (16,)}] * 4
    limited = work({"a": section(), "b": section()}, [EdgeWork(producer="a", consumer="b", fan_out=3)], samples)
    assert units_of(cut(limited), "a") == [(4, 4, 4), (4,)]


def alone(workload: Workload) -> bool:
    """Whether each sample can be cut when it is the only one."""
    for sample in (s for step in workload.steps for s in step):
        try:
            cut(dataclasses.replace(workload, steps=((sample,),)))
        except ScheduleError:
            return False
    return True


@settings(derandomize=True, deadline=None, max_examples=80)
@given(workload=support.workloads(fans=True))
def test_cut_is_refused_only_when_one_sample_alone_is_too_wide(workload: Workload) -> None:
    if alone(workload):
        microbatches = cut(workload)
        widest = [(e, fans(workload, microbatches, e)) for e in workload.edges]
        assert all(e.fan_in is None or found[0] <= e.fan_in for e, found in widest)
        assert all(e.fan_out is None or found[1] <= e.fan_out for e, found in widest)
    else:
        with pytest.raises(ScheduleError, match="fan limits"):
            cut(workload)


@settings(derandomize=True, deadline=None)
@given(units=st.lists(st.integers(1, 8), min_size=1, max_size=12), row_length=st.sampled_from([None, 8]))
def test_a_sample_alone_is_cut_as_its_check_foresees(units: list[int], row_length: int | None) -> None:
    found = cut(work({"a": section(buckets=(16,), row_length=row_length)}, [], [{"a": tuple(units)}]))
    numbers = [number for number, microbatch in enumerate(found) for _ in microbatch.items]
    assert in_turn(units, 16, row_length) == numbers


def test_a_new_consumer_microbatch_is_opened_where_only_that_helps() -> None:
    """The second sample's items of b (2 and 14 units) lie in one micro-batch only if b starts a new one."""
    edge = EdgeWork(producer="a", consumer="b", fan_out=1)
    workload = work({"a": section(), "b": section()}, [edge], [{"a": (1,), "b": (14,)}, {"a": (1,), "b": (2, 14)}])
    microbatches = cut(workload)
    assert units_of(microbatches, "a") == [(1,), (1,)]
    assert units_of(microbatches, "b") == [(14,), (2, 14)]


@pytest.mark.quick
def test_a_sample_that_is_too_wide_is_named() -> None:
    edge = EdgeWork(producer="a", consumer="b", fan_in=1)
    workload = work({"a": section(), "b": section()}, [edge], [{"a": (2,)}, {"a": (16, 16), "b": (4,)}])
    with pytest.raises(ScheduleError) as caught:
        cut(workload)
    assert str(caught.value) == (
        "sample 1 cannot be cut within the fan limits of ['b'].\n"
        "  wanted   a sample whose items lie in no more micro-batches than fan_in and fan_out allow\n"
        "  have     items {'a': (16, 16), 'b': (4,)}\n"
        "  set by   the workload\n"
        "  fix      raise fan_in or fan_out of the edge, or use larger micro-batches\n"
        "  help     docs/errors.md#fan-limit"
    )
