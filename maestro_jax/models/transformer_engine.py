"""Attention over packed rows by Transformer Engine's fused kernel, on NVIDIA GPUs, where it is installed.

Written from NVIDIA's documentation of version 2.18 (docs.nvidia.com/deeplearning/transformer-engine, "JAX: Context-Parallel
Attention with TransformerEngine"); this project has had no machine on which to run it, so "auto" never takes it.

Dimensions: R rows, L length, H query heads, G key heads, K features of a head.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConfigError
from .blockwise import blockwise_attention

SEGMENTS = 256
"""Most segments in a row: the kernel has to know. A row with more makes NaN."""


def packed_attention(
    q_RLHK: jax.Array, k_RLGK: jax.Array, v_RLGK: jax.Array, segment_ids_RL: jax.Array, positions_RL: jax.Array | None
) -> jax.Array:
    """The kind "transformer_engine": see `attention` for its arguments. Positions count the units of each segment.

    In float32, which the kernel does not serve and verification asks for, "blockwise" computes the same.

    Returns:
        [R, L, H, K] in the dtype of the values; zeros at padding, NaN in rows that the kernel cannot serve.

    Raises:
        ConfigError: Transformer Engine is not installed.
    """
    engine = _engine()
    if v_RLGK.dtype.itemsize != 2:
        return blockwise_attention(q_RLHK, k_RLGK, v_RLGK, segment_ids_RL, positions_RL)
    is_item_RL = segment_ids_RL > 0
    counted_RL = _counted(segment_ids_RL)
    fits_RL = (segment_ids_RL <= SEGMENTS) & ((positions_RL == counted_RL) | ~is_item_RL if positions_RL is not None else True)
    mask = engine.AttnMaskType.PADDING_MASK if positions_RL is None else engine.AttnMaskType.PADDING_CAUSAL_MASK
    mixed_RLHK = engine.fused_attn(
        (q_RLHK, k_RLGK, v_RLGK),
        None,
        engine.SequenceDescriptor.from_segment_ids_and_pos(segment_ids_RL, counted_RL),
        None,
        attn_bias_type=engine.AttnBiasType.NO_BIAS,
        attn_mask_type=mask,
        qkv_layout=engine.QKVLayout.THD_THD_THD,
        softmax_type=engine.AttnSoftmaxType.VANILLA_SOFTMAX,
        scaling_factor=1 / math.sqrt(q_RLHK.shape[-1]),
        dropout_probability=0.0,
        is_training=True,
        max_segments_per_seq=min(SEGMENTS, q_RLHK.shape[1]),
        window_size=None,
    )
    mixed_RLHK = jnp.where(is_item_RL[:, :, None, None], mixed_RLHK, 0)
    return jnp.where(jnp.all(fits_RL, axis=1)[:, None, None, None], mixed_RLHK, jnp.nan)


def _counted(segment_ids_RL: jax.Array) -> jax.Array:
    """The number of each unit in its segment, from 0: the kernel finds the beginnings of segments by it."""
    places_L = jnp.arange(segment_ids_RL.shape[1], dtype=jnp.int32)
    begins_RL = jnp.diff(segment_ids_RL, axis=1, prepend=-1) != 0
    return places_L[None] - jax.lax.cummax(jnp.where(begins_RL, places_L[None], 0), axis=1)


def _engine() -> Any:
    try:
        return importlib.import_module("transformer_engine.jax.attention")
    except ImportError as error:
        raise ConfigError(
            "attention 'transformer_engine' needs Transformer Engine, which is not installed.",
            wanted="the package transformer_engine, version 2.18 or later, with its JAX part",
            have=f"{type(error).__name__}: {error}",
            set_by="attention, in the model's configuration",
            fix="pip install 'transformer_engine[jax]' on a machine with NVIDIA GPUs, or leave attention at 'auto'",
            anchor="transformer-engine",
        ) from error
