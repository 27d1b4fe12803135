"""The update: equal parameters on all replicas, state spread over them, memory within its bound, one verdict for all."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from engines import Setup, build
from jax.sharding import NamedSharding
from support import text_samples, wired

from maestro_jax.graph import SectionGraph

SAMPLES = text_samples(12, longest=14)
WIDTH = 64
"""Wide enough that parameters outweigh scalars."""


def graph(**student: Any) -> SectionGraph:
    return wired("pair", {"a": {"replicas": 2}, "b": {"replicas": 4, **student}}, WIDTH)


def stepped(setup: Setup, steps: int) -> Setup:
    for step in range(steps):
        setup.engine.step(setup.preparer.prepare(SAMPLES, step))
    return setup


def shard_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def peak(compiled: Any) -> int:
    """Bytes that a program needs on each device."""
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes


@pytest.fixture(scope="module")
def setup() -> Setup:
    return stepped(build(graph(), optimizer=optax.adam(1e-2), clip_norm=1.0), 4)


def test_the_replicas_hold_the_same_bits_after_several_steps(setup: Setup) -> None:
    for name, state in setup.engine.states.items():
        replicas = setup.engine.plan.sections[name].submesh.replicas
        for path, value in state.compute.items():
            bits = {np.asarray(shard.data).tobytes() for shard in value.addressable_shards}
            assert (len(value.addressable_shards), len(bits)) == (replicas, 1), (name, path)
            np.testing.assert_array_equal(np.asarray(value), np.asarray(state.master[path]))


def test_every_replica_runs_on_the_new_parameters(setup: Setup) -> None:
    """The views that the replicas' programs take are the compute parameters themselves, not what was there before an update."""
    state = setup.engine.states["b"]
    for replica in range(4):
        for path, view in state.params(replica)[0].items():
            assert view.sharding.device_set == set(setup.engine.plan.sections["b"].submesh.replica_devices(replica))
            np.testing.assert_array_equal(np.asarray(view), np.asarray(state.master[path]))


def test_master_parameters_and_optimizer_state_are_spread_over_replicas(setup: Setup) -> None:
    state = setup.engine.states["b"]
    moments: Any = state.optimizer[0]
    for path, master in state.master.items():
        size = math.prod(master.shape)
        for spread in (master, moments.mu[path], moments.nu[path]):
            assert isinstance(spread.sharding, NamedSharding)
            assert [shard.data.size for shard in spread.addressable_shards] == [size // 4] * 4
            assert len({str(shard.index) for shard in spread.addressable_shards}) == 4
        assert [shard.data.size for shard in state.compute[path].addressable_shards] == [size] * 4


SCALARS = 1024
"""Bytes for numbers, objective sums and the tables of results."""


@pytest.mark.parametrize("layout", [{"replicas": 1}, {"replicas": 4}, {"replicas": 2, "axes": {"tensor": 2}}], ids=str)
@pytest.mark.parametrize("kind", ["reduce", "apply", "zero"])
def test_an_update_needs_one_copy_of_the_gradient(kind: str, layout: dict[str, Any]) -> None:
    """A device holds parameters (master and compute), optimizer state and accumulators; the sum lies in the accumulators.

    What a program does not take lies beside it. Of several replicas, each needs room for its share of the sum while it is made.
    A program may need room for its part of the largest parameter, because it makes a new value before it overwrites the old
    one. In float32, because the CPU backend widens bfloat16 to float32 around collectives.
    """
    setup = build(graph(**layout), optimizer=optax.adam(1e-2))
    state, compiled = setup.engine.states["b"], setup.engine.compiled
    resident = shard_bytes((state.master, state.compute, state.optimizer))
    accumulators = shard_bytes(compiled.arguments["b"].gradient_stack())
    share = shard_bytes(state.master) if layout["replicas"] > 1 else 0
    largest = max(map(shard_bytes, state.master.values()))
    beside = 0 if kind == "apply" else resident
    assert beside + peak(compiled["b", kind, 0, 0]) <= resident + accumulators + share + largest + SCALARS


def test_a_gradient_that_is_not_finite_in_one_replica_skips_the_step_in_all_sections() -> None:
    setup = build(graph(), optimizer=optax.adam(1e-2))
    before, state = setup.parameters(), setup.engine.states["b"]
    counts = [np.asarray(s.optimizer[0].count) for s in setup.engine.states.values()]
    gradients, sums = state.holder(2, 0).take()
    poison = np.zeros(gradients["inner"].shape, np.float32)
    poison[0, 1, 1] = np.nan
    state.holder(2, 0).put({**gradients, "inner": jax.device_put(poison, gradients["inner"].sharding)}, sums)
    assert setup.engine.step(setup.preparer.prepare(SAMPLES, 0)).read(setup.objectives())["applied"] == 0
    after = setup.parameters()
    assert all(np.array_equal(before[n][p], after[n][p]) for n in before for p in before[n])
    assert [np.asarray(s.optimizer[0].count) for s in setup.engine.states.values()] == counts
    assert all(np.isfinite(np.asarray(v)).all() for s in setup.engine.states.values() for v in jax.tree.leaves((s.optimizer, s.compute)))
    assert setup.engine.step(setup.preparer.prepare(SAMPLES, 1)).read(setup.objectives())["applied"] == 1
    trained = setup.parameters()
    assert all(not np.array_equal(after[n][p], trained[n][p]) for n in after for p in after[n])
