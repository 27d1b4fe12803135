"""The planner: plans against all plans there are, with wrong costs, within memory, on many devices, and what does not fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from planning_support import all_allocations, made_up

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules.candidates import placed
from maestro_jax.schedules.planning import judge, plan, regret, with_candidates, with_errors


@pytest.mark.parametrize(("seed", "sections", "devices"), [(0, 2, 8), (1, 3, 6), (3, 3, 5), (4, 2, 7)])
def test_the_plan_is_within_two_per_cent_of_the_best_of_all(seed: int, sections: int, devices: int) -> None:
    problem = made_up(seed, sections=sections, devices=devices, samples=12, tensors=(1, 2))
    best = min(judge(problem, allocation).step for allocation in all_allocations(problem))
    assert plan(problem).best[0].step <= 1.02 * best


def regrets(seeds: range, *, apart: bool) -> list[float]:
    found = []
    for seed in seeds:
        true = made_up(seed, samples=48)
        chosen = with_candidates(true, plan(with_errors(true, 0.3, seed, apart=apart), wanted=1).best[0].allocation)
        found.append(regret(true, chosen, [plan(true, wanted=1).best[0].allocation, chosen]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_with_costs_that_are_off_by_thirty_per_cent_plans_lose_less_than_a_fifth(apart: bool) -> None:
    # A tenth is what is aimed at; docs/planning.md says what is reached, with more seeds.
    found = regrets(range(5), apart=apart)
    assert max(found) > 0.0
    assert np.quantile(found, 0.95) <= 0.20


def test_wrong_costs_are_wrong_within_their_share_and_alike_for_the_candidates_of_a_section() -> None:
    true = made_up(0)
    wrong = with_errors(true, 0.3, 1)
    for name, candidates in true.candidates.items():
        factors = {
            round(b.work.forward.per_unit / a.work.forward.per_unit, 2) for a, b in zip(candidates, wrong.candidates[name], strict=True)
        }
        assert len(factors) == 1
        assert 0.7 <= factors.pop() <= 1.3
    assert wrong.candidates != with_errors(true, 0.3, 2).candidates
    assert with_errors(true, 0.0, 1).candidates == true.candidates


def test_the_same_problem_gives_the_same_plans() -> None:
    one, two = (plan(made_up(7)) for _ in range(2))
    assert [p.allocation.sort_key for p in one.best] == [p.allocation.sort_key for p in two.best]
    assert len({p.allocation.sort_key for p in one.best}) == len(one.best) == 5
    assert [p.step for p in one.best] == sorted(p.step for p in one.best)


def test_devices_of_groups_are_apart_and_replicas_begin_at_multiples_of_their_size() -> None:
    for planned in plan(made_up(3)).best:
        ranges = [
            {d for name in group for place in planned.allocation.choices[name].places for d in place} for group in planned.allocation.groups
        ]
        assert sum(map(len, ranges)) == len(set().union(*ranges)) == planned.allocation.devices <= 8
        for choice in planned.allocation.choices.values():
            assert all(place[0] % choice.candidate.devices == 0 for place in choice.places)


def test_plans_keep_within_memory_and_shared_devices_hold_all_of_their_sections() -> None:
    problem = made_up(5, memory=7 * 10**8)
    free = made_up(5)
    plans = plan(problem)
    for planned in plans.best:
        assert planned.allocation.memory <= problem.memory
    assert plans.best[0].step >= plan(free).best[0].step


def test_conventional_layouts_are_plans_of_their_kind_on_all_devices() -> None:
    plans = plan(made_up(2))
    assert plans.one_layout is not None
    choices = list(plans.one_layout.allocation.choices.values())
    assert len({(c.candidate.key, c.replicas, c.first) for c in choices}) == 1
    assert plans.time_shared is not None
    assert len(plans.time_shared.allocation.groups) == 1
    assert plans.best[0].step <= plans.time_shared.step <= plans.one_layout.step * 1.05
    assert plans.disjoint is not None
    assert len(plans.disjoint.allocation.groups) == 3
    assert plans.best[0].step <= plans.disjoint.step


def test_what_does_not_fit_is_refused_with_the_limit_that_binds() -> None:
    small = made_up(5, memory=2 * 10**8)
    with pytest.raises(ScheduleError) as caught:
        plan(small)
    assert (caught.value.anchor, "0.2 GB a device" in caught.value.have) == ("plan-infeasible", True)
    alone = made_up(5, tensors=(4,), devices=8)
    with pytest.raises(ScheduleError) as caught:
        plan(dataclasses.replace(alone, devices=2))
    assert "4 devices for section" in caught.value.wanted


def test_a_plan_for_many_devices_uses_nearly_all_of_them() -> None:
    problem = made_up(1, devices=64, samples=150, tensors=(1, 2, 4, 8))
    best = plan(problem).best[0]
    assert best.allocation.devices >= 56
    assert best.step <= 1.6 * best.lower_bound


def test_an_allocation_is_judged_by_the_costs_of_the_problem() -> None:
    problem = made_up(0, sections=2)
    first, second = (problem.candidates[name][0] for name in problem.candidates)
    allocation = placed({"first": (first, 2), "second": (second, 4)}, [("first",), ("second",)])
    assert allocation.choices["second"].first == 0 or allocation.choices["second"].first == 2
    judged = judge(problem, allocation)
    assert judged.lower_bound <= judged.step
    assert set(judged.utilization) == {"first", "second"}
