"""Trial cuts: sizes are filled in order, limits are kept, and every item lands in exactly one micro-batch."""

from __future__ import annotations

import pytest
import workload_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_support import section, work

from maestro_jax.schedules import EdgeWork, Workload, cut, place
from maestro_jax.schedules.compact import Compact
from maestro_jax.schedules.parts import Part, cut_section, cut_together, pairs_of, within_fans


def lengths(model: Compact, part: Part) -> list[list[int]]:
    return [[model.steps[0].units[0][i] for i in items] for items in part.items]


def one_section(units: list[int], **fields: object) -> Compact:
    return Compact(work({"a": section(**fields)}, [], [{"a": (n,)} for n in units]))


def test_micro_batches_are_filled_up_to_their_sizes() -> None:
    model = one_section([3, 5, 4, 9, 8, 1], buckets=(4, 8, 16))
    part = cut_section(model, 0, 0, range(6), (4, 16))
    assert lengths(model, part) == [[3], [5, 4], [9], [8, 1]]
    assert part.buckets == [4, 16, 16, 16]


def test_an_item_larger_than_the_size_gets_the_bucket_that_holds_it() -> None:
    model = one_section([9, 2], buckets=(4, 8, 16))
    assert cut_section(model, 0, 0, range(2), (4, 4)).buckets == [16]


def test_the_order_of_samples_is_the_order_of_items() -> None:
    model = one_section([1, 2, 3], buckets=(4, 8))
    assert lengths(model, cut_section(model, 0, 0, (2, 0, 1), (8,))) == [[3, 1, 2]]


def test_items_never_straddle_rows() -> None:
    model = one_section([5, 5, 3, 3, 8, 2], buckets=(8, 16), row_length=8)
    part = cut_section(model, 0, 0, range(6), ())
    assert lengths(model, part) == [[5, 5, 3, 3], [8, 2]]
    assert [place(found, bucket, 8) is not None for found, bucket in zip(lengths(model, part), part.buckets, strict=True)] == [True, True]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(workload=support.workloads())
def test_cut_in_arrival_order_is_that_of_in_order(workload: Workload) -> None:
    model = Compact(workload)
    wanted = {(m.section, m.step, m.items): m.bucket for m in cut(workload)}
    found = {}
    for t, step in enumerate(model.steps):
        parts = cut_together(model, t, range(step.samples), [()] * len(model.sections))
        assert parts is not None
        for n, part in enumerate(parts):
            pieces = step.pieces[n]
            found |= {(model.names[n], t, tuple(pieces[i] for i in items)): b for items, b in zip(part.items, part.buckets, strict=True)}
    assert found == wanted


@settings(derandomize=True, deadline=None, max_examples=100)
@given(workload=support.workloads(fans=True, most_items=1), data=st.data(), aligned=st.booleans())
def test_cut_together_keeps_fan_limits_and_every_item(workload: Workload, data: st.DataObject, aligned: bool) -> None:
    model = Compact(workload)
    for t, step in enumerate(model.steps):
        order = data.draw(st.permutations(range(step.samples)))
        sizes = [tuple(data.draw(st.lists(st.sampled_from(s.buckets), max_size=4))) for s in model.sections]
        parts = cut_together(model, t, order, sizes, aligned)
        assert parts is not None
        assert within_fans(model, [pairs_of(model, t, parts, n) for n in range(len(model.links))])
        for part, units in zip(parts, step.units, strict=True):
            assert sorted(i for items in part.items for i in items) == list(range(len(units)))


def test_a_sample_that_no_fan_limit_allows_cannot_be_cut() -> None:
    sections = {"a": section(buckets=(8,)), "b": section(buckets=(8,))}
    model = Compact(work(sections, [EdgeWork(producer="a", consumer="b", fan_in=1)], [{"a": (8, 8), "b": (8,)}]))
    assert cut_together(model, 0, (0,), [(), ()]) is None


@pytest.mark.parametrize("aligned", [False, True])
def test_aligned_cuts_close_all_sections_together(aligned: bool) -> None:
    sections = {"a": section(buckets=(8,)), "b": section(buckets=(8,))}
    model = Compact(work(sections, ["a b"], [{"a": (4,), "b": (1,)}] * 4))
    parts = cut_together(model, 0, range(4), [(), ()], aligned)
    assert parts is not None
    assert [part.units for part in parts] == [[8, 8], [2, 2] if aligned else [4]]


def test_items_that_are_not_packed_take_a_row_each() -> None:
    rows = one_section([5, 1, 8, 2, 3], buckets=(8, 16, 32), row_length=8, packed=False)
    part = cut_section(rows, 0, 0, range(5), (16,))
    assert (lengths(rows, part), part.buckets) == ([[5, 1], [8, 2, 3]], [16, 32])


def test_without_rows_items_that_are_not_packed_take_a_micro_batch_each_of_the_bucket_that_holds_it() -> None:
    alone = one_section([5, 9, 2], buckets=(4, 8, 16), packed=False)
    part = cut_section(alone, 0, 0, range(3), (16, 16))
    assert (lengths(alone, part), part.buckets) == ([[5], [9], [2]], [8, 16, 4])


@pytest.mark.parametrize("row", [8, None])
def test_items_that_are_not_packed_are_cut_alike_by_all(row: int | None) -> None:
    workload = work({"a": section(buckets=(8, 16), row_length=row, packed=False)}, [], [{"a": (n, 3)} for n in (5, 1, 8, 2)])
    model = Compact(workload)
    wanted = [(m.bucket, len(m.items)) for m in cut(workload)]
    together = cut_together(model, 0, range(4), [()])
    assert together is not None
    for part in (together[0], cut_section(model, 0, 0, range(4), ())):
        assert list(zip(part.buckets, map(len, part.items), strict=True)) == wanted
    assert wanted == ([(16, 2)] * 4 if row else [(8, 1)] * 8)
