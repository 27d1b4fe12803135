"""Refuses samples that a plan cannot process, before anything of a step has been issued."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..data import ArraySpec, Item, Sample
from ..errors import DataError
from ..graph.shapes import Specs
from .plan import Plan


def check_sample(plan: Plan, specs: Specs, sample: Sample) -> None:
    """Checks the items of a sample against sections, edges and the declared arrays.

    Args:
        plan: where sections run, and in which micro-batches.
        specs: stream -> array name -> spec, from the data set.
        sample: the sample.

    Raises:
        DataError: an item that no micro-batch of a section can hold, arrays that are not those of the data set's specs, or
            numbers of items that differ at the two ends of an edge.
    """
    for section in (s.section for s in plan.sections.values()):
        for number, item in enumerate(sample.items.get(section.reads, ())):
            if item.units > section.largest_item:
                raise _too_long(sample, item, section.name, section.largest_item)
            _check_arrays(sample, f"item {number} of stream {section.reads!r}", item, specs[section.reads])
    for edge in plan.graph.edges:
        ends = [sample.items.get(plan.graph[name].reads, ()) for name in (edge.producer, edge.consumer)]
        if all(ends) and len(ends[0]) != len(ends[1]):
            raise DataError(
                f"sample {sample.id!r} cannot cross edge {edge.label}.",
                wanted="as many items at the producer as at the consumer: they are paired in order",
                have=f"{len(ends[0])} items at the producer and {len(ends[1])} at the consumer",
                fix="let both sections read the same stream, or give both streams equal numbers of items",
                anchor="route-units",
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


def _too_long(sample: Sample, item: Item, section: str, largest: int) -> DataError:
    return DataError(
        f"sample {sample.id!r} is longer than the largest micro-batch of section {section!r}.",
        wanted=f"items of at most {largest} units",
        have=f"{item.units} units",
        fix="raise microbatch (or row_length), shorten samples (max_length), or set train.on_bad_sample to 'skip'",
        anchor="sample-too-long",
        set_by=f"the data, sample {sample.id!r}",
    )
