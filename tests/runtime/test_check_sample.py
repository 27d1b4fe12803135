"""Samples that a plan cannot process are named before anything is issued."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from support import TEXT_SPECS, chain, text_samples

from maestro_jax.data import ArraySpec, Sample
from maestro_jax.errors import DataError
from maestro_jax.runtime import make_plan
from maestro_jax.runtime.check_sample import check_sample

[SAMPLE] = text_samples(1)
[ITEM] = SAMPLE.items["text"]


def check(sample: Sample, specs: Any = TEXT_SPECS, **sections: Any) -> None:
    check_sample(make_plan(chain(**sections), specs, jax.devices()), specs, sample)


def test_a_good_sample_passes() -> None:
    check(SAMPLE)


@pytest.mark.parametrize(
    ("array", "have"),
    [
        (None, "no such array"),
        (np.zeros(1, np.float32), "float32[1]"),
        (np.zeros((ITEM.units, 2), np.float32), f"float32[{ITEM.units}, 2]"),
    ],
)
def test_arrays_that_differ_from_the_specs_are_refused(array: Any, have: str) -> None:
    arrays = {**ITEM.arrays, "loss_mask": array}
    if array is None:
        del arrays["loss_mask"]
    bad = dataclasses.replace(SAMPLE, items={"text": (dataclasses.replace(ITEM, arrays=arrays),)})
    with pytest.raises(DataError, match=r"array 'loss_mask' in item 0 of stream 'text' of sample 's0'") as caught:
        check(bad)
    assert caught.value.have == have


def test_floats_are_not_cut_to_whole_numbers() -> None:
    arrays = {**ITEM.arrays, "tokens": ITEM.arrays["tokens"] + 0.5}
    with pytest.raises(DataError, match="array 'tokens'"):
        check(dataclasses.replace(SAMPLE, items={"text": (dataclasses.replace(ITEM, arrays=arrays),)}))


def test_different_numbers_of_items_at_the_ends_of_an_edge_are_refused() -> None:
    specs = {**TEXT_SPECS, "other": TEXT_SPECS["text"]}
    sample = dataclasses.replace(SAMPLE, items={"text": (ITEM,), "other": (ITEM, ITEM)})
    with pytest.raises(DataError, match=r"cannot cross edge teacher.hidden->middle.hidden") as caught:
        check(sample, specs, teacher={"reads": "other"})
    assert caught.value.have == f"items of {[ITEM.units] * 2} units at the producer and of {[ITEM.units]} at the consumer"
    check(dataclasses.replace(SAMPLE, items={"text": (ITEM,)}), specs, teacher={"reads": "other"})


def test_specs_with_wider_rows_are_kept() -> None:
    specs = {"text": {**TEXT_SPECS["text"], "weights": ArraySpec(shape=(3,), dtype="float32")}}
    arrays = {**ITEM.arrays, "weights": np.zeros((ITEM.units, 3), np.float32)}
    check(dataclasses.replace(SAMPLE, items={"text": (dataclasses.replace(ITEM, arrays=arrays),)}), specs)


def test_a_long_sample_is_told_what_microbatch_counts() -> None:
    with pytest.raises(DataError, match="is longer than the largest micro-batch of section 'middle'") as caught:
        check(SAMPLE, middle={"microbatch": ITEM.units - 1})
    assert "both count units (tokens, patches, frames), not samples" in caught.value.fix
    assert "max_length of Conversations" in caught.value.fix


def several(count: int) -> Sample:
    """A sample of so many items, each of which fills a micro-batch of 32."""
    items = (dataclasses.replace(ITEM, units=32, arrays={name: np.resize(array, 32) for name, array in ITEM.arrays.items()}),) * count
    return dataclasses.replace(SAMPLE, items={"text": items})


@pytest.mark.parametrize(
    ("sections", "limit"),
    [
        ({"teacher": {"microbatch": 32}, "middle": {"microbatch": 128, "fan_in": 2}}, "fan_in of section 'middle'"),
        ({"teacher": {"microbatch": 128, "fan_out": 2}, "middle": {"microbatch": 32}}, "fan_out of section 'teacher'"),
    ],
)
def test_a_sample_in_more_micro_batches_than_fans_allow_is_named_with_the_limit(sections: Any, limit: str) -> None:
    sections = {**sections, "student": {"microbatch": 128, "fan_in": 4}, "middle": {**sections["middle"], "fan_out": 4}}
    check(several(2), **sections)
    with pytest.raises(DataError) as caught:
        check(several(3), **sections)
    error = caught.value
    assert error.what == f"sample 's0' cannot cross edge teacher.hidden->middle.hidden within {limit}."
    assert error.have.startswith("3, of items of [32, 32, 32] units")
    field, _, name = limit.partition(" of section ")
    assert error.set_by == f"the calling program: Section({name}).{field}"
    assert error.anchor == "fan-limit"


def test_a_limit_that_sizes_set_is_named_by_them_and_one_that_was_given_by_its_place() -> None:
    """Paired edges have one slot more than sizes need: four micro-batches of 32 fill one of 128."""
    sections: dict[str, Any] = {"teacher": {"microbatch": 32}, "middle": {"microbatch": 128}, "student": {"microbatch": 128}}
    plan = make_plan(chain(**sections), TEXT_SPECS, jax.devices())
    edges = {label: dataclasses.replace(edge, fan_in=2) for label, edge in plan.edges.items()}
    with pytest.raises(DataError) as caught:
        check_sample(dataclasses.replace(plan, edges=edges), TEXT_SPECS, several(3))
    assert caught.value.set_by == "the calling program: Section('teacher').microbatch"
    plan = make_plan(chain(**{**sections, "middle": {"microbatch": 128, "fan_in": 2}}), TEXT_SPECS, jax.devices())
    object.__setattr__(plan.graph["middle"], "_provenance", {"fan_in": "a.gin:7  middle/Section.fan_in"})
    with pytest.raises(DataError) as caught:
        check_sample(plan, TEXT_SPECS, several(3))
    assert caught.value.set_by == "a.gin:7  middle/Section.fan_in"
