"""The dropout mask of a token depends on the token alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_jax.models import token_dropout

KEY = np.array([3, 4], np.uint32)
FEATURES = 9
drop = jax.jit(token_dropout, static_argnums=1, static_argnames="place")


def packed(order: list[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs sample s, of 2 + s tokens, in the given order; returns ids and positions [rows, length]."""
    rows: list[list[tuple[int, int]]] = [[]]
    for sample in order:
        item = [(sample, position) for position in range(2 + sample)]
        if len(rows[-1]) + len(item) > length:
            rows.append([])
        rows[-1] += item
    padded = [row + [(0, 0)] * (length - len(row)) for row in rows]
    table = np.array(padded)
    return table[..., 0].astype(np.uint32), table[..., 1].astype(np.int32)


def masks(ids: np.ndarray, positions: np.ndarray, *, key: np.ndarray = KEY, layer: int = 0, place: int = 0) -> np.ndarray:
    ones = jnp.ones((*ids.shape, FEATURES))
    return np.asarray(drop(ones, 0.5, jnp.asarray(key), jnp.asarray(ids), jnp.asarray(positions), layer=layer, place=place))


def by_token(ids: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> dict[tuple[int, int], bytes]:
    return {(int(i), int(p)): mask[at].tobytes() for at, i in np.ndenumerate(ids) for p in [positions[at]]}


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(6)), st.sampled_from([8, 16, 32]))
def test_masks_do_not_move_with_order_row_or_bucket(order: list[int], length: int) -> None:
    reference, other = packed(list(range(6)), 32), packed(order, length)
    wanted, got = by_token(*reference, masks(*reference)), by_token(*other, masks(*other))
    wanted.setdefault((0, 0), got[0, 0])
    assert got == wanted


def test_masks_differ_between_tokens_samples_layers_places_and_keys() -> None:
    ids, positions = packed([1, 2], 8)
    base = masks(ids, positions)
    others = [
        masks(ids, positions, layer=1),
        masks(ids, positions, place=1),
        masks(ids, positions, key=KEY + np.uint32(1)),
        masks(ids + np.uint32(1), positions),
        masks(ids, positions + 1),
    ]
    assert len({x.tobytes() for x in [base, *others]}) == 6
    assert base[0, 0].tobytes() != base[0, 1].tobytes()


def test_a_traced_layer_number_gives_the_mask_of_that_number() -> None:
    ids, positions = packed([5, 4, 3], 32)
    ones = jnp.ones((*ids.shape, FEATURES))

    def of_layer(_: None, layer: jax.Array) -> tuple[None, jax.Array]:
        return None, token_dropout(ones, 0.5, jnp.asarray(KEY), jnp.asarray(ids), jnp.asarray(positions), layer=layer, place=2)

    _, scanned = jax.lax.scan(of_layer, None, jnp.arange(3))
    np.testing.assert_array_equal(scanned[2], masks(ids, positions, layer=2, place=2))


def test_the_rate_of_dropped_features_is_as_asked_and_the_mean_is_kept() -> None:
    ids, positions = np.zeros((1, 4096), np.uint32), np.arange(4096, dtype=np.int32)[None]
    out = drop(jnp.ones((1, 4096, FEATURES)), 0.2, jnp.asarray(KEY), jnp.asarray(ids), jnp.asarray(positions), layer=0, place=0)
    # 36,864 draws: the standard deviation of the rate is 0.0021.
    assert abs(float(jnp.mean(out == 0)) - 0.2) < 0.01
    assert abs(float(jnp.mean(out)) - 1.0) < 0.015


def test_without_a_key_nothing_is_dropped() -> None:
    x = jnp.ones((1, 4, FEATURES))
    ids, positions = jnp.ones((1, 4), jnp.uint32), jnp.arange(4)[None]
    assert token_dropout(x, 0.5, None, ids, positions, layer=0, place=0) is x
