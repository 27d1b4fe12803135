"""Cuts the samples of a step into micro-batches, in the order given, for all sections together.

Samples are taken one by one. Each section has one open micro-batch that is filled up to its largest bucket and then
closed. Fan limits are kept by closing early: a new producer micro-batch has fed no consumer yet and a new consumer
micro-batch has been fed by no producer. With new ones everywhere a sample is cut as if it were alone, so the cut never
gets stuck unless a single sample needs more than the limits allow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable

from ..errors import ScheduleError
from .placement import place, smallest_bucket
from .tasks import Piece, Task
from .workload import EdgeWork, SampleWork, SectionWork, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Items that one program call processes.

    Args:
        section: name of the section.
        step: number of the step.
        number: position among the section's micro-batches of the whole workload, from 0.
        bucket: static size in units.
        items: pieces in row order.
        units: length of each item.
    """

    section: str
    step: int
    number: int
    bucket: int
    items: tuple[Piece, ...]
    units: tuple[int, ...]


@dataclasses.dataclass
class _Open:
    """Micro-batches of one section while they are being filled; the last one is open."""

    section: SectionWork
    closed: list[list[tuple[Piece, int]]] = dataclasses.field(default_factory=list)
    current: list[tuple[Piece, int]] = dataclasses.field(default_factory=list)

    def extended(self, pieces: list[tuple[Piece, int]], start_new: bool) -> tuple[_Open, list[int]]:
        """Returns a copy with the pieces added, and for each the number of the micro-batch that it landed in."""
        copy = _Open(self.section, list(self.closed), list(self.current))
        if start_new:
            copy.close()
        used = []
        for piece in pieces:
            section, units = self.section, [u for _, u in [*copy.current, piece]]
            if place(units, section.buckets[-1], section.row_length, section.packed) is None:
                copy.close()
            copy.current.append(piece)
            used.append(len(copy.closed))
        return copy, used

    def close(self) -> None:
        if self.current:
            self.closed.append(self.current)
            self.current = []


class _Fans:
    """Which producer micro-batches feed which consumer micro-batches, per edge."""

    def __init__(self, workload: Workload) -> None:
        self.edges = workload.edges
        self.pairs: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)

    def sections_over_limit(self, used: dict[str, list[int]]) -> set[str]:
        """Sections that should open a new micro-batch so that the sample breaks no fan limit."""
        crowded = set()
        for edge in self.edges:
            pairs = self.pairs[edge.producer, edge.consumer] | self._new(edge, used)
            for p in used.get(edge.producer, ()):
                if edge.fan_out is not None and len({c for q, c in pairs if q == p}) > edge.fan_out:
                    crowded.add(edge.producer)
            for c in used.get(edge.consumer, ()):
                if edge.fan_in is not None and len({p for p, d in pairs if d == c}) > edge.fan_in:
                    crowded.add(edge.consumer)
        return crowded

    def add(self, used: dict[str, list[int]]) -> None:
        for edge in self.edges:
            self.pairs[edge.producer, edge.consumer] |= self._new(edge, used)

    @staticmethod
    def _new(edge: EdgeWork, used: dict[str, list[int]]) -> set[tuple[int, int]]:
        produced, consumed = used.get(edge.producer, []), used.get(edge.consumer, [])
        return set(zip(produced, consumed, strict=False)) if edge.paired else set(itertools.product(produced, consumed))


def cut(workload: Workload, aligned: bool = False, alone: bool = False) -> list[Microbatch]:
    """Cuts every step in arrival order, filling the largest bucket greedily and then taking the smallest that holds the items.

    Args:
        workload: what is to be done.
        aligned: close the micro-batches of all sections together, so that those of one group of samples need no others: any
            limit that holds one group keeps a schedule going.
        alone: put no two samples into one micro-batch.

    Returns:
        Micro-batches, by step, then section (producers first), then arrival.

    Raises:
        ScheduleError: when one sample alone needs more micro-batches than an edge's fan limits allow.
    """
    made: list[Microbatch] = []
    counts = dict.fromkeys(workload.order, 0)
    for step, samples in enumerate(workload.steps):
        open_by_section = _cut_step(workload, samples, aligned, alone)
        for name in workload.order:
            for filled in open_by_section[name].closed:
                made.append(_finished(workload, name, step, counts[name], filled))
                counts[name] += 1
    return made


def microbatches_of(workload: Workload, tasks: Iterable[Task]) -> list[Microbatch]:
    """The micro-batches that a schedule runs, in its order of forwards."""
    units = {sample.id: sample.items for step in workload.steps for sample in step}
    counts: dict[str, int] = defaultdict(int)
    found = []
    for task in tasks:
        if task.kind in ("forward", "forward_backward"):
            sizes = tuple(units[s][task.section][n] for s, n in task.items)
            number = counts[task.section]
            counts[task.section] += 1
            found.append(Microbatch(section=task.section, step=task.step, number=number, bucket=task.bucket, items=task.items, units=sizes))
    return found


def _cut_step(workload: Workload, samples: Iterable[SampleWork], aligned: bool, alone: bool) -> dict[str, _Open]:
    state = {name: _Open(workload.sections[name]) for name in workload.order}
    fans = _Fans(workload)
    for sample in samples:
        forced: set[str] = set()
        if alone:
            for section in state.values():
                section.close()
        while True:
            trial, used = {}, {}
            for name, units in sample.items.items():
                pieces = [((sample.id, n), u) for n, u in enumerate(units)]
                trial[name], used[name] = state[name].extended(pieces, name in forced)
            crowded = fans.sections_over_limit(used)
            if aligned and not forced and any(len(trial[name].closed) > len(state[name].closed) for name in trial):
                forced = set(state)
                for section in state.values():
                    section.close()
                continue
            if not crowded:
                break
            if forced >= sample.items.keys():
                raise _too_wide(sample, crowded)
            # Where a crowded section has a new micro-batch already, the other end of the edge may need one: its open
            # micro-batch takes the first items of the sample and leaves the rest to another.
            forced |= set(sample.items) if crowded <= forced else crowded
        fans.add(used)
        state.update(trial)
    for section in state.values():
        section.close()
    return state


def _finished(workload: Workload, name: str, step: int, number: int, filled: list[tuple[Piece, int]]) -> Microbatch:
    section = workload.sections[name]
    units = [u for _, u in filled]
    bucket = smallest_bucket(units, section.buckets, section.row_length, section.packed)
    if bucket is None:
        raise RuntimeError(f"a micro-batch of {name!r} was filled beyond its largest bucket: {units}")
    return Microbatch(section=name, step=step, number=number, bucket=bucket, items=tuple(p for p, _ in filled), units=tuple(units))


def _too_wide(sample: SampleWork, crowded: set[str]) -> ScheduleError:
    return ScheduleError(
        f"sample {sample.id} cannot be cut within the fan limits of {sorted(crowded)}.",
        wanted="a sample whose items lie in no more micro-batches than fan_in and fan_out allow",
        have=f"items {dict(sample.items)}",
        fix="raise fan_in or fan_out of the edge, or use larger micro-batches",
        anchor="fan-limit",
        set_by="the workload",
    )
