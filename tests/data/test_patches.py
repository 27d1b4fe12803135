"""Images into patches: order, places and brightness, and the scaling of small images."""

from __future__ import annotations

import numpy as np
import pytest

from maestro_jax.data.patches import image_item, image_specs, resized


@pytest.mark.parametrize(("patch_size", "merge", "channels"), [(2, 2, 1), (1, 3, 3), (4, 1, 2)])
def test_patches_are_what_lies_at_their_places(patch_size: int, merge: int, channels: int) -> None:
    image = np.random.default_rng(0).random((24, 12, channels))
    item = image_item(image, patch_size, merge)
    assert item.units == 24 * 12 // patch_size**2
    for patch, (row, column) in zip(item.arrays["patches"], item.arrays["coords"] * patch_size, strict=True):
        pixels = image[row : row + patch_size, column : column + patch_size]
        np.testing.assert_allclose(patch, 2 * pixels.reshape(-1) - 1, rtol=1e-6, atol=1e-6)


def test_patches_of_a_block_lie_next_to_each_other() -> None:
    blocks = image_item(np.zeros((8, 12, 1)), patch_size=2, merge=2).arrays["coords"].reshape(-1, 4, 2)
    assert (blocks // 2 == blocks[:, :1] // 2).all()
    assert (blocks[:, 0] // 2).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert len({tuple(place) for place in blocks.reshape(-1, 2).tolist()}) == 24


def test_arrays_are_those_of_the_specs() -> None:
    item = image_item(np.zeros((4, 4, 3)), patch_size=2, merge=2)
    found = {name: (array.dtype.name, array.shape[1:]) for name, array in item.arrays.items()}
    assert found == {name: (spec.dtype, spec.shape) for name, spec in image_specs(2, 3).items()}


def test_scaling_keeps_brightness_and_direction() -> None:
    image = np.add.outer(np.arange(8.0), 10 * np.arange(8.0))
    large = resized(image, 12, 16)
    assert large.shape == (12, 16)
    assert large.mean() == pytest.approx(image.mean())
    assert (np.diff(large, axis=0) >= 0).all()
    assert (np.diff(large, axis=1) >= 0).all()


def test_an_image_of_the_size_stays_as_it_is() -> None:
    image = np.random.default_rng(0).random((8, 8))
    np.testing.assert_array_equal(resized(image, 8, 8), image)
