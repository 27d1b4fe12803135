"""Attention for rows of one item computes what dense attention computes, and never a wrong number for other rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.models.attention import dense_attention
from maestro_jax.models.one_sample import one_sample_attention

LENGTHS = (12, 7, 0)
SEGMENTS = jnp.asarray([[int(n < units) for n in range(12)] for units in LENGTHS], jnp.int32)
POSITIONS = jnp.arange(12, dtype=jnp.int32)[None] * SEGMENTS


def inputs() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (3, 12, heads, 6)) for key, heads in zip(keys, (4, 2, 2, 4), strict=True)]


@pytest.mark.parametrize("positions", [POSITIONS, None], ids=["causal", "both ways"])
def test_values_and_gradients_are_those_of_dense_attention(positions: jax.Array | None) -> None:
    *arrays, weights = inputs()
    weights *= (SEGMENTS > 0)[..., None, None]
    found = [
        jax.jit(jax.value_and_grad(lambda q, k, v, kind=kind: jnp.sum(weights * kind(q, k, v, SEGMENTS, positions)), (0, 1, 2)))(*arrays)
        for kind in (one_sample_attention, dense_attention)
    ]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("segments", "positions"),
    [
        (SEGMENTS.at[1, 4:7].set(2), POSITIONS),
        (SEGMENTS.at[1, 3].set(0), POSITIONS),
        (SEGMENTS, POSITIONS.at[1, 4:7].set(4)),
    ],
    ids=["two items", "a gap", "other positions"],
)
def test_a_row_that_is_not_one_item_is_not_a_number(segments: jax.Array, positions: jax.Array) -> None:
    q, k, v, _ = inputs()
    out = one_sample_attention(q, k, v, segments, positions)
    assert bool(jnp.isnan(out[1]).all())
    assert bool(jnp.isfinite(out[0]).all())


def test_padding_gives_zeros() -> None:
    q, k, v, _ = inputs()
    out = one_sample_attention(q, k, v, SEGMENTS, POSITIONS)
    assert not out[SEGMENTS == 0].any()
