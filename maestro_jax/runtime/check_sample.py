"""Refuses samples that a plan cannot process, before anything of a step has been issued."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ..data import ArraySpec, Item, Sample
from ..errors import DataError, set_by
from ..graph.shapes import Specs
from ..schedules.placement import in_turn
from .plan import EdgePlan, Plan


def check_sample(plan: Plan, specs: Specs, sample: Sample) -> None:
    """Checks the items of a sample against sections, edges and the declared arrays.

    Args:
        plan: where sections run, and in which micro-batches.
        specs: stream -> array name -> spec, from the data set.
        sample: the sample.

    Raises:
        DataError: an item that no micro-batch of a section can hold, arrays that are not those of the data set's specs,
            numbers of items that differ at the two ends of an edge, or items in more micro-batches than its fans allow.
    """
    for section in (s.section for s in plan.sections.values()):
        for number, item in enumerate(sample.items.get(section.reads, ())):
            if not 1 <= item.units <= section.largest_item:
                raise _wrong_length(sample, item, section.name, section.largest_item)
            _check_arrays(sample, f"item {number} of stream {section.reads!r}", item, specs[section.reads])
    for edge in plan.graph.edges:
        ends = [sample.items.get(plan.graph[name].reads, ()) for name in (edge.producer, edge.consumer)]
        units = [[item.units for item in items] for items in ends]
        if edge.rows is not None:
            _check_taken(sample, edge.label, edge.rows, ends[1], plan.edges[edge.label].merge, units[0])
        elif all(ends) and units[0] != units[1]:
            raise DataError(
                f"sample {sample.id!r} cannot cross edge {edge.label}.",
                wanted="the same numbers of units in the same order at both ends: items are paired",
                have=f"items of {units[0]} units at the producer and of {units[1]} at the consumer",
                fix="let both sections read the same stream, or give both streams items of equal lengths",
                anchor="route-units",
                set_by=f"the data, sample {sample.id!r}",
            )
    for edge in plan.edges.values():
        _check_fans(plan, edge, sample)


def _check_fans(plan: Plan, edge: EdgePlan, sample: Sample) -> None:
    """A sample that breaks a limit when it is cut alone breaks it in every batch."""
    ends = edge.edge.producer, edge.edge.consumer
    sections = [plan.graph[name] for name in ends]
    units = [[item.units for item in sample.items.get(section.reads, ())] for section in sections]
    made, taken = (
        in_turn(each, section.buckets[-1], section.row_length, section.packed) for each, section in zip(units, sections, strict=True)
    )
    # As in the workload: several edges between two sections are one dependency.
    paired = all(e.edge.rows is None for e in plan.edges.values() if (e.edge.producer, e.edge.consumer) == ends)
    pairs = set(zip(made, taken, strict=False) if paired else itertools.product(made, taken))
    for own, field, limit in ((0, "fan_out", edge.fan_out), (1, "fan_in", edge.fan_in)):
        most = max(collections.Counter(pair[own] for pair in pairs).values(), default=0)
        if most > limit:
            section, other = sections[own], sections[1 - own]
            raise DataError(
                f"sample {sample.id!r} cannot cross edge {edge.edge.label} within {field} of section {section.name!r}.",
                wanted=f"items in at most {limit} micro-batches of section {other.name!r} for each one of section {section.name!r}",
                have=f"{most}, of items of {units[1 - own]} units in micro-batches of at most {other.buckets[-1]}",
                fix=f"raise {field} of section {section.name!r} to {most}, or microbatch of section {other.name!r}; or set "
                "train.on_bad_sample to 'skip'",
                anchor="fan-limit",
                set_by=set_by(section, field) if getattr(section, field) else set_by(other, "microbatch"),
            )


def _check_taken(sample: Sample, label: str, rows: str, consumers: Sequence[Item], merge: int, units: Sequence[int]) -> None:
    """Every row that a unit takes exists, and none is taken twice."""
    uneven = [each for each in units if each % merge]
    total = sum(each // merge for each in units)
    taken = np.concatenate([np.zeros(0, np.int64), *(item.arrays[rows] for item in consumers)])
    taken = taken[taken >= 0]
    if not uneven and len(np.unique(taken)) == len(taken) and not (len(taken) and taken.max() >= total):
        return
    raise DataError(
        f"sample {sample.id!r} cannot cross edge {label}.",
        wanted=f"in {rows!r}, each of the numbers from 0 to {total - 1} at most once, or -1"
        if not uneven
        else f"items whose units {merge} divides, because that many become one row",
        have=f"{len(taken)} units that take rows, the largest number {taken.max() if len(taken) else -1}, and items of {list(units)} units",
        fix="give each placeholder the number of its row, counted through all items of the sample",
        anchor="route-rows",
        set_by=f"the data, sample {sample.id!r}",
    )


def _check_arrays(sample: Sample, where: str, item: Item, specs: Mapping[str, ArraySpec]) -> None:
    for name, spec in specs.items():
        array, shape = item.arrays.get(name), (item.units, *spec.shape)
        if array is not None and array.shape == shape and np.can_cast(array.dtype, spec.dtype, "same_kind"):
            continue
        raise DataError(
            f"array {name!r} in {where} of sample {sample.id!r} is not what the data set declares.",
            wanted=f"{spec.dtype}{list(shape)}",
            have="no such array" if array is None else f"{array.dtype}{list(array.shape)}",
            fix="correct the arrays of the item, or Dataset.specs",
            anchor="item-arrays",
            set_by=f"the data, sample {sample.id!r}",
        )


def _wrong_length(sample: Sample, item: Item, section: str, largest: int) -> DataError:
    wrong = "is longer than the largest micro-batch" if item.units > largest else "has an empty item"
    return DataError(
        f"sample {sample.id!r} {wrong} of section {section!r}.",
        wanted=f"items of 1 to {largest} units",
        have=f"{item.units} units",
        fix="raise microbatch (or row_length): both count units (tokens, patches, frames), not samples; or shorten samples "
        "(max_length of Conversations, TextFolder and other sources of text), or set train.on_bad_sample to 'skip'",
        anchor="sample-too-long",
        set_by=f"the data, sample {sample.id!r}",
    )
