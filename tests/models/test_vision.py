"""The vision transformer: positions in two dimensions, and which patches become one row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_support import image, packed, parts

from maestro_jax.errors import ConfigError
from maestro_jax.models import VisionTransformer
from maestro_jax.models.vision import rotary_angles_2d

TINY = VisionTransformer(layers=1, embed=16, heads=2, mlp=20, patch_size=2, channels=1, merge=1, width=10, rope_theta=100.0)
LEARNED = dataclasses.replace(TINY, positions="learned", grid=6)


def rows_of(config: VisionTransformer, changes: Any = None) -> np.ndarray:
    """The rows of one image of 4 x 4 patches, with other coordinates, or other arrays."""
    params, _, apply = parts(config)
    batch = packed([[(7, image(4, 4, 0, merge=config.merge))]], 16)
    batch |= {"coords": jnp.asarray(changes)[None]} if isinstance(changes, np.ndarray) else changes or {}
    return np.asarray(jax.jit(apply)(params, batch)["hidden"][0])


def coords() -> np.ndarray:
    return image(4, 4, 0, merge=1).arrays["coords"]


@pytest.mark.parametrize("config", [TINY, LEARNED], ids=["rotary", "learned"])
@pytest.mark.parametrize("other", [coords()[::-1], coords()[:, ::-1]], ids=["reversed", "rows-for-columns"])
def test_where_a_patch_lies_matters(config: VisionTransformer, other: np.ndarray) -> None:
    assert float(np.max(np.abs(rows_of(config) - rows_of(config, other)))) > 1e-3


def test_rotary_rows_depend_on_differences_of_coordinates_alone() -> None:
    np.testing.assert_allclose(rows_of(TINY, coords() + np.array([3, 11])), rows_of(TINY), atol=3e-6)


def test_patches_may_come_in_any_order_with_their_coordinates() -> None:
    order = np.random.default_rng(0).permutation(16)
    arrays = image(4, 4, 0, merge=1).arrays
    moved = rows_of(TINY, {name: jnp.asarray(arrays[name][order])[None] for name in ("patches", "coords")})
    np.testing.assert_allclose(moved, rows_of(TINY)[order], atol=3e-6)


def test_angles_turn_the_first_half_of_pairs_by_row_and_the_others_by_column() -> None:
    cosines, sines = rotary_angles_2d(jnp.array([[[2, 5]]]), 8, 100.0)
    wanted = np.array([2.0, 0.2, 5.0, 0.5])
    np.testing.assert_allclose(cosines[0, 0], np.cos(wanted), atol=1e-6)
    np.testing.assert_allclose(sines[0, 0], np.sin(wanted), atol=1e-6)


def test_a_row_is_made_of_one_block_of_neighbouring_patches() -> None:
    config = dataclasses.replace(TINY, merge=2, width=None)
    single, merged = rows_of(dataclasses.replace(config, merge=1)), rows_of(config)
    # The same patches, row by row in one image and in blocks of 2 x 2 in the other.
    grid = image(4, 4, 0, merge=1).arrays
    blocks = image(4, 4, 0, merge=2).arrays
    place = {tuple(at): n for n, at in enumerate(grid["coords"].tolist())}
    for row in range(4):
        four = [place[tuple(at)] for at in blocks["coords"][4 * row : 4 * row + 4].tolist()]
        assert {(int(a) // 2, int(b) // 2) for a, b in grid["coords"][four]} == {divmod(row, 2)}
        np.testing.assert_allclose(merged[row], single[four].reshape(-1), atol=3e-6)


def test_a_patch_beyond_the_grid_of_learned_positions_is_not_taken_for_one_at_its_edge() -> None:
    inside, beyond = rows_of(LEARNED, coords() + 2), rows_of(LEARNED, coords() + 3)
    assert np.all(np.isfinite(inside))
    assert np.all(np.isnan(beyond))


@pytest.mark.parametrize(("whole", "reached"), [((), 4), ((1,), 16)])
def test_a_patch_is_seen_in_its_window_alone_unless_a_layer_sees_the_whole_image(whole: tuple[int, ...], reached: int) -> None:
    config = dataclasses.replace(TINY, layers=2, window=2, whole_layers=whole, width=None)
    patches = image(4, 4, 0, merge=1).arrays["patches"].copy()
    before = rows_of(config)
    patches[5] += 1.0
    changed = np.any(rows_of(config, {"patches": jnp.asarray(patches)[None]}) != before, axis=-1)
    places = coords()[changed]
    assert len(places) == reached
    assert reached == 16 or {tuple(place // 2) for place in places} == {tuple(coords()[5] // 2)}


@pytest.mark.parametrize(("changes", "field"), [({"merge": 2, "window": 3}, "window"), ({"whole_layers": (1,)}, "whole_layers")])
def test_windows_that_do_not_fit_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"VisionTransformer\.{field} does not fit"):
        dataclasses.replace(TINY, **changes)
