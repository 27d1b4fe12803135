"""Attention over packed rows behind one interface; kinds are registered by name.

A packed row holds several items, numbered from 1 by `segment_ids`, and padding, numbered 0. A token sees the tokens of
its own segment at its own position or before; without positions it sees its whole segment, as encoders want it. What
comes out at padding is finite, differs by kind and means nothing; no token of an item sees padding.

Segments need not be items: attention in windows, as some encoders of images have it, passes the numbers of windows.

| kind | memory | serves |
| --- | --- | --- |
| "dense" | square of the row length | anything; the reference |
| "blockwise" | row length | anything (`blockwise.py`) |
| "one_sample" | row length with cuDNN, else its square | rows that hold one item each (`one_sample.py`) |
| "transformer_engine" | row length | packed rows in half precision on GPUs (`transformer_engine.py`) |
| "auto" | | one of these, by platform, dtype, row length and packing (`attention_choice.py`) |

Dimensions: R rows, L length (of queries), S length (of keys), H query heads, G key heads, M = H / G query heads to a
key head, K features of a head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..errors import ConfigError, did_you_mean
from .attention_choice import AUTO, choose, known_rows
from .blockwise import blockwise_attention
from .one_sample import one_sample_attention
from .transformer_engine import packed_attention

AttentionKind = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""What a kind of attention computes; see `attention` for its five arrays."""

# Added to the scores of pairs that do not see each other: large enough to make any weight 0, and finite.
_UNSEEN = -1e30


@dataclasses.dataclass(frozen=True)
class _Registered:
    function: AttentionKind
    packed: bool


_KINDS: dict[str, _Registered] = {}


def register_attention(name: str, *, packed: bool = True) -> Callable[[AttentionKind], AttentionKind]:
    """Returns a decorator that makes a function known to `attention` as `kind=name`.

    Args:
        name: the new kind; an existing one of that name is replaced.
        packed: whether it serves rows of several segments; where not, sections that pack several items into a row refuse it.

    Returns:
        A decorator that gives its function back.
    """

    def register(function: AttentionKind) -> AttentionKind:
        _KINDS[name] = _Registered(function, packed)
        return function

    return register


def check_attention(kind: str, *, owner: str, set_by: str) -> None:
    """Refuses a kind that nobody registered.

    Args:
        kind: name to look up.
        owner: what asks for it, for the error text.
        set_by: where the name was set, for the error text.

    Raises:
        ConfigError: the kind is unknown.
    """
    known = sorted([AUTO, *_KINDS])
    if kind not in known:
        raise ConfigError(
            f"{owner} asks for an unknown kind of attention.",
            wanted="one of " + ", ".join(repr(name) for name in known),
            have=repr(kind) + did_you_mean(kind, known),
            set_by=set_by,
            fix="name a registered kind, or register your own with maestro_jax.models.register_attention before the configuration is read",
            anchor="unknown-attention",
        )


def attention(
    q_RLHK: jax.Array,
    k_RLGK: jax.Array,
    v_RLGK: jax.Array,
    segment_ids_RL: jax.Array,
    positions_RL: jax.Array | None,
    kind: str = "dense",
    *,
    windows: bool = False,
) -> jax.Array:
    """Packed attention, causal by positions; query head h reads key head h // (H / G).

    Args:
        q_RLHK: queries, any float dtype.
        k_RLGK: keys; G divides H.
        v_RLGK: values.
        segment_ids_RL: int32, 0 for padding, items of a row (or windows of items) numbered from 1.
        positions_RL: int32, from 0 within an item; tokens of equal position see each other. None lets every token see its
            whole segment.
        kind: name of a registered kind, or "auto".
        windows: whether segments are parts of items, so that a row of one item holds several.

    Returns:
        [R, L, H, K] in the dtype of the values. Rows of padding are finite and mean nothing.

    Raises:
        ConfigError: the kind is unknown, is not installed, or does not serve rows of several segments, which the section packs.

    >>> one = jnp.ones((1, 3, 1, 2))
    >>> v = jnp.arange(3.0).reshape(1, 3, 1, 1) * one
    >>> attention(one, one, v, jnp.array([[1, 1, 2]]), jnp.array([[0, 1, 0]]))[0, :, 0, 0]
    Array([0. , 0.5, 2. ], dtype=float32)
    """
    check_attention(kind, owner="attention", set_by="the calling program: attention(kind=...)")
    if kind == AUTO:
        kind = choose(length=q_RLHK.shape[1], features=q_RLHK.shape[3], dtype=v_RLGK.dtype, windows=windows)
    rows = known_rows()
    if rows is not None:
        rows.kinds[kind] = None
    registered = _KINDS[kind]
    if not registered.packed:
        _check_not_packed(kind, windows)
    return registered.function(q_RLHK, k_RLGK, v_RLGK, segment_ids_RL, positions_RL)


