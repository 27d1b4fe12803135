"""Losses over a vocabulary, a chunk of tokens at a time, so that [tokens, vocabulary] logits never exist at once.

`chunked_sums` scans over chunks of tokens: logits of a chunk, then the sums that a `Terms` object makes of them. Its
backward pass scans again and recomputes the logits of each chunk, which costs one more matrix product and keeps the
peak memory at one chunk in both directions. The gradient of the head is accumulated in float32 whatever its dtype.
The recomputation is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).

The next-token loss is here, with one mask or several; the losses of distillation (`maestro_jax.distill.objectives`) run
on the same scan.

Dimensions: N tokens, C tokens of a chunk, J chunks, D width of the hidden state, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Sums = dict[str, jax.Array]
MaskedObjective = tuple[str, str, str]

KINDS = ("accuracy", "cross_entropy")
"""What a vocabulary head can be measured by."""


class Terms(Protocol):
    """Makes sums of one chunk: a hashable object, as it is a static argument of `chunked_sums`."""

    def __call__(self, logits_CV: jax.Array, tokens: Any, constants: Any) -> Sums:
        """Returns float32 scalars from float32 logits, a chunk of per-token arrays and constants."""
        ...


def vocabulary_logits(hidden_CD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Returns [C, V] float32 logits; products in the inputs' dtype, sums in float32."""
    return jnp.einsum("CD,VD->CV", hidden_CD, head_VD, preferred_element_type=jnp.float32)


def cross_entropy_sums(logits_CV: jax.Array, targets_C: jax.Array, mask_C: jax.Array) -> Sums:
    """Cross-entropy against targets, and hits, summed over tokens.

    Args:
        logits_CV: float32.
        targets_C: int32; a target outside of the vocabulary must have mask 0.
        mask_C: float32 weight of each token.

    Returns:
        "cross_entropy": sum of mask * (log sum exp(logits) - logits[target]); "accuracy": sum of mask where the first
        largest logit is the target's.

    >>> cross_entropy_sums(jnp.zeros((2, 4)), jnp.array([0, 1]), jnp.array([1.0, 1.0]))
    {'accuracy': Array(1., dtype=float32), 'cross_entropy': Array(2.7725887, dtype=float32)}
    """
    return {kind: jnp.sum(mask_C * value_C) for kind, value_C in _token_values(logits_CV, targets_C).items()}


def _token_values(logits_CV: jax.Array, targets_C: jax.Array) -> dict[str, jax.Array]:
    """Kind of objective -> its value of each token [C], unmasked; the keys are `KINDS`."""
    columns_CV = jax.lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1)
    # Selecting by comparison, unlike a gather, stays local when the vocabulary is sharded, and has no scatter backward.
    target_C = jnp.sum(jnp.where(columns_CV == targets_C[:, None], logits_CV, 0.0), axis=1)
    cross_entropy_C = jax.nn.logsumexp(logits_CV, axis=1) - target_C
    return {"accuracy": _hits(logits_CV, columns_CV, targets_C), "cross_entropy": cross_entropy_C}


