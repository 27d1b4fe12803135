"""A schedule as a timeline: a lane for each replica, a box for each task.

A schedule alone says what runs when. With its workload the drawing also knows what share of a micro-batch is padding, and the lower
bound.
"""

from __future__ import annotations

import dataclasses
import html
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..errors import ScheduleError
from ..schedules.bounds import lower_bound
from .scale import Scale
from .svg import BLUE, GREY, ORANGE, cut, drawing, element, readable, text, text_width

if TYPE_CHECKING:
    from ..schedules import Schedule, Task, Workload

COLOURS = {"forward": (BLUE,), "backward": (ORANGE,), "forward_backward": (BLUE, ORANGE), "update": (GREY,)}
"""Kind of a task -> colours of its box, from above."""

WORDS = {"forward": "forward", "backward": "backward", "forward_backward": "forward and backward", "update": "update"}
"""Kind of a task -> what it is called."""

WIDTH, HEADLINE, AXIS, LEGEND = 900, 40, 22, 30
"""Of the drawing, and heights of its parts above and below the lanes."""

LANE, GAP, SECTION_GAP = 18.0, 4.0, 8.0
"""Height of a lane, and room between lanes and between sections."""

SIDE = 46.0
"""Room right of the lanes, for utilization."""

FAINT, PADDED = "0.07", "0.35"
"""Opacity of a lane where nothing runs, and of the share of a box that is padding."""

NUMBERED = 14.0
"""Least width of a box that carries the number of its step."""

SAMPLES = 8
"""Most samples that are named when the pointer is over a box."""

MOST = 4000
"""Most tasks that are drawn: browsers get slow."""

UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A drawing of a schedule, for notebooks; the pointer over a box tells the task.

    Args:
        schedule: what is drawn; of more than 4,000 tasks the first.
        workload: what was scheduled; tells units, padding and the lower bound. None: not known.
        sample: id of a sample whose tasks get a frame. None: no frames.
        until: nanoseconds that fit at least, so that drawings can be compared. None: as long as the schedule.
        bound: nanoseconds of the lower bound. None: as it follows from the workload, where that is known.
        title: what stands before the makespan.

    Raises:
        ScheduleError: the schedule is not one of this workload.
    """

    schedule: Schedule
    workload: Workload | None = None
    sample: int | None = None
    until: int | None = None
    bound: int | None = None
    title: str = ""

    def __post_init__(self) -> None:
        """Refuses a workload that knows nothing of a task."""
        if self.workload is not None:
            _check_tasks(self.schedule.tasks, self.workload)

    def _repr_html_(self) -> str:
        return _Picture(self).html() if self.schedule.tasks else "<p>no tasks</p>"


class _Picture:
    """Places of everything in a drawing."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.workload = timeline, timeline.workload
        self.tasks = sorted(timeline.schedule.tasks, key=lambda task: (task.start, task.end))[:MOST]
        self.makespan = max(task.end for task in self.tasks)
        end = max(self.makespan, timeline.until or 0, 1)
        self.unit, self.unit_name = next((size, name) for size, name in UNITS if end >= size)
        self.lanes = _lanes(self.tasks, self.workload)
        self.left = max(text_width(_lane_name(*lane, self.lanes)) for lane in self.lanes) + 8
        self.scale = Scale([0, end / self.unit], self.left, WIDTH - SIDE, parts=10)
        self.bottom = max(self.lanes.values()) + LANE
        self.numbered = len({task.step for task in self.tasks}) > 1
        self.units = _units(self.workload) if self.workload is not None else {}
        self.bound = timeline.bound
        if self.bound is None and self.workload is not None:
            self.bound = lower_bound(self.workload)

    def html(self) -> str:
        headline = self._headline()
        parts = [text(0, 14, headline, font_weight="bold"), *map(self._lane, self.lanes), self._axis()]
        parts += [self._box(task) for task in self.tasks]
        parts += [self._bound(), self._legend()]
        return drawing(WIDTH, self.bottom + AXIS + LEGEND, "".join(parts), f"timeline of a schedule: {headline}")

    def _place(self, nanoseconds: int) -> float:
        return self.scale.place(nanoseconds / self.unit)

    def _time(self, nanoseconds: int) -> str:
        return f"{readable(nanoseconds / self.unit)} {self.unit_name}"

    def _headline(self) -> str:
        return f"{self.timeline.title}: {self._length()}" if self.timeline.title else self._length()

    def _length(self) -> str:
        left_out = len(self.timeline.schedule.tasks) - len(self.tasks)
        if left_out:
            return f"the first {len(self.tasks):,} of {len(self.timeline.schedule.tasks):,} tasks, until {self._time(self.makespan)}"
        if not self.bound:
            return f"makespan {self._time(self.makespan)}"
        return f"makespan {self._time(self.makespan)}, lower bound {self._time(self.bound)}, ratio {self.makespan / self.bound:.3f}"

    def _lane(self, lane: tuple[str, int]) -> str:
        """The name of a replica, its idle time in the background, and how much of the time it has a task."""
        top, start, end = self.lanes[lane], self._place(0), self._place(self.makespan)
        busy = sum(task.end - task.start for task in self.tasks if (task.section, task.replica) == lane)
        share = f"{busy / self.makespan:.0%}" if self.makespan else ""
        name = text(self.left - 8, top + 13.5, _lane_name(*lane, self.lanes), text_anchor="end")
        idle = element("rect", x=start, y=top, width=end - start, height=LANE, fill_opacity=FAINT)
        return name + idle + text(WIDTH, top + 13.5, share, text_anchor="end", fill_opacity="0.75")

    def _axis(self) -> str:
        parts = []
        for tick in self.scale.ticks:
            place = self.scale.place(tick)
            line = element("line", x1=place, x2=place, y1=HEADLINE, y2=self.bottom + 4, stroke="currentColor", stroke_opacity="0.15")
            words = f"{tick:g} {self.unit_name}" if tick else "0"
            parts.append(line + text(place, self.bottom + 17, words, text_anchor="middle", fill_opacity="0.75", font_size=11))
        return "".join(parts)

    def _box(self, task: Task) -> str:
        """A box with the padding in a lighter colour at its right."""
        left, top = self._place(task.start), self.lanes[task.section, task.replica]
        width = self._place(task.end) - left
        # A little room tells one box from the next.
        width = max(width - 0.8, width * 0.7, 0.5)
        filled = width * self._filled(task)
        colours = COLOURS[task.kind]
        height = LANE / len(colours)
        parts = [element("title", html.escape(self._told(task)))]
        for number, colour in enumerate(colours):
            place = {"x": left, "y": top + number * height, "height": height, "fill": colour}
            if filled < width:
                parts.append(element("rect", **place, width=width, fill_opacity=PADDED))
            parts.append(element("rect", **place, width=filled))
        if self.timeline.sample is not None and self.timeline.sample in _samples(task):
            frame = {"stroke": "currentColor", "stroke_width": 2.5, "fill": "none"}
            parts.append(element("rect", x=left, y=top - 1, width=width, height=LANE + 2, **frame))
        if self.numbered and filled >= NUMBERED:
            parts.append(text(left + 3, top + 13, str(task.step), fill="#ffffff", font_size=11))
        return element("g", "".join(parts))

    def _filled(self, task: Task) -> float:
        """Share of a micro-batch that is not padding; 1 where that is not known."""
        return sum(self.units[task.section, *piece] for piece in task.items) / task.bucket if self.units and task.bucket else 1.0

    def _told(self, task: Task) -> str:
        lines = [f"{task.section} {task.replica}: {WORDS[task.kind]}, step {task.step}"]
        samples = _samples(task)
        if samples:
            rest = f" and {len(samples) - SAMPLES} more" if len(samples) > SAMPLES else ""
            lines.append(f"sample{'s' if len(samples) > 1 else ''} {', '.join(map(str, samples[:SAMPLES]))}{rest}")
        if task.bucket and self.units:
            filled = self._filled(task)
            lines.append(f"{round(filled * task.bucket)} of {task.bucket} units, {1 - filled:.1%} padding")
        elif task.bucket:
            lines.append(f"bucket of {task.bucket} units")
        lines.append(f"{self._time(task.end - task.start)}, from {self._time(task.start)} to {self._time(task.end)}")
        return "\n".join(lines)

    def _bound(self) -> str:
        """A dashed line at the lower bound, where it is known and has a place: not beyond the first tasks."""
        if not self.bound or self.bound > max(self.makespan, self.timeline.until or 0):
            return ""
        place, words = self._place(self.bound), "lower bound"
        line = element("line", x1=place, x2=place, y1=HEADLINE - 16, y2=self.bottom + 4, stroke="currentColor", stroke_dasharray="4 3")
        before = place - text_width(words) > 0
        shift, anchor = (-5, "end") if before else (5, "start")
        return line + text(place + shift, HEADLINE - 7, words, text_anchor=anchor, font_size=11)

    def _legend(self) -> str:
        x, y, parts = self.left, self.bottom + AXIS + 8, []
        marks = [(WORDS[kind], colours, "1") for kind, colours in COLOURS.items() if any(task.kind == kind for task in self.tasks)]
        if any(self._filled(task) < 1 for task in self.tasks):
            marks.append(("padding", ("currentColor",), PADDED))
        marks.append(("nothing runs", ("currentColor",), FAINT))
        for words, colours, opacity in marks:
            height = 12 / len(colours)
            for number, colour in enumerate(colours):
                parts.append(element("rect", x=x, y=y + number * height, width=18, height=height, fill=colour, fill_opacity=opacity))
            parts.append(text(x + 24, y + 10.5, words))
            x += 24 + text_width(words) + 12
        return "".join(parts)


