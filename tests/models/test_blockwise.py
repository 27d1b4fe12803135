"""Attention by blocks computes what dense attention computes, in memory that grows with the length alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.models.attention import dense_attention
from maestro_jax.models.blockwise import BLOCK, SAVED, blockwise_attention, visited_blocks

Arrays = tuple[jax.Array, ...]


def rows_of_items(rows: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions of items of these units, packed into rows."""
    segments, positions = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), np.int32)
    for row, items in enumerate(rows):
        ends = np.cumsum(items)
        for number, (units, end) in enumerate(zip(items, ends, strict=True)):
            segments[row, end - units : end] = number + 1
            positions[row, end - units : end] = np.arange(units)
    return segments, positions


def arrays_of(rows: int, length: int, heads: int, groups: int, features: int = 8, dtype: str = "float32") -> list[jax.Array]:
    """Queries, keys, values, and weights of what comes out."""
    keys = jax.random.split(jax.random.key(length), 4)
    return [jax.random.normal(key, (rows, length, n, features), dtype) for key, n in zip(keys, (heads, groups, groups, heads), strict=True)]


def both(function: Callable[..., jax.Array], arrays: list[jax.Array], segments: np.ndarray, positions: np.ndarray | None) -> Arrays:
    """What comes out at items, and the gradients of its weighted sum."""
    *inputs, weights = arrays

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        places = None if positions is None else jnp.asarray(positions)
        out = jnp.where((segments > 0)[..., None, None], function(q, k, v, jnp.asarray(segments), places), 0)
        return jnp.sum((weights * out).astype(jnp.float32)), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*inputs)
    return out, *gradients


def assert_close(got: Arrays, wanted: Arrays, within: float) -> None:
    for a, b in zip(got, wanted, strict=True):
        scale = np.abs(np.asarray(b, np.float64)).max()
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=within * scale)


@pytest.mark.quick
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (4, 1)])
def test_values_and_gradients_are_those_of_dense_attention(heads: int, groups: int, causal: bool) -> None:
    # Items that end within blocks, at their borders and at the end of a row; rows of 53 are no multiple of 16.
    segments, positions = rows_of_items([[20, 12, 1, 17], [53], [16, 16]], 53)
    arrays = arrays_of(3, 53, heads, groups)
    places = positions if causal else None
    wanted = both(dense_attention, arrays, segments, places)
    assert_close(both(lambda *x: blockwise_attention(*x, block=16), arrays, segments, places), wanted, 1e-5)


def test_tokens_of_equal_position_see_each_other() -> None:
    segments, positions = rows_of_items([[40]], 40)
    positions[0, 10:30] = 10  # as an image in a text would have it, over the borders of blocks
    arrays = arrays_of(1, 40, 2, 2)
    wanted = both(dense_attention, arrays, segments, positions)
    assert_close(both(lambda *x: blockwise_attention(*x, block=8), arrays, segments, positions), wanted, 1e-5)


def test_segments_need_neither_order_nor_neighbours() -> None:
    draw = np.random.default_rng(0)
    segments, positions = draw.integers(0, 5, (2, 48)).astype(np.int32), draw.integers(0, 9, (2, 48)).astype(np.int32)
    arrays = arrays_of(2, 48, 2, 1)
    for places in (positions, None):
        wanted = both(dense_attention, arrays, segments, places)
        assert_close(both(lambda *x: blockwise_attention(*x, block=8), arrays, segments, places), wanted, 1e-5)


def test_bfloat16_is_as_close_to_float32_as_dense_attention_is() -> None:
    segments, positions = rows_of_items([[30, 20]], 60)
    wide = arrays_of(1, 60, 4, 2)
    half = [each.astype(jnp.bfloat16) for each in wide]
    wanted = both(dense_attention, [each.astype(jnp.float32) for each in half], segments, positions)
    got = both(lambda *x: blockwise_attention(*x, block=16), half, segments, positions)
    assert all(each.dtype == jnp.bfloat16 for each in got)
    assert_close(got, wanted, 0.02)


