"""Verification: right plans pass with a small number, planted faults are caught, and what cannot be verified is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import TEXT_SPECS, chain, student_functions, teacher_functions, text_samples, wired

import maestro_jax
from maestro_jax import verification
from maestro_jax.data import ArraySpec, Batches, Dataset, Item, Packed, Part, Sample
from maestro_jax.errors import ConfigError, DataError, EdgeError, GraphError
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.models import Decoder
from maestro_jax.optimizers import Sgd
from maestro_jax.run import Run
from maestro_jax.runtime import Preparer, feeds, global_batch
from maestro_jax.runtime.state import SectionState
from maestro_jax.trainer import Trainer
from maestro_jax.verification import verify, verify_run

EXACT = 1e-5


def started(graph: SectionGraph, **fields: Any) -> Run:
    data = Dataset(train=text_samples(40), specs=TEXT_SPECS)
    return Trainer(graph=graph, data=data, steps=3, batch=8, optimizer=Sgd(learning_rate=0.05), **fields).start()


@pytest.fixture(scope="module")
def run() -> Run:
    return started(wired("pair", {"a": {"replicas": 2, "microbatch": (32, 64)}, "b": {"replicas": 3, "axes": {"tensor": 2}}}))


def single(module: Any, **fields: Any) -> SectionGraph:
    objectives = {"cross_entropy": Objective()}
    return SectionGraph(sections=(Section(name="model", module=module, objectives=objectives, microbatch=32, replicas=2, **fields),))


def alone() -> Any:
    """Functions of a section without inputs."""
    init, apply = student_functions(8)
    return init, lambda params, batch: apply(params, batch, jnp.ones((*batch["tokens"].shape, 8)))


# -- what is right


@pytest.mark.quick
def test_replicas_packing_and_a_tensor_axis_pass(run: Run) -> None:
    found = verify_run(run)
    found.require()
    assert found.worst.relative < EXACT
    assert {(leaf.section, leaf.path) for leaf in found.leaves} == {(n, p) for n in ("a", "b") for p in run.engine.plan.sections[n].trained}
    assert all(leaf.scale > 0 for leaf in found.leaves)
    assert found.notes == ()
    assert 6 <= len(found.samples) < 40


def test_the_run_goes_on_as_if_it_had_not_been_verified() -> None:
    run = started(chain())
    verify_run(run)
    losses = [result.metrics["loss"] for result in run.steps()]
    assert losses == [result.metrics["loss"] for result in started(chain()).steps()]


def test_verify_makes_specs_weights_and_plan_itself() -> None:
    found = maestro_jax.verify(chain(student={"replicas": 2}), text_samples(20), seed=3)
    assert type(found) is maestro_jax.Verification
    assert found.ok
    assert found.worst.relative < EXACT


def test_samples_can_come_from_a_data_set() -> None:
    """Here with a stream that samples alone would not tell, and parts that lie one after another."""
    pictures = [with_image(sample) for sample in text_samples(4, seed=1)]
    named = [dataclasses.replace(sample, id=f"image/{sample.id}") for sample in pictures]
    parts = (Part("text", 2000, 1.0), Part("image", 4, 1.0))
    data = Dataset(train=[*text_samples(2000), *named], specs={**TEXT_SPECS, "image": {"tokens": ArraySpec()}}, parts=parts)
    encoder = Section(name="encoder", module=teacher_functions(8), reads="image", microbatch=32)
    reader = Section(
        name="reader",
        module=student_functions(8),
        inputs={"hidden": "encoder.hidden"},
        objectives={"cross_entropy": Objective()},
        microbatch=32,
    )
    found = verify(SectionGraph(sections=(encoder, reader)), data, most_units=500)
    assert found.ok
    assert any(name.startswith("image/") for name in found.samples)


def test_weights_that_are_given_are_the_ones_verified() -> None:
    graph = SectionGraph(sections=(chain()["teacher"], dataclasses.replace(chain()["student"], inputs={"hidden": "teacher.hidden"})))
    params = teacher_functions(8)[0](jax.random.key(5))
    weights = {"teacher": {path: 0 * np.asarray(value) for path, value in params.items()}}
    found = verify(graph, text_samples(6), weights=weights)
    # tanh(0 @ 0): without values, no gradient reaches the teacher.
    assert found.ok
    assert found.notes == ("section 'teacher' has no gradient on these samples: every element of it is 0",)


def test_half_precision_is_verified_in_float32_at_the_parameters_of_the_run() -> None:
    half = started(single(alone(), dtype="bfloat16"))
    found = verify_run(half)
    assert found.worst.relative < EXACT
    list(half.steps())
    half.step = 0  # the same samples again
    moved = verify_run(half)
    assert moved.worst.relative < EXACT
    assert moved.samples == found.samples
    assert {leaf.path: leaf.scale for leaf in moved.leaves} != {leaf.path: leaf.scale for leaf in found.leaves}


def test_noise_that_belongs_to_tokens_passes() -> None:
    """That it is on shows below: noise that belongs to arrays is caught."""
    module = Decoder(vocab_size=16, layers=1, embed=8, heads=2, kv_heads=1, mlp=8, dropout=0.4)
    assert verify(single(module), text_samples(12)).worst.relative < EXACT


def test_a_section_that_runs_for_some_samples_only() -> None:
    encoder = Section(name="encoder", module=teacher_functions(8), reads="image", microbatch=32, replicas=2)
    reader = Section(
        name="reader",
        module=student_functions(8),
        inputs={"hidden": "encoder.hidden"},
        objectives={"cross_entropy": Objective()},
        microbatch=(32, 64),
    )
    samples = [with_image(s) if n % 3 == 2 else s for n, s in enumerate(text_samples(20))]
    found = verify(SectionGraph(sections=(encoder, reader)), samples)
    assert found.worst.relative < EXACT
    assert all(leaf.scale > 0 for leaf in found.leaves)


def with_image(sample: Sample) -> Sample:
    (text,) = sample.items["text"]
    image = Item(units=text.units, arrays={"tokens": text.arrays["targets"]})
    return dataclasses.replace(sample, items={**sample.items, "image": (image,)})


# -- planted faults


def a_count_for_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Preparer._put

    def wrong(self: Preparer, task: Any, packed: Packed, indices: Any, counts: Any, *rest: Any) -> Any:
        return put(self, task, packed, indices, dict.fromkeys(counts, float(packed.arrays["loss_mask"].sum())), *rest)

    monkeypatch.setattr(Preparer, "_put", wrong)


def half_of_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    total = global_batch._total
    monkeypatch.setattr(global_batch, "_total", lambda plan, counts: total(plan, counts[: len(counts) // 2]))


def rows_in_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the pairing check: what was hashed is not what the device receives."""
    put = Preparer._put

    def wrong(self: Preparer, task: Any, packed: Packed, indices: dict[str, np.ndarray], *rest: Any) -> Any:
        rolled = {name: np.roll(rows, 1, axis=-1) if name.endswith(" in") else rows for name, rows in indices.items()}
        return put(self, task, packed, rolled, *rest)

    monkeypatch.setattr(Preparer, "_put", wrong)