def _hits(logits_CV: jax.Array, columns_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    """The first column that holds the largest value, by two plain reductions: cheaper than argmax on CPU and when sharded."""
    fixed_CV = jax.lax.stop_gradient(logits_CV)
    is_largest_CV = fixed_CV == jnp.max(fixed_CV, axis=1, keepdims=True)
    first_C = jnp.min(jnp.where(is_largest_CV, columns_CV, logits_CV.shape[1]), axis=1)
    return (first_C == targets_C).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _MaskedTerms:
    objectives: tuple[MaskedObjective, ...]

    def __call__(self, logits_CV: jax.Array, tokens: Any, constants: Any) -> Sums:
        values = _token_values(logits_CV, tokens["targets"])
        return {name: jnp.sum(tokens["masks"][mask] * values[kind]) for name, kind, mask in self.objectives}


def masked_sums(
    hidden_ND: jax.Array,
    head_VD: jax.Array,
    targets_N: jax.Array,
    masks: Mapping[str, jax.Array],
    objectives: tuple[MaskedObjective, ...],
    chunk: int = 256,
) -> Sums:
    """Several objectives of one vocabulary head, each with a mask of its own, in one pass over chunks of tokens.

    Args:
        hidden_ND: last hidden states, float32 or bfloat16.
        head_VD: weight of the head.
        targets_N: int32, the next token of each token.
        masks: name -> float32 weight of each token [N], 0 for padding.
        objectives: (name, kind, name of its mask); kinds are "cross_entropy" (nats) and "accuracy", as in `cross_entropy_sums`.
        chunk: most tokens whose logits exist at once; it need not divide N.

    Returns:
        Name -> float32 scalar. Differentiable in `hidden_ND` and `head_VD`; masks are constants.

    >>> masks = {"all": jnp.ones(3), "last": jnp.array([0.0, 0.0, 1.0])}
    >>> objectives = (("hits", "accuracy", "all"), ("last_hits", "accuracy", "last"))
    >>> masked_sums(jnp.zeros((3, 2)), jnp.ones((4, 2)), jnp.array([0, 1, 0]), masks, objectives, chunk=2)
    {'hits': Array(2., dtype=float32), 'last_hits': Array(1., dtype=float32)}
    """
    tokens = {"targets": targets_N, "masks": dict(masks)}
    return chunked_sums(_MaskedTerms(objectives), chunk, hidden_ND, head_VD, tokens, ())


def next_token_sums(hidden_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, mask_N: jax.Array, chunk: int = 256) -> Sums:
    """Cross-entropy of a vocabulary head and its hits, chunked over tokens.

    Args:
        hidden_ND: last hidden states, float32 or bfloat16.
        head_VD: weight of the head.
        targets_N: int32, the next token of each token.
        mask_N: float32 weight of each token, 0 for padding.
        chunk: most tokens whose logits exist at once; it need not divide N.

    Returns:
        Float32 scalars "cross_entropy" (nats) and "accuracy", as in `cross_entropy_sums`. Differentiable in `hidden_ND`
        and `head_VD`; the gradient with respect to the mask is taken as zero.

    >>> next_token_sums(jnp.zeros((3, 2)), jnp.ones((4, 2)), jnp.array([0, 1, 2]), jnp.ones(3), chunk=2)["accuracy"]
    Array(1., dtype=float32)
    """
    objectives = tuple((kind, kind, "mask") for kind in KINDS)
    return masked_sums(hidden_ND, head_VD, targets_N, {"mask": mask_N}, objectives, chunk)


def chunked_sums(terms: Terms, chunk: int, hidden_ND: jax.Array, head_VD: jax.Array, tokens: Any, constants: Any) -> Sums:
    """Sums of `terms` over tokens, with at most `chunk` tokens' logits in memory, forward and backward.

    Args:
        terms: makes sums of one chunk. Tokens that are all zero, which fill the last chunk, must add nothing.
        chunk: most tokens in a chunk.
        hidden_ND: hidden states.
        head_VD: weight of the head.
        tokens: tree of per-token arrays [N, ...], given to `terms` in chunks.
        constants: tree of arrays given to `terms` whole.

    Returns:
        The sums, float32 scalars. Only `hidden_ND` and `head_VD` get gradients; to `tokens` and `constants` none flows.
    """
    # Stopped here and not only in the backward function: its zeros would be arrays, and what made `constants` would run
    # its backward on them.
    return _sums(terms, chunk, hidden_ND, head_VD, *jax.lax.stop_gradient((tokens, constants)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(terms: Terms, chunk: int, hidden_ND: jax.Array, head_VD: jax.Array, tokens: Any, constants: Any) -> Sums:
    return _forward(terms, chunk, hidden_ND, head_VD, tokens, constants)[0]


def _forward(terms: Terms, chunk: int, hidden_ND: jax.Array, head_VD: jax.Array, tokens: Any, constants: Any) -> tuple[Sums, Any]:
    def one_chunk(carry: None, piece: tuple[jax.Array, Any]) -> tuple[None, Sums]:
        hidden_CD, tokens_C = piece
        return carry, terms(vocabulary_logits(hidden_CD, head_VD), tokens_C, constants)

    _, sums_J = jax.lax.scan(one_chunk, None, _chunks((hidden_ND, tokens), chunk))
    return jax.tree.map(lambda sum_J: jnp.sum(sum_J, axis=0), sums_J), (hidden_ND, head_VD, tokens, constants)


def _backward(terms: Terms, chunk: int, saved: Any, cotangents: Sums) -> tuple[jax.Array, jax.Array, None, None]:
    hidden_ND, head_VD, tokens, constants = saved

    def one_chunk(grad_head_VD: jax.Array, piece: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        hidden_CD, tokens_C = piece
        logits_CV = vocabulary_logits(hidden_CD, head_VD)
        (grad_CV,) = jax.vjp(lambda logits_CV: terms(logits_CV, tokens_C, constants), logits_CV)[1](cotangents)
        # In the dtype of the parameters, so that the two large products run at its speed; their sums are float32.
        grad_CV = grad_CV.astype(head_VD.dtype)
        grad_hidden_CD = jnp.einsum("CV,VD->CD", grad_CV, head_VD, preferred_element_type=jnp.float32)
        grad_head_VD += jnp.einsum("CV,CD->VD", grad_CV, hidden_CD, preferred_element_type=jnp.float32)
        return grad_head_VD, grad_hidden_CD.astype(hidden_ND.dtype)

    empty_VD = jnp.zeros(head_VD.shape, jnp.float32)
    grad_head_VD, grad_hidden_JCD = jax.lax.scan(one_chunk, empty_VD, _chunks((hidden_ND, tokens), chunk))
    grad_hidden_ND = grad_hidden_JCD.swapaxes(0, 1).reshape(-1, hidden_ND.shape[1])[: hidden_ND.shape[0]]
    return grad_hidden_ND, grad_head_VD.astype(head_VD.dtype), None, None


_sums.defvjp(_forward, _backward)


def _chunks(tree: Any, chunk: int) -> Any:
    """Cuts arrays [N, ...] into [J, C, ...], padded with zeros; chunk j holds the tokens j, j + J, j + 2 J, ...

    Strides instead of runs: when rows are sharded over devices, each chunk then has tokens on every device, and the
    devices share the work of each chunk. Chunks are of equal size, so that little is padded.
    """
    count = jax.tree.leaves(tree)[0].shape[0]
    chunks = max(1, -(-count // chunk))
    size = -(-count // chunks)

    def cut(x_N: jax.Array) -> jax.Array:
        padded_N = jnp.pad(x_N, [(0, size * chunks - count)] + [(0, 0)] * (x_N.ndim - 1))
        return padded_N.reshape(size, chunks, *x_N.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(cut, tree)
