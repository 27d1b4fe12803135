"""Multiplications are counted exactly where they are matrix products, through every kind of call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maestro_jax.runtime.counts import multiplications

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
