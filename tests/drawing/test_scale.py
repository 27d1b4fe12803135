"""From values to pixels."""

from __future__ import annotations

import pytest

from maestro_jax.drawing.scale import Scale


def test_lowest_and_highest_value_lie_at_the_ends() -> None:
    scale = Scale([3.0, 7.0, 5.0], 100, 20)
    assert [scale.place(value) for value in (3.0, 5.0, 7.0)] == [100, 60, 20]


def test_a_constant_lies_in_the_middle() -> None:
    assert Scale([0.0, 0.0], 0, 10).place(0.0) == 5
    assert Scale([4.0], 0, 10).place(4.0) == pytest.approx(5)


def test_round_numbers_are_as_close_as_parts_allow() -> None:
    assert Scale([0, 36], 0, 1, parts=10).ticks == [0, 5, 10, 15, 20, 25, 30, 35]
    assert Scale([0, 36], 0, 1, parts=4).ticks == [0, 10, 20, 30]


def test_round_numbers_are_at_least_so_far_apart() -> None:
    assert Scale([1, 3], 0, 1, least=1.0).ticks == [1, 2, 3]
