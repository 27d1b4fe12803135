"""The shipped distillation under different policies: the same gradients, and the dispatcher issues what was scheduled."""

from __future__ import annotations

import jax
import pytest
from engines import worst_leaf

from maestro_jax import configurables
from maestro_jax.config import load
from maestro_jax.runtime import Compiled, Engine, Preparer
from maestro_jax.schedules import InOrder, Lockstep, Wavefront


@pytest.mark.quick
def test_kd_tiny_has_one_gradient_under_every_policy() -> None:
    trainer: configurables.trainer.Trainer = load("configs/kd_tiny.gin", [], root="train").build()
    assert trainer.policy == Wavefront()
    setup = trainer.setup()
    assert setup.batches is not None
    engine = Engine(Compiled(setup.plan, setup.optimizers, trainer.clip_norm, evaluation=False), trainer.seed, setup.weights)
    # Two steps are scheduled together, so that the orders differ; the gradient is that of the first.
    batches = [setup.batches(step) for step in range(2)]
    gradients, orders = {}, {}
    for policy in (InOrder(), Wavefront(), Lockstep()):
        preparer = Preparer(engine.compiled, policy, setup.dataset.specs, trainer.seed)
        gradients[policy] = jax.device_get(engine.accumulate(preparer.prepare(batches[0], 0)))
        orders[policy] = preparer.prepare_window(batches, 0).schedule
    assert worst_leaf(gradients[Wavefront()], gradients[InOrder()]) < 1e-5
    assert worst_leaf(gradients[Lockstep()], gradients[InOrder()]) < 1e-5
    assert orders[Wavefront()].makespan < orders[InOrder()].makespan
    window = Preparer(engine.compiled, Wavefront(), setup.dataset.specs, trainer.seed).prepare_window(batches, 0)
    assert len(list(engine.run(window))) == 2
    assert tuple(engine.last_tasks) == window.schedule.tasks == orders[Wavefront()].tasks
