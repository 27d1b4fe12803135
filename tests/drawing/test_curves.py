"""Curves over steps, and the table of one step."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest

from maestro_jax.drawing.curves import HEIGHT, WIDTH, curve, step_html

SVG = "{http://www.w3.org/2000/svg}"


def places(html: str) -> list[list[tuple[float, float]]]:
    """The points of every line of values, in pixels."""
    lines = [element.get("points", "") for element in ElementTree.fromstring(html).iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())] for line in lines]


def dots(html: str) -> int:
    return len(list(ElementTree.fromstring(html).iter(f"{SVG}circle")))


def numbers(html: str, anchor: str) -> list[float]:
    """The numbers at the left side (anchor "end") or below ("middle")."""
    return [float(e.text or "") for e in ElementTree.fromstring(html).iter(f"{SVG}text") if e.get("text-anchor") == anchor]


def test_lower_values_lie_lower() -> None:
    [line] = places(curve("loss", [(1, 5.0), (2, 1.0), (3, 3.0)]))
    heights = [y for _, y in line]
    assert heights[0] < heights[2] < heights[1]


@pytest.mark.parametrize("values", [[5.0, 2.0, 7.5], [1e-9, 2e-9], [-3.0, 4e12], [2.0, 2.0], [0.0, 0.0]])
def test_everything_lies_inside(values: Sequence[float]) -> None:
    html = curve("x", list(enumerate(values, 1)), [(0, values[0])])
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for line in places(html) for x, y in line)
    assert numbers(html, "end")


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    line = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, 4.0), (6, math.inf)]
    assert [len(piece) for piece in places(curve("x", line))] == [2, 2]


def test_a_lonely_value_between_gaps_is_a_dot() -> None:
    assert dots(curve("x", [(1, 1.0), (2, math.nan), (3, 2.0)])) == 2


def test_no_finite_value_is_said_so() -> None:
    assert "no finite value" in curve("x", [(1, math.nan)])


def test_of_many_steps_the_spikes_stay() -> None:
    values = [1.0] * 20_000
    values[777], values[12_345] = 9.0, -9.0
    [line] = places(curve("x", list(enumerate(values))))
    [extremes] = places(curve("x", [(0, 9.0), (1, -9.0)]))
    assert len(line) < 2 * WIDTH
    assert {min(y for _, y in line), max(y for _, y in line)} == {y for _, y in extremes}


def test_steps_are_whole_numbers() -> None:
    assert numbers(curve("x", [(1, 1.0), (2, 2.0), (3, 1.5)]), "middle") == [1, 2, 3]


def test_second_series_is_drawn_as_dots() -> None:
    assert dots(curve("x", [(1, 1.0), (2, 2.0)], [(0, 3.0), (2, 1.0), (3, math.nan)])) == 2


def test_the_title_is_escaped() -> None:
    assert "<b>" not in curve("<b>", [(1, 1.0)])


def test_a_step_is_a_row_of_numbers() -> None:
    html = step_html(7, {"loss": 1.5, "student/<kl>": math.nan, "applied": 1.0}, 12_345)
    assert re.findall(r">([^<]+)<", html) == ["step", "loss", "student/&lt;kl&gt;", "tokens", "7", "1.500", "-", "12,345"]


def test_a_skipped_step_says_so() -> None:
    assert "skipped" in step_html(7, {"loss": 1.5, "applied": 0.0}, 1)
    assert "skipped" not in step_html(7, {"loss": 1.5}, 1)
