"""Packs items into the static shape of a micro-batch, with segment ids and positions.

Places are given (they are the scheduler's first fit), so that what was costed is what runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from .samples import ArraySpec, Item

Piece = tuple[int, int]
"""(number of the sample in its global batch, number of the item in the sample)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A micro-batch as arrays, and where each item lies in it.

    Args:
        arrays: item arrays `[rows, length, ...]`, `segment_ids` int32 (0 is padding; items are numbered from 1 in each
            row), `positions` int32 (from 0 in each item), `sample_ids` uint32 (see `item_id`); all `[rows, length]`.
        starts: piece -> (first flat row, units).
    """

    arrays: Mapping[str, np.ndarray]
    starts: Mapping[Piece, tuple[int, int]]

    @property
    def size(self) -> int:
        """Units of the micro-batch, padding included."""
        return self.arrays["segment_ids"].size


def item_id(sample: int, item: int) -> int:
    """A 32-bit number for an item of a sample, so that two images of one sample draw different noise; the sample's own for its first.

    >>> item_id(7, 0), item_id(7, 1) != item_id(7, 2)
    (7, True)
    """
    # Odd and near the golden ratio of 2**32: neighbouring numbers lie far apart.
    return sample ^ (item * 0x9E3779B1 & 0xFFFFFFFF)


def pack(
    pieces: Sequence[Piece],
    items: Sequence[tuple[int, Item]],
    places: Sequence[tuple[int, int]],
    specs: Mapping[str, ArraySpec],
    shape: tuple[int, int],
) -> Packed:
    """Copies items into new arrays; what no item covers is zero.

    Args:
        pieces: which items they are, in row order.
        items: (32-bit sample number, item) of each piece.
        places: (row, offset) of each piece.
        specs: the item arrays to pack.
        shape: (rows, length) of the micro-batch.
    """
    # New arrays each time: `device_put` may alias a host buffer, so none is ever reused.
    arrays = {name: np.zeros(shape + spec.shape, spec.dtype) for name, spec in specs.items()}
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    sample_ids = np.zeros(shape, np.uint32)
    starts: dict[Piece, tuple[int, int]] = {}
    count = [0] * shape[0]
    for piece, (number, item), (row, offset) in zip(pieces, items, places, strict=True):
        span = slice(offset, offset + item.units)
        count[row] += 1
        for name in specs:
            arrays[name][row, span] = item.arrays[name]
        segments[row, span] = count[row]
        positions[row, span] = np.arange(item.units)
        sample_ids[row, span] = item_id(number, piece[1])
        starts[piece] = row * shape[1] + offset, item.units
    arrays |= {"segment_ids": segments, "positions": positions, "sample_ids": sample_ids}
    return Packed(arrays=arrays, starts=starts)
