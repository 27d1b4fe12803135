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
