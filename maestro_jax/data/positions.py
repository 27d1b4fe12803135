"""Positions of text and images in time, height and width, for rotary embeddings of three axes.

Text counts on in all three axes at once. An image at position p lies at p in time, at p + row and p + column in height and width, and
what follows it goes on behind the longer of its sides (multimodal RoPE: P. Wang et al., "Qwen2-VL", arXiv 2409.12191, section 2.1; as
`get_rope_index` of transformers' Qwen2.5-VL).

Dimensions: U units of a text, R rows that an image takes in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .patches import patch_places


def rope_positions(image_rows_U: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """Numbers the units of a text.

    Args:
        image_rows_U: which row of the images each unit takes, counted through all of them in order; -1 is text.
        grids: height and width of each image in rows that it takes, R of them together.

    Returns:
        int32 [U, 3]: time, height, width.

    >>> rope_positions(np.array([-1, 0, 1, 2, 3, 4, 5, -1, -1]), [(2, 3)]).T.tolist()
    [[0, 1, 1, 1, 1, 1, 1, 4, 5], [0, 1, 1, 1, 2, 2, 2, 4, 5], [0, 1, 2, 3, 1, 2, 3, 4, 5]]
    """
    placed = np.flatnonzero(image_rows_U >= 0)
    steps_U = (image_rows_U < 0).astype(np.int32)
    # An image is left behind at its last unit, all at once.
    steps_U[placed[np.cumsum([height * width for height, width in grids], dtype=np.int64) - 1]] = [max(grid) for grid in grids]
    positions_U3 = np.repeat((np.cumsum(steps_U, dtype=np.int32) - steps_U)[:, None], 3, axis=1)
    if grids:
        positions_U3[placed, 1:] += np.concatenate([patch_places(height, width, 1) for height, width in grids])
    return positions_U3
