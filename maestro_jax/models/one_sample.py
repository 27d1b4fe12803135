"""Attention for rows that hold one item each, by `jax.nn.dot_product_attention`: cuDNN's kernel on GPUs, XLA elsewhere.

The kernel knows how long each item is, and nothing of segments or positions. A row that is not one item, at its beginning, with
positions that count its units, makes NaN: never a wrong number.

Dimensions: R rows, L length, H query heads, G key heads, K features of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

CUDNN_FEATURES = range(8, 129, 8)
"""Features of a head that cuDNN serves on every GPU that it serves at all."""


def one_sample_attention(
    q_RLHK: jax.Array, k_RLGK: jax.Array, v_RLGK: jax.Array, segment_ids_RL: jax.Array, positions_RL: jax.Array | None
) -> jax.Array:
    """The kind "one_sample": see `attention` for its arguments.

    Returns:
        [R, L, H, K] in the dtype of the values; zeros at padding, NaN in rows that are not one item.
    """
    is_item_RL = segment_ids_RL > 0
    lengths_R = jnp.sum(is_item_RL, axis=1, dtype=jnp.int32)
    counted_L = jnp.arange(segment_ids_RL.shape[1], dtype=jnp.int32)
    fits_RL = segment_ids_RL == (counted_L[None] < lengths_R[:, None])
    if positions_RL is not None:
        fits_RL &= ~is_item_RL | (positions_RL == counted_L[None])
    causal = positions_RL is not None
    # A softmax over no keys is not a number; padding, which then sees one, is not looked at.
    xla = partial(_computed, "xla", causal)
    arrays = q_RLHK, k_RLGK, v_RLGK, jnp.maximum(lengths_R, 1)
    if jax.default_backend() == "gpu" and v_RLGK.dtype.itemsize == 2 and q_RLHK.shape[-1] in CUDNN_FEATURES:
        # By the platform of the program, as the CPU of a machine with GPUs runs some programs too.
        mixed_RLHK = jax.lax.platform_dependent(*arrays, cuda=partial(_computed, "cudnn", causal), default=xla)
    else:
        mixed_RLHK = xla(*arrays)
    mixed_RLHK = jnp.where(is_item_RL[:, :, None, None], mixed_RLHK, 0)
    return jnp.where(jnp.all(fits_RL, axis=1)[:, None, None, None], mixed_RLHK, jnp.nan)


def _computed(
    implementation: Literal["xla", "cudnn"], causal: bool, q_RLHK: jax.Array, k_RLGK: jax.Array, v_RLGK: jax.Array, lengths_R: jax.Array
) -> jax.Array:
    return jax.nn.dot_product_attention(
        q_RLHK, k_RLGK, v_RLGK, is_causal=causal, key_value_seq_lengths=lengths_R, implementation=implementation
    )
