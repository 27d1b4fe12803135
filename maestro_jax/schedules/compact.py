"""A workload as lists of integers, for search: what thousands of trial cuts and trial runs look up.

Sections, edges, samples and items are numbered. Items of a section lie in one flat list per step, samples in the order in
which the step has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from .tasks import Piece
from .workload import EdgeWork, SampleWork, SectionWork, Workload

Getter = Callable[[Sequence[int]], tuple[int, ...]]
"""Picks the entries of a list of which a fixed list of positions is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A dependency between two sections, by number."""

    producer: int
    consumer: int
    delay: int
    fan_in: int | None
    fan_out: int | None
    paired: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepItems:
    """The items of one step. The first index of every list is the section's number.

    Args:
        samples: how many there are.
        first: per sample, the position of its first item.
        count: per sample, how many items it has.
        units: per item, its length.
        pieces: per item, its (sample id, number within the sample).
        totals: per sample, the units of its items together.
        dependent: per link, getters of the producer's and of the consumer's items that depend on each other; None: none do.
    """

    samples: int
    first: list[list[int]]
    count: list[list[int]]
    units: list[list[int]]
    pieces: list[list[Piece]]
    totals: list[list[int]]
    dependent: list[tuple[Getter, Getter] | None]


class Compact:
    """A workload, compiled for search.

    Args:
        workload: what is to be done.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.names = workload.order
        number = {name: n for n, name in enumerate(self.names)}
        self.sections: list[SectionWork] = [workload.sections[n] for n in self.names]
        self.runs_backward = [workload.runs_backward[n] for n in self.names]
        self.links = [_link(e, number) for e in workload.edges]
        self.steps = [_step_items(samples, self.names, self.links) for samples in workload.steps]
        self.has_fans = any(e.fan_in is not None or e.fan_out is not None for e in self.links)
        # Replicas are numbered over all sections; `base` is the number of a section's first one.
        self.base: list[int] = []
        self.section_of: list[int] = []
        for n, section in enumerate(self.sections):
            self.base.append(len(self.section_of))
            self.section_of += [n] * section.replicas
        self.devices = _devices(self.sections)
        everyone = [d for found in self.devices for d in found]
        self.shares_devices = len(everyone) > len(set(everyone))
        self.binding = [self._binds(n) for n in range(len(self.sections))]
        self.loads = [self._load(n) for n in range(len(self.sections))]

    def total(self, section: int, step: int) -> int:
        """Units of all items of a section in a step."""
        return sum(self.steps[step].units[section])

    def _binds(self, section: int) -> bool:
        """Whether a memory limit of a section could ever be reached."""
        work = self.sections[section]
        return work.max_bytes is not None or sum(self.total(section, t) for t in range(len(self.steps))) > work.max_inflight

    def _load(self, section: int) -> float:
        """Nanoseconds of one replica when all items of a section are spread evenly in full micro-batches."""
        work, spent = self.sections[section], 0.0
        for step in self.steps:
            units = step.units[section]
            squares = sum(u * u for u in units) / 1000
            for cost in [work.forward, work.backward][: 2 if self.runs_backward[section] else 1]:
                spent += sum(units) * (cost.per_unit + cost.fixed / work.buckets[-1]) + cost.per_unit_squared * squares
        return spent / work.replicas


def _link(edge: EdgeWork, number: dict[str, int]) -> Link:
    return Link(number[edge.producer], number[edge.consumer], edge.delay, edge.fan_in, edge.fan_out, edge.paired)


def _step_items(samples: Sequence[SampleWork], names: Sequence[str], links: Iterable[Link]) -> StepItems:
    made = StepItems(
        samples=len(samples),
        first=[[] for _ in names],
        count=[[] for _ in names],
        units=[[] for _ in names],
        pieces=[[] for _ in names],
        totals=[[] for _ in names],
        dependent=[],
    )
    for sample in samples:
        for n, name in enumerate(names):
            units = sample.items.get(name, ())
            made.first[n].append(len(made.units[n]))
            made.count[n].append(len(units))
            made.totals[n].append(sum(units))
            made.units[n].extend(units)
            made.pieces[n].extend((sample.id, i) for i in range(len(units)))
    made.dependent.extend(_dependent(made, link) for link in links)
    return made


def _dependent(step: StepItems, link: Link) -> tuple[Getter, Getter] | None:
    """Every pair of items that an edge connects, as two lists of positions of equal length."""
    produced: list[int] = []
    consumed: list[int] = []
    for sample in range(step.samples):
        n, m = step.count[link.producer][sample], step.count[link.consumer][sample]
        a, b = step.first[link.producer][sample], step.first[link.consumer][sample]
        if link.paired:
            produced += range(a, a + min(n, m))
            consumed += range(b, b + min(n, m))
        else:
            produced += [a + i for i in range(n) for _ in range(m)]
            consumed += [b + j for _ in range(n) for j in range(m)]
    return (_getter(produced), _getter(consumed)) if produced else None


def _getter(positions: list[int]) -> Getter:
    if len(positions) == 1:
        only = positions[0]
        return lambda entries: (entries[only],)
    return itemgetter(*positions)


def _devices(sections: Iterable[SectionWork]) -> list[tuple[int, ...]]:
    """Device numbers of each replica; sections with devices of their own get numbers that nobody else has."""
    found: list[tuple[int, ...]] = []
    own = -1
    for section in sections:
        for replica in range(section.replicas):
            if section.devices:
                found.append(tuple(dict.fromkeys(section.devices[replica])))
            else:
                found.append((own,))
                own -= 1
    return found
