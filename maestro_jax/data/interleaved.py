"""Text with images and clips in it: one text item whose placeholder units take rows of encoders.

An image that an encoder makes into 4 rows has 4 units in the text. Their token is `PLACEHOLDER` (or the one that a model has for images),
which only keeps the place, no loss is counted before them, and `image_rows` (or `audio_rows`) says which row each one takes, counted
through all images of the sample.

The weight of each target is in the mask of one kind, so that a loss or an accuracy about images has a denominator of its own;
`loss_mask` is the sum of the three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np

from .samples import ArraySpec, Item

Stream = Literal["image", "audio"]
Kind = Literal["image", "audio", "text"]

PLACEHOLDER = 0
"""Token of units that take a row, where no model has one of its own."""

_KINDS: tuple[Kind, ...] = ("image", "audio", "text")
_INTEGERS = ("tokens", "targets", "image_rows", "audio_rows")
_WEIGHTS = ("loss_mask", *(f"{kind}_mask" for kind in _KINDS))

INTERLEAVED_SPECS: Mapping[str, ArraySpec] = MappingProxyType(
    {**{name: ArraySpec() for name in _INTEGERS}, **{name: ArraySpec(dtype="float32") for name in _WEIGHTS}}
)
"""Arrays of a text item, each `[units]`: token ids, the token after each, the row that each takes (-1: none), and four masks."""


class Interleaved:
    """A text that is being put together.

    >>> text = Interleaved()
    >>> text.place("image", 2)
    >>> text.write([65, 66])
    >>> text.write([16, 17], "image")
    >>> {name: text.item().arrays[name].tolist() for name in ("tokens", "image_rows", "image_mask")}
    {'tokens': [0, 0, 65, 66, 16], 'image_rows': [0, 1, -1, -1, -1], 'image_mask': [0.0, 0.0, 0.0, 1.0, 1.0]}
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._counts: list[int] = []  # 0 is no loss, 1 the first kind
        self._rows: dict[Stream, list[int]] = {"image": [], "audio": []}
        self._next: dict[Stream, int] = {"image": 0, "audio": 0}

    def write(self, ids: Sequence[int], counts_for: Kind | None = None) -> None:
        """Appends tokens.

        Args:
            ids: their ids.
            counts_for: the kind of text whose loss counts them; None is no loss.
        """
        self._tokens += ids
        self._counts += [0 if counts_for is None else 1 + _KINDS.index(counts_for)] * len(ids)
        for rows in self._rows.values():
            rows += [-1] * len(ids)

    def place(self, stream: Stream, rows: int, token: int = PLACEHOLDER) -> None:
        """Appends units that take the next `rows` rows of the images, or of the clips.

        Args:
            stream: which of the two.
            rows: how many.
            token: the id that keeps their places.
        """
        self.write([token] * rows)
        first = self._next[stream]
        self._rows[stream][len(self._tokens) - rows :] = range(first, first + rows)
        self._next[stream] = first + rows

    @property
    def units(self) -> int:
        """Units of the item so far: one less than its tokens, the last of which is a target only."""
        return max(0, len(self._tokens) - 1)

    def item(self) -> Item:
        """Returns the item; its last token must take no row, and its first is no target."""
        tokens = np.array(self._tokens, np.int32)
        arrays = {"tokens": tokens[:-1], "targets": tokens[1:]}
        arrays |= {f"{stream}_rows": np.array(rows[:-1], np.int32) for stream, rows in self._rows.items()}
        counts = np.array(self._counts[1:], np.int32)
        masks = {"loss_mask": counts > 0} | {f"{kind}_mask": counts == number for number, kind in enumerate(_KINDS, start=1)}
        return Item(units=self.units, arrays={**arrays, **{name: mask.astype(np.float32) for name, mask in masks.items()}})


def plain_text(item: Item) -> Item:
    """Gives a text item of a text source the arrays that one with images has; all of its loss is that of plain text."""
    none, zero = np.broadcast_to(np.int32(-1), item.units), np.broadcast_to(np.float32(0), item.units)  # views of one number
    masks = {"image_mask": zero, "audio_mask": zero, "text_mask": item.arrays["loss_mask"]}
    return Item(units=item.units, arrays={**item.arrays, "image_rows": none, "audio_rows": none, **masks})
