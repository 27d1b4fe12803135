"""A distilled student: its parts, its sums, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maestro_jax.distill import Distilled, distillation_sums
from maestro_jax.errors import ConfigError
from maestro_jax.models import Decoder

STUDENT = Decoder(vocab_size=32, layers=1, embed=8, heads=2, kv_heads=1, mlp=16)
DISTILLED = Distilled(student=STUDENT, teacher_vocab_size=40, teacher_embed=12, temperature=2.0, chunk=4)


def batch(rows: int = 2, length: int = 6) -> dict[str, jax.Array]:
    tokens = jax.random.randint(jax.random.key(0), (rows, length), 0, 32)
    ones = jnp.ones((rows, length), jnp.int32)
    return {
        "tokens": tokens,
        "targets": (tokens + 1) % 32,
        "loss_mask": (tokens % 3 != 0).astype(jnp.float32),
        "segment_ids": ones,
        "positions": jnp.arange(length)[None] * ones,
        "sample_ids": ones.astype(jnp.uint32),
    }


def test_parts_are_named_student_and_teacher_head() -> None:
    flat = {"/".join(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(DISTILLED(nnx.Rngs(0))))}
    assert flat["teacher_head/weight"].get_value().shape == (40, 12)
    assert flat["teacher_head/weight"].get_metadata("out_sharding") == ("vocab", "embed")
    assert flat["student/head/weight"].get_value().shape == (32, 8)
    assert {path.split("/")[0] for path in flat} == {"student", "teacher_head"}


def test_sums_are_those_of_the_students_hidden_states_and_both_heads() -> None:
    module, data = DISTILLED(nnx.Rngs(0)), batch()
    teacher_hidden = jax.random.normal(jax.random.key(1), (2, 6, 12))
    got = module(data, teacher_hidden=teacher_hidden)
    hidden = module.student(data)["hidden"]
    heads = module.student.head.weight[...], module.teacher_head.weight[...]
    targets, mask = data["targets"].reshape(12), data["loss_mask"].reshape(12)
    flat = hidden.reshape(12, 8), heads[0], teacher_hidden.reshape(12, 12), heads[1], targets, mask
    wanted = distillation_sums(*flat, temperature=2.0, chunk=12)
    assert set(got) == {"hidden", "kl", "cross_entropy", "teacher_entropy", "accuracy"}
    np.testing.assert_array_equal(got["hidden"], hidden)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_the_loss_reaches_every_parameter_of_the_student_and_none_of_the_teacher() -> None:
    graph, state = nnx.split(DISTILLED(nnx.Rngs(0)))
    teacher_hidden = jax.random.normal(jax.random.key(1), (2, 6, 12))
    gradients = jax.jit(jax.grad(lambda s: nnx.merge(graph, s)(batch(), teacher_hidden=teacher_hidden)["kl"]))(state)
    largest = {"/".join(map(str, path)): float(jnp.max(jnp.abs(g.get_value()))) for path, g in nnx.to_flat_state(gradients)}
    assert largest.pop("teacher_head/weight") == 0.0
    assert min(largest.values()) > 0.0


def test_any_module_with_hidden_states_and_a_head_can_be_a_student() -> None:
    class Bigram(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = nnx.Param(jax.random.normal(rngs.params(), (32, 5)))

        def __call__(self, batch: Any) -> dict[str, jax.Array]:
            return {"hidden": self.table[...][batch["tokens"]]}

        def head_weight(self) -> jax.Array:
            return self.table[...]

    module = dataclasses.replace(DISTILLED, student=Bigram)(nnx.Rngs(0))
    assert float(module(batch(), teacher_hidden=jnp.ones((2, 6, 12)))["kl"]) > 0.0


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"teacher_embed": -1}, {"teacher_vocab_size": 0}, {"chunk": 0}])
def test_what_is_not_positive_is_refused_by_field(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"Distilled\.{next(iter(changes))} does not fit") as caught:
        dataclasses.replace(DISTILLED, **changes)
    assert caught.value.anchor == "distilled-shape"


def test_a_student_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="no output head") as caught:
        dataclasses.replace(DISTILLED, student=dataclasses.replace(STUDENT, objective="none"))
    assert caught.value.anchor == "decoder-without-head"
