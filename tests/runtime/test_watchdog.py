"""When a run counts as standing still, and what is said of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from maestro_jax.runtime.watchdog import FIRST_SECONDS, LATE_FACTOR, LATE_SECONDS, LATE_WINDOWS, Standing
from maestro_jax.schedules import Schedule, Task

SECOND = 1_000_000_000


class Run:
    """A process with one replica of two sections, on a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ended_steps: int, seconds: float = 2.0) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.tasks = (
            Task(section="a", replica=0, kind="forward", step=0, bucket=8, items=((0, 0),), start=0, end=SECOND),
            Task(section="b", replica=0, kind="forward_backward", step=0, bucket=8, items=((0, 0),), start=SECOND, end=4 * SECOND),
        )
        self.given: dict[Any, list[Task]] = {}
        self.standing = Standing(moved=self.now, unfinished=lambda: self.given)
        self.standing.begin()
        self.standing.window(Schedule(tasks=self.tasks), 1)
        for _ in range(ended_steps):
            self.now += seconds
            self.standing.step_ended()

    def issue(self, number: int) -> None:
        task = self.tasks[number]
        self.given[task.section, 0] = [task]
        self.standing.start(task)

    def pass_(self, seconds: float) -> str:
        """Lets time pass as the watchdog sees it."""
        for _ in range(round(seconds)):
            self.now += 1.0
            found = self.standing.late()
            if found:
                return found
        return ""


def test_nothing_is_late_before_training_and_while_files_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 3)
    with run.standing.pause():
        assert run.pass_(3 * FIRST_SECONDS) == ""
    assert run.pass_(LATE_SECONDS - 1) == ""
    fresh = Standing(moved=run.now)
    run.now += 3 * FIRST_SECONDS
    assert fresh.late() == ""


def test_a_task_is_late_by_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 scheduled seconds took 20: the schedule's seconds count five times. The task and the wait before it are the whole of it.
    run = Run(monkeypatch, 3, seconds=20.0)
    run.issue(1)
    limit = LATE_FACTOR * 20.0
    assert run.pass_(limit - 1) == ""
    run.standing.moved = run.now  # the host goes on
    assert "forward_backward of step 0" in run.pass_(5)
    assert "b replica 0 is late" in run.standing.late()
    # That of the other section is a quarter.
    other = Run(monkeypatch, 3, seconds=20.0)
    other.issue(0)
    assert other.pass_(limit / 4 - 1) == ""
    assert "a replica 0 is late" in other.pass_(5)


def test_a_task_may_wait_for_all_others_of_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 3, seconds=20.0)
    run.standing.window(Schedule(tasks=run.tasks), 8)
    run.issue(0)
    assert run.pass_(LATE_WINDOWS * 8 * 20.0 - 1) == ""
    assert "a replica 0 is late" in run.pass_(5)


def test_short_tasks_have_a_least_limit_and_the_first_steps_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for ended, limit in ((3, LATE_SECONDS), (1, FIRST_SECONDS)):
        run = Run(monkeypatch, ended, seconds=0.1)
        run.issue(0)
        assert run.pass_(limit - 1) == ""
        assert run.pass_(5) != ""


def test_a_replica_that_ends_tasks_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 3, seconds=0.1)
    for _ in range(10):
        run.issue(0)
        assert run.pass_(LATE_SECONDS / 2) == ""
        run.issue(1)
        run.given["a", 0] = []
        assert run.pass_(LATE_SECONDS / 4) == ""
        run.given["b", 0] = []
        assert run.pass_(2) == ""


def test_a_host_that_issues_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 3, seconds=0.1)
    assert run.pass_(LATE_SECONDS - 1) == ""
    assert "nothing was issued" in run.pass_(5)


def test_where_a_process_stands_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 3)
    run.issue(1)
    run.standing.waiting = "the oldest task of b replica 0"
    run.standing.preparing = "reads the samples of step 5"
    told = run.standing.describe()
    assert "beside it: reads the samples of step 5" in told
    assert "3 steps have ended; waits for the oldest task of b replica 0" in told
    assert "b replica 0: last issued forward_backward" in told
    assert "1 unfinished, the oldest is forward_backward" in told
