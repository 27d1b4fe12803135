"""Routes: which rows of a producer micro-batch go to which rows of a consumer micro-batch.

Items of a sample are paired in order: item n of the producer feeds item n of the consumer, unit by unit. Both sides of
a route also give a hash of what their rows are (sample, item, position), made from the packed arrays themselves: a payload
carries the producer's, the consumer compares it with its own, and rows that met the wrong sample are found at once.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from ..errors import DataError
from .packing import Packed


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


def route(producer: Packed, consumer: Packed, slot_rows: int, label: str, sample_names: dict[int, str]) -> Route | None:
    """Pairs the rows of two micro-batches.

    Args:
        producer: micro-batch whose output rows are sent.
        consumer: micro-batch that takes them.
        slot_rows: G.
        label: names the edge in error texts.
        sample_names: number of a sample in its batch -> id, for error texts.

    Returns:
        The route, or None when the two share no sample.

    Raises:
        DataError: when a sample's items do not have equal units at both ends.
    """
    shared = [piece for piece in producer.starts if piece in consumer.starts]
    if not shared:
        return None
    gather = np.full(slot_rows, _size(producer), np.int32)
    place = np.full(slot_rows, _size(consumer), np.int32)
    used = 0
    for piece in shared:
        (source, have), (target, want) = producer.starts[piece], consumer.starts[piece]
        if have != want:
            raise _unequal(label, sample_names.get(piece[0], str(piece[0])), have, want)
        gather[used : used + have] = np.arange(source, source + have)
        place[used : used + have] = np.arange(target, target + have)
        used += have
    return Route(gather=gather, place=place, rows=used)


def pairing(label: str, step: int, packed: Packed, rows: np.ndarray) -> str:
    """Hashes what the rows of a payload are, as one end of the edge sees them.

    Args:
        label: of the edge.
        step: global step.
        packed: micro-batch at this end.
        rows: flat rows at this end in slot order; rows out of range are empty and do not count.
    """
    rows = rows[rows < _size(packed)]
    digest = hashlib.blake2b(f"{label} {step} {len(rows)} ".encode(), digest_size=8)
    for values in (packed.arrays["sample_ids"], packed.item_numbers, packed.arrays["positions"]):
        digest.update(values.reshape(-1)[rows].tobytes())
    return digest.hexdigest()


def _size(packed: Packed) -> int:
    return packed.arrays["segment_ids"].size


def _unequal(label: str, sample: str, have: int, want: int) -> DataError:
    return DataError(
        f"sample {sample!r} cannot cross edge {label}.",
        wanted="items of equal units at both ends",
        have=f"{have} units at the producer and {want} at the consumer",
        fix="let both sections read the same stream, or give both streams items of equal length",
        anchor="route-units",
        set_by=f"the data of sample {sample!r}",
    )
