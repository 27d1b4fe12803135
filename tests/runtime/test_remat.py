"""What a forward keeps for its backward changes memory, not gradients."""

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
