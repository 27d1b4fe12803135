"""Where items lie in a micro-batch: first fit into rows, in the order given.

First fit is online (an item's place does not depend on later items), so a micro-batch that is filled item by item
keeps its places, and the same rows serve whichever bucket of the ladder is chosen in the end.
"""

from __future__ import annotations

from collections.abc import Iterable


def place(units: Iterable[int], bucket: int, row_length: int | None = None, packed: bool = True) -> list[tuple[int, int]] | None:
    """Places items into the rows of a micro-batch.

    Args:
        units: length of each item.
        bucket: size of the micro-batch in units.
        row_length: units a row; None makes the micro-batch one row.
        packed: whether items share rows; where not, each has a row of its own.

    Returns:
        (row, offset in units) of each item, or None when they do not fit.

    >>> place([3, 4, 1], bucket=8, row_length=4)
    [(0, 0), (1, 0), (0, 3)]
    >>> place([3, 3, 3], bucket=8, row_length=4) is None
    True
    >>> place([3, 1], bucket=8, row_length=4, packed=False)
    [(0, 0), (1, 0)]
    """
    length = row_length or bucket
    filled = [0] * (bucket // length)
    places = []
    for size in units:
        row = next((r for r, used in enumerate(filled) if used + size <= length and (packed or not used)), None)
        if row is None:
            return None
        places.append((row, filled[row]))
        filled[row] += size
    return places


def in_turn(units: Iterable[int], bucket: int, row_length: int | None = None, packed: bool = True) -> list[int]:
    """Fills micro-batches one after the other, and returns the number of the one that each item lies in.

    >>> in_turn([3, 4, 3, 1], bucket=8, row_length=4)
    [0, 0, 1, 1]
    """
    numbers: list[int] = []
    current: list[int] = []
    for size in units:
        if current and place([*current, size], bucket, row_length, packed) is None:
            current = []
        numbers.append(numbers[-1] + (not current) if numbers else 0)
        current.append(size)
    return numbers


def smallest_bucket(units: list[int], buckets: Iterable[int], row_length: int | None = None, packed: bool = True) -> int | None:
    """Returns the first bucket of an ascending ladder that holds the items, or None.

    >>> smallest_bucket([100, 30], [64, 128, 256])
    256
    """
    return next((b for b in buckets if place(units, b, row_length, packed) is not None), None)
