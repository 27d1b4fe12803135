"""Every schedule is valid to an independent judge, and the same one in every process."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import workload_support as support
from hypothesis import given, settings
from workload_support import judged, section, work

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import Clock, Cost, EdgeWork, InOrder, Policy, Progress, Schedule, Sequential, Task, Workload, cut, run
from maestro_jax.schedules.policies import replay

ROOT = Path(__file__).parent.parent.parent
POLICIES = (InOrder(), Sequential())
RATIOS = {
    "kd_long_tail": 1.206,
    "kd_three_steps": 1.239,
    "llm_two_stages": 1.203,
    "mllm_half_images": 1.183,
    "mllm_mostly_text": 1.228,
    "mllm_tiny_batch": 2.288,
    "omni_three_encoders": 1.161,
}


def shared_file(name: str) -> Workload:
    return Workload.from_json(support.raw_file(name))


def replayed(workload: Workload, schedule: Schedule) -> Schedule:
    progress = Progress(workload, cut(workload))
    return Schedule(tasks=tuple(run(progress, replay(progress, schedule), Clock())))


def named(schedule: Schedule) -> list[tuple[str, str, int]]:
    """The tasks as (section, kind, replica)."""
    return [(t.section, t.kind, t.replica) for t in schedule.tasks]


def overlaps(schedule: Schedule) -> int:
    spans = sorted((t.start, t.end) for t in schedule.tasks)
    return sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))


@pytest.mark.quick
@pytest.mark.parametrize("name", RATIOS)
def test_in_order_reaches_its_known_ratio(name: str) -> None:
    workload = shared_file(name)
    assert judged(workload, InOrder().schedule(workload))["ratio"] == pytest.approx(RATIOS[name], abs=5e-4)


@pytest.mark.parametrize("name", support.FILES)
def test_sequential_is_valid_and_runs_one_task_at_a_time(name: str) -> None:
    workload = shared_file(name)
    schedule = Sequential().schedule(workload)
    judged(workload, schedule)
    assert overlaps(schedule) == 0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@settings(derandomize=True, deadline=None, max_examples=150)
@given(workload=support.workloads())
def test_schedules_of_random_workloads_are_valid(policy: Policy, workload: Workload) -> None:
    judged(workload, policy.schedule(workload))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(workload=support.workloads(tight=True))
def test_tight_memory_gives_a_valid_schedule_or_a_clear_error(policy: Policy, workload: Workload) -> None:
    try:
        schedule = policy.schedule(workload)
    except ScheduleError as caught:
        error = caught
    else:
        judged(workload, schedule)
        return
    assert error.anchor == "schedule-stuck"


@settings(derandomize=True, deadline=None, max_examples=50)
@given(workload=support.workloads())
def test_sequential_never_overlaps_tasks(workload: Workload) -> None:
    assert overlaps(Sequential().schedule(workload)) == 0


@settings(derandomize=True, deadline=None, max_examples=50)
@given(workload=support.workloads())
def test_updates_of_a_replica_stand_in_the_order_of_steps(workload: Workload) -> None:
    found: dict[tuple[str, int], list[int]] = {}
    for task in InOrder().schedule(workload).tasks:
        if task.kind == "update":
            found.setdefault((task.section, task.replica), []).append(task.step)
    assert all(steps == list(range(len(workload.steps))) for steps in found.values())


def test_a_step_without_samples_does_not_let_the_next_one_overtake() -> None:
    workload = work({"a": section()}, [], [{"a": (8,)}], [], [{"a": (8,)}])
    tasks = InOrder().schedule(workload).tasks
    assert [(t.kind, t.step) for t in tasks] == [
        ("forward_backward", 0),
        ("update", 0),
        ("update", 1),
        ("forward_backward", 2),
        ("update", 2),
    ]


@pytest.mark.quick
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_schedule_does_not_depend_on_the_process_or_its_hash_seed(policy: Policy) -> None:
    program = (
        "import json, sys; from maestro_jax.schedules import InOrder, Sequential, Workload; "
        f"print({type(policy).__name__}().schedule(Workload.from_json(json.load(sys.stdin))).digest())"
    )
    file = ROOT / "tests" / "schedules" / "workloads" / "omni_three_encoders.json"
    digests = {policy.schedule(shared_file("omni_three_encoders")).digest()}
    for seed in ("1", "2024"):
        with file.open() as text:
            environment = {**os.environ, "PYTHONHASHSEED": seed}
            command = [sys.executable, "-c", program]
            found = subprocess.run(command, stdin=text, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        digests.add(found.stdout.strip())
    assert len(digests) == 1


def test_earliest_free_replica_takes_the_next_microbatch() -> None:
    samples = [{"a": (16,)}, {"a": (8,)}, {"a": (16,)}, {"a": (16,)}]
    sections = {"a": section(buckets=(16,), replicas=2, trainable=False, forward=Cost(per_unit_squared=1000))}
    tasks = InOrder().schedule(work(sections, [], samples)).tasks
    assert [(t.replica, t.start) for t in tasks] == [(0, 0), (1, 0), (1, 64), (0, 256)]


def test_backward_comes_before_a_forward_that_could_start_too() -> None:
    sections = {"a": section(buckets=(16,)), "b": section(buckets=(16,), forward=Cost(fixed=1), backward=Cost(fixed=1))}
    schedule = InOrder().schedule(work(sections, ["a b"], [{"a": (16,), "b": (16,)}] * 3))
    kinds = [t.kind for t in schedule.tasks if t.section == "a"]
    assert kinds == ["forward", "forward", "backward", "backward", "forward", "backward", "update"]


def test_microbatches_without_consumers_run_fused() -> None:
    sections = {"a": section(buckets=(8,)), "b": section(buckets=(8,))}
    schedule = InOrder().schedule(work(sections, ["a b"], [{"a": (8,)}, {"a": (8,), "b": (8,)}]))
    kinds = {t.items[0][0]: t.kind for t in schedule.tasks if t.section == "a" and t.kind.startswith("forward")}
    assert kinds == {0: "forward_backward", 1: "forward"}


def test_delay_holds_up_forward_and_backward() -> None:
    sections = {name: section(forward=Cost(fixed=10), backward=Cost(fixed=20)) for name in "ab"}
    edge = EdgeWork(producer="a", consumer="b", delay=7)
    tasks = InOrder().schedule(work(sections, [edge], [{"a": (1,), "b": (1,)}])).tasks
    assert [(t.section, t.kind, t.start, t.end) for t in tasks] == [
        ("a", "forward", 0, 10),
        ("b", "forward_backward", 17, 47),
        ("a", "backward", 54, 74),
        ("b", "update", 74, 77),
        ("a", "update", 74, 77),
    ]


def test_forward_only_sections_run_ahead_of_the_update() -> None:
    sections = {"teacher": section(trainable=False), "student": section()}
    samples = [{"teacher": (8,), "student": (8,)}]
    tasks = InOrder().schedule(work(sections, ["teacher student"], samples, samples)).tasks
    update = next(t for t in tasks if t.kind == "update" and t.step == 0)
    ahead = next(t for t in tasks if t.section == "teacher" and t.step == 1)
    behind = next(t for t in tasks if t.section == "student" and t.step == 1)
    assert ahead.end <= update.start
    assert behind.start >= update.end


def test_sections_on_one_device_take_turns() -> None:
    sections = {"a": section(trainable=False, devices=((0, 1),)), "b": section(trainable=False, devices=((1, 2),))}
    schedule = InOrder().schedule(work(sections, [], [{"a": (8,), "b": (8,)}] * 3))
    assert overlaps(schedule) == 0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_too_little_memory_for_one_sample_raises(policy: Policy) -> None:
    sections = {"a": section(max_inflight=16), "b": section(buckets=(32,))}
    workload = work(sections, ["a b"], [{"a": (16, 16), "b": (16,)}])
    with pytest.raises(ScheduleError, match="the schedule is stuck with 6 tasks left"):
        policy.schedule(workload)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_limits_that_hold_one_sample_never_get_stuck(policy: Policy) -> None:
    sections = {"a": section(max_inflight=16), "b": section(buckets=(32,))}
    workload = work(sections, ["a b"], [{"a": (16,), "b": (16,)}] * 4)
    schedule = policy.schedule(workload)
    support.judged(workload, schedule)
    assert sum(t.section == "b" and t.kind != "update" for t in schedule.tasks) == 4


def test_forward_only_producer_holds_memory_until_its_consumers_have_run_forward() -> None:
    sections = {"a": section(trainable=False, buckets=(16,), max_inflight=32), "b": section(buckets=(16,), forward=Cost(fixed=1000))}
    schedule = InOrder().schedule(work(sections, ["a b"], [{"a": (16,), "b": (16,)}] * 4))
    ends = [t.end for t in schedule.tasks if t.kind == "forward_backward"]
    starts = [t.start for t in schedule.tasks if t.section == "a"]
    assert starts[2:] == ends[:2]


@pytest.mark.quick
@pytest.mark.parametrize("name", support.FILES)
def test_replay_of_a_shared_file_gives_the_same_schedule(name: str) -> None:
    workload = shared_file(name)
    schedule = InOrder().schedule(workload)
    assert replayed(workload, schedule) == schedule


@settings(derandomize=True, deadline=None, max_examples=50)
@given(workload=support.workloads())
def test_replay_starts_tasks_in_the_order_of_the_schedule(workload: Workload) -> None:
    schedule = Sequential().schedule(workload)
    again = replayed(workload, schedule)
    assert [dataclasses.replace(t, start=0, end=0) for t in again.tasks] == [dataclasses.replace(t, start=0, end=0) for t in schedule.tasks]
    judged(workload, again)
    assert again.makespan <= schedule.makespan


PAIR = work({"a": section(), "b": section(replicas=2)}, ["a b"], [{"a": (8,), "b": (8,)}])


def broken(change: str) -> Schedule:
    """A schedule of `PAIR` with one fault."""
    tasks = list(InOrder().schedule(PAIR).tasks)
    assert named(Schedule(tasks=tuple(tasks[:3]))) == [("a", "forward", 0), ("b", "forward_backward", 0), ("a", "backward", 0)]
    faults: dict[str, list[Task]] = {
        "consumer first": [tasks[1], tasks[0], *tasks[2:]],
        "backward first": [tasks[2], *tasks[:2], *tasks[3:]],
        "update first": [tasks[-1], *tasks[:-1]],
        "task missing": tasks[1:],
        "last task missing": tasks[:-1],
        "task twice": [tasks[0], *tasks],
        "task after the end": [*tasks, tasks[0]],
        "other items": [dataclasses.replace(tasks[0], items=((0, 1),)), *tasks[1:]],
        "other bucket": [dataclasses.replace(tasks[0], bucket=16), *tasks[1:]],
        "other kind": [dataclasses.replace(tasks[0], kind="forward_backward"), *tasks[1:]],
        "no such replica": [tasks[0], dataclasses.replace(tasks[1], replica=2), *tasks[2:]],
        "no such section": [dataclasses.replace(tasks[0], section="c"), *tasks[1:]],
        "no such step": [*tasks[:-1], dataclasses.replace(tasks[-1], step=1)],
    }
    return Schedule(tasks=tuple(faults[change]))


@pytest.mark.quick
@pytest.mark.parametrize("change", ["consumer first", "backward first", "update first", "task missing", "last task missing"])
def test_replay_refuses_an_order_that_cannot_run(change: str) -> None:
    with pytest.raises(ScheduleError, match="the schedule is stuck"):
        replayed(PAIR, broken(change))


@pytest.mark.parametrize(
    "change",
    ["task twice", "task after the end", "other items", "other bucket", "other kind", "no such replica", "no such section", "no such step"],
)
def test_replay_refuses_tasks_that_the_workload_does_not_have(change: str) -> None:
    with pytest.raises(ScheduleError):
        replayed(PAIR, broken(change))


def test_replay_refuses_a_backward_on_another_replica() -> None:
    sections = {"a": section(replicas=2), "b": section()}
    workload = work(sections, ["a b"], [{"a": (8,), "b": (8,)}])
    tasks = [dataclasses.replace(t, replica=1) if t.kind == "backward" else t for t in InOrder().schedule(workload).tasks]
    with pytest.raises(ScheduleError):
        replayed(workload, Schedule(tasks=tuple(tasks)))
