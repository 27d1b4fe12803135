"""Attention block by block: memory grows with the length of a row and not with its square.

Queries and keys are cut into blocks. For each pair of blocks of which some query sees some key, scores are made, used and
forgotten; a running maximum and sum make the softmax of what came so far (online softmax, Milakov and Gimelshein, arXiv
1805.02867). The backward makes the scores again from the logarithm of the sums (FlashAttention-2, Dao, arXiv 2307.08691).

Which pairs those are is found from the first and last segment of each block before anything is multiplied, so a packed row
costs about the sum of its items' squares, half of that where attention is causal. Nothing is assumed about the data: segments
that are not contiguous only make it find fewer pairs to leave out. What it finds is the same on all devices that share the
rows, so nothing is exchanged within the loop. Padding sees nothing, is seen by nothing, and gives zeros.

Dimensions: R rows, L length, N blocks, B length of a block, H query heads, G key heads, M = H / G query heads to a key head,
X = M * B queries of a block that share a key head, S = B keys of a block, K features of a head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from .loops import bounded_loop

BLOCK = 128
"""Most queries, and keys, in a block."""

SAVED = "attention"
"""Name for `jax.checkpoint` policies of what the backward needs besides its inputs; it is small beside the work that makes it."""

_LOWEST = -1e30
_NO_SEGMENT = np.iinfo(np.int32).max


def blockwise_attention(
    q_RLHK: jax.Array,
    k_RLGK: jax.Array,
    v_RLGK: jax.Array,
    segment_ids_RL: jax.Array,
    positions_RL: jax.Array | None,
    block: int = BLOCK,
) -> jax.Array:
    """The kind "blockwise": see `attention` for its arguments.

    Args:
        q_RLHK: queries.
        k_RLGK: keys.
        v_RLGK: values.
        segment_ids_RL: int32, 0 for padding.
        positions_RL: int32, or None.
        block: most queries, and keys, in a block.

    Returns:
        [R, L, H, K] in the dtype of the values; zeros at padding.
    """
    # Shorter rows are one block, of a length that vector units like.
    block = min(block, -(-q_RLHK.shape[1] // 8) * 8)
    return _attend(block, q_RLHK, k_RLGK, v_RLGK, segment_ids_RL, positions_RL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(block: int, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, positions: jax.Array | None) -> jax.Array:
    return _forward(block, q, k, v, segment_ids, positions)[0]


def _forward(block: int, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, positions: jax.Array | None) -> Any:
    rows = _Rows.of(block, q, k, segment_ids, positions)
    q_NRGXK, k_NRGSK, v_NRGSK = rows.queries(q), rows.keys(k), rows.keys(v)
    mixed_NRGXK = jnp.zeros(q_NRGXK.shape, jnp.float32)
    largest_NRGX = jnp.full(q_NRGXK.shape[:-1], _LOWEST, jnp.float32)
    sums_NRGX = jnp.zeros(q_NRGXK.shape[:-1], jnp.float32)

    def pair(i: jax.Array, j: jax.Array, state: Any) -> Any:
        mixed_RGXK, largest_RGX, sums_RGX = (_at(each, i) for each in state)
        scores_RGXS = _product("RGXK,RGSK->RGXS", _at(q_NRGXK, i), _at(k_NRGSK, j))
        sees_RGXS = rows.sees(i, j)
        new_RGX = jnp.maximum(largest_RGX, jnp.max(jnp.where(sees_RGXS, scores_RGXS, _LOWEST), axis=-1))
        weights_RGXS = jnp.where(sees_RGXS, jnp.exp(scores_RGXS - new_RGX[..., None]), 0.0)
        shrink_RGX = jnp.exp(largest_RGX - new_RGX)
        sums_RGX = sums_RGX * shrink_RGX + jnp.sum(weights_RGXS, axis=-1)
        found_RGXK = _product("RGXS,RGSK->RGXK", weights_RGXS.astype(v.dtype), _at(v_NRGSK, j))
        mixed_RGXK = mixed_RGXK * shrink_RGX[..., None] + found_RGXK
        return tuple(_with(each, i, new) for each, new in zip(state, (mixed_RGXK, new_RGX, sums_RGX), strict=True))

    mixed_NRGXK, largest_NRGX, sums_NRGX = rows.visit(pair, (mixed_NRGXK, largest_NRGX, sums_NRGX))
    # A query that sees nothing has a sum of 0.
    mixed_NRGXK /= jnp.where(sums_NRGX > 0, sums_NRGX, 1.0)[..., None]
    logs_NRGX = checkpoint_name(largest_NRGX + jnp.log(jnp.where(sums_NRGX > 0, sums_NRGX, 1.0)), SAVED)
    mixed = checkpoint_name(rows.from_queries(mixed_NRGXK).astype(v.dtype), SAVED)
    return mixed, (q, k, v, segment_ids, positions, mixed, logs_NRGX)


def _backward(block: int, residuals: Any, cotangent: jax.Array) -> Any:
    q, k, v, segment_ids, positions, mixed, logs_NRGX = residuals
    rows = _Rows.of(block, q, k, segment_ids, positions)
    q_NRGXK, k_NRGSK, v_NRGSK = rows.queries(q), rows.keys(k), rows.keys(v)
    cotangent_NRGXK = rows.blocks_of_queries(cotangent)
    products = jnp.sum(cotangent.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1, keepdims=True)
    products_NRGX = rows.blocks_of_queries(products)[..., 0]
    zeros = [jnp.zeros(each.shape, jnp.float32) for each in (q_NRGXK, k_NRGSK, v_NRGSK)]

    def pair(i: jax.Array, j: jax.Array, state: Any) -> Any:
        q_RGXK, k_RGSK, v_RGSK, cotangent_RGXK = _at(q_NRGXK, i), _at(k_NRGSK, j), _at(v_NRGSK, j), _at(cotangent_NRGXK, i)
        scores_RGXS = _product("RGXK,RGSK->RGXS", q_RGXK, k_RGSK)
        weights_RGXS = jnp.where(rows.sees(i, j), jnp.exp(scores_RGXS - _at(logs_NRGX, i)[..., None]), 0.0)
        to_weights_RGXS = _product("RGXK,RGSK->RGXS", cotangent_RGXK, v_RGSK)
        to_scores_RGXS = (weights_RGXS * (to_weights_RGXS - _at(products_NRGX, i)[..., None])).astype(q.dtype)
        to_q, to_k, to_v = state
        to_q = _with(to_q, i, _at(to_q, i) + _product("RGXS,RGSK->RGXK", to_scores_RGXS, k_RGSK))
        to_k = _with(to_k, j, _at(to_k, j) + _product("RGXS,RGXK->RGSK", to_scores_RGXS, q_RGXK))
        to_v = _with(to_v, j, _at(to_v, j) + _product("RGXS,RGXK->RGSK", weights_RGXS.astype(v.dtype), cotangent_RGXK))
        return to_q, to_k, to_v

    to_q, to_k, to_v = rows.visit(pair, tuple(zeros))
    to_q = rows.from_queries(to_q) / math.sqrt(q.shape[-1])
    return to_q.astype(q.dtype), rows.from_keys(to_k).astype(k.dtype), rows.from_keys(to_v).astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)


def _at(x: jax.Array, n: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, n, keepdims=False)


def _with(x: jax.Array, n: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, n, axis=0)


def _product(names: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(names, left, right, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows cut into blocks, and the pairs of blocks that have to be visited.

    Args:
        block: B.
        length: L, before it is filled up to N * B.
        groups: G.
        each: M.
        segments_NRB: int32, 0 for padding.
        positions_NRB: int32, or None.
        first_N: int32, the first key block that each query block visits.
        end_N: int32, the one behind the last; that of a query block that visits none is its first.
    """

    block: int
    length: int
    groups: int
    each: int
    segments_NRB: jax.Array
    positions_NRB: jax.Array | None
    first_N: jax.Array
    end_N: jax.Array

    @classmethod
    def of(cls, block: int, q: jax.Array, k: jax.Array, segment_ids_RL: jax.Array, positions_RL: jax.Array | None) -> _Rows:
        """Cuts rows into blocks."""
        first_N, end_N = visited_blocks(segment_ids_RL, positions_RL, block)
        return cls(
            block=block,
            length=q.shape[1],
            groups=k.shape[2],
            each=q.shape[2] // k.shape[2],
            segments_NRB=_cut(segment_ids_RL, block),
            positions_NRB=None if positions_RL is None else _cut(positions_RL, block),
            first_N=first_N,
            end_N=end_N,
        )

    def visit(self, body: Callable[[jax.Array, jax.Array, Any], Any], state: Any) -> Any:
        """Runs `state = body(i, j, state)` for each query block i and each key block j that it visits."""
        blocks, first_N, end_N = self.first_N.shape[0], self.first_N, self.end_N
        # Blocks of padding visit nothing and are passed over: the next block that visits any, from each on.
        busy_N = jnp.where(first_N < end_N, jnp.arange(blocks, dtype=jnp.int32), blocks - 1)
        next_N = jax.lax.cummin(busy_N, reverse=True)

        def turn(_: jax.Array, carried: Any) -> Any:
            i, j, state = carried
            state = body(i, j, state)
            following = next_N[jnp.minimum(i + 1, blocks - 1)]
            is_last = j + 1 >= end_N[i]
            return jnp.where(is_last, following, i), jnp.where(is_last, first_N[following], j + 1), state

        # Rows without padding visit every block's own keys at least; at most, a row is one item.
        most = blocks * blocks if self.positions_NRB is None else blocks * (blocks + 1) // 2
        start = next_N[0], first_N[next_N[0]], state
        return bounded_loop(jnp.sum(end_N - first_N), (blocks, most), turn, start)[2]

    def sees(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Which queries of block i see which keys of block j, [R, 1, X, S]."""
        own, others = _at(self.segments_NRB, i), _at(self.segments_NRB, j)
        sees_RBS = (own[:, :, None] == others[:, None, :]) & (own > 0)[:, :, None]
        if self.positions_NRB is not None:
            sees_RBS &= _at(self.positions_NRB, i)[:, :, None] >= _at(self.positions_NRB, j)[:, None, :]
        rows, queries, keys = sees_RBS.shape
        sees_RMBS = jnp.broadcast_to(sees_RBS[:, None], (rows, self.each, queries, keys))
        return sees_RMBS.reshape(rows, 1, -1, keys)

    def blocks_of_queries(self, x_RLHK: jax.Array) -> jax.Array:
        """[R, L, H, K] -> [N, R, G, X, K]."""
        x_NRBHK = _cut(x_RLHK, self.block)
        blocks, rows, _, _, features = x_NRBHK.shape
        x_NRBGMK = x_NRBHK.reshape(blocks, rows, self.block, self.groups, -1, features)
        return x_NRBGMK.transpose(0, 1, 3, 4, 2, 5).reshape(blocks, rows, self.groups, -1, features)

    def queries(self, q_RLHK: jax.Array) -> jax.Array:
        """Queries as `blocks_of_queries`, divided by the root of their features."""
        return self.blocks_of_queries(q_RLHK / math.sqrt(q_RLHK.shape[-1]))

    def keys(self, k_RLGK: jax.Array) -> jax.Array:
        """[R, L, G, K] -> [N, R, G, S, K]."""
        return _cut(k_RLGK, self.block).swapaxes(2, 3)

    def from_queries(self, x_NRGXK: jax.Array) -> jax.Array:
        """[N, R, G, X, K] -> [R, L, H, K]."""
        blocks, rows, groups, _, features = x_NRGXK.shape
        x_NRGMBK = x_NRGXK.reshape(blocks, rows, groups, -1, self.block, features)
        x_RNBGMK = x_NRGMBK.transpose(1, 0, 4, 2, 3, 5)
        return x_RNBGMK.reshape(rows, blocks * self.block, -1, features)[:, : self.length]

    def from_keys(self, x_NRGSK: jax.Array) -> jax.Array:
        """[N, R, G, S, K] -> [R, L, G, K]."""
        return self.from_queries(x_NRGSK)


def _cut(x_RL: jax.Array, block: int) -> jax.Array:
    """[R, L, ...] -> [N, R, B, ...], with zeros at the end."""
    rows, length, *rest = x_RL.shape
    blocks = -(-length // block)
    filled = jnp.pad(x_RL, ((0, 0), (0, blocks * block - length), *((0, 0) for _ in rest)))
    return filled.reshape(rows, blocks, block, *rest).swapaxes(0, 1)


def visited_blocks(segment_ids_RL: jax.Array, positions_RL: jax.Array | None, block: int) -> tuple[jax.Array, jax.Array]:
    """Which key blocks each query block visits: from the first to the last of which a query sees a key, in some row.

    Blocks share a segment where the ranges of their segment ids meet. Where the ranges meet in one segment alone, as those of
    different blocks do when segments are contiguous and numbered in order, positions tell whether any query comes late enough.
    Elsewhere blocks may be visited of which nothing is seen.

    Args:
        segment_ids_RL: int32, 0 for padding.
        positions_RL: int32, or None.
        block: B.

    Returns:
        int32 [N], int32 [N]: the first, and the one behind the last.
    """
    segments_NRB = _cut(segment_ids_RL, block)
    is_item_NRB = segments_NRB > 0
    last_NR = jnp.max(segments_NRB, axis=-1)
    first_NR = jnp.min(jnp.where(is_item_NRB, segments_NRB, _NO_SEGMENT), axis=-1)
    meet_NNR = (first_NR[:, None] <= last_NR[None]) & (first_NR[None] <= last_NR[:, None])
    if positions_RL is not None:
        positions_NRB = _cut(positions_RL, block)
        at_first_NRB = segments_NRB == first_NR[..., None]
        at_last_NRB = segments_NRB == last_NR[..., None]
        latest = [jnp.max(jnp.where(at, positions_NRB, -1), axis=-1) for at in (at_first_NRB, at_last_NRB)]
        earliest = [jnp.min(jnp.where(at, positions_NRB, _NO_SEGMENT), axis=-1) for at in (at_first_NRB, at_last_NRB)]
        # The queries' last segment is the keys' first, or the other way round.
        later_NNR = jnp.where(
            last_NR[:, None] == first_NR[None],
            latest[1][:, None] >= earliest[0][None],
            (first_NR[:, None] != last_NR[None]) | (latest[0][:, None] >= earliest[1][None]),
        )
        meet_NNR &= later_NNR
    sees_NN = jnp.any(meet_NNR, axis=-1)
    keys_N = jnp.arange(sees_NN.shape[1], dtype=jnp.int32)[None]
    end_N = jnp.max(jnp.where(sees_NN, keys_N + 1, 0), axis=1)
    return jnp.minimum(jnp.min(jnp.where(sees_NN, keys_N, _NO_SEGMENT), axis=1), end_N), end_N