def _lanes(tasks: Iterable[Task], workload: Workload | None) -> dict[tuple[str, int], float]:
    """(section, replica) -> upper edge of its lane; producers stand above consumers."""
    replicas: dict[str, int] = defaultdict(int)
    for task in tasks:
        replicas[task.section] = max(replicas[task.section], task.replica + 1)
    if workload is not None:
        replicas = {name: workload.sections[name].replicas for name in workload.order}
    else:
        replicas = {name: replicas[name] for name in _order(tasks)}
    lanes, top = {}, float(HEADLINE)
    for name, count in replicas.items():
        for replica in range(count):
            lanes[name, replica] = top
            top += LANE + GAP
        top += SECTION_GAP
    return lanes


def _order(tasks: Iterable[Task]) -> list[str]:
    """Sections as samples visit them: by how many others a sample has visited before, at most."""
    visited: dict[int, dict[str, None]] = defaultdict(dict)
    depth: dict[str, int] = {}
    for task in sorted(tasks, key=lambda task: task.end):
        depth.setdefault(task.section, 0)
        for sample in _samples(task):
            visited[sample].setdefault(task.section)
    for sections in visited.values():
        for number, name in enumerate(sections):
            depth[name] = max(depth[name], number)
    return sorted(depth, key=depth.__getitem__)


def _lane_name(section: str, replica: int, lanes: Mapping[tuple[str, int], float]) -> str:
    return cut(section, 20) + (f" {replica}" if (section, 1) in lanes else "")


def _samples(task: Task) -> list[int]:
    return list(dict.fromkeys(sample for sample, _ in task.items))


def _units(workload: Workload) -> dict[tuple[str, int, int], int]:
    """(section, sample, item) -> units."""
    samples = [sample for step in workload.steps for sample in step]
    return {(name, s.id, n): u for s in samples for name, units in s.items.items() for n, u in enumerate(units)}


def _check_tasks(tasks: Iterable[Task], workload: Workload) -> None:
    units = _units(workload)
    for task in tasks:
        section = workload.sections.get(task.section)
        known = section is not None and task.replica < section.replicas and all((task.section, *piece) in units for piece in task.items)
        if not known or sum(units[task.section, *piece] for piece in task.items) > task.bucket:
            raise ScheduleError(
                f"a {task.kind} of section {task.section!r} is not a task of the workload.",
                wanted="a schedule of this workload",
                have=f"step {task.step}, replica {task.replica}, bucket {task.bucket}, items {task.items[:4]}",
                fix="draw the schedule with the workload that it was made for, or without one",
                anchor="schedule-task",
                set_by="Timeline.workload",
            )
