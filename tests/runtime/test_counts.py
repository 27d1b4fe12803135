"""Multiplications are counted exactly where they are matrix products, through every kind of call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maestro_jax.models import attention
from maestro_jax.models.loops import bounded_loop
from maestro_jax.runtime.counts import Work, multiplications, work

A = jax.ShapeDtypeStruct((4, 6), "float32")
B = jax.ShapeDtypeStruct((6, 10), "float32")
PRODUCT = 4 * 6 * 10


def loop(a: jax.Array, b: jax.Array) -> Any:
    return jax.lax.scan(lambda carry, _: (carry + (a @ b).sum(), None), 0.0, None, length=7)[0]


def branches(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: jnp.zeros((4, 10)))


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda a, b: a @ b, PRODUCT),
        (jax.jit(lambda a, b: a @ b), PRODUCT),
        (jax.checkpoint(lambda a, b: a @ b), PRODUCT),
        (loop, 7 * PRODUCT),
        (branches, PRODUCT),
        (lambda a, b: jnp.exp(a @ b), PRODUCT + 4 * 10),
        (lambda a, b: jax.vmap(lambda row: row @ b)(a), PRODUCT),
        (lambda a, b: a[:, :3] + b[:4, :3], 0),
    ],
    ids=["product", "jit", "checkpoint", "scan", "cond", "elementwise", "vmap", "sum"],
)
def test_products_are_counted(function: Callable[..., Any], count: int) -> None:
    assert multiplications(function, A, B) == count


def test_a_gradient_costs_two_more_products() -> None:
    both = multiplications(jax.value_and_grad(lambda a, b: (a @ b).sum(), argnums=(0, 1)), A, B)
    assert both == 3 * PRODUCT


def test_a_convolution_sees_its_window_and_channels() -> None:
    image, kernel = jax.ShapeDtypeStruct((1, 8, 8, 3), "float32"), jax.ShapeDtypeStruct((3, 3, 3, 5), "float32")

    def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert multiplications(convolve, image, kernel) == 8 * 8 * 5 * 3 * 3 * 3


def test_a_loop_counts_between_the_bounds_that_it_tells() -> None:
    def often(a: jax.Array, b: jax.Array) -> Any:
        turns = jnp.sum(a > 0, dtype=jnp.int32)
        return bounded_loop(turns, (2, 9), lambda _, total: total + (a @ b).sum(), jnp.float32(0))

    assert work(jax.jit(often), A, B) == Work(least=2 * PRODUCT, most=9 * PRODUCT)
    assert work(loop, A, B) == Work(least=7 * PRODUCT, most=7 * PRODUCT)


LENGTH, BLOCKS, HEADS, FEATURES = 512, 4, 4, 16
PAIR = HEADS * 128 * 128 * FEATURES
"""Multiplications of a product of two blocks of 128."""


def attended(kind: str, causal: bool) -> Callable[..., Any]:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.sum(attention(q, k, v, segments, positions if causal else None, kind))

    return loss


def shapes() -> list[jax.ShapeDtypeStruct]:
    heads = [jax.ShapeDtypeStruct((1, LENGTH, n, FEATURES), "float32") for n in (HEADS, 2, 2)]
    return heads + [jax.ShapeDtypeStruct((1, LENGTH), "int32")] * 2


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_blockwise_attention_counts_the_pairs_of_blocks_that_it_visits(causal: bool) -> None:
    found = [work(made, *shapes()) for made in (attended("blockwise", causal), jax.grad(attended("blockwise", causal), (0, 1, 2)))]
    pairs = BLOCKS * (BLOCKS + 1) // 2 if causal else BLOCKS**2
    # Two products forward; five more backward, of which each yields or reads scores. Besides, what is counted for each score is little.
    for each, products in zip(found, (2, 7), strict=True):
        assert products * PAIR * BLOCKS <= each.least <= 1.4 * products * PAIR * BLOCKS
        assert products * PAIR * pairs <= each.most <= 1.4 * products * PAIR * pairs


@pytest.mark.parametrize("kind", ["dense", "one_sample"])
def test_whole_scores_are_counted_at_any_data(kind: str) -> None:
    found = work(jax.grad(attended(kind, True), (0, 1, 2)), *shapes())
    assert found.least == found.most
    assert 6 * PAIR * BLOCKS**2 <= found.most <= 1.4 * 6 * PAIR * BLOCKS**2
