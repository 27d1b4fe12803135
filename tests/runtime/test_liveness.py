"""What a traced program needs at the same time: chains, loops, and what is never used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maestro_jax.runtime.liveness import peak_bytes

SQUARE = jax.ShapeDtypeStruct((8, 8), "float32")
SIZE = 8 * 8 * 4


def peak_of(function: Callable[[jax.Array], Any]) -> int:
    return peak_bytes(jax.make_jaxpr(function)(SQUARE).jaxpr)


def test_a_chain_of_products_holds_two_results_however_long_it_is() -> None:
    def chain(a: jax.Array) -> jax.Array:
        found = a
        for _ in range(6):
            found = found @ a
        return found

    assert peak_of(chain) == 2 * SIZE


def test_what_is_kept_for_later_adds_up() -> None:
    def kept(a: jax.Array) -> jax.Array:
        one, two, three = a @ a, a.T @ a, a @ a.T
        return one @ (two @ three)

    assert peak_of(kept) == 4 * SIZE


def test_a_loop_holds_its_results_and_what_one_round_needs() -> None:
    def rounds(a: jax.Array) -> jax.Array:
        def one(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return carry @ a, (carry @ a.T) @ a

        return jax.lax.scan(one, a, None, length=10)[1]

    assert 11 * SIZE <= peak_of(rounds) <= 14 * SIZE


def test_what_nobody_uses_needs_nothing() -> None:
    assert peak_of(lambda a: (a @ a, jnp.sin(a) @ a)[0]) == SIZE


def test_arrays_that_are_split_count_by_their_shares() -> None:
    program = jax.make_jaxpr(lambda a: (a @ a) @ a)(SQUARE).jaxpr
    assert peak_bytes(program, lambda shape, size: size // 2 if 8 in shape else size) == SIZE
