"""Places for the boxes of a graph without cycles: in columns from left to right, each box right of those that lead to it.

A link that passes a column runs through it in a lane of its own, so no line crosses a box. Columns are ordered by the mean height of
their neighbours, as by Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of Hierarchical System Structures" (IEEE
Transactions on Systems, Man, and Cybernetics 11(2), 1981).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

BOX_GAP = 26.0
"""Pixels between two boxes of a column."""
LANE = 24.0
"""Height of a lane."""
CURVE = 52.0
"""Width in which lines bend between columns."""
MARGIN = 14.0
"""Beside a label."""
IN_STEP, OUT_STEP = 44.0, 18.0
"""Between the lines that end, and that begin, at a box: lines are labelled at their end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A line from one box to another.

    Args:
        start: name of the box where it begins.
        end: name of the box where it ends.
        label: width of the text at its end, in pixels.
    """

    start: str
    end: str
    label: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A rectangle, in pixels from the upper left corner."""

    x: float
    y: float
    width: float
    height: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """How a link runs, in pixels: from its start through level runs, with bends between.

    Args:
        x: of its start.
        y: of its start.
        runs: (from x, to x, y); the last one ends at the box and carries the label.
    """

    x: float
    y: float
    runs: tuple[tuple[float, float, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where everything goes.

    Args:
        places: box -> its place.
        routes: for each link, in their order, how it runs.
        width: of the whole, in pixels.
        height: of the whole.
    """

    places: Mapping[str, Place]
    routes: Sequence[Route]
    width: float
    height: float


Node = str | tuple[int, int]
"""A box, or the lane of a link (its number) in a column (its number)."""


def arrange(boxes: Mapping[str, tuple[float, float]], links: Sequence[Link]) -> Layout:
    """Places boxes and links.

    Args:
        boxes: name -> least width and height, in pixels; each stands after those that lead to it.
        links: between them.

    >>> found = arrange({"a": (50, 40), "b": (50, 40)}, [Link(start="a", end="b", label=30)])
    >>> [(place.x, place.y) for place in found.places.values()]
    [(0.0, 2.0), (146.0, 0.0)]
    """
    layers = _layers(boxes, links)
    lanes = [[(number, layer) for layer in range(layers[k.start] + 1, layers[k.end])] for number, k in enumerate(links)]
    chains: list[list[Node]] = [[link.start, *between, link.end] for link, between in zip(links, lanes, strict=True)]
    heights: dict[Node, float] = {name: _height(name, height, links) for name, (_, height) in boxes.items()}
    columns: list[list[Node]] = [[name for name in boxes if layers[name] == layer] for layer in range(max(layers.values()) + 1)]
    for lane in (lane for between in lanes for lane in between):
        heights[lane] = LANE
        columns[lane[1]].append(lane)
    tops = _down(columns, chains, heights)
    columns_x = _across(columns, boxes, links, layers)
    places = {}
    for name, layer in layers.items():
        left, right = columns_x[layer]
        places[name] = Place(x=left, y=tops[name], width=right - left, height=heights[name])
    centres = {node: top + heights[node] / 2 for node, top in tops.items()}
    routes = [_route(number, links, chains, columns_x, layers, centres) for number in range(len(links))]
    return Layout(places=places, routes=routes, width=columns_x[-1][1], height=max(top + heights[node] for node, top in tops.items()))


def _layers(boxes: Mapping[str, tuple[float, float]], links: Sequence[Link]) -> dict[str, int]:
    """Box -> column: right of all that lead to it; a box to which nothing leads stands just left of the first that it leads to."""
    layers: dict[str, int] = {}
    for name in boxes:
        layers[name] = max((layers[link.start] + 1 for link in links if link.end == name), default=0)
    for name in boxes:
        if all(link.end != name for link in links):
            layers[name] = min((layers[link.end] - 1 for link in links if link.start == name), default=0)
    return layers


def _height(name: str, least: float, links: Sequence[Link]) -> float:
    """A box is high enough for the lines at its sides."""
    ends, starts = sum(link.end == name for link in links), sum(link.start == name for link in links)
    return max(least, ends * IN_STEP, starts * OUT_STEP)


def _down(columns: Sequence[list[Node]], chains: Sequence[Sequence[Node]], heights: Mapping[Node, float]) -> dict[Node, float]:
    """Orders every column, and returns the upper edge of every node; columns are centred."""
    total = max(_stacked(column, heights) for column in columns)
    before: dict[Node, list[Node]] = {}
    after: dict[Node, list[Node]] = {}
    for chain in chains:
        for left, right in itertools.pairwise(chain):
            before.setdefault(right, []).append(left)
            after.setdefault(left, []).append(right)
    tops: dict[Node, float] = {}
    for column in columns:
        _stack(column, total, heights, tops)
    forward, backward = [(column, before) for column in columns], [(column, after) for column in reversed(columns)]
    for column, neighbours in [*forward, *backward, *forward]:
        means = {node: _mean([tops[n] + heights[n] / 2 for n in neighbours.get(node, [node])]) for node in column}
        column.sort(key=means.__getitem__)
        _stack(column, total, heights, tops)
    return tops


def _stack(column: Sequence[Node], total: float, heights: Mapping[Node, float], tops: dict[Node, float]) -> None:
    top = (total - _stacked(column, heights)) / 2
    for node in column:
        tops[node] = top
        top += heights[node] + BOX_GAP


def _stacked(column: Sequence[Node], heights: Mapping[Node, float]) -> float:
    return sum(heights[node] for node in column) + BOX_GAP * (len(column) - 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _across(
    columns: Sequence[Sequence[Node]], boxes: Mapping[str, tuple[float, float]], links: Sequence[Link], layers: Mapping[str, int]
) -> list[tuple[float, float]]:
    """Left and right edge of every column; labels have room left of the column where their links end."""
    found: list[tuple[float, float]] = []
    left = 0.0
    for layer, column in enumerate(columns):
        if layer:
            left = found[-1][1] + CURVE + max((link.label + MARGIN for link in links if layers[link.end] == layer), default=0.0)
        found.append((left, left + max((boxes[node][0] for node in column if isinstance(node, str)), default=0.0)))
    return found


def _route(
    number: int,
    links: Sequence[Link],
    chains: Sequence[Sequence[Node]],
    columns: Sequence[tuple[float, float]],
    layers: Mapping[str, int],
    centres: Mapping[Node, float],
) -> Route:
    link, chain = links[number], chains[number]
    ends = sorted((n for n, k in enumerate(links) if k.end == link.end), key=lambda n: centres[chains[n][-2]])
    starts = sorted((n for n, k in enumerate(links) if k.start == link.start), key=lambda n: centres[chains[n][1]])
    start_y = centres[link.start] + (starts.index(number) - (len(starts) - 1) / 2) * OUT_STEP
    end_y = centres[link.end] + (ends.index(number) - (len(ends) - 1) / 2) * IN_STEP
    first = layers[link.start]
    runs = [(*columns[first + 1 + n], centres[lane]) for n, lane in enumerate(chain[1:-1])]
    tip = columns[layers[link.end]][0]
    return Route(x=columns[first][1], y=start_y, runs=(*runs, (tip - link.label - MARGIN, tip, end_y)))
