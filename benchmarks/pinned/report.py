"""What came out: a table, sentences about the aims, and a picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from maestro_jax.drawing.svg import BLUE, GREY, ORANGE, drawing, element, text, text_width
from maestro_jax.schedules import Cost

from .cases import Case
from .conductor import Measured
from .ways import WAYS

WAVEFRONT, IN_ORDER, PACKED = "wavefront", "in_order", "one_packed"
TOLERANCE = 1e-3
"""Largest relative difference between the losses of two ways: rounding, which Adam enlarges from step to step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What came out of a way.

    Args:
        name: of the way.
        seconds: of each window.
        tokens: of a window, without padding.
        busy: seconds for which each process computed, median.
        padding: work with padding as a multiple of work without; None: not known.
        losses: of each window's last step.
        predicted: seconds that the scheduler predicted, median; None where nothing is scheduled.
        bound: seconds below which no schedule can end, as the fitted costs have it.
    """

    name: str
    seconds: tuple[float, ...]
    tokens: int
    busy: tuple[float, ...]
    padding: float | None
    losses: tuple[float, ...]
    predicted: float | None = None
    bound: float | None = None

    @property
    def median(self) -> float:
        """Seconds of a window."""
        return statistics.median(self.seconds)

    def rate(self, seconds: float | None = None) -> float:
        """Tokens per second."""
        return self.tokens / (self.median if seconds is None else seconds)


def rows_of(case: Case, measured: Mapping[str, Sequence[Measured]]) -> dict[str, Row]:
    """Sums up the windows of each way."""
    costs = unit_costs(case, measured)
    rows = {}
    for name, windows in measured.items():
        facts = windows[-1].facts
        times = {key: statistics.median(w.facts[key] for w in windows) if key in facts else None for key in ("predicted", "bound")}
        rows[name] = Row(
            name=name,
            seconds=tuple(w.seconds for w in windows),
            tokens=case.tokens,
            busy=tuple(statistics.median(each) for each in zip(*(w.busy for w in windows), strict=True)),
            padding=padded_work(costs, facts["scheduled"], case.units()) if costs else None,
            losses=tuple(w.losses[-1] for w in windows),
            **times,
        )
    return rows


def unit_costs(case: Case, measured: Mapping[str, Sequence[Measured]]) -> dict[str, float]:
    """Section -> nanoseconds of a unit in its largest micro-batch, as measured; empty where the system did not run."""
    told = next((windows[-1].facts["costs"] for windows in measured.values() if "costs" in windows[-1].facts), None)
    if told is None:
        return {}
    found = {}
    for section in case.sections:
        bucket = section.buckets[-1]
        forward, backward = (Cost(**told["sections"][section.name][kind]).of(bucket, ()) for kind in ("forward", "backward"))
        found[section.name] = (forward + backward) / bucket
    return found


def padded_work(costs: Mapping[str, float], scheduled: Mapping[str, int], units: Mapping[str, int]) -> float:
    """What is computed, as a multiple of what would be without padding.

    >>> padded_work({"vision": 2.0, "llm": 1.0}, {"vision": 150, "llm": 100}, {"vision": 100, "llm": 100})
    1.3333333333333333
    """
    return sum(costs[name] * scheduled[name] for name in units) / sum(costs[name] * units[name] for name in units)


def largest_difference(rows: Mapping[str, Row]) -> float:
    """Largest relative difference between the losses of two ways after equally many steps."""
    together = list(zip(*(row.losses for row in rows.values()), strict=True))
    return max((max(each) - min(each)) / abs(min(each)) for each in together)


def table(case: str, rows: Mapping[str, Row], failed: Mapping[str, str]) -> str:
    """The table of a case in Markdown."""
    base = rows.get(WAVEFRONT)
    lines = [
        "| way | tokens per second (range) | seconds | wavefront is faster | of that, padding | cores compute | predicted | loss | why |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, way in WAYS[case].items():
        if name in failed:
            lines.append(f"| {way.title} | did not run: {failed[name]} | | | | | | | {way.reason} |")
        if name not in rows:
            continue
        row = rows[name]
        span = f"{row.rate():.0f} ({row.rate(max(row.seconds)):.0f} to {row.rate(min(row.seconds)):.0f})"
        ratio = f"{row.median / base.median:.2f}" if base else "-"
        padding = f"{row.padding / base.padding:.2f}" if base and row.padding and base.padding else "-"
        computing = " and ".join(f"{busy / row.median:.0%}" for busy in row.busy)
        predicted = f"{row.predicted:.2f} ({row.median / row.predicted - 1:+.1%})" if row.predicted else ""
        cells = [way.title, span, f"{row.median:.2f}", ratio, padding, computing, predicted, f"{row.losses[-1]:.5f}", way.reason]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sentences(case: str, rows: Mapping[str, Row]) -> list[str]:
    """What the figures say about the aims."""
    base = rows.get(WAVEFRONT)
    if base is None:
        return []
    found = [f"Losses of all ways agree within {largest_difference(rows):.1g} of their size."]
    order = rows.get(IN_ORDER)
    if order is not None and base.bound is not None and order.median > base.bound:
        closed = (order.median - base.median) / (order.median - base.bound)
        found.append(
            f"The lower bound of the fitted costs is {base.bound:.2f} s: wavefront closes {closed:.0%} of the gap that in order leaves."
        )
    packed = rows.get(PACKED)
    if packed is not None:
        slower = f"{base.rate() / packed.rate():.3f} times the rate of the packed program"
        found.append(f"Wavefront has {slower}; its cores compute for {_seconds(base)}, so that {balance(base):.3f} is what balance allows.")
    for name, row in rows.items():
        if row.padding is not None and base.padding is not None and row.padding / base.padding > 1.05:
            ratio, part = row.median / base.median, row.padding / base.padding
            title = WAYS[case][name].title
            found.append(f"{title}: {ratio:.2f} times, of which {part:.2f} are padding and {ratio / part:.2f} all else.")
    return found


def balance(row: Row) -> float:
    """How evenly the cores are busy: 1 where they compute equally long, 0.5 where one of two does all.

    >>> balance(Row(name="a", seconds=(2.0,), tokens=1, busy=(2.0, 1.0), padding=None, losses=(0.0,)))
    0.75
    """
    return statistics.mean(row.busy) / max(row.busy)


def _seconds(row: Row) -> str:
    return " and ".join(f"{busy:.2f} s" for busy in row.busy)


WIDTH, BAR, GAP, HEAD, VALUE = 900, 18.0, 8.0, 34.0, 150.0
"""Of the picture: width, height of a bar, room between bars, room for a heading, and for figures behind the bars."""


def picture(cases: Mapping[str, Mapping[str, Row]]) -> str:
    """Draws tokens per second of all ways as bars, with their ranges as lines."""
    titles = [WAYS[case][name].title for case, rows in cases.items() for name in rows]
    left = max(map(text_width, titles)) + 12
    parts, top = [], 0.0
    for case, rows in cases.items():
        parts.append(text(0, top + 16, f"{case}: tokens per second", font_weight="bold", fill=GREY))
        top += HEAD
        most = max(row.rate(min(row.seconds)) for row in rows.values())
        for name, row in rows.items():
            parts.append(_bar(WAYS[case][name].title, row, left, top, (WIDTH - left - VALUE) / most))
            top += BAR + GAP
        top += GAP
    return drawing(WIDTH, top, "".join(parts), "tokens per second of several ways of training")


def _bar(title: str, row: Row, left: float, top: float, scale: float) -> str:
    colour = BLUE if row.name == WAVEFRONT else ORANGE
    slowest, fastest = (left + scale * row.rate(seconds) for seconds in (max(row.seconds), min(row.seconds)))
    middle = top + BAR / 2
    line = {"stroke": GREY, "stroke_width": 2}
    return "".join(
        [
            text(left - 8, top + 13.5, title, text_anchor="end", fill=GREY),
            element("rect", x=left, y=top, width=scale * row.rate(), height=BAR, fill=colour),
            element("line", x1=slowest, x2=fastest, y1=middle, y2=middle, **line),
            *(element("line", x1=x, x2=x, y1=middle - 4, y2=middle + 4, **line) for x in (slowest, fastest)),
            text(fastest + 8, top + 13.5, f"{row.rate():.0f}", fill=GREY),
        ]
    )


BEGIN, END = "<!-- python -m benchmarks.pinned -->", "<!-- end of python -m benchmarks.pinned -->"


def inserted(page: str, words: str) -> str:
    """Puts words between the two marks of a page.

    Raises:
        ValueError: the page does not have both marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no two lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{words}\n{END}{after}"
