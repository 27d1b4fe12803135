"""Memory: what a forward keeps for its backward, and bounds on what is in flight."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import optax
import pytest
from engines import build, worst_leaf
from support import chain, text_samples

from maestro_jax.errors import ConfigError
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.graph.section import POLICIES
from maestro_jax.models import Decoder
from maestro_jax.runtime.arguments import bytes_on_a_device
from maestro_jax.runtime.memory import memory_use, predict_memory

SAMPLES = text_samples(20)
CHOICES = ("none", "inputs", *POLICIES)


@pytest.mark.parametrize("remat", CHOICES)
def test_gradients_are_the_same(remat: str) -> None:
    setup = build(chain(teacher={"remat": remat, "replicas": 2}, middle={"remat": remat}, student={"remat": remat}))
    assert worst_leaf(setup.gradients(SAMPLES), setup.reference(SAMPLES)[1]) < 1e-5


def kept_bytes(remat: str) -> int:
    compiled = build(chain(width=32, teacher={"remat": remat, "microbatch": 64})).engine.compiled
    if not compiled.plan.sections["teacher"].keeps_residuals:
        return 0
    forward: Any = compiled["teacher", "forward", 64, 0]
    return sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(forward.out_info[2]))


def test_what_is_kept_shrinks() -> None:
    kept = {remat: kept_bytes(remat) for remat in ("none", "nothing_saveable", "inputs")}
    assert kept["none"] > kept["nothing_saveable"] >= kept["inputs"] == 0


def test_policies_have_the_names_of_jax() -> None:
    assert all(callable(getattr(jax.checkpoint_policies, name)) for name in POLICIES)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="wrong remat") as caught:
        chain(teacher={"remat": "dots_savable"})
    assert "did you mean 'dots_saveable'" in caught.value.wanted


def limited(**teacher: Any) -> Any:
    """A graph whose producers wait for consumers of another size."""
    return chain(teacher={"microbatch": (32,), **teacher}, middle={"microbatch": (48,)}, student={"microbatch": (96,)})


def test_bytes_in_flight_stay_within_the_bound() -> None:
    free = build(limited())
    needed = max(free.engine.compiled.bucket_bytes["teacher"])
    setup = build(limited(max_bytes=2 * needed))
    prepared = setup.preparer.prepare(SAMPLES, 0)
    held, most, number = 0, 0, {}
    for task in prepared.schedule.tasks:
        if task.section == "teacher" and task.items:
            held += needed if task.kind == "forward" else -needed
            most = max(most, held)
            number[task.kind] = number.get(task.kind, 0) + 1
    assert most == 2 * needed
    assert number["forward"] == number["backward"] > 2
    assert worst_leaf(setup.gradients(SAMPLES), setup.reference(SAMPLES)[1]) < 1e-5
    # Without the bound more micro-batches wait for their consumers.
    assert [t.kind for t in free.preparer.prepare(SAMPLES, 0).schedule.tasks if t.section == "teacher"][:3] == ["forward"] * 3


def test_a_bound_too_small_for_one_micro_batch_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="section 'teacher' may not hold even one of its micro-batches") as caught:
        build(limited(max_bytes=100))
    assert caught.value.have == "100"


def test_one_micro_batch_at_a_time_is_enough() -> None:
    needed = max(build(limited()).engine.compiled.bucket_bytes["teacher"])
    setup = build(limited(max_bytes=needed))
    assert worst_leaf(setup.gradients(SAMPLES), setup.reference(SAMPLES)[1]) < 1e-5


FSDP = {"axes": {"fsdp": 2}, "row_length": 32, "microbatch": (64,)}


@pytest.mark.parametrize("layout", [FSDP, {"axes": {"tensor": 2}}, {**FSDP, "axes": {"fsdp": 2, "tensor": 2}}], ids=str)
def test_scattered_accumulators_hold_less_and_give_the_same_gradients(layout: Any) -> None:
    setup = build(chain(teacher={**layout, "scatter_gradients": True}))
    assert worst_leaf(setup.gradients(SAMPLES), setup.reference(SAMPLES)[1]) < 1e-5
    whole, scattered = (
        build(chain(teacher={**layout, "scatter_gradients": s})).engine.compiled.arguments["teacher"] for s in (False, True)
    )
    sizes = [sum(bytes_on_a_device(leaf) for leaf in a.gradients(0).values()) for a in (whole, scattered)]
    devices = math.prod(layout["axes"].values())
    assert sizes[1] == sizes[0] // devices
    params = [sum(bytes_on_a_device(leaf) for leaf in a.params(0).values()) for a in (whole, scattered)]
    assert params[0] == params[1]


def test_parameters_of_our_models_are_split_over_fsdp() -> None:
    module = Decoder(vocab_size=16, layers=2, embed=8, heads=2, kv_heads=2, mlp=16)
    section = Section(name="model", module=module, objectives={"cross_entropy": Objective()}, **FSDP)
    setup = build(SectionGraph(sections=(section,)))
    params = setup.engine.compiled.arguments["model"].params(0)
    assert all("fsdp" in tuple(shape.sharding.spec) for shape in params.values())
    assert worst_leaf(setup.gradients(SAMPLES), setup.reference(SAMPLES)[1]) < 1e-5


@pytest.mark.parametrize("remat", ["none", "inputs", "dots_saveable"])
def test_memory_predicted_before_compilation_is_what_the_programs_hold(remat: str) -> None:
    """Without axes inside a replica, exactly; with them, residuals are counted whole on each device."""
    setup = build(chain(teacher={"replicas": 2, "remat": remat}), optimizer=optax.adam(1e-3))
    compiled = memory_use(setup.engine.compiled, in_flight=4)
    predicted = predict_memory(setup.engine.plan, setup.engine.compiled.optimizers, in_flight=4)
    assert predicted == {name: dataclasses.replace(use, program=None) for name, use in compiled.items()}
    split = build(chain(teacher={"axes": {"tensor": 2}, "remat": remat}))
    assert (
        predict_memory(split.engine.plan, split.engine.compiled.optimizers, 4)["teacher"].microbatch
        >= memory_use(split.engine.compiled, 4)["teacher"].microbatch
    )


def test_predicted_memory_covers_what_is_resident() -> None:
    setup = build(chain(width=32, teacher={"replicas": 2, "max_bytes": 10**6}), optimizer=optax.adam(1e-3))
    uses = memory_use(setup.engine.compiled, in_flight=4)
    state = setup.engine.states["teacher"]
    device = setup.engine.plan.sections["teacher"].submesh.mesh.devices.flat[0]
    gradients, sums = state.holder(0, 0).take()
    state.holder(0, 0).put(gradients, sums)
    resident = jax.tree.leaves((state.master, state.compute, state.frozen, gradients))
    optimizer = jax.tree.leaves(state.optimizer)
    on_device = [sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device) for arrays in (resident, optimizer)]
    assert [uses["teacher"].state, uses["teacher"].optimizer] == on_device
    assert uses["teacher"].in_flight == 10**6
    assert uses["student"].in_flight == 4 * uses["student"].microbatch
    assert all(use.program is not None and use.program > 0 for use in uses.values())
