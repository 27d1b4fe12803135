"""Routes: which rows of a producer micro-batch go to which rows of a consumer micro-batch.

Either items are paired in order (item n of the producer feeds item n of the consumer, unit by unit), or an item array of the consumer says
for each unit which of the sample's rows it takes, so that any image may land anywhere in the text. Several units of a producer may become
one row (a patch merger). Both ends of a route also give a hash of what their rows are (item and row in it), made from the packed arrays
themselves: a payload carries the producer's, the consumer compares it with its own, and rows that met the wrong sample are found at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from ..errors import DataError
from .packing import Packed, item_id
from .samples import Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """Rows of one payload, padded to the G rows of a slot.

    Args:
        gather: int32 `[G]`, flat row of the producer; out of range where the slot is empty.
        place: int32 `[G]`, flat row of the consumer; out of range where the slot is empty.
        rows: rows in use.
    """

    gather: np.ndarray
    place: np.ndarray
    rows: int


Wanted = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Flat unit of a consumer, sample, item of the producer and row in it, each `[n]`."""


class Wiring:
    """How the rows of one edge are numbered in the samples of a step.

    Args:
        label: names the edge in error texts.
        samples: of the step; their numbers are those of pieces.
        stream: what the producer reads.
        merge: how many units of the producer become one row.
        rows: item array of the consumer that says which row each unit takes; None pairs items in order.
        takes: what the consumer reads, for consumers that were packed without their arrays because they run in another process.
    """

    def __init__(
        self, label: str, samples: Sequence[Sample], stream: str, merge: int = 1, rows: str | None = None, takes: str | None = None
    ) -> None:
        self.label, self.merge, self.rows = label, merge, rows
        self.samples, self._stream, self._takes = samples, stream, takes
        # A consumer meets every producer of a step. Kept with its micro-batch, so that no other can have its identity.
        self._wanted: dict[int, tuple[Packed, Wanted]] = {}

    def starts(self, sample: int) -> np.ndarray:
        """The number of the first row of each item of a sample, and of the row after the last."""
        units = [item.units // self.merge for item in self.samples[sample].items.get(self._stream, ())]
        return np.cumsum([0, *units])

    def wanted(self, consumer: Packed) -> Wanted:
        """What the units of a consumer micro-batch take."""
        if id(consumer) not in self._wanted:
            self._wanted[id(consumer)] = consumer, self._find(consumer)
        return self._wanted[id(consumer)][1]

    def _find(self, consumer: Packed) -> Wanted:
        found = [self._of_piece(consumer, piece) for piece in consumer.starts] or [(np.zeros(0, np.int64),) * 4]
        units, samples, items, rows = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return units, samples, items, rows

    def _of_piece(self, consumer: Packed, piece: tuple[int, int]) -> tuple[np.ndarray, ...]:
        start, units = consumer.starts[piece]
        if self.rows is None:
            own = np.arange(units)
            return start + own, np.full(units, piece[0]), np.full(units, piece[1]), own
        pointers = self._pointers(consumer, piece, start, units)
        used = np.nonzero(pointers >= 0)[0]
        starts = self.starts(piece[0])
        items = np.searchsorted(starts, pointers[used], side="right") - 1
        return start + used, np.full(len(used), piece[0]), items, pointers[used] - starts[items]

    def _pointers(self, consumer: Packed, piece: tuple[int, int], start: int, units: int) -> np.ndarray:
        if self.rows is None:
            raise RuntimeError("paired items have no pointers")
        if self.rows in consumer.arrays:
            return consumer.arrays[self.rows].reshape(-1)[start : start + units]
        # A sample of which nothing was read here takes nothing from here: rows do not cross samples.
        found = self.samples[piece[0]].items[self._takes or ""][piece[1]].arrays
        return found[self.rows] if self.rows in found else np.full(units, -1, np.int32)


def route(producer: Packed, consumer: Packed, slot_rows: int, wiring: Wiring) -> Route | None:
    """Pairs the rows of two micro-batches.

    Args:
        producer: micro-batch whose output rows are sent.
        consumer: micro-batch that takes them.
        slot_rows: G.
        wiring: which rows are wanted where.

    Returns:
        The route, or None when no row of the producer is wanted.

    Raises:
        DataError: when paired items do not have equal units at both ends.
    """
    units, samples, items, rows = wiring.wanted(consumer)
    first = {piece: start // wiring.merge for piece, (start, _) in producer.starts.items()}
    here = np.array([first.get(piece, -1) for piece in zip(samples.tolist(), items.tolist(), strict=True)], np.int64)
    if wiring.rows is None:
        _check_equal(producer, consumer, wiring)
    kept = here >= 0
    count = int(kept.sum())
    if not count:
        return None
    gather = np.full(slot_rows, producer.size // wiring.merge, np.int32)
    place = np.full(slot_rows, consumer.size, np.int32)
    gather[:count], place[:count] = here[kept] + rows[kept], units[kept]
    return Route(gather=gather, place=place, rows=count)


def sent(wiring: Wiring, step: int, producer: Packed, gather: np.ndarray) -> str:
    """Hashes what the rows of a payload are, as their producer packed them.

    Args:
        wiring: of the edge.
        step: global step.
        producer: the micro-batch that sends them.
        gather: flat rows in slot order; rows out of range are empty and do not count.
    """
    units = gather[gather < producer.size // wiring.merge] * wiring.merge
    ids, positions = (producer.arrays[name].reshape(-1)[units] for name in ("sample_ids", "positions"))
    return _hash(wiring.label, step, ids, positions // wiring.merge)


def expected(wiring: Wiring, step: int, consumer: Packed, place: np.ndarray) -> str:
    """Hashes what the rows of a payload must be, as their consumer takes them (see `sent`)."""
    places = place[place < consumer.size]
    units, samples, items, rows = wiring.wanted(consumer)
    order = np.argsort(units)
    # Where a unit stands among those that take a row; one that takes none can match nothing.
    at = np.minimum(np.searchsorted(units[order], places), max(len(units) - 1, 0))
    chosen = order[at] if len(units) else np.zeros(0, np.int64)
    numbers = [wiring.samples[s].number for s in samples[chosen].tolist()]
    ids = np.array([item_id(number, item) for number, item in zip(numbers, items[chosen].tolist(), strict=True)], np.uint32)
    return _hash(wiring.label, step, ids, rows[chosen])


def _hash(label: str, step: int, ids: np.ndarray, rows: np.ndarray) -> str:
    digest = hashlib.blake2b(f"{label} {step} {len(ids)} ".encode(), digest_size=8)
    digest.update(ids.astype(np.uint32).tobytes())
    digest.update(rows.astype(np.int32).tobytes())
    return digest.hexdigest()


def _check_equal(producer: Packed, consumer: Packed, wiring: Wiring) -> None:
    for piece in producer.starts.keys() & consumer.starts.keys():
        have, want = producer.starts[piece][1], consumer.starts[piece][1]
        if have != want:
            sample = wiring.samples[piece[0]].id
            raise DataError(
                f"sample {sample!r} cannot cross edge {wiring.label}.",
                wanted="items of equal units at both ends",
                have=f"{have} units at the producer and {want} at the consumer",
                fix="let both sections read the same stream, or give both streams items of equal length",
                anchor="route-units",
                set_by=f"the data of sample {sample!r}",
            )