def test_padding_gives_zeros_and_finite_gradients() -> None:
    q, k, v, weights = arrays_of(1, 24, 2, 2)
    nothing = jnp.zeros((1, 24), jnp.int32)

    @jax.jit
    def found(*arrays: jax.Array) -> Arrays:
        out, vjp = jax.vjp(lambda q, k, v: blockwise_attention(q, k, v, nothing, nothing, block=8), *arrays)
        return out, *vjp(weights)

    assert all(not each.any() for each in found(q, k, v))


def test_large_scores_neither_overflow_nor_leak_into_other_segments() -> None:
    segments, positions = (jnp.asarray(each) for each in rows_of_items([[20, 20]], 40))
    q, k, v, _ = arrays_of(1, 40, 2, 2)
    found = jax.jit(lambda k: blockwise_attention(q, k, v, segments, positions, block=8))
    wild, calm = found(k.at[:, :20].multiply(1e6)), found(k)
    assert bool(jnp.isfinite(wild).all())
    np.testing.assert_array_equal(wild[:, 20:], calm[:, 20:])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_only_blocks_that_see_each_other_are_visited(causal: bool) -> None:
    segments, positions = rows_of_items([[16, 16, 8, 5]], 64)
    places = positions if causal else None
    first, end = visited_blocks(jnp.asarray(segments), None if places is None else jnp.asarray(places), block=8)
    is_seen = (segments[0][:, None] == segments[0][None]) & (segments[0] > 0)[:, None]
    if causal:
        is_seen &= positions[0][:, None] >= positions[0][None]
    keys = [np.flatnonzero(row) for row in is_seen.reshape(8, 8, 8, 8).any((1, 3))]
    assert [list(range(a, b)) for a, b in zip(first.tolist(), end.tolist(), strict=True)] == [found.tolist() for found in keys]


def test_an_item_that_ends_in_a_block_costs_no_pair_with_the_items_behind_it() -> None:
    segments, positions = rows_of_items([[12, 20, 32]], 64)
    first, end = visited_blocks(jnp.asarray(segments), jnp.asarray(positions), block=8)
    assert first.tolist() == [0, 0, 1, 1, 4, 4, 4, 4]
    assert end.tolist() == list(range(1, 9))


def test_blocks_of_padding_between_items_are_passed_over() -> None:
    segments, positions = rows_of_items([[8, 24, 10]], 48)
    segments[segments == 2], positions[segments == 2] = 0, 0
    arrays = arrays_of(1, 48, 2, 2)
    wanted = both(dense_attention, arrays, segments, positions)
    assert_close(both(lambda *x: blockwise_attention(*x, block=8), arrays, segments, positions), wanted, 1e-5)


def test_twice_the_length_takes_twice_the_memory() -> None:
    def bytes_at(length: int) -> int:
        q, k = (jax.ShapeDtypeStruct((1, length, heads, 16), "float32") for heads in (4, 2))
        ids = jax.ShapeDtypeStruct((1, length), "int32")

        def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
            return jnp.sum(blockwise_attention(q, k, v, segments, positions))

        found: Any = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, k, ids, ids).compile().memory_analysis()
        return found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes

    assert bytes_at(2**17) <= 2.2 * bytes_at(2**16)


def test_what_checkpointing_keeps_saves_the_second_forward() -> None:
    segments, positions = (jnp.asarray(each) for each in rows_of_items([[64]], 64))
    q, k, v, _ = arrays_of(1, 64, 2, 2)

    def loops(policy: Callable[..., bool]) -> int:
        kept = jax.checkpoint(lambda q: jnp.sum(blockwise_attention(q, k, v, segments, positions, block=8)), policy=policy)
        # The second gradient is of what follows: the first alone would not run the forward of the layer a second time.
        return str(jax.make_jaxpr(jax.grad(kept))(q)).count("while[")

    policies = jax.checkpoint_policies
    assert loops(policies.save_only_these_names(SAVED)) == 2
    assert loops(policies.nothing_saveable) == 3


def test_the_block_is_no_longer_than_the_row() -> None:
    segments, positions = (jnp.asarray(each) for each in rows_of_items([[5]], 5))
    q, k, v, _ = arrays_of(1, 5, 2, 2)
    text = str(jax.make_jaxpr(blockwise_attention)(q, k, v, segments, positions))
    assert f",{BLOCK}" not in text
