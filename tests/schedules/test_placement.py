"""Items lie in rows by first fit: inside their row, without overlap, wherever the ladder ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_jax.schedules.placement import place, smallest_bucket

units = st.lists(st.integers(1, 8), max_size=12)


@pytest.mark.quick
@settings(derandomize=True, deadline=None)
@given(units=units, rows=st.integers(1, 4))
def test_items_lie_inside_their_rows_and_do_not_overlap(units: list[int], rows: int) -> None:
    places = place(units, rows * 8, row_length=8)
    if places is None:
        return
    taken = [(row, offset + n) for (row, offset), size in zip(places, units, strict=True) for n in range(size)]
    assert len(set(taken)) == len(taken) == sum(units)
    assert all(0 <= row < rows and 0 <= offset < 8 for row, offset in taken)


@settings(derandomize=True, deadline=None)
@given(units=units)
def test_without_row_length_items_stand_one_after_another(units: list[int]) -> None:
    places = place(units, 40)
    assert places == ([(0, sum(units[:n])) for n in range(len(units))] if sum(units) <= 40 else None)


@settings(derandomize=True, deadline=None)
@given(units=units, more=units)
def test_later_items_move_no_earlier_one(units: list[int], more: list[int]) -> None:
    all_places = place(units + more, 10**4, row_length=8)
    assert all_places is not None
    assert all_places[: len(units)] == place(units, 10**4, row_length=8)


@settings(derandomize=True, deadline=None)
@given(units=units)
def test_places_are_the_same_in_every_bucket_that_holds_the_items(units: list[int]) -> None:
    found = [place(units, bucket, row_length=8) for bucket in (8, 16, 32, 64, 128)]
    held = [places for places in found if places is not None]
    assert held
    assert all(places == held[0] for places in held)


def test_an_item_longer_than_a_row_does_not_fit() -> None:
    assert place([5], bucket=8, row_length=4) is None
    assert place([4], bucket=8, row_length=4) == [(0, 0)]


def test_items_do_not_straddle_rows_though_units_would_suffice() -> None:
    assert place([3, 3, 2], bucket=8, row_length=4) is None
    assert place([3, 3, 1, 1], bucket=8, row_length=4) == [(0, 0), (1, 0), (0, 3), (1, 3)]


def test_smallest_bucket_counts_rows_not_units_alone() -> None:
    assert smallest_bucket([3, 3], (4, 8, 16)) == 8
    assert smallest_bucket([3, 3, 2], (4, 8, 16), row_length=4) == 16
    assert smallest_bucket([3, 3, 3, 3, 3], (4, 8, 16), row_length=4) is None


def test_no_items_fit_anywhere() -> None:
    assert place([], bucket=8, row_length=4) == []
    assert smallest_bucket([], (4, 8)) == 4


@settings(derandomize=True, deadline=None)
@given(units=units)
def test_items_that_are_not_packed_have_rows_of_their_own(units: list[int]) -> None:
    assert place(units, 12 * 8, row_length=8, packed=False) == [(n, 0) for n in range(len(units))]
    assert (place(units, 8, packed=False) is None) == (len(units) > 1)
