"""How the samples of a step lie in the arrays of one program over all cores, whose shapes are static and equal on each core."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from maestro_jax.data import Item, Packed, Sample, pack, route
from maestro_jax.data.routes import Wiring
from maestro_jax.graph import SectionGraph
from maestro_jax.graph.shapes import Specs
from maestro_jax.schedules import place

Kind = Literal["packed", "largest", "slots"]
Places = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How images lie in rows; text is packed always.

    Args:
        kind: "packed" puts several into a row, "largest" gives each a row of the size of the largest, "slots" gives besides each sample
            as many of these rows as the sample with most images has.
        padded: the stream that this is about; others are packed.
        most: items that a sample may have in that stream.
        row: units of a row.
    """

    kind: Kind
    padded: str = "image"
    most: int = 1
    row: int

    def places(self, stream: str, samples: Sequence[Sample]) -> tuple[Places, int]:
        """Returns (row, offset) of each item of the samples, and how many rows they take."""
        items = [(n, k, item) for n, sample in enumerate(samples) for k, item in enumerate(sample.items.get(stream, ()))]
        if stream != self.padded or self.kind == "packed":
            return self._packed([item.units for _, _, item in items])
        if self.kind == "largest":
            return [(n, 0) for n in range(len(items))], len(items)
        return [(n * self.most + k, 0) for n, k, _ in items], len(samples) * self.most

    def _packed(self, units: Sequence[int]) -> tuple[Places, int]:
        rows = -(-sum(units) // self.row)
        while (found := place(units, rows * self.row, self.row)) is None:
            rows += 1
        return found, rows

    def load(self, stream: str, sample: Sample) -> int:
        """Units that a sample takes in a stream, those rows that it has for itself as a whole."""
        items = sample.items.get(stream, ())
        if stream != self.padded or self.kind == "packed":
            return sum(item.units for item in items)
        return self.row * (self.most if self.kind == "slots" else len(items))


def balanced(samples: Sequence[Sample], layout: Layout, streams: Sequence[str], bins: int) -> list[list[Sample]]:
    """Spreads samples over bins, the largest first, each into the bin whose fuller stream is then least full.

    Shapes are static, so the stream that is fullest in any bin decides how long all cores compute: balance of each stream counts.
    """
    totals = {stream: max(1, sum(layout.load(stream, sample) for sample in samples)) for stream in streams}

    def shares(sample: Sample) -> np.ndarray:
        return np.array([layout.load(stream, sample) / totals[stream] for stream in streams])

    loads, found = np.zeros((bins, len(streams))), [[] for _ in range(bins)]
    for sample in sorted(samples, key=lambda sample: (-shares(sample).sum(), sample.id)):
        fullest = (loads + shares(sample)).max(axis=1)
        # Of equal ones, the bin that is least full in all.
        chosen = min(range(bins), key=lambda n: (round(fullest[n], 9), loads[n].sum(), n))
        loads[chosen] += shares(sample)
        found[chosen].append(sample)
    return found


def batch_arrays(
    graph: SectionGraph, specs: Specs, merges: Mapping[str, int], layout: Layout, bins: Sequence[Sequence[Sample]]
) -> dict[str, dict[str, np.ndarray]]:
    """Makes the arrays of all bins, one after the other along a new first axis.

    Args:
        graph: the sections.
        specs: stream -> array name -> spec.
        merges: edge label -> units of the producer that become one row.
        layout: how items lie in rows.
        bins: samples of each.

    Returns:
        Section -> name -> `[bins, rows, length, ...]`: what its module reads, and for each edge into it, under the edge's label, the flat
        row of the producer's output that each unit takes, out of range where it takes none.
    """
    streams = list(dict.fromkeys(section.reads for section in graph.sections))
    places = [{stream: layout.places(stream, samples) for stream in streams} for samples in bins]
    rows = {stream: max(1, *(each[stream][1] for each in places)) for stream in streams}
    found: list[dict[str, dict[str, np.ndarray]]] = []
    for samples, each in zip(bins, places, strict=True):
        packed = {stream: _pack(stream, samples, each[stream][0], specs, (rows[stream], layout.row)) for stream in streams}
        found.append({section.name: dict(packed[section.reads].arrays) for section in graph.sections})
        for edge in graph.edges:
            producer, consumer = (graph[name].reads for name in (edge.producer, edge.consumer))
            wiring = Wiring(edge.label, samples, producer, merges[edge.label], edge.rows)
            found[-1][edge.consumer][edge.label] = _taken(packed[producer], packed[consumer], wiring)
    return {name: {key: np.stack([each[name][key] for each in found]) for key in found[0][name]} for name in found[0]}


def _pack(stream: str, samples: Sequence[Sample], places: Places, specs: Specs, shape: tuple[int, int]) -> Packed:
    pieces = [(n, k) for n, sample in enumerate(samples) for k in range(len(sample.items.get(stream, ())))]
    items: list[tuple[int, Item]] = [(samples[n].number, samples[n].items[stream][k]) for n, k in pieces]
    return pack(pieces, items, places, specs[stream], shape)


def _taken(producer: Packed, consumer: Packed, wiring: Wiring) -> np.ndarray:
    """For each unit of a consumer the flat row that it takes."""
    taken = np.full(consumer.size, producer.size, np.int32)
    found: Any = route(producer, consumer, consumer.size, wiring)
    if found is not None:
        taken[found.place[: found.rows]] = found.gather[: found.rows]
    return taken.reshape(consumer.arrays["segment_ids"].shape)
