"""Images into patches, the units of a vision encoder.

Patches come in blocks of `merge` x `merge`, row by row inside a block and from block to block, so that the units which become one row
of the encoder's output lie next to each other. Where a patch lies is in `coords`; an image of any height and width that the blocks
divide makes one item.

Dimensions: H height and W width in pixels, C channels, N patches, P numbers of a patch (its pixels row by row, channels last).
"""

from __future__ import annotations

import functools

import numpy as np

from .samples import ArraySpec, Item


def image_specs(patch_size: int, channels: int) -> dict[str, ArraySpec]:
    """Returns the arrays of an item that `image_item` makes: "patches" float32 [N, P], "coords" int32 [N, 2]."""
    return {"patches": ArraySpec(shape=(patch_size**2 * channels,), dtype="float32"), "coords": ArraySpec(shape=(2,))}


def image_item(image_HWC: np.ndarray, patch_size: int, merge: int) -> Item:
    """Cuts an image into patches.

    Args:
        image_HWC: brightness from 0 to 1, float; H and W are multiples of patch_size * merge.
        patch_size: pixels along a side of a patch.
        merge: patches along a side of a block.

    Returns:
        "patches": brightness from -1 to 1; "coords": row and column of each patch in its image, from 0.

    >>> item = image_item(np.arange(16).reshape(4, 4, 1) / 15, patch_size=1, merge=2)
    >>> item.arrays["coords"][:5].tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]
    >>> (item.arrays["patches"][:, 0] * 7.5 + 7.5).round().astype(int).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    """
    height, width, channels = image_HWC.shape
    rows, columns = height // patch_size, width // patch_size
    patches = image_HWC.reshape(rows, patch_size, columns, patch_size, channels).swapaxes(1, 2)
    numbers_NP = _in_blocks(patches.reshape(rows, columns, -1), merge)
    arrays = {"patches": (2 * numbers_NP - 1).astype(np.float32), "coords": patch_places(rows, columns, merge)}
    return Item(units=rows * columns, arrays=arrays)


@functools.lru_cache
def patch_places(rows: int, columns: int, merge: int) -> np.ndarray:
    """Returns row and column of each patch of an image, in the order of patches.

    Args:
        rows: of patches, a multiple of merge.
        columns: of patches, a multiple of merge.
        merge: patches along a side of a block.

    Returns:
        int32 [rows * columns, 2]; read-only, since images share it.
    """
    places_N2 = _in_blocks(np.moveaxis(np.indices((rows, columns), np.int32), 0, -1), merge)
    places_N2.flags.writeable = False
    return places_N2


def resized(image_HW: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scales a small image by linear interpolation between the centres of its pixels, without smoothing; one of that size stays as it is.

    >>> resized(np.array([[0.0, 1.0]]), 1, 4).tolist()
    [[0.0, 0.25, 0.75, 1.0]]
    """
    return _weights(image_HW.shape[0], height) @ image_HW @ _weights(image_HW.shape[1], width).T


def _in_blocks(grid: np.ndarray, merge: int) -> np.ndarray:
    """[rows, columns, d] -> [rows * columns, d], block by block."""
    rows, columns, numbers = grid.shape
    return grid.reshape(rows // merge, merge, columns // merge, merge, numbers).swapaxes(1, 2).reshape(-1, numbers)


@functools.lru_cache
def _weights(old: int, new: int) -> np.ndarray:
    """[new, old]: what each new pixel takes of the old ones; each row sums to 1."""
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.clip(1 - np.abs(places[:, None] - np.arange(old)), 0, 1)
