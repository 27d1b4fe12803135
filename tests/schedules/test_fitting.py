"""Costs fitted to measured tasks are those that made them."""

from __future__ import annotations

import dataclasses

import pytest
from workload_support import raw_file, section, work

from maestro_jax.schedules import Cost, EdgeWork, InOrder, Schedule, Workload, fitted_call, fitted_workload
from maestro_jax.schedules.queues import execute

FORWARD, BACKWARD = Cost(fixed=50_000, per_unit=900, per_unit_squared=70), Cost(fixed=90_000, per_unit=2_000, per_unit_squared=150)


def fitted(workload: Workload, real: Workload) -> Workload:
    """Schedules by one workload's costs, runs with those of another, and fits."""
    run = execute(real, InOrder().schedule(workload))
    return fitted_workload(workload, run.measured)


def slower(workload: Workload, factor: int) -> Workload:
    def scaled(cost: Cost) -> Cost:
        return Cost(**{name: value * factor for name, value in dataclasses.asdict(cost).items()})

    sections = {
        name: dataclasses.replace(s, forward=scaled(s.forward), backward=scaled(s.backward), update=s.update * factor)
        for name, s in workload.sections.items()
    }
    return dataclasses.replace(workload, sections=sections)


@pytest.mark.parametrize("name", ["mllm_half_images", "llm_two_stages", "kd_three_steps"])
def test_nominal_costs_are_scaled_to_real_ones(name: str) -> None:
    """Seven times slower devices than assumed: what the fitted costs predict of another schedule is seven times as long."""
    workload = Workload.from_json(raw_file(name))
    real = slower(workload, 7)
    other = InOrder().schedule(real)
    assert execute(fitted(workload, real), other).measured.makespan == pytest.approx(other.makespan, rel=0.01)


def test_forward_and_backward_are_fitted_apart() -> None:
    real = section(buckets=(64, 256), trainable=True, forward=FORWARD, backward=BACKWARD, update=500)
    last = section(buckets=(256,), trainable=False)
    small = [[{"a": (units,), "b": (units,)}] for units in (20, 40, 60)]
    large = [[{"a": (units,), "b": (units,)} for units in (150 - spread, 50 + spread)] for spread in (0, 20, 40)]
    workload = work({"a": real, "b": last}, ["a b"], *small, *large)
    nominal = dataclasses.replace(
        workload,
        sections={**workload.sections, "a": dataclasses.replace(real, forward=Cost(per_unit=1), backward=Cost(per_unit=1), update=1)},
    )
    found = fitted(nominal, workload).sections["a"]
    for bucket, units in ((64, [50]), (256, [100, 100])):
        assert found.forward.of(bucket, units) == pytest.approx(FORWARD.of(bucket, units), rel=0.03)
        assert found.backward.of(bucket, units) == pytest.approx(BACKWARD.of(bucket, units), rel=0.03)
    assert found.update == 500


def test_tasks_of_one_size_keep_the_form_of_the_cost() -> None:
    nominal = section(buckets=(8,), forward=Cost(fixed=2, per_unit=1), backward=Cost(fixed=4, per_unit=2))
    real = dataclasses.replace(nominal, forward=Cost(fixed=20, per_unit=10), backward=Cost(fixed=40, per_unit=20))
    samples = [{"a": (8,)}] * 3
    found = fitted(work({"a": nominal}, [], samples), work({"a": real}, [], samples)).sections["a"]
    assert (found.forward, found.backward) == (real.forward, real.backward)


def test_a_section_without_tasks_keeps_its_costs() -> None:
    workload = work({"a": section(), "b": section()}, [], [{"a": (8,)}])
    assert fitted(workload, slower(workload, 3)).sections["b"].forward == workload.sections["b"].forward


@pytest.mark.parametrize(("seen", "delay"), [(40, 40), (0, 0), (90, 50)])
def test_a_transfer_takes_no_longer_than_its_consumers_waited(seen: int, delay: int) -> None:
    single = section(buckets=(8,), trainable=False, forward=Cost(fixed=10))
    workload = work({"a": single, "b": single}, [EdgeWork(producer="a", consumer="b", delay=50)], [{"a": (8,), "b": (8,)}])
    first, second = InOrder().schedule(workload).tasks
    measured = Schedule(tasks=(first, dataclasses.replace(second, start=10 + seen, end=20 + seen)))
    assert fitted_workload(workload, measured).edges[0].delay == delay


@pytest.mark.parametrize("call", [0, 40_000])
def test_the_host_s_time_is_told_from_waiting_for_full_queues(call: int) -> None:
    workload = Workload.from_json(raw_file("llm_two_stages"))
    run = execute(workload, InOrder().schedule(workload), depth=2, call=call)
    assert fitted_call(run.measured, run.issued, depth=2) == call
    # With deeper queues in mind, waiting would count.
    assert fitted_call(run.measured, run.issued, depth=1000) > call
