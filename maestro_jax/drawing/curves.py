"""Curves over steps as small drawings, and the numbers of one step."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from .scale import Scale
from .svg import BLUE, ORANGE, drawing, element, readable, text
from .tables import table_html

WIDTH, HEIGHT = 310, 170
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 28, 24
"""Room around the curve, for its title and the numbers at its sides."""

Points = Sequence[tuple[float, float]]


def curve(title: str, line: Points, dots: Points = ()) -> str:
    """Draws values over steps.

    Values that are not finite are left out, and the line has a gap there. Of more points than pixels, the lowest and the highest in each
    pixel are drawn.

    Args:
        title: stands above.
        line: (step, value), ascending steps.
        dots: (step, value) of a second, sparse series, drawn as dots with a dashed line through them.
    """
    shown = [point for point in (*line, *dots) if math.isfinite(point[1])]
    parts = [text(LEFT, 16, title, font_weight="bold")]
    if not shown:
        parts.append(text(LEFT, HEIGHT / 2, "no finite value"))
        return drawing(WIDTH, HEIGHT, "".join(parts), f"{title}: no finite value")
    steps = Scale([step for step, _ in shown], LEFT, WIDTH - RIGHT - 6, least=1.0)
    values = Scale([value for _, value in shown], HEIGHT - BOTTOM, TOP)
    parts += [_grid_line(values.place(tick), f"{tick:g}") for tick in values.ticks]
    for tick in steps.ticks:
        parts.append(text(steps.place(tick), HEIGHT - 7, f"{tick:g}", text_anchor="middle", fill_opacity="0.75", font_size=11))
    for piece in _pieces(line):
        places = _thinned([(steps.place(step), values.place(value)) for step, value in piece])
        parts.append(_polyline(places, BLUE, "none") if len(places) > 1 else _dot(*places[0], BLUE))
    places = [(steps.place(step), values.place(value)) for step, value in dots if math.isfinite(value)]
    if len(places) > 1:
        parts.append(_polyline(places, ORANGE, "3 4"))
    parts += [_dot(x, y, ORANGE) for x, y in places]
    return drawing(WIDTH, HEIGHT, "".join(parts), f"{title} over steps, last {readable(shown[-1][1])}")


def legend(line: str, dots: str = "") -> str:
    """Says what line and dots of curves are, as a paragraph."""
    marks = [(line, "line", BLUE), *([(dots, "dots", ORANGE)] if dots else [])]
    words = [f'<span style="color:{colour}">●</span> {html.escape(meaning)} ({shape})' for meaning, shape, colour in marks]
    return f"<p>{', '.join(words)}</p>"


def step_html(step: int, metrics: Mapping[str, float], tokens: int) -> str:
    """Writes the numbers of a step as a table of one row."""
    names = [name for name in metrics if name != "applied"]
    cells = [str(step), *(readable(metrics[name]) for name in names), f"{tokens:,}"]
    table = table_html(["step", *names, "tokens"], [cells], numbers=range(len(cells)))
    return table if metrics.get("applied", 1.0) else table + "<p>The step was skipped: nothing counted, or something was not finite.</p>"


def _pieces(line: Points) -> list[list[tuple[float, float]]]:
    """The line without its gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in line:
        if math.isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _thinned(places: Points) -> Points:
    if len(places) <= 2 * (WIDTH - LEFT - RIGHT):
        return places
    columns: dict[int, list[tuple[float, float]]] = {}
    for place in places:
        columns.setdefault(round(place[0]), []).append(place)
    found = []
    for column in columns.values():
        ends = {min(column, key=lambda place: place[1]), max(column, key=lambda place: place[1])}
        found += sorted(ends)
    return found


def _polyline(places: Points, colour: str, dashes: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = {"stroke": colour, "stroke_width": "1.6", "stroke_linejoin": "round", "stroke_dasharray": dashes}
    return element("polyline", points=points, fill="none", **line)


def _dot(x: float, y: float, colour: str) -> str:
    return element("circle", cx=x, cy=y, r=3.5, fill=colour)


def _grid_line(y: float, words: str) -> str:
    line = element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, stroke="currentColor", stroke_opacity="0.15")
    return line + text(LEFT - 6, y + 4, words, text_anchor="end", fill_opacity="0.75", font_size=11)
