"""What may start when: the clock, dependencies, memory, devices, and an executor that has no clock."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import workload_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_support import section, work

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import DEVICES, Clock, Cost, EdgeWork, InOrder, Progress, Task, Workload, cut, run
from maestro_jax.schedules.loop import Key
from maestro_jax.schedules.policies import replay


def task(end: int, replica: int = 0) -> Task:
    return Task(section="a", replica=replica, kind="forward", step=0, end=end)


def progress_of(workload: Workload) -> Progress:
    return Progress(workload, cut(workload))


def done(progress: Progress, key: Key, replica: int = 0, now: int = 0) -> Task:
    """Starts a task and ends it."""
    made = progress.task(key, replica, now)
    progress.start(made)
    progress.finish(made)
    return made


class Disorder:
    """An executor like devices: no clock, any running task may be the next to end."""

    now = DEVICES

    def __init__(self, seed: int) -> None:
        self.random, self.running = random.Random(seed), []
        self.events: list[tuple[str, Task]] = []

    def start(self, task: Task) -> int:
        self.running.append(task)
        self.events.append(("start", task))
        return DEVICES

    def wait(self, until: int | None) -> list[Task]:
        assert until is None
        if not self.running:
            return []
        ended = self.running.pop(self.random.randrange(len(self.running)))
        self.events.append(("end", ended))
        return [ended]


@pytest.mark.quick
def test_clock_returns_the_tasks_that_end_first_together() -> None:
    clock = Clock()
    first, second, third = task(9), task(5, 1), task(5, 2)
    assert [clock.start(t) for t in (first, second, third)] == [9, 5, 5]
    assert (clock.wait(None), clock.now) == ([second, third], 5)
    assert (clock.wait(None), clock.now) == ([first], 9)
    assert (clock.wait(None), clock.now) == ([], 9)


def test_clock_stops_before_an_end_that_is_later_than_until() -> None:
    clock = Clock()
    clock.start(task(9))
    assert (clock.wait(4), clock.now) == ([], 4)
    assert (clock.wait(9), clock.now) == ([task(9)], 9)
    assert (clock.wait(12), clock.now) == ([], 12)


@pytest.mark.quick
def test_consumer_is_available_after_the_last_of_its_producers_and_the_delay() -> None:
    workload = work({"a": section(), "b": section()}, [EdgeWork(producer="a", consumer="b", delay=6)], [{"a": (16, 16), "b": (3,)}])
    progress = progress_of(workload)
    consumer: Key = ("forward_backward", "b", 0)
    assert done(progress, ("forward", "a", 0)).end == 21
    assert not progress.available(consumer, DEVICES)
    assert done(progress, ("forward", "a", 1), now=21).end == 42
    assert [progress.available(consumer, now) for now in (47, 48)] == [False, True]
    assert [progress.next_availability(now) for now in (0, 47, 48)] == [48, 48, None]


def test_backward_waits_for_every_consumer() -> None:
    workload = work({"a": section(), "b": section(), "c": section()}, ["a b", "a c"], [{"a": (3,), "b": (3,), "c": (3,)}])
    progress = progress_of(workload)
    backward: Key = ("backward", "a", 0)
    done(progress, ("forward", "a", 0))
    done(progress, ("forward_backward", "b", 0))
    assert not progress.available(backward, DEVICES)
    done(progress, ("forward_backward", "c", 0))
    assert progress.available(backward, DEVICES)


def test_update_waits_for_the_backward_of_every_section() -> None:
    workload = work({"a": section(), "b": section()}, [], [{"a": (3,)}, {"b": (3,)}])
    progress = progress_of(workload)
    done(progress, ("forward_backward", "a", 0))
    assert not progress.available(("update", "a", 0), DEVICES)
    done(progress, ("forward_backward", "b", 0))
    assert progress.available(("update", "a", 0), DEVICES)


def test_forward_of_the_next_step_waits_for_the_update_of_its_own_replica() -> None:
    workload = work({"a": section(replicas=2)}, [], [{"a": (3,)}], [{"a": (3,)}])
    progress = progress_of(workload)
    done(progress, ("forward_backward", "a", 0))
    key: Key = ("forward_backward", "a", 1)
    assert [progress.fits(key, replica) for replica in (0, 1)] == [False, False]
    done(progress, ("update", "a", 1), replica=1)
    assert [progress.fits(key, replica) for replica in (0, 1)] == [False, True]


def test_frozen_sections_below_something_trainable_wait_for_no_update_of_their_own() -> None:
    workload = work({"a": section(), "b": section(trainable=False)}, ["a b"], [{"a": (3,), "b": (3,)}], [{"b": (3,)}])
    progress = progress_of(workload)
    assert progress.available(("forward_backward", "b", 1), 0)
    assert progress.fits(("forward_backward", "b", 1), 0)


def test_units_are_held_until_the_backward_ends() -> None:
    workload = work({"a": section(max_inflight=20), "b": section()}, ["a b"], [{"a": (12,), "b": (12,)}] * 2)
    progress = progress_of(workload)
    done(progress, ("forward", "a", 0))
    assert progress.held["a", 0] == 12
    assert not progress.fits(("forward", "a", 1), 0)
    done(progress, ("forward_backward", "b", 0))
    assert progress.held["a", 0] == 12
    done(progress, ("backward", "a", 0))
    assert progress.held["a", 0] == 0
    assert progress.fits(("forward", "a", 1), 0)


def test_forward_only_units_are_held_until_the_last_consumer_has_run_forward() -> None:
    sections = {"a": section(trainable=False), "b": section(trainable=False), "c": section()}
    progress = progress_of(work(sections, ["a b", "a c"], [{"a": (5,), "b": (5,), "c": (5,)}]))
    done(progress, ("forward", "a", 0))
    done(progress, ("forward", "b", 0))
    assert (progress.held["a", 0], progress.held["b", 0]) == (5, 0)
    done(progress, ("forward_backward", "c", 0))
    assert (progress.held["a", 0], progress.held["c", 0]) == (0, 0)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(workload=support.workloads())
def test_nothing_is_held_in_the_end(workload: Workload) -> None:
    progress = progress_of(workload)
    run(progress, replay(progress, InOrder().schedule(workload)), Clock())
    assert not any(progress.held.values())
    assert (progress.left, progress.nodes) == (0, {})


def test_a_busy_device_keeps_every_replica_on_it_from_starting() -> None:
    sections = {"a": section(devices=((0, 1),)), "b": section(replicas=2, devices=((1,), (2,)))}
    progress = progress_of(work(sections, [], [{"a": (3,), "b": (3,)}]))
    running = progress.task(("forward_backward", "a", 0), 0, 0)
    progress.start(running)
    assert (progress.idle("b", 0), progress.idle("b", 1)) == (False, True)
    progress.finish(running)
    assert progress.idle("b", 0)


def tasks_of(tasks: Iterable[Task], name: str, kinds: tuple[str, ...], samples: set[int]) -> set[Task]:
    """The tasks of a section and of these kinds that hold any of the samples."""
    return {t for t in tasks if t.section == name and t.kind in kinds and samples & {s for s, _ in t.items}}


FORWARD, BACKWARD = ("forward", "forward_backward"), ("backward", "forward_backward")


@settings(derandomize=True, deadline=None, max_examples=60)
@given(workload=support.workloads(), seed=st.integers(0, 9))
def test_devices_that_end_tasks_in_any_order_keep_every_dependency(workload: Workload, seed: int) -> None:
    schedule, executor = InOrder().schedule(workload), Disorder(seed)
    progress = progress_of(workload)
    started = run(progress, replay(progress, schedule), executor)
    assert [(t.section, t.kind, t.items) for t in started] == [(t.section, t.kind, t.items) for t in schedule.tasks]
    ended: set[Task] = set()
    for what, each in executor.events:
        if what == "end":
            ended.add(each)
            continue
        samples = {s for s, _ in each.items}
        for edge in workload.edges:
            if edge.consumer == each.section and each.kind in FORWARD:
                assert tasks_of(started, edge.producer, FORWARD, samples) <= ended
            if edge.producer == each.section and each.kind in BACKWARD:
                assert tasks_of(started, edge.consumer, BACKWARD, samples) <= ended


@pytest.mark.quick
def test_a_stuck_schedule_says_what_waits_and_who_holds_memory() -> None:
    workload = work({"a": section(max_inflight=16), "b": section(buckets=(32,))}, ["a b"], [{"a": (16, 16), "b": (16,)}])
    with pytest.raises(ScheduleError) as caught:
        InOrder().schedule(workload)
    assert str(caught.value) == (
        "the schedule is stuck with 6 tasks left.\n"
        "  wanted   a task that may start\n"
        "  have     forward 1 of 'a' cannot start; units held: {'a[0]': 16}\n"
        "  set by   the workload\n"
        "  fix      raise max_inflight or max_bytes of the sections that hold the most, or use smaller micro-batches\n"
        "  help     docs/errors.md#schedule-stuck"
    )


def test_a_chooser_that_starts_nothing_is_stuck() -> None:
    with pytest.raises(ScheduleError, match="stuck with 2 tasks left"):
        run(progress_of(work({"a": section()}, [], [{"a": (3,)}])), lambda progress, now: None, Clock())


def test_tasks_without_duration_end_at_once() -> None:
    sections = {name: section(forward=Cost(), backward=Cost(), update=0) for name in "ab"}
    schedule = InOrder().schedule(work(sections, ["a b"], [{"a": (3,), "b": (3,)}], [{"a": (3,)}]))
    assert schedule.makespan == 0
    assert len(schedule.tasks) == 8


def test_a_workload_without_samples_updates_only() -> None:
    schedule = InOrder().schedule(work({"a": section(replicas=2), "b": section(trainable=False)}, ["a b"], []))
    assert [(t.section, t.kind, t.replica) for t in schedule.tasks] == [("a", "update", 0), ("a", "update", 1)]
