"""When tasks end, as it is noted beside the dispatcher."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from engines import Setup, build
from process_support import run_processes
from support import chain, text_samples

from maestro_jax.record import Record
from maestro_jax.runtime import Window
from maestro_jax.runtime.completions import Completions, Times, measured
from maestro_jax.schedules import Task

BATCHES = [text_samples(10, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def setup() -> Setup:
    """Parameters never change, so that one serves all tests."""
    return build(chain(student={"replicas": 2}), optimizer=optax.sgd(0.0))


@pytest.fixture(scope="module")
def record(setup: Setup) -> Record:
    return recorded(setup, setup.preparer.prepare_window(BATCHES, 6))


def recorded(setup: Setup, window: Window) -> Record:
    completions = Completions(setup.engine.plan, window)
    list(setup.engine.run(window, completions))
    return completions.record()


def bare(task: Task) -> tuple[Any, ...]:
    return task.section, task.replica, task.kind, task.step, task.bucket, task.items


def producers(record: Record, task: Task) -> list[Task]:
    """The measured tasks whose results a measured task takes from other sections, found by their samples."""
    samples = {sample for sample, _ in task.items}
    ends = {"producer": "consumer"} if task.kind == "backward" else {"consumer": "producer"}
    [(own, other)] = ends.items()
    sections = {getattr(edge, other) for edge in record.workload.edges if getattr(edge, own) == task.section}
    kinds = ("backward", "forward_backward") if task.kind == "backward" else ("forward",)
    return [t for t in record.measured.tasks if t.section in sections and t.kind in kinds and samples & {s for s, _ in t.items}]


@pytest.mark.quick
def test_every_task_is_measured_in_the_order_in_which_it_was_issued(record: Record) -> None:
    assert record.first_step == 7
    assert {task.kind for task in record.measured.tasks} == {"forward", "backward", "forward_backward", "update"}
    assert list(map(bare, record.measured.tasks)) == list(map(bare, record.scheduled.tasks))
    samples = {(t.section, s) for t in record.measured.tasks for s, _ in t.items}
    assert samples == {(name, s.id) for step in record.workload.steps for s in step for name in s.items}


def test_tasks_end_after_they_start_and_start_after_they_were_issued(record: Record) -> None:
    assert min(record.issued) == 0
    for issued, task in zip(record.issued, record.measured.tasks, strict=True):
        assert issued <= task.start <= task.end


def test_no_two_tasks_run_on_one_device_at_a_time(record: Record) -> None:
    lanes = defaultdict(list)
    for task in record.measured.tasks:
        lanes[task.section, task.replica].append(task)
    assert len(lanes) == 4
    for tasks in lanes.values():
        tasks.sort(key=lambda task: (task.start, task.end))
        assert all(one.end <= other.start for one, other in itertools.pairwise(tasks))


def test_what_is_needed_ends_before_what_needs_it(record: Record) -> None:
    """To the delay with which a thread wakes."""
    pairs = [(producer, task) for task in record.measured.tasks if task.items for producer in producers(record, task)]
    assert len(pairs) > 10
    late = [producer.end - task.end for producer, task in pairs]
    assert max(late) < 20_000_000


def test_updates_come_last_in_their_step(record: Record) -> None:
    for update in (t for t in record.measured.tasks if t.kind == "update"):
        backwards = [t.end for t in record.measured.tasks if t.step == update.step and t.kind in ("backward", "forward_backward")]
        assert update.end >= max(backwards) - 20_000_000


def test_a_record_is_the_same_after_its_file_format(record: Record) -> None:
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_sections_that_share_devices_take_turns() -> None:
    shared = build(chain(student={"submesh": "teacher"}, teacher={"submesh": "teacher"}))
    found = recorded(shared, shared.preparer.prepare(BATCHES[0], 0))
    assert found.workload.sections["student"].devices == found.workload.sections["teacher"].devices
    tasks = sorted((t for t in found.measured.tasks if t.section in ("student", "teacher")), key=lambda task: (task.start, task.end))
    assert all(one.end <= other.start for one, other in itertools.pairwise(tasks))


def test_steps_that_are_not_recorded_start_no_threads(setup: Setup) -> None:
    before = set(threading.enumerate())
    for _ in setup.engine.run(setup.preparer.prepare(BATCHES[0], 0)):
        assert set(threading.enumerate()) == before


def test_a_recorded_step_gives_the_numbers_of_one_that_is_not(setup: Setup) -> None:
    [want] = setup.engine.run(setup.preparer.prepare(BATCHES[0], 0))
    window = setup.preparer.prepare(BATCHES[0], 0)
    [have] = setup.engine.run(window, Completions(setup.engine.plan, window))
    assert have.read(setup.objectives()) == want.read(setup.objectives())


def test_a_window_that_is_broken_off_leaves_no_thread(setup: Setup) -> None:
    window = setup.preparer.prepare_window(BATCHES, 0)
    before = set(threading.enumerate())
    broken: Any = setup.engine.run(window, Completions(setup.engine.plan, window))
    with contextlib.closing(broken):
        next(broken)
        assert any(thread.name.startswith("completions") for thread in threading.enumerate())
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_what_fails_on_a_device_is_raised_when_the_record_is_made(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    window = setup.preparer.prepare(BATCHES[0], 0)
    completions = Completions(setup.engine.plan, window)
    watch = completions.watch

    def deleted(task: Task, issued: int, needs: Any, marker: jax.Array) -> None:
        watch(task, issued, needs, gone(marker) if task.section == "middle" else marker)

    monkeypatch.setattr(completions, "watch", deleted)
    list(setup.engine.run(window, completions))
    with pytest.raises(RuntimeError, match="deleted"):
        completions.record()


def gone(marker: jax.Array) -> jax.Array:
    other = marker + 0
    other.delete()
    return other


def test_every_process_knows_what_all_of_them_measured(tmp_path: Path) -> None:
    """The teacher in one process, the student in the other."""
    records = [Record.from_json(each) for each in run_processes(tmp_path, 2, 2, "process_steps.timeline")]
    assert records[0] == records[1]
    found = records[0]
    assert list(map(bare, found.measured.tasks)) == list(map(bare, found.scheduled.tasks))
    assert {t.section for t in found.measured.tasks} == {"teacher", "middle", "student"}
    assert all(task.start <= task.end for task in found.measured.tasks)
    late = [producer.end - task.end for task in found.measured.tasks if task.items for producer in producers(found, task)]
    assert len(late) > 10
    assert max(late) < 100_000_000  # one clock
    assert found.measured.makespan < 60_000_000_000


def task(section: str, replica: int = 0, step: int = 0) -> Task:
    return Task(section=section, replica=replica, kind="update", step=step)


def test_a_task_starts_at_the_latest_of_what_it_waits_for() -> None:
    a, b, c, d = task("a", step=0), task("a", step=1), task("a", step=2), task("b")
    times = {
        a: Times(100, 0, 150),  # waits for nothing but its issue
        b: Times(101, 0, 170),  # for the task before it
        c: Times(102, 200, 230),  # for what it needs
        d: Times(300, 0, 310),  # for its issue, long after the others
    }
    found = measured([a, b, c, d], times, {a: [0], b: [0], c: [0], d: [0]}, 100)
    assert [(t.start, t.end) for t in found] == [(0, 50), (50, 70), (100, 130), (200, 210)]


def test_a_device_runs_tasks_in_the_order_in_which_they_end() -> None:
    """Where the later one is issued first, because sections share a device."""
    early, late = task("a"), task("b")
    found = measured([late, early], {late: Times(0, 0, 90), early: Times(1, 0, 40)}, {late: [3], early: [3, 4]}, 0)
    assert [(t.section, t.start, t.end) for t in found] == [("b", 40, 90), ("a", 1, 40)]


def test_nothing_ends_before_it_starts() -> None:
    one = task("a")
    [found] = measured([one], {one: Times(0, 50, 40)}, {one: [0]}, 0)
    assert (found.start, found.end) == (40, 40)
