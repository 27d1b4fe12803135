"""Simulated queues: what runs when, in the scheduled order and adaptively, with durations that are not the scheduled ones."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import workload_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_support import JUDGE, judged, section, work

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import Cost, EdgeWork, InOrder, Schedule, Task, Wavefront, Workload
from maestro_jax.schedules.queues import execute, perturbed


def judged_but_durations(workload: Workload, measured: Schedule) -> None:
    """What the judge says of inputs, devices, updates and memory; it is not asked whether tasks take what they cost."""
    require = JUDGE.require

    def lenient(condition: bool, message: str) -> None:
        require(condition or "its cost is" in message or "an update of" in message, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JUDGE, "require", lenient)
        judged(workload, measured)


def as_scheduled(task: Task) -> int:
    return task.end - task.start


@settings(derandomize=True, deadline=None, max_examples=60)
@given(workload=support.workloads(tight=True), depth=st.integers(1, 4), in_order=st.booleans(), noise=st.sampled_from([0.0, 0.5]))
def test_whatever_can_be_scheduled_runs_to_its_end(workload: Workload, depth: int, in_order: bool, noise: float) -> None:
    """Memory is tight: an adaptive rule that gave away room that an overtaken task needs would get stuck."""
    try:
        schedule = InOrder().schedule(workload)
    except ScheduleError:
        return
    run = execute(workload, schedule, perturbed(schedule, noise), depth, in_order)
    assert sorted(map(repr, run.scheduled.tasks)) == sorted(map(repr, schedule.tasks))
    assert [dataclasses.replace(t, start=0, end=0) for t in run.measured.tasks] == [
        dataclasses.replace(t, start=0, end=0) for t in run.scheduled.tasks
    ]
    assert all(given <= task.start for given, task in zip(run.issued, run.measured.tasks, strict=True))
    if not in_order:
        judged_but_durations(workload, run.measured)


@pytest.mark.quick
@pytest.mark.parametrize("name", support.FILES)
def test_without_noise_a_schedule_takes_what_it_says(name: str) -> None:
    workload = Workload.from_json(support.raw_file(name))
    schedule = InOrder().schedule(workload)
    for depth, in_order in ((1, True), (8, True), (8, False)):
        assert execute(workload, schedule, as_scheduled, depth, in_order).measured.makespan == schedule.makespan


def late_first() -> tuple[Workload, Schedule]:
    """Two samples, each with a producer of its own, and a consumer that is scheduled to take the first one first."""
    slow, fast = (section(buckets=(8,), trainable=False, forward=Cost(fixed=cost)) for cost in (10, 20))
    c = section(buckets=(8,), trainable=False, forward=Cost(fixed=30))
    edges = [EdgeWork(producer=name, consumer="c") for name in ("a", "b")]
    workload = work({"a": slow, "b": fast, "c": c}, edges, [{"a": (8,), "c": (8,)}, {"b": (8,), "c": (8,)}])
    return workload, InOrder().schedule(workload)


def lasts(task: Task) -> int:
    """The first producer takes ten times as long as scheduled."""
    return 100 if task.section == "a" else task.end - task.start


def test_in_order_waits_for_what_is_late_and_adaptive_dispatch_overtakes() -> None:
    workload, schedule = late_first()
    in_order, adaptive = (execute(workload, schedule, lasts, 2, rule).measured for rule in (True, False))
    # By hand: c takes 100 to 130 and 130 to 160 in order; 20 to 50 and 100 to 130 otherwise.
    assert [(t.start, t.end) for t in in_order.tasks if t.section == "c"] == [(100, 130), (130, 160)]
    assert [(t.start, t.end) for t in adaptive.tasks if t.section == "c"] == [(20, 50), (100, 130)]


def test_a_short_queue_holds_up_the_host_and_so_other_replicas() -> None:
    a, b = (section(buckets=(8,), trainable=False, forward=Cost(fixed=10)) for _ in range(2))
    workload = work({"a": a, "b": b}, [], [{"a": (8,), "b": (8,)}] * 3)
    schedule = InOrder().schedule(workload)

    def slow(task: Task) -> int:
        return 100 if task.section == "a" else 10

    ends = {depth: max(t.end for t in execute(workload, schedule, slow, depth).measured.tasks if t.section == "b") for depth in (1, 3)}
    assert ends[3] == 30
    # Its third task is issued when the second of a has begun, at the earliest.
    assert ends[1] > 100


def test_calls_take_time_of_the_host() -> None:
    workload, schedule = late_first()
    assert execute(workload, schedule, as_scheduled, 8, call=1000).issued == (1000, 2000, 3000, 4000)


def test_room_is_left_for_what_is_overtaken() -> None:
    """A micro-batch of c takes two of a, which holds two at most. Were the third run while the second waits, neither c could ever run."""
    first = section(buckets=(8,), trainable=False, forward=Cost(fixed=1))
    a = section(buckets=(8,), trainable=False, max_inflight=16, forward=Cost(fixed=1))
    c = section(buckets=(16,), trainable=False, forward=Cost(fixed=1))
    samples = [{"a": (8,), "c": (8,)}, {"p": (8,), "a": (8,), "c": (8,)}, {"a": (8,), "c": (8,)}, {"a": (8,), "c": (8,)}]
    workload = work({"p": first, "a": a, "c": c}, ["p a", "a c"], samples)
    schedule = InOrder().schedule(workload)

    def slow(task: Task) -> int:
        return 100 if task.section == "p" else 1

    run = execute(workload, schedule, slow, 4, in_order=False)
    assert [t.items[0][0] for t in run.measured.tasks if t.section == "a"] == [0, 1, 2, 3]
    judged_but_durations(workload, run.measured)


def test_noise_has_the_size_that_was_asked_for() -> None:
    workload = Workload.from_json(support.raw_file("omni_three_encoders"))
    schedule = InOrder().schedule(workload)
    take = perturbed(schedule, 0.2)
    ratios = [take(t) / (t.end - t.start) for t in schedule.tasks if t.end > t.start]
    assert statistics.mean(ratios) == pytest.approx(1.0, abs=0.05)
    assert statistics.stdev(map(math.log, ratios)) == pytest.approx(0.2, abs=0.03)
    assert [take(t) for t in schedule.tasks] == [perturbed(schedule, 0.2)(t) for t in schedule.tasks]


def test_a_longer_queue_never_hurts_in_order() -> None:
    """The finding behind the default depth: see docs/scheduling.md."""
    for name in ("omni_three_encoders", "llm_two_stages"):
        workload = Workload.from_json(support.raw_file(name))
        schedule = Wavefront().schedule(workload)
        spans = [execute(workload, schedule, perturbed(schedule, 0.3), depth).measured.makespan for depth in (1, 2, 4, 8, 32)]
        assert spans == sorted(spans, reverse=True)
        assert spans[0] > 1.02 * spans[-1]
