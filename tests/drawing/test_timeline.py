"""The drawing of a schedule."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import pytest
from workload_support import FILES, raw_file, section

from maestro_jax.drawing.svg import BLUE, GREY, ORANGE
from maestro_jax.drawing.timeline import LANE, MOST, PADDED, WIDTH, Timeline
from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import EdgeWork, InOrder, SampleWork, Schedule, Task, Wavefront, Workload

SVG = "{http://www.w3.org/2000/svg}"

FORWARD = Task(section="a", replica=0, kind="forward", step=0, bucket=8, items=((3, 0), (3, 1), (4, 0)), start=0, end=2_000_000)
FUSED = Task(section="b", replica=1, kind="forward_backward", step=0, bucket=4, items=((3, 0),), start=2_500_000, end=5_000_000)
BACKWARD = dataclasses.replace(FORWARD, kind="backward", start=5_000_000, end=9_000_000)
UPDATE = Task(section="a", replica=0, kind="update", step=0, start=9_000_000, end=10_000_000)
SCHEDULE = Schedule(tasks=(FORWARD, FUSED, BACKWARD, UPDATE))


def workload() -> Workload:
    """What `SCHEDULE` is one of: 6 of 8 units in `a`, 4 of 4 in `b`."""
    sections = {"b": section(replicas=3, buckets=(4,)), "a": section(buckets=(8,))}
    samples = (SampleWork(id=3, items={"a": (1, 2), "b": (4,)}), SampleWork(id=4, items={"a": (3,)}))
    return Workload(sections=sections, edges=(EdgeWork(producer="a", consumer="b"),), steps=(samples,))


def shared(name: str) -> Workload:
    return Workload.from_json(raw_file(name))


def drawn(schedule: Schedule, **settings: Any) -> ElementTree.Element:
    return ElementTree.fromstring(Timeline(schedule=schedule, **settings)._repr_html_())


def boxes(root: ElementTree.Element) -> list[tuple[str, list[ElementTree.Element]]]:
    """What is told of each task, and its rectangles."""
    found = [(group.find(f"{SVG}title"), list(group.iter(f"{SVG}rect"))) for group in root.iter(f"{SVG}g")]
    return [(title.text or "", rects) for title, rects in found if title is not None]


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "nan"))


def lanes(root: ElementTree.Element) -> list[str]:
    """Names of lanes, from above."""
    names = [e for e in root.iter(f"{SVG}text") if e.get("text-anchor") == "end" and number(e, "x") < WIDTH / 2 and not e.get("font-size")]
    return [e.text or "" for e in sorted(names, key=lambda e: number(e, "y"))]


def ends(rects: Sequence[ElementTree.Element]) -> tuple[float, float]:
    return min(number(r, "x") for r in rects), max(number(r, "x") + number(r, "width") for r in rects)


def test_a_schedule_draws_itself() -> None:
    assert SCHEDULE._repr_html_() == Timeline(schedule=SCHEDULE)._repr_html_()
    assert len(boxes(ElementTree.fromstring(SCHEDULE._repr_html_()))) == 4


def test_without_tasks_it_says_so() -> None:
    assert Schedule(tasks=())._repr_html_() == "<p>no tasks</p>"


def test_each_kind_has_its_colours() -> None:
    found = [[rect.get("fill") for rect in rects] for _, rects in boxes(drawn(SCHEDULE))]
    assert found == [[BLUE], [BLUE, ORANGE], [ORANGE], [GREY]]


def test_the_two_colours_of_one_program_share_its_lane() -> None:
    upper, lower = boxes(drawn(SCHEDULE))[1][1]
    assert number(upper, "y") + number(upper, "height") == number(lower, "y")
    assert number(upper, "height") + number(lower, "height") == LANE


def test_boxes_lie_where_their_times_are() -> None:
    forward, fused, backward, update = (ends(rects) for _, rects in boxes(drawn(SCHEDULE)))
    pixel = (update[1] - forward[0]) / 10
    assert fused[0] - forward[0] == pytest.approx(2.5 * pixel, abs=0.5)
    assert fused[1] - forward[0] == pytest.approx(5 * pixel, abs=1.5)
    assert backward[1] < update[0]


def test_each_replica_has_a_lane_producers_first() -> None:
    """Without a workload, an idle replica is known from those with higher numbers only."""
    assert lanes(drawn(SCHEDULE)) == ["a", "b 0", "b 1"]
    assert lanes(drawn(SCHEDULE, workload=workload())) == ["a", "b 0", "b 1", "b 2"]


def test_producers_come_first_whatever_starts_first() -> None:
    alone = Task(section="b", replica=0, kind="forward_backward", step=0, bucket=4, items=((9, 0),), end=1_000)
    assert lanes(drawn(Schedule(tasks=(alone, *SCHEDULE.tasks)))) == ["a", "b 0", "b 1"]


@pytest.mark.parametrize("name", FILES)
def test_producers_come_first_in_shared_workloads(name: str) -> None:
    given = shared(name)
    sections = [lane.split()[0] for lane in lanes(drawn(Wavefront(effort=0).schedule(given)))]
    assert set(sections) == set(given.sections)
    assert all(sections.index(edge.producer) < sections.index(edge.consumer) for edge in given.edges)


def test_lanes_tell_utilization() -> None:
    assert [each for each in texts(drawn(SCHEDULE)) if each.endswith("%")] == ["70%", "0%", "25%"]


def test_the_axis_has_a_unit_that_fits() -> None:
    assert {"0", "5 ms", "10 ms"} < set(texts(drawn(SCHEDULE)))
    assert "10 ns" in texts(drawn(Schedule(tasks=(dataclasses.replace(FORWARD, end=10),))))
    assert "10 s" in texts(drawn(Schedule(tasks=(dataclasses.replace(FORWARD, end=10_000_000_000),))))


def test_a_schedule_alone_tells_what_it_knows() -> None:
    told = [words for words, _ in boxes(drawn(SCHEDULE))]
    assert told[0] == "a 0: forward, step 0\nsamples 3, 4\nbucket of 8 units\n2.000 ms, from 0 ms to 2.000 ms"
    assert told[1].splitlines()[:2] == ["b 1: forward and backward, step 0", "sample 3"]
    assert told[3] == "a 0: update, step 0\n1.000 ms, from 9.000 ms to 10.00 ms"


def test_with_a_workload_units_and_padding_are_told() -> None:
    told = [words.splitlines() for words, _ in boxes(drawn(SCHEDULE, workload=workload()))]
    assert [lines[2] for lines in told[:2]] == ["6 of 8 units, 25.0% padding", "4 of 4 units, 0.0% padding"]


def test_padding_is_lighter() -> None:
    padded, filled = boxes(drawn(SCHEDULE, workload=workload()))[0][1]
    assert padded.get("fill-opacity") == PADDED
    assert number(filled, "width") == pytest.approx(0.75 * number(padded, "width"), abs=0.2)


def test_without_padding_there_is_no_lighter_part() -> None:
    assert len(boxes(drawn(SCHEDULE, workload=workload()))[1][1]) == 2


def test_many_samples_are_cut() -> None:
    many = dataclasses.replace(FORWARD, items=tuple((n, 0) for n in range(11)))
    assert "samples 0, 1, 2, 3, 4, 5, 6, 7 and 3 more\n" in boxes(drawn(Schedule(tasks=(many,))))[0][0]


def test_the_lower_bound_is_a_line() -> None:
    given = shared("mllm_tiny_batch")
    root = drawn(InOrder().schedule(given), workload=given)
    [line] = [element for element in root.iter(f"{SVG}line") if element.get("stroke-dasharray")]
    left, right = ends([rect for _, rects in boxes(root) for rect in rects])
    assert (right - left) / (number(line, "x1") - left) == pytest.approx(2.288, abs=0.01)
    assert "makespan 36.02 ms, lower bound 15.75 ms, ratio 2.288" in texts(root)


def test_the_tasks_of_a_sample_get_a_frame() -> None:
    found = [any(rect.get("stroke") for rect in rects) for _, rects in boxes(drawn(SCHEDULE, sample=4))]
    assert found == [True, False, True, False]


def test_drawings_can_have_one_axis() -> None:
    _, alone = ends(boxes(drawn(SCHEDULE))[-1][1])
    left, beside = ends(boxes(drawn(SCHEDULE, until=20_000_000))[-1][1])
    assert beside - left < alone - left
    assert "20 ms" in texts(drawn(SCHEDULE, until=20_000_000))


def test_boxes_carry_their_step_where_there_are_several() -> None:
    both = (*SCHEDULE.tasks, dataclasses.replace(UPDATE, step=1, start=10_000_000, end=12_000_000))
    carried = [[words for group in drawn(each).iter(f"{SVG}g") for words in texts(group)] for each in (SCHEDULE, Schedule(tasks=both))]
    assert carried == [[], ["0", "0", "0", "0", "1"]]


@pytest.mark.parametrize("name", FILES)
def test_everything_lies_inside(name: str) -> None:
    given = shared(name)
    root = drawn(Wavefront(effort=0).schedule(given), workload=given)
    height = number(root, "height")
    for rect in root.iter(f"{SVG}rect"):
        assert 0 <= number(rect, "x") <= number(rect, "x") + number(rect, "width") <= WIDTH
        assert 0 <= number(rect, "y") <= number(rect, "y") + number(rect, "height") <= height


def test_of_very_many_tasks_the_first_are_drawn() -> None:
    tasks = tuple(dataclasses.replace(UPDATE, start=n, end=n + 1) for n in range(MOST + 1))
    root = drawn(Schedule(tasks=tasks[::-1]))
    assert len(boxes(root)) == MOST
    assert "the first 4,000 of 4,001 tasks, until 4.000 us" in texts(root)


def test_names_are_escaped() -> None:
    html = Schedule(tasks=(dataclasses.replace(FORWARD, section="<script>&'\""),))._repr_html_()
    assert "<script>" not in html
    assert boxes(ElementTree.fromstring(html))[0][0].startswith("<script>&'\" 0: forward")


def test_shapes_have_no_other_colours_and_no_style_sheet() -> None:
    root = drawn(SCHEDULE, workload=workload(), sample=3)
    colours = {element.get(name) for element in root.iter() for name in ("fill", "stroke")}
    assert colours <= {None, "none", "currentColor", BLUE, ORANGE, GREY}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "g", "rect", "line", "text", "title"}
    assert [element.tag for element in root.iter() if "style" in element.attrib] == [f"{SVG}svg"]


def test_equal_schedules_are_drawn_equally() -> None:
    given = shared("mllm_tiny_batch")
    first, second = (Timeline(schedule=Wavefront().schedule(given), workload=given)._repr_html_() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "task",
    [
        dataclasses.replace(FORWARD, section="c"),
        dataclasses.replace(FORWARD, replica=1),
        dataclasses.replace(FORWARD, items=((3, 0), (3, 2))),
        dataclasses.replace(FORWARD, bucket=5),
    ],
)
def test_a_schedule_of_another_workload_is_refused(task: Task) -> None:
    with pytest.raises(ScheduleError) as raised:
        Timeline(schedule=Schedule(tasks=(FUSED, task)), workload=workload())
    message = str(raised.value)
    assert message.startswith(f"a forward of section '{task.section}' is not a task of the workload.")
    assert re.search(r"set by +Timeline.workload\n +fix +draw the schedule with the workload that it was made for", message)
