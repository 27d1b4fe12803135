"""Memory: what a forward keeps for its backward, and bounds on what is in flight."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from engines import build, worst_leaf
from support import chain, text_samples

from maestro_jax.errors import ConfigError
from maestro_jax.graph.section import POLICIES

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
