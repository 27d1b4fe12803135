"""The fewest samples that exercise a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import pytest
from support import TEXT_SPECS, chain, student_functions, teacher_functions, text_samples

from maestro_jax.data import Sample
from maestro_jax.errors import DataError
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.runtime import Plan, make_plan, make_workload
from maestro_jax.runtime.costs import counted_costs
from maestro_jax.runtime.fewest import (
    FORWARDS,
    enough_samples,
    fewest_samples,
    idle_replicas,
    padded_units,
    run_once,
    several_micro_batches,
)
from maestro_jax.schedules import InOrder, Policy, Wavefront
from maestro_jax.schedules.cutting import microbatches_of
from maestro_jax.schedules.loop import Clock, Progress, run
from maestro_jax.schedules.policies import check_covers, replay

SAMPLES = text_samples(60)


def plan(graph: SectionGraph) -> Plan:
    return make_plan(graph, {"image": TEXT_SPECS["text"], **TEXT_SPECS}, jax.devices())


def idle(plan: Plan, samples: list[Sample], runs: int = 2) -> dict[str, list[int]]:
    return idle_replicas(plan, InOrder().schedule(make_workload(plan, [samples], True, counted_costs(plan))), runs)


def two_streams(microbatch: int = 32) -> SectionGraph:
    encoder = Section(name="encoder", module=teacher_functions(8), reads="image", microbatch=microbatch)
    reader = Section(
        name="reader",
        module=student_functions(8),
        inputs={"hidden": "encoder.hidden"},
        objectives={"cross_entropy": Objective()},
        microbatch=microbatch,
    )
    return SectionGraph(sections=(encoder, reader))


def mixed(*streams: tuple[str, ...]) -> list[Sample]:
    """Samples "s0", "s1", ..., each with an item in the streams named."""
    return [
        dataclasses.replace(sample, items=dict.fromkeys(names, sample.items["text"]))
        for sample, names in zip(text_samples(len(streams)), streams, strict=True)
    ]


@pytest.mark.quick
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_every_replica_runs_two_micro_batches_and_few_samples_more(replicas: int) -> None:
    made = plan(chain(student={"replicas": replicas, "microbatch": (32, 64)}))
    chosen = fewest_samples(made, SAMPLES, InOrder(), 10_000, counted_costs(made))
    assert idle(made, chosen) == {}
    assert len(chosen) >= 2 * replicas
    assert idle(made, chosen[: len(chosen) // 2])


def test_short_samples_are_two_a_replica_at_least() -> None:
    made = plan(chain(teacher={"microbatch": 32}, middle={"microbatch": 32}, student={"replicas": 3}))
    assert len(fewest_samples(made, text_samples(30, shortest=30), InOrder(), 10_000, counted_costs(made))) >= 6


def test_units_are_bounded_with_padding() -> None:
    made = plan(chain(student={"replicas": 4, "microbatch": 64}))
    chosen = fewest_samples(made, SAMPLES, InOrder(), 200, counted_costs(made))
    assert idle(made, chosen)
    assert padded_units(chosen) <= 200 < padded_units([*chosen, SAMPLES[len(chosen)]])
    assert padded_units(mixed(("text",), ("text",))) == 2 * max(s.items["text"][0].units for s in text_samples(2))


def test_one_sample_is_taken_whatever_its_length() -> None:
    made = plan(chain())
    assert fewest_samples(made, SAMPLES, InOrder(), 1, counted_costs(made)) == SAMPLES[:1]


def test_the_first_samples_of_every_section_and_edge_come_before_others_and_in_order() -> None:
    samples = mixed(*[("text",)] * 20, ("image",), *[("text",)] * 20, ("image", "text"), ("image", "text"))
    made = plan(two_streams())
    chosen = fewest_samples(made, samples, InOrder(), 100, counted_costs(made))
    ids = [sample.id for sample in chosen]
    assert {"s0", "s20", "s41"} <= set(ids)
    assert "s42" not in ids
    assert ids == sorted(ids, key=lambda name: int(name[1:]))


def test_candidates_are_read_only_until_there_are_enough() -> None:
    read: list[str] = []

    def candidates() -> Iterator[Sample]:
        for sample in mixed(*[("text",)] * 10, ("image", "text"), *[("text",)] * 10):
            read.append(sample.id)
            yield sample

    assert enough_samples(two_streams(), candidates(), 1, 100)[-1].id == "s10"
    assert len(read) == 12


def test_a_section_that_no_sample_reaches_is_refused() -> None:
    samples = mixed(*[("text",)] * 5, ("image", "text"))
    assert len(enough_samples(two_streams(), samples, 10_000, 6)) == 6
    with pytest.raises(DataError, match="section 'encoder' cannot be verified: no sample reaches it") as caught:
        enough_samples(two_streams(), samples, 10_000, 5)
    assert caught.value.have == "5 samples, none of them with such items"


@pytest.mark.parametrize("name", ["InOrder", "Wavefront"])
def test_a_policy_in_two_gives_every_section_two_micro_batches_of_a_valid_step(name: str) -> None:
    samples = mixed(*[("image", "text"), ("text",)] * 4)
    made = plan(two_streams(microbatch=512))
    policy: Policy = {"InOrder": InOrder(), "Wavefront": Wavefront()}[name]
    costs = counted_costs(made)
    workload = make_workload(made, [samples], True, costs)
    assert run_once(made, policy.schedule(workload)) == ["reader"]
    chosen = several_micro_batches(made, samples, policy, costs)
    schedule = chosen.schedule(workload)
    assert run_once(made, schedule) == []
    assert {name: sum(t.section == name and t.kind in FORWARDS for t in schedule.tasks) for name in made.sections} == {
        "encoder": 2,
        "reader": 2,
    }
    microbatches = microbatches_of(workload, schedule.tasks)
    check_covers(workload, microbatches)
    progress = Progress(workload, microbatches)
    choose = replay(progress, schedule)
    assert [t.section for t in run(progress, choose, Clock())] == [t.section for t in schedule.tasks]


def test_a_policy_that_cuts_small_enough_is_kept() -> None:
    made, policy = plan(two_streams()), InOrder()
    assert several_micro_batches(made, mixed(*[("image", "text")] * 8), policy, counted_costs(made)) is policy


def test_two_samples_stay_together() -> None:
    made, policy = plan(two_streams(microbatch=512)), InOrder()
    assert several_micro_batches(made, mixed(*[("image", "text")] * 2), policy, counted_costs(made)) is policy
