"""What was scheduled beside what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from record_support import FACTOR, LATER, record

from maestro_jax.record import FOLDER, Record, read_records
from maestro_jax.schedules import Task


def test_a_record_is_the_same_after_its_file_format() -> None:
    for made in (record(), record(nominal=True)):
        assert Record.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_records_of_a_run_come_in_their_order(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for first in (101, 9, 1_000_001):
        (tmp_path / FOLDER / f"step-{first:06d}.json").write_text(json.dumps(record(first).to_json()))
    assert [found.first_step for found in read_records(tmp_path)] == [9, 101, 1_000_001]
    assert read_records(tmp_path / "elsewhere") == []


def test_steps_are_named_as_the_run_counts_them() -> None:
    assert record(9).title == "steps 9 to 10"


def test_units_are_those_of_the_items() -> None:
    made = record()
    assert all(0 < units <= task.bucket for units, task in zip(made.units, made.scheduled.tasks, strict=True) if task.items)
    of_mind = sum(u for u, t in zip(made.units, made.scheduled.tasks, strict=True) if t.section == "mind")
    assert of_mind == 2 * (14 + 16 + 20)


def expected(tasks: tuple[Task, ...], task: Task) -> set[int]:
    """Numbers of the tasks that a task needs, found by their samples."""
    samples = {sample for sample, _ in task.items}
    wanted = {
        ("mind", "forward_backward"): {("eye", "forward"), ("ear", "forward")},
        ("ear", "backward"): {("mind", "forward_backward")},
    }.get((task.section, task.kind), set())
    return {n for n, t in enumerate(tasks) if (t.section, t.kind) in wanted and samples & {s for s, _ in t.items}}


def test_producers_are_the_tasks_whose_payloads_or_gradients_a_task_takes() -> None:
    made = record()
    tasks = made.scheduled.tasks
    assert [set(numbers) for numbers in made.producers] == [expected(tasks, task) for task in tasks]
    assert sum(map(len, made.producers)) > 8


def test_nominal_times_are_stretched_to_the_measured_end() -> None:
    assert record().stretch == 1
    made = record(nominal=True)
    assert made.stretch * made.scheduled.makespan == pytest.approx(made.scheduled.makespan * FACTOR + LATER)


def widths(html: str, picture: str) -> list[float]:
    """Of the boxes in the scheduled or the measured picture."""
    [drawn] = [part for part in html.split("<svg") if f": steps 9 to 10, {picture}" in part]
    groups = [group for group in drawn.split("<g>")[1:] if "<title>" in group]
    return [float(re.findall(r'width="([\d.]+)"', group)[0]) for group in groups]


def test_a_notebook_shows_scheduled_above_measured_on_one_scale() -> None:
    html = record()._repr_html_()
    assert html.index("steps 9 to 10, scheduled") < html.index("steps 9 to 10, measured")
    scheduled, measured = widths(html, "scheduled"), widths(html, "measured")
    assert len(scheduled) == len(measured) == len(record().scheduled.tasks)
    assert sum(measured) / sum(scheduled) == pytest.approx(FACTOR, rel=0.25)  # boxes leave a little room
    assert "nominal" not in html
    assert set(re.findall(r", step (\d+)\n", html)) == {"9", "10"}


def test_a_notebook_says_where_costs_are_nominal() -> None:
    made = record(nominal=True)
    html = made._repr_html_()
    assert f"multiplied by {made.stretch:.3g}" in html
    assert sum(widths(html, "measured")) < sum(widths(html, "scheduled"))
