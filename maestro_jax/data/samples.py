"""What a training example is: a sample with an id, and per stream the items that sections see of it.

A *stream* is one kind of item ("text", "image", ...); a section names the stream that it reads. A sample
without items in a stream does not run in the sections that read it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Shape and dtype of one array of an item, without its leading unit dimension.

    Args:
        shape: trailing dimensions; `()` for one number a unit, such as a token id.
        dtype: name of a numpy dtype.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "int32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A piece of a sample that a section processes as a whole.

    Args:
        units: length in tokens, patches or frames; at least 1.
        arrays: each `[units, ...]`, one row a unit.
    """

    units: int
    arrays: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One training example.

    Args:
        id: unique and stable name, for example `"topics/assert:2"`; dropout and error texts depend on it.
        items: per stream, the items in order.
    """

    id: str
    items: Mapping[str, tuple[Item, ...]]

    @property
    def number(self) -> int:
        """A 32-bit number made from the id (CRC-32), the form in which ids travel on devices."""
        return zlib.crc32(self.id.encode())
