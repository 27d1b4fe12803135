"""Greedy continuations of prompts, for evaluation: a batch of them, static shapes, and a cache of keys and values.

A prompt is padded at its end. What padding wrote into the cache lies behind the position that is computed, where nothing looks, until the
token of that place takes it over; so prompts of different lengths go on side by side, each at its own position.

Dimensions: R prompts, L tokens that are computed at once, S places of the cache, N layers, D embed, H query heads, G key heads,
K features of a head, X queries of one key head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .errors import DataError
from .models.decoder import DecoderModule
from .models.heads import vocabulary_logits
from .models.layers import rotary_angles

Cache = tuple[jax.Array, jax.Array]
"""Keys and values [N, R, S, G, K]."""

SHORTEST = 16
"""Prompts are padded to this length, or to the next power of two, so that few programs are compiled."""


def generate(
    model: Any,
    parameters: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 32,
    stop: Sequence[int] = (),
    prefix: str = "",
) -> list[list[int]]:
    """Continues prompts greedily: each new token is the one with the largest logit.

    Args:
        model: the configuration of a decoder with a head, `Decoder` or `HuggingFace`.
        parameters: path -> value, as `huggingface.load` and `run.engine.parameters(section)` give them, on any devices.
        prompts: token ids of each prompt, at least one.
        new_tokens: most tokens that are added to each.
        stop: token ids after which a continuation ends.
        prefix: where the decoder's parameters lie, such as "student" in a distilled section.

    Returns:
        The new tokens of each prompt, with the one that ended it.

    Raises:
        DataError: a prompt is empty, or a token is not in the vocabulary.
        ConfigError: the decoder has no head.

    >>> from maestro_jax.models import Decoder
    >>> decoder = Decoder(vocab_size=8, layers=1, embed=8, heads=2, kv_heads=1, mlp=8)
    >>> state = nnx.to_flat_state(nnx.state(decoder(nnx.Rngs(0))))
    >>> parameters = {"/".join(map(str, path)): value.get_value() for path, value in state}
    >>> [len(tokens) for tokens in generate(decoder, parameters, [[1, 2, 3], [4]], new_tokens=5)]
    [5, 5]
    """
    config = getattr(model, "config", model)
    _check(prompts, config.vocab_size)
    if not prompts or new_tokens < 1:
        return [[] for _ in prompts]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = max(SHORTEST, 2 ** math.ceil(math.log2(max(lengths))))
    tokens_RL = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_RL[row, : len(prompt)] = prompt
    start = prefix + "/" if prefix else ""
    own = {path[len(start) :]: value for path, value in parameters.items() if path.startswith(start)}
    found_RT = np.asarray(_continue(config, new_tokens, own, tokens_RL, lengths))
    return [_until(row, stop) for row in found_RT.tolist()]


def _check(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    for number, prompt in enumerate(prompts):
        # Indexing would take a neighbour for a token that is not there.
        if not len(prompt) or not all(0 <= token < vocab_size for token in prompt):
            raise DataError(
                f"prompt {number} cannot be continued.",
                wanted=f"at least one token, all from 0 to {vocab_size - 1}",
                have=f"{len(prompt)} tokens" + (f" from {min(prompt)} to {max(prompt)}" if len(prompt) else ""),
                fix="give token ids of the model's own tokenizer",
                anchor="foreign-vocabulary",
            )


def _until(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """The tokens up to the first one that ends a text."""
    ends = [place for place, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


@functools.partial(jax.jit, static_argnums=(0, 1))
def _continue(config: Any, new_tokens: int, parameters: Mapping[str, Any], tokens_RL: jax.Array, lengths_R: jax.Array) -> jax.Array:
    """Returns the new tokens [R, new_tokens]."""
    module = _with_parameters(config, parameters)
    rows, length = tokens_RL.shape
    dtype = module.embedding.weight[...].dtype
    empty = jnp.zeros((config.layers, rows, length + new_tokens, config.kv_heads, config.head_size), dtype)
    positions_RL = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
    hidden_RLD, cache = _advance(module, (empty, empty), tokens_RL, positions_RL)
    last_RD = jnp.take_along_axis(hidden_RLD, (lengths_R - 1)[:, None, None], axis=1)[:, 0]

    def one(carry: tuple[Cache, jax.Array], number: jax.Array) -> tuple[tuple[Cache, jax.Array], jax.Array]:
        cache, token_R = carry
        hidden_R1D, cache = _advance(module, cache, token_R[:, None], (lengths_R + number)[:, None])
        return (cache, _largest(module, hidden_R1D[:, 0])), token_R

    (_, last_R), found_TR = jax.lax.scan(one, (cache, _largest(module, last_RD)), jnp.arange(new_tokens - 1, dtype=jnp.int32))
    return jnp.concatenate([found_TR, last_R[None]]).T


def _largest(module: DecoderModule, hidden_RD: jax.Array) -> jax.Array:
    return jnp.argmax(vocabulary_logits(hidden_RD, module.head_weight()), axis=1).astype(jnp.int32)


def _with_parameters(config: Any, parameters: Mapping[str, Any]) -> DecoderModule:
    graph, state = nnx.split(nnx.eval_shape(lambda: config(nnx.Rngs(0))))
    flat = [(path, variable.replace(parameters["/".join(map(str, path))])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _advance(module: DecoderModule, cache: Cache, tokens_RL: jax.Array, positions_RL: jax.Array) -> tuple[jax.Array, Cache]:
    """Computes tokens at these positions, which see the cache up to their own.

    Returns:
        The last hidden states [R, L, D], and the cache with these tokens in it.
    """
    config = module.config
    angles = rotary_angles(positions_RL, config.head_size, config.rope_theta, config.rope_scaling)
    graph, weights = nnx.split(module.layers)
    rows_R1 = jnp.arange(tokens_RL.shape[0])[:, None]

    def layer(x_RLD: jax.Array, piece: Any) -> tuple[jax.Array, Cache]:
        layer_weights, keys_RSGK, values_RSGK = piece
        part = nnx.merge(graph, layer_weights)
        q_RLHK, k_RLGK, v_RLGK = part.attention.heads(part.attention_norm(x_RLD), angles)
        keys_RSGK = keys_RSGK.at[rows_R1, positions_RL].set(k_RLGK)
        values_RSGK = values_RSGK.at[rows_R1, positions_RL].set(v_RLGK)
        x_RLD += part.attention.mixed(_mixed(q_RLHK, keys_RSGK, values_RSGK, positions_RL))
        return x_RLD + part.mlp(part.mlp_norm(x_RLD)), (keys_RSGK, values_RSGK)

    x_RLD, cache = jax.lax.scan(layer, module.embedding.weight[...][tokens_RL], (weights, *cache))
    return module.final_norm(x_RLD), cache


def _mixed(q_RLHK: jax.Array, keys_RSGK: jax.Array, values_RSGK: jax.Array, positions_RL: jax.Array) -> jax.Array:
    """Attention of queries over the places of the cache up to their own position; softmax in float32."""
    rows, length, heads, features = q_RLHK.shape
    places, groups = keys_RSGK.shape[1:3]
    q_RLGXK = q_RLHK.reshape(rows, length, groups, heads // groups, features)
    scores_RGXLS = jnp.einsum("RLGXK,RSGK->RGXLS", q_RLGXK, keys_RSGK, preferred_element_type=jnp.float32) / math.sqrt(features)
    sees_RLS = jnp.arange(places)[None, None, :] <= positions_RL[:, :, None]
    weights_RGXLS = jax.nn.softmax(jnp.where(sees_RLS[:, None, None], scores_RGXLS, -jnp.inf), axis=-1).astype(values_RSGK.dtype)
    mixed_RLGXK = jnp.einsum("RGXLS,RSGK->RLGXK", weights_RGXLS, values_RSGK, preferred_element_type=jnp.float32)
    return mixed_RLGXK.reshape(q_RLHK.shape).astype(values_RSGK.dtype)
