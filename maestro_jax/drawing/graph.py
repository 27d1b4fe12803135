"""A section graph as a drawing: a box for each section, an arrow for each edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .layers import Link, Place, Route, arrange
from .svg import BLUE, GREY, ORANGE, SIZE, cut, drawing, element, text, text_width

if TYPE_CHECKING:
    from ..graph import Edge, Section, SectionGraph

COLOURS = {"train": BLUE, "pass gradient": ORANGE, "forward only": GREY}
"""Mode -> colour of the box."""

LONGEST = 38
"""Signs of a line in a box; the rest is cut off."""

LINE, PADDING, EDGE_MARGIN = 18, 12, 8

BOLD = 1.15
"""How much wider bold text is."""


def graph_html(graph: SectionGraph, rows: Mapping[str, str] | None = None, facts: Mapping[str, Sequence[str]] | None = None) -> str:
    """Draws a graph.

    Args:
        graph: the sections; their modes decide the colours.
        rows: label of an edge -> shape of its rows, where it is known.
        facts: section -> more lines for its box.
    """
    rows, facts = rows or {}, facts or {}
    lines = {name: _lines(graph, graph[name], facts.get(name, ())) for name in graph.order}
    boxes = {
        name: (max(BOLD * text_width(found[0]), _width(found)) + 2 * PADDING, LINE * len(found) + 2 * PADDING - 4.0)
        for name, found in lines.items()
    }
    labels = [_label(graph, edge, rows) for edge in graph.edges]
    links = [Link(start=e.producer, end=e.consumer, label=_width(label)) for e, label in zip(graph.edges, labels, strict=True)]
    layout = arrange(boxes, links)
    parts = []
    for edge, label, route in zip(graph.edges, labels, layout.routes, strict=True):
        parts.append(_arrow(route, label, graph.runs_backward[edge.producer]))
    for name, found in lines.items():
        parts.append(_box(layout.places[name], found, COLOURS[graph.mode(name)]))
    # Borders are drawn on both sides of the edge of a box.
    moved = element("g", "".join(parts), transform=f"translate({EDGE_MARGIN} {EDGE_MARGIN})")
    summary = "section graph: " + ", ".join(f"{name} ({graph.mode(name)})" for name in graph.order)
    return drawing(layout.width + 2 * EDGE_MARGIN, layout.height + 2 * EDGE_MARGIN, moved, summary)


def _lines(graph: SectionGraph, section: Section, facts: Sequence[str]) -> list[str]:
    """What stands in a box: name, mode, place, micro-batch, losses, and what is frozen."""
    replicas = f"{section.replicas} replica{'s' if section.replicas > 1 else ''}"
    place = " x ".join([replicas, *(f"{axis}={size}" for axis, size in section.axes.items() if size > 1)])
    lines = [section.name, graph.mode(section.name), place, "micro-batch " + ", ".join(map(str, section.buckets))]
    loss = " + ".join(_term(name, o.weight) for name, o in section.objectives.items() if o.weight)
    if loss:
        lines.append(f"loss {loss}")
    if section.trainable and section.frozen:
        lines.append("frozen " + ", ".join(section.frozen))
    return [cut(line, LONGEST) for line in (*lines, *facts)]


def _term(name: str, weight: float) -> str:
    return name if weight == 1 else f"{weight:g} {name}"


def _label(graph: SectionGraph, edge: Edge, rows: Mapping[str, str]) -> list[str]:
    """What stands at the end of an arrow, above it and below."""
    name = edge.output if edge.output == edge.input else f"{edge.output} → {edge.input}"
    below = [rows[edge.label]] if edge.label in rows else []
    if graph.runs_backward[edge.producer]:
        below.append("gradient back")
    return [cut(name, LONGEST), ", ".join(below)]


def _width(lines: Sequence[str]) -> float:
    return max(map(text_width, lines))


def _box(place: Place, lines: Sequence[str], colour: str) -> str:
    parts = [
        element(
            "rect",
            x=place.x,
            y=place.y,
            width=place.width,
            height=place.height,
            rx=8,
            fill=colour,
            fill_opacity="0.1",
            stroke=colour,
            stroke_width=1.5,
        )
    ]
    styles: list[dict[str, str]] = [{"font_weight": "bold"}, {"fill": colour, "font_weight": "bold"}]
    top = place.y + (place.height - LINE * len(lines)) / 2 + SIZE
    for number, line in enumerate(lines):
        style = styles[number] if number < len(styles) else {"fill_opacity": "0.85"}
        parts.append(text(place.x + PADDING, top + LINE * number, line, **style))
    return "".join(parts)


def _arrow(route: Route, label: Sequence[str], backward: bool) -> str:
    x, y = route.x, route.y
    path = [f"M{x:.1f} {y:.1f}"]
    for start, end, level in route.runs:
        half = (x + start) / 2
        path.append(f"C{half:.1f} {y:.1f} {half:.1f} {level:.1f} {start:.1f} {level:.1f}H{end:.1f}")
        x, y = end, level
    parts = [element("path", d="".join(path), fill="none", stroke="currentColor", stroke_opacity="0.7", stroke_width=1.5)]
    parts.append(_head(x, y, 1))
    if backward:
        parts.append(_head(route.x, route.y, -1))
    place = (route.runs[-1][0] + x) / 2
    parts += [text(place, y + shift, words, text_anchor="middle") for words, shift in zip(label, (-6, 16), strict=True) if words]
    return "".join(parts)


def _head(x: float, y: float, direction: int) -> str:
    """The head of an arrow; drawn, because a marker would need a definition."""
    back = x - 9 * direction
    return element("path", d=f"M{x:.1f} {y:.1f}L{back:.1f} {y - 4.5:.1f}V{y + 4.5:.1f}Z")