def a_replica_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    take = SectionState.take_stacks

    def wrong(self: SectionState, step: int) -> Any:
        gradients, sums = take(self, step)

        def without_the_second(stack: jax.Array) -> jax.Array:
            values = np.array(stack)
            values[1] = 0
            return jax.device_put(values, stack.sharding)

        return jax.tree.map(without_the_second, gradients), sums

    monkeypatch.setattr(SectionState, "take_stacks", wrong)


FAULTS = [a_count_for_each_micro_batch, half_of_the_count, rows_in_other_places, a_replica_left_out]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_planted_faults_are_caught(fault: Callable[[pytest.MonkeyPatch], None], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    found = verify_run(run)
    assert found.worst.relative > 100 * found.limit
    with pytest.raises(GraphError, match="the plan computes another gradient of section") as caught:
        found.require()
    assert found.worst.path in caught.value.have
    monkeypatch.undo()
    assert verify_run(run).worst.relative < EXACT


def test_a_route_that_both_ends_know_otherwise_is_refused_by_its_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    right = feeds.route

    def shuffled(*args: Any) -> Any:
        found = right(*args)
        return found and dataclasses.replace(found, place=np.concatenate([found.place[: found.rows][::-1], found.place[found.rows :]]))

    monkeypatch.setattr(feeds, "route", shuffled)
    with pytest.raises(EdgeError, match="met the wrong consumer in step 0"):
        verify(wired("pair", {}), text_samples(4))


# -- mistakes of a user's module


def noisy_by_array() -> Any:
    init, apply = alone()

    def noisy(params: Any, batch: Any) -> Any:
        mask = batch["loss_mask"]
        if "key" in batch:
            mask *= jax.random.bernoulli(jax.random.wrap_key_data(batch["key"]), 0.5, mask.shape)
        return apply(params, {**batch, "loss_mask": mask})

    return init, noisy


def mixing() -> Any:
    """Each token with the one before it in the row, which may be of another sample."""
    init, apply = student_functions(8)

    def mixed(params: Any, batch: Any) -> Any:
        return apply(params, batch, params["embed"][jnp.roll(batch["tokens"], 1, axis=1)])

    return init, mixed


@pytest.mark.parametrize("module", [noisy_by_array, mixing], ids=lambda f: f.__name__)
def test_modules_that_depend_on_packing_are_caught(module: Callable[[], Any]) -> None:
    found = verify(single(module()), text_samples(12))
    assert found.worst.relative > 100 * found.limit


def mean() -> Any:
    init, apply = alone()
    return init, lambda params, batch: {"cross_entropy": apply(params, batch)["cross_entropy"] / batch["loss_mask"].sum()}


def roomy(module: Any) -> SectionGraph:
    """One section whose largest micro-batch holds all samples of a test."""
    section = Section(name="model", module=module, objectives={"cross_entropy": Objective()}, microbatch=(128, 512))
    return SectionGraph(sections=(section,))


def test_a_mean_is_caught_where_one_micro_batch_would_hold_everything() -> None:
    found = verify(roomy(mean()), text_samples(12))
    assert not found.ok
    assert found.notes == ()
    right = verify(roomy(alone()), text_samples(12))
    assert (right.ok, right.notes) == (True, ())


def test_a_mean_is_caught_in_a_run_too() -> None:
    assert not started(roomy(mean())).verify().ok


def test_too_few_samples_to_see_a_mean_are_noted() -> None:
    found = verify(roomy(mean()), text_samples(1))
    assert found.notes[-1:] == ("section 'model' ran in one micro-batch: whether its objectives are sums, and not means, was not seen",)


def test_values_that_are_not_finite_are_named() -> None:
    init, apply = alone()

    def broken(params: Any, batch: Any) -> Any:
        return {"cross_entropy": apply(params, batch)["cross_entropy"] + jnp.sqrt(params["head"].sum() * 0.0)}

    found = verify(single((init, broken)), text_samples(6))
    assert not found.ok
    assert found.worst.path == "head"
    with pytest.raises(GraphError, match="head: not finite on the plan and in one program"):
        found.require()


# -- what cannot be verified


def test_nothing_trained_is_refused() -> None:
    frozen = {"trainable": False}
    with pytest.raises(ConfigError, match="no gradient to verify"):
        verify(chain(teacher=frozen, middle=frozen, student={"frozen": ("*",)}), text_samples(4))


def test_samples_that_miss_a_section_are_refused() -> None:
    with pytest.raises(DataError, match="section 'teacher' cannot be verified: no sample reaches it"):
        verify(chain(), [])


def test_samples_that_are_too_long_are_refused() -> None:
    with pytest.raises(DataError, match="is longer than the largest micro-batch of section 'middle'"):
        verify(chain(middle={"microbatch": 16}), text_samples(20))


def test_replicas_that_did_not_run_are_noted(run: Run) -> None:
    found = verify_run(run, most_units=1)
    assert found.ok
    assert len(found.samples) == 1
    assert found.notes == (
        "no micro-batch ran on replicas [1] of section 'a'",
        "no micro-batch ran on replicas [1, 2] of section 'b'",
        "section 'b' ran in one micro-batch: whether its objectives are sums, and not means, was not seen",
    )


def test_samples_of_a_run_are_those_of_its_next_steps_each_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 samples make 5 steps of 8: after step 4 samples come again."""
    monkeypatch.setattr(run, "step", 4)
    candidates = [sample.id for sample in verification._next_samples(run)]
    batches = Batches(run.dataset, run.trainer.batch, run.trainer.seed)
    assert candidates[:8] == [sample.id for sample in batches(4)]
    assert 32 <= len(candidates) == len(set(candidates)) <= 40
    assert set(verify_run(run).samples) <= set(candidates)
