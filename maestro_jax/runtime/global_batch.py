"""The samples of a step as every process knows them: in full where they are read, elsewhere by id, lengths and counts.

A schedule needs lengths alone, and a loss divides by counts over the whole batch. So each process reads its share of a batch and tells
the others what they need to know of it in one small exchange; the arrays of a sample are read where a section runs on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ..data import Item, Sample
from ..data.dataset import refuse_repeated_ids
from ..errors import DataError, error_of
from ..graph.shapes import Specs
from .check_sample import check_sample
from .plan import Plan

Counts = dict[tuple[str, str], float]
"""(section, objective) -> what it counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The samples of a step.

    Args:
        samples: in arrival order; items of samples that were not read here have lengths and no arrays.
        counts: denominators over all of them.
        read: returns a sample, by its number, with its arrays.
    """

    samples: Sequence[Sample]
    counts: Counts
    read: Callable[[int], Sample]


def whole_batch(plan: Plan, specs: Specs, samples: Sequence[Sample]) -> GlobalBatch:
    """A batch of samples that are all here.

    Args:
        plan: where sections run.
        specs: stream -> array name -> spec, from the data set.
        samples: in arrival order.

    Raises:
        DataError: a sample that the plan cannot process.
    """
    for sample in samples:
        check_sample(plan, specs, sample)
    return GlobalBatch(samples=samples, counts=_total(plan, [counts_of(plan, sample) for sample in samples]), read=samples.__getitem__)


def counts_of(plan: Plan, sample: Sample) -> list[float]:
    """What each objective counts in a sample, in the order of `objectives_of`."""
    found = []
    for name, key in objectives_of(plan):
        section = plan.sections[name].section
        found.append(float(sum(section.objectives[key].count_of(item) for item in sample.items.get(section.reads, ()))))
    return found


def objectives_of(plan: Plan) -> list[tuple[str, str]]:
    """(section, objective) of all sections, in the order of the plan."""
    return [(name, key) for name, section in plan.sections.items() for key in section.section.objectives]


def _total(plan: Plan, counts: Sequence[Sequence[float]]) -> Counts:
    return {key: sum(of_sample[n] for of_sample in counts) for n, key in enumerate(objectives_of(plan))}


class BadSample(NamedTuple):
    """A sample that cannot be used.

    Args:
        error: why.
        streams: those that it has items of; none where it could not be read.
    """

    error: DataError
    streams: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Known:
    """A sample that the plan can process, and its counts."""

    sample: Sample
    counts: list[float]


class Reader:
    """Reads the samples of steps, each process its share.

    Args:
        plan: where sections run.
        specs: stream -> array name -> spec, from the data set.
        skip: leave bad samples out, instead of raising the error of the first one.
    """

    def __init__(self, plan: Plan, specs: Specs, *, skip: bool) -> None:
        self.plan, self.specs, self.skip = plan, specs, skip

    def read(self, source: Sequence[Sample], steps: Sequence[Sequence[int]], channel: str) -> list[tuple[GlobalBatch, list[BadSample]]]:
        """Reads steps; every process calls this for the same ones, in one order on a channel.

        Args:
            source: the samples of a data set.
            steps: places in it of each step's samples.
            channel: of the exchange.

        Returns:
            For each step, the samples that can be used, and the others with their errors.

        Raises:
            DataError: two samples of a step have one id, or one is bad and they are not to be skipped.
        """
        group = self.plan.group
        shares = [{n: self._one(source, place) for n, place in enumerate(step) if n % group.count == group.index} for step in steps]
        if group.count > 1:
            told = group.all_gather(channel, [{str(n): _told(known) for n, known in share.items()} for share in shares])
            others = [{int(n): _heard(known) for part in told for n, known in part[step].items()} for step in range(len(steps))]
            shares = [{**heard, **share} for heard, share in zip(others, shares, strict=True)]
        return [self._step(source, places, share) for places, share in zip(steps, shares, strict=True)]

    def _one(self, source: Sequence[Sample], place: int) -> _Known | BadSample:
        sample = None
        try:
            sample = source[place]
            check_sample(self.plan, self.specs, sample)
        except DataError as error:
            return BadSample(error, tuple(sample.items) if sample is not None else ())
        return _Known(sample, counts_of(self.plan, sample))

    def _step(
        self, source: Sequence[Sample], places: Sequence[int], found: Mapping[int, _Known | BadSample]
    ) -> tuple[GlobalBatch, list[BadSample]]:
        order = [found[n] for n in range(len(places))]
        bad = [sample for sample in order if isinstance(sample, BadSample)]
        if bad and not self.skip:
            raise bad[0].error
        good = [(place, known) for place, known in zip(places, order, strict=True) if isinstance(known, _Known)]
        samples = [known.sample for _, known in good]
        refuse_repeated_ids(samples, "a batch")

        def read(number: int) -> Sample:
            here = all(item.arrays for items in samples[number].items.values() for item in items)
            return samples[number] if here else source[good[number][0]]

        return GlobalBatch(samples=samples, counts=_total(self.plan, [known.counts for _, known in good]), read=read), bad


def _told(known: _Known | BadSample) -> dict[str, Any]:
    """What others need to know of a sample, as JSON."""
    if isinstance(known, BadSample):
        return {"error": known.error.to_json(), "streams": known.streams}
    units = {stream: [item.units for item in items] for stream, items in known.sample.items.items()}
    return {"id": known.sample.id, "units": units, "counts": known.counts}


def _heard(told: Mapping[str, Any]) -> _Known | BadSample:
    if "error" in told:
        return BadSample(cast(DataError, error_of(told["error"])), tuple(told["streams"]))
    items = {stream: tuple(Item(units=units, arrays={}) for units in lengths) for stream, lengths in told["units"].items()}
    return _Known(Sample(id=told["id"], items=items), told["counts"])
