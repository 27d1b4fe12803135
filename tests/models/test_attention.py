"""Attention sees its own segment up to its own position, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.errors import ConfigError
from maestro_jax.models import attention, register_attention

ROWS, LENGTH, HEADS, GROUPS, FEATURES = 2, 12, 4, 2, 6
# Two items and padding; one item and two short ones.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 3]], np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 1]], np.int32)


def inputs(seed: int = 0, dtype: str = "float32") -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(ROWS, LENGTH, heads, FEATURES) for heads in (HEADS, GROUPS, GROUPS)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def one_by_one(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    out = np.zeros(q.shape)
    for row, query, head in np.ndindex(ROWS, LENGTH, HEADS):
        group = head // (HEADS // GROUPS)
        seen = (SEGMENTS[row] == SEGMENTS[row, query]) & (POSITIONS[row] <= POSITIONS[row, query])
        scores = k[row, seen, group] @ q[row, query, head] / np.sqrt(FEATURES)
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights / weights.sum() @ v[row, seen, group]
    return out


def test_dense_equals_a_softmax_over_the_seen_tokens_one_query_at_a_time() -> None:
    q, k, v = inputs()
    got = attention(q, k, v, jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS))
    np.testing.assert_allclose(got, one_by_one(*(np.asarray(x, np.float64) for x in (q, k, v))), atol=2e-6)


def test_gradients_equal_those_of_a_masked_softmax() -> None:
    q, k, v = inputs(1)
    sees = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (POSITIONS[:, :, None] >= POSITIONS[:, None, :])

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
        scores = jnp.einsum("rlhk,rshk->rhls", q, k) / FEATURES**0.5
        return jnp.einsum("rhls,rshk->rlhk", jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf)), v)

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS))

    weight = jax.random.normal(jax.random.key(9), q.shape)
    wanted = jax.grad(lambda *x: jnp.sum(weight * plain(*x)), (0, 1, 2))(q, k, v)
    got = jax.grad(lambda *x: jnp.sum(weight * ours(*x)), (0, 1, 2))(q, k, v)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_a_row_of_padding_has_finite_values_and_gradients() -> None:
    q, k, v = inputs()
    nothing = jnp.zeros((ROWS, LENGTH), jnp.int32)
    value, gradients = jax.value_and_grad(lambda q, k, v: jnp.sum(attention(q, k, v, nothing, nothing)), (0, 1, 2))(q, k, v)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in (value, *gradients))


def test_large_scores_neither_overflow_nor_leak_into_other_segments() -> None:
    q, k, v = inputs()
    k = k.at[:, :4].multiply(1e6)
    got = attention(q, k, v, jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS))
    calm = attention(q, inputs()[1], v, jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS))
    assert bool(jnp.all(jnp.isfinite(got)))
    np.testing.assert_array_equal(got[0, 4:9], calm[0, 4:9])


def test_bfloat16_stays_bfloat16_and_close_to_float32() -> None:
    q, k, v = inputs(dtype="bfloat16")
    got = attention(q, k, v, jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS))
    wanted = one_by_one(*(np.asarray(x, np.float64) for x in (q, k, v)))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=0.03)


def test_a_registered_kind_is_used() -> None:
    @register_attention("values_of_its_own_token")
    def own(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, positions: jax.Array | None) -> jax.Array:
        return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)

    q, k, v = inputs()
    got = attention(q, k, v, jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS), kind="values_of_its_own_token")
    np.testing.assert_array_equal(got, jnp.repeat(v, 2, axis=2))


def test_an_unknown_kind_is_refused_with_a_suggestion() -> None:
    q, k, v = inputs()
    with pytest.raises(ConfigError, match=r"unknown kind of attention") as caught:
        attention(q, k, v, jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS), kind="dens")
    assert "did you mean 'dense'?" in caught.value.have
    assert caught.value.anchor == "unknown-attention"
