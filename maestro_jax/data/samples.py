"""What a training example is: a sample with an id, and per stream the items that sections see of it.

A *stream* is one kind of item ("text", "image", ...); a section names the stream that it reads. A sample
without items in a stream does not run in the sections that read it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

import numpy as np

from ..errors import DataError


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

    Raises:
        DataError: a stream has something else than a tuple (or a list) of items.
    """

    id: str
    items: Mapping[str, tuple[Item, ...]]

    def __post_init__(self) -> None:
        for stream, found in self.items.items():
            if not isinstance(found, tuple | list):
                raise _no_tuple(self.id, stream, found)

    def _repr_html_(self) -> str:
        from ..drawing.sample import sample_html  # here, because only notebooks draw

        return sample_html(self)

    @property
    def number(self) -> int:
        """A 32-bit number made from the id (CRC-32), the form in which ids travel on devices."""
        return zlib.crc32(self.id.encode())


def _no_tuple(sample: str, stream: str, found: object) -> DataError:
    return DataError(
        f"sample {sample!r} has no tuple of items in stream {stream!r}.",
        wanted="a tuple, also of one item: a sample may have several in a stream",
        have=type(found).__name__,
        fix=f"write items={{{stream!r}: (item,)}}",
        anchor="sample-items",
        set_by=f"the data, sample {sample!r}",
    )
