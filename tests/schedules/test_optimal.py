"""The exact model allows what is valid, nothing else, and finds what is shortest. Skipped without OR-tools (`.[optimal]`)."""

from __future__ import annotations

import contextlib
import dataclasses
import sys

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from workload_support import judged, section, work, workloads

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import Cost, EdgeWork, InOrder, Sequential, Wavefront, Workload
from maestro_jax.schedules.lockstep import Lockstep

pytest.importorskip("ortools")
from benchmarks import optimal

TEN = Cost(fixed=10)
POLICIES = (InOrder(), Sequential(), Lockstep(), Wavefront())


def image_and_text(most_held: int) -> Workload:
    """An encoder and an LLM in which every task takes 10 ns; one sample with an image and one without, in micro-batches of their own."""
    sections = {
        "encoder": section(buckets=(1,), forward=TEN, backward=TEN, update=0),
        "llm": section(buckets=(1,), forward=TEN, backward=TEN, update=0, max_inflight=most_held),
    }
    return work(sections, ["encoder llm"], [{"encoder": (1,), "llm": (1,)}, {"llm": (1,)}])


def optimum(workload: Workload, seconds: float = 20) -> optimal.Solution:
    """The solver's answer, after the judge has seen its schedule."""
    found = optimal.solve(workload, Sequential().schedule(workload), seconds)
    judged(workload, found.schedule)
    return found


SQUARES = section(buckets=(12,), replicas=2, forward=Cost(), backward=Cost(per_unit_squared=100), max_inflight=12, update=0)
AHEAD = section(buckets=(12,), replicas=2, forward=Cost(fixed=1), trainable=False)


# The last forward of a sample may be that of a short item; a bound may be too high by what it rounds up.
@example(work({"a": SQUARES}, [], [{"a": (10, 7, 7)}]))
@example(work({"a": AHEAD}, [], [{"a": (10,)}], [{"a": (10,)}]))
@settings(deadline=None, max_examples=25)
@given(st.booleans().flatmap(lambda tight: workloads(tight=tight, most_items=2)))
def test_optimal_schedules_are_valid_and_no_policy_is_shorter(workload: Workload) -> None:
    assume(sum(len(units) for step in workload.steps for sample in step for units in sample.items.values()) <= 12)
    known = []
    for policy in POLICIES:
        with contextlib.suppress(ScheduleError):
            known.append(policy.schedule(workload))
    assume(known)
    # A model that did not allow one of them would find nothing that ends as soon, and raise.
    for schedule in known:
        found = optimal.solve(workload, schedule, seconds=20)
        assert judged(workload, found.schedule)["makespan"] <= min(s.makespan for s in known)
        assert found.optimal
        assert found.bound == found.schedule.makespan


def test_forward_of_text_fills_the_beginning_and_its_backward_the_end() -> None:
    # LLM: forward of the text, forward and backward of the image, backward of the text. One task for both would take 50 ns.
    assert optimum(image_and_text(most_held=2)).schedule.makespan == 40


def test_memory_limit_keeps_a_micro_batch_from_waiting_inside_another() -> None:
    assert optimum(image_and_text(most_held=1)).schedule.makespan == 50


def test_micro_batches_are_as_large_as_it_pays() -> None:
    # Two buckets of 16 (2 x (5 + 16) forward, 2 x (5 + 32) backward, 3 for the update) beat one of 16 and two of 8.
    alone = work({"a": section()}, [], [{"a": (8,)}, {"a": (7,)}, {"a": (6,)}, {"a": (9,)}])
    found = optimum(alone)
    assert found.schedule.makespan == 119
    assert sorted(task.bucket for task in found.schedule.tasks if task.kind == "forward") == [16, 16]


def test_fan_limits_change_the_optimum() -> None:
    sections = {"a": section(buckets=(8,), trainable=False), "b": section(buckets=(8,), replicas=2, update=0)}
    items = [{"a": (4,), "b": (8,)}, {"a": (4,), "b": (8,)}]
    free, limited = (work(sections, [EdgeWork(producer="a", consumer="b", fan_out=limit)], items) for limit in (None, 1))
    # One forward of 13 ns upstream feeds both (13 + 13 + 21), or each has its own and the second waits for two.
    assert optimum(free).schedule.makespan == 47
    assert optimum(limited).schedule.makespan == 60


def test_replicas_that_share_devices_differently_are_not_alike() -> None:
    alone = section(buckets=(1,), forward=TEN, trainable=False)
    sections = {"a": dataclasses.replace(alone, devices=((0,),)), "b": dataclasses.replace(alone, replicas=2, devices=((0,), (1,)))}
    assert optimum(work(sections, [], [{"a": (1,), "b": (1,)}])).schedule.makespan == 10


def test_steps_wait_for_updates() -> None:
    one = [{"a": (8,)}]
    # Forward 13, backward 21, update 3, twice; and the update of a step without samples.
    assert optimum(work({"a": section(replicas=2)}, [], one, one)).schedule.makespan == 74
    assert optimum(work({"a": section(replicas=2)}, [], one, [], one)).schedule.makespan == 77


def test_cheapest_cut() -> None:
    # 16 and 8 units, or 8, 8 and 8: 21 + 13 against 3 x 13.
    assert optimal.cheapest([8, 16], [Cost(fixed=5, per_unit=1)], [8, 8, 3]) == 34


def test_schedule_is_the_same_each_time() -> None:
    workload = optimal.instance("vision", samples=5, seed=0)
    assert optimum(workload).schedule.digest() == optimum(workload).schedule.digest()


def test_known_schedule_is_kept_when_time_runs_out() -> None:
    workload = optimal.instance("two stages", samples=12, seed=1)
    found = optimum(workload, seconds=0.001)
    assert not found.optimal
    assert found.bound <= found.schedule.makespan <= Sequential().schedule(workload).makespan


def test_rows_are_refused() -> None:
    rows = work({"a": section(row_length=8)}, [], [{"a": (4,)}])
    with pytest.raises(ValueError, match="row_length"):
        optimum(rows)


def test_table_has_a_row_for_each_kind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["optimal", "--samples", "3", "--instances", "1"])
    optimal.main()
    printed = capsys.readouterr().out
    assert all(f"| {kind}, 3 samples, seed 0 |" in printed for kind in optimal.UPSTREAM)
    assert "5 solved: wavefront / optimal is 1." in printed