def _check_not_packed(kind: str, windows: bool) -> None:
    """Refuses a kind for rows of one segment where it is known that there are more; called outside a section, it is the caller's word."""
    rows = known_rows()
    if rows is None or not (windows or rows.packed):
        return
    if windows:
        have, fix = "attention in windows, several to an item", "leave attention at 'auto', which takes this kind where it serves"
    else:
        have = "Section.packed=True"
        fix = "set Section.packed = False (rows are then padded, so choose microbatch and row_length by the items), or another attention"
    raise ConfigError(
        f"section {rows.section!r} asks for attention {kind!r}, which serves rows of one segment only.",
        wanted="rows that hold one item each, without windows",
        have=have,
        set_by=rows.set_by,
        fix=fix,
        anchor="attention-packed",
    )


@register_attention("dense")
def dense_attention(
    q_RLHK: jax.Array, k_RLGK: jax.Array, v_RLGK: jax.Array, segment_ids_RL: jax.Array, positions_RL: jax.Array | None
) -> jax.Array:
    """The kind "dense": all scores at once, in float32; memory grows with the square of the row length.

    Padding is a segment like any other: it sees only padding, itself at least, so no softmax runs over an empty set and
    neither values nor gradients can become NaN.
    """
    rows, length, _, features = q_RLHK.shape
    groups = k_RLGK.shape[2]
    # Query heads of one key head are stacked along the queries (X = M * L): plain products of matrices, with no axis
    # between those of the score matrix, which XLA on CPU would transpose element by element.
    q_RGMLK = (q_RLHK / math.sqrt(features)).reshape(rows, length, groups, -1, features).transpose(0, 2, 3, 1, 4)
    q_RGXK = q_RGMLK.reshape(rows, groups, -1, features)
    k_RGSK, v_RGSK = k_RLGK.swapaxes(1, 2), v_RLGK.swapaxes(1, 2)
    scores_RGXS = jnp.einsum("RGXK,RGSK->RGXS", q_RGXK, k_RGSK, preferred_element_type=jnp.float32)
    sees_RLS = segment_ids_RL[:, :, None] == segment_ids_RL[:, None, :]
    if positions_RL is not None:
        sees_RLS &= positions_RL[:, :, None] >= positions_RL[:, None, :]
    scores_RGMLS = scores_RGXS.reshape(rows, groups, -1, length, length) + jnp.where(sees_RLS, 0.0, _UNSEEN)[:, None, None]
    # Softmax, but divided by its sum after the product with the values, where there is less to divide. The largest
    # score cancels out, so no gradient runs through it.
    largest_RGML1 = jax.lax.stop_gradient(jnp.max(scores_RGMLS, axis=-1, keepdims=True))
    weights_RGMLS = jnp.exp(scores_RGMLS - largest_RGML1)
    sums_RGML1 = jnp.sum(weights_RGMLS, axis=-1, keepdims=True)
    weights_RGXS = weights_RGMLS.astype(v_RLGK.dtype).reshape(scores_RGXS.shape)
    mixed_RGXK = jnp.einsum("RGXS,RGSK->RGXK", weights_RGXS, v_RGSK, preferred_element_type=jnp.float32)
    mixed_RGMLK = mixed_RGXK.reshape(q_RGMLK.shape) / sums_RGML1
    return mixed_RGMLK.transpose(0, 3, 1, 2, 4).reshape(q_RLHK.shape).astype(v_RLGK.dtype)


register_attention("blockwise")(blockwise_attention)
register_attention("one_sample", packed=False)(one_sample_attention)
register_attention("transformer_engine")(packed_attention)
