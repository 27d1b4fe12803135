"""From values to pixels, with round numbers in between."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Scale:
    """A line of pixels for values.

    Args:
        values: what has to fit; a constant still gets some room.
        start: pixel of the lowest value.
        end: pixel of the highest value.
        least: that round numbers are at least this far apart.
        parts: about how many parts the round numbers make, at most.

    >>> Scale([0.3, 9.7], 0, 100).ticks
    [2.0, 4.0, 6.0, 8.0]
    """

    def __init__(self, values: Sequence[float], start: float, end: float, least: float = 0.0, parts: int = 5) -> None:
        low, high = min(values), max(values)
        # A constant still needs some height.
        room = 0.0 if high > low else abs(high) * 0.05 or 1.0
        self._low, self._high = low - room, high + room
        self._start, self._end, self._least, self._parts = start, end, least, parts

    def place(self, value: float) -> float:
        """The pixel of a value."""
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)

    @property
    def ticks(self) -> list[float]:
        """Round numbers between the lowest and the highest value, ascending."""
        wanted = max((self._high - self._low) / self._parts, self._least)
        power = 10.0 ** math.floor(math.log10(wanted))
        width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.99 * wanted)
        first, last = math.ceil(self._low / width - 1e-9), math.floor(self._high / width + 1e-9)
        return [round(number * width, 12) for number in range(first, last + 1)]
