"""Places of boxes and lines, for random graphs without cycles."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_jax.drawing.layers import IN_STEP, LANE, Layout, Link, arrange

Graph = tuple[dict[str, tuple[float, float]], list[Link]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    names = [f"s{number}" for number in range(draw(st.integers(1, 7)))]
    boxes = {name: (float(draw(st.integers(40, 300))), float(draw(st.integers(30, 160)))) for name in names}
    pairs = [pair for pair in itertools.combinations(names, 2) if draw(st.booleans())]
    return boxes, [Link(start=start, end=end, label=float(draw(st.integers(0, 200)))) for start, end in pairs]


def arranged(graph: Graph) -> Layout:
    return arrange(*graph)


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_no_two_boxes_overlap(graph: Graph) -> None:
    for a, b in itertools.combinations(arranged(graph).places.values(), 2):
        assert a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height < b.y or b.y + b.height < a.y


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_boxes_have_their_size_and_lie_inside(graph: Graph) -> None:
    found = arranged(graph)
    for name, place in found.places.items():
        assert place.width >= graph[0][name][0]
        assert place.height >= graph[0][name][1]
        assert place.x >= 0
        assert place.y >= 0
        assert place.x + place.width <= found.width
        assert place.y + place.height <= found.height


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_lines_run_from_box_to_box_and_to_the_right(graph: Graph) -> None:
    found = arranged(graph)
    for link, route in zip(graph[1], found.routes, strict=True):
        start, end = found.places[link.start], found.places[link.end]
        assert route.x == start.x + start.width
        assert start.y <= route.y <= start.y + start.height
        assert route.runs[-1][1] == end.x
        assert end.y <= route.runs[-1][2] <= end.y + end.height
        ways = [route.x, *(x for run in route.runs for x in run[:2])]
        assert ways == sorted(ways)


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_a_line_that_passes_a_column_crosses_no_box_of_it(graph: Graph) -> None:
    found = arranged(graph)
    for route in found.routes:
        for start, end, level in route.runs[:-1]:
            beside = [p for p in found.places.values() if p.x < end and start < p.x + p.width]
            assert all(level + LANE / 2 <= p.y or p.y + p.height <= level - LANE / 2 for p in beside)


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_labels_have_room(graph: Graph) -> None:
    boxes, links = graph
    found = arranged(graph)
    for link, route in zip(links, found.routes, strict=True):
        assert route.runs[-1][1] - route.runs[-1][0] >= link.label
    for name in boxes:
        levels = sorted(route.runs[-1][2] for link, route in zip(links, found.routes, strict=True) if link.end == name)
        assert all(below - above >= IN_STEP - 1e-6 for above, below in itertools.pairwise(levels))


def test_what_leads_to_a_late_box_only_stands_beside_it() -> None:
    links = [Link(start=start, end=end, label=0) for start, end in (("a", "b"), ("b", "d"), ("c", "d"))]
    places = arrange(dict.fromkeys("abcd", (50.0, 40.0)), links).places
    assert places["c"].x == places["b"].x


def test_a_box_is_high_enough_for_its_lines() -> None:
    found = arrange(dict.fromkeys("abcde", (50.0, 40.0)), [Link(start=start, end="e", label=0) for start in "abcd"])
    levels = [route.runs[-1][2] for route in found.routes]
    place = found.places["e"]
    assert place.y < min(levels)
    assert max(levels) < place.y + place.height


def test_columns_are_ordered_so_that_lines_do_not_cross() -> None:
    links = [Link(start="a", end="d", label=0), Link(start="b", end="c", label=0)]
    places = arrange(dict.fromkeys("abcd", (50.0, 40.0)), links).places
    assert (places["a"].y < places["b"].y) == (places["d"].y < places["c"].y)
