"""The page of recorded windows: that it needs nothing else, what it is given, and what its script makes of that."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from typing import Any

import pytest
from record_support import FACTOR, LATER, record

from maestro_jax.record import Record
from maestro_jax.schedules import Schedule, lower_bound
from maestro_jax.timeline_page import timeline_page

NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="node runs the page's script")


class Page(HTMLParser):
    """The tags of a page, and the text of its scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data


def renamed(made: Record, old: str, new: str) -> Record:
    """A record with another name of a section."""

    def tasks(schedule: Schedule) -> Schedule:
        return Schedule(tasks=tuple(dataclasses.replace(t, section=new if t.section == old else t.section) for t in schedule.tasks))

    raw = json.loads(json.dumps(made.workload.to_json()).replace(f'"{old}"', json.dumps(new)))
    return dataclasses.replace(
        made, workload=type(made.workload).from_json(raw), scheduled=tasks(made.scheduled), measured=tasks(made.measured)
    )


def ran(page: Page, expression: str) -> Any:
    """Evaluates JavaScript after the page's model, with `windows` as the page reads them."""
    program = f"{page.scripts['model']}\nconst windows = {page.scripts['data']}.map(read);\nconsole.log(JSON.stringify({expression}));"
    assert NODE is not None
    done = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_needs_nothing_else() -> None:
    text = timeline_page([record()])
    assert re.findall(r"https?:|//[a-z]+\.[a-z]|@import|url\(|fetch\(|XMLHttp", text) == []
    assert [tag for tag, attributes in Page(text).tags if {"src", "href"} & set(attributes)] == []


def test_it_knows_light_and_dark() -> None:
    text = timeline_page([record()])
    assert "color-scheme: light dark" in text
    assert "@media (prefers-color-scheme: dark)" in text


def test_it_holds_every_window_with_its_tasks() -> None:
    windows = json.loads(Page(timeline_page([record(9), record(21, nominal=True)])).scripts["data"])
    assert [window["title"] for window in windows] == ["steps 9 to 10", "steps 21 to 22"]
    made = record()
    assert windows[0]["lanes"] == [["eye", 0], ["eye", 1], ["ear", 0], ["mind", 0]]
    assert windows[0]["bound"] == lower_bound(made.workload)
    assert len(windows[0]["tasks"]) == len(made.scheduled.tasks)
    for row, scheduled, measured in zip(windows[0]["tasks"], made.scheduled.tasks, made.measured.tasks, strict=True):
        assert row[7] == [scheduled.start, scheduled.end, measured.start, measured.end]
        assert windows[0]["lanes"][row[0]] == [scheduled.section, scheduled.replica]
        assert row[1:4] == [scheduled.kind, 9 + scheduled.step, scheduled.bucket]
    ends = [[max(row[7][n] for row in window["tasks"]) for n in (1, 3)] for window in windows]
    assert ends[0][0] * FACTOR + LATER == ends[0][1]
    assert ends[1][0] == ends[1][1]  # nominal times end with the measured ones


@pytest.mark.parametrize("name", ["</script><b>", "DATA", "Ohr & Auge"])
def test_no_name_of_a_section_breaks_the_page(name: str) -> None:
    page = Page(timeline_page([renamed(record(), "ear", name)]))
    assert [name, 0] in json.loads(page.scripts["data"])[0]["lanes"]
    assert page.scripts["page"]
    assert "b" not in {tag for tag, _ in page.tags}


@needs_node
def test_busy_shares_are_those_of_each_part() -> None:
    made = record()
    found = ran(Page(timeline_page([made])), "windows[0].groups.map(group => group.busy)")
    for schedule, busy in zip((made.scheduled, made.measured), found, strict=True):
        eye = sum(task.end - task.start for task in schedule.tasks if (task.section, task.replica) == ("eye", 0))
        assert busy[0] == pytest.approx(eye / schedule.makespan)


@needs_node
def test_the_pointer_finds_the_task_below_it_or_close_by() -> None:
    page = Page(timeline_page([record()]))
    lane = [task.end for task in record().measured.tasks if task.section == "ear"]
    starts = [task.start for task in record().measured.tasks if task.section == "ear"]
    at = "(time, slack) => { const found = nearest(windows[0].groups[1].lanes[2], 1, time, slack); return found && found.times[1]; }"
    inside, beside, far = ran(page, f"[[{starts[0] + 1}, 0], [{starts[0] - 3}, 4], [{starts[0] - 30}, 4]].map(([t, s]) => ({at})(t, s))")
    assert inside == beside == [starts[0], lane[0]]
    assert far is None


@needs_node
def test_what_is_told_of_a_task() -> None:
    made = record()
    number = next(n for n, t in enumerate(made.measured.tasks) if t.section == "eye" and len({s for s, _ in t.items}) < len(t.items))
    scheduled, measured, units = made.scheduled.tasks[number], made.measured.tasks[number], made.units[number]
    lines = ran(Page(timeline_page([made])), f"told(windows[0], windows[0].tasks[{number}])").split("\n")
    assert lines[0] == f"eye {measured.replica}: forward, step {9 + measured.step}"
    assert lines[1] == f"sample {measured.items[0][0]}; {len(measured.items)} items"
    assert lines[2] == f"{units} of 8 units, {100 * (1 - units / 8):.1f} % padding"
    assert lines[3].startswith(f"scheduled: {scheduled.end - scheduled.start} ns, from {scheduled.start} ns")
    assert f"from {measured.start / 1000:.3f} µs" in lines[4]
    assert lines[5].startswith(f"issued at {made.issued[number]} ns, ends ")
    assert lines[5].endswith("later than scheduled")


@needs_node
def test_zooming_keeps_what_is_below_the_pointer_and_stays_in_the_window() -> None:
    page = Page(timeline_page([record()]))
    near, out, moved = ran(
        page, "[zoomed({from: 0, to: 1000}, 0.5, 250, 2000), zoomed({from: 0, to: 1000}, 9, 0, 2000), moved({from: 0, to: 10}, 1e9, 2000)]"
    )
    assert near == {"from": 125, "to": 625}
    assert out == {"from": -40, "to": 2040}
    assert moved == {"from": 2030, "to": 2040}


@needs_node
def test_times_are_written_in_units_that_suit_them() -> None:
    found = ran(
        Page(timeline_page([record()])),
        "[time(12), time(1234), time(25e6), time(3.2e9), ticks({from: 0, to: 5e6}, 5).map(tick => tick.words)]",
    )
    assert found == ["12 ns", "1.234 µs", "25.00 ms", "3.200 s", ["0", "1 ms", "2 ms", "3 ms", "4 ms", "5 ms"]]


@needs_node
def test_it_says_where_costs_are_nominal() -> None:
    plain, nominal = ran(Page(timeline_page([record(), record(nominal=True)])), "windows.map(summary)")
    assert "Both parts have one time scale" in plain
    assert "nominal device: its times are multiplied by" in nominal
