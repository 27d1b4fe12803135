"""Packing copies every item to its place and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import TEXT_SPECS, text_samples

from maestro_jax.data import ArraySpec, Item, Packed, Sample, pack
from maestro_jax.schedules import place

SPECS = TEXT_SPECS["text"]
SHAPE = (3, 12)


def packed(samples: list[Sample], shape: tuple[int, int] = SHAPE) -> tuple[Packed, list[tuple[int, int]]]:
    """Packs the samples that fit, one item each; returns the places too."""
    items = [(sample.number, sample.items["text"][0]) for sample in samples]
    places = place([item.units for _, item in items], shape[0] * shape[1], shape[1])
    assert places is not None
    return pack([(n, 0) for n in range(len(items))], items, places, SPECS, shape), places


@pytest.mark.quick
@settings(derandomize=True, deadline=None, max_examples=40)
@given(count=st.integers(0, 5), seed=st.integers(0, 99))
def test_every_item_is_read_back_from_its_place(count: int, seed: int) -> None:
    samples = text_samples(count, seed=seed, shortest=1, longest=7)
    result, places = packed(samples, (5, 12))
    for n, (sample, (row, offset)) in enumerate(zip(samples, places, strict=True)):
        item = sample.items["text"][0]
        span = slice(offset, offset + item.units)
        for name in SPECS:
            np.testing.assert_array_equal(result.arrays[name][row, span], item.arrays[name])
        np.testing.assert_array_equal(result.arrays["positions"][row, span], np.arange(item.units))
        assert set(result.arrays["sample_ids"][row, span].tolist()) == {sample.number}
        assert result.starts[n, 0] == (row * 12 + offset, item.units)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(count=st.integers(0, 5), seed=st.integers(0, 99))
def test_what_no_item_covers_is_zero(count: int, seed: int) -> None:
    samples = text_samples(count, seed=seed, shortest=1, longest=7)
    result, _ = packed(samples, (5, 12))
    padding = result.arrays["segment_ids"] == 0
    assert padding.sum() == 60 - sum(s.items["text"][0].units for s in samples)
    assert all(not array[padding].any() for array in result.arrays.values())


def test_items_are_numbered_from_one_in_each_row() -> None:
    samples = text_samples(4, shortest=6, longest=6)
    result, places = packed(samples)
    assert places == [(0, 0), (0, 6), (1, 0), (1, 6)]
    assert [result.arrays["segment_ids"][row].tolist() for row in range(3)] == [[1] * 6 + [2] * 6] * 2 + [[0] * 12]


@pytest.mark.quick
def test_dtypes_and_shapes_are_those_of_the_specs() -> None:
    image = Item(units=2, arrays={"pixels": np.full((2, 3, 2), 7, np.uint8)})
    result = pack([(0, 0)], [(5, image)], [(0, 1)], {"pixels": ArraySpec(shape=(3, 2), dtype="uint8")}, (1, 4))
    assert {name: (array.shape, str(array.dtype)) for name, array in result.arrays.items()} == {
        "pixels": ((1, 4, 3, 2), "uint8"),
        "segment_ids": ((1, 4), "int32"),
        "positions": ((1, 4), "int32"),
        "sample_ids": ((1, 4), "uint32"),
    }
    assert result.arrays["pixels"][0, :, 0, 0].tolist() == [0, 7, 7, 0]


def test_several_items_of_a_sample_are_pieces_of_their_own() -> None:
    (sample,) = text_samples(1, shortest=3, longest=3)
    item = sample.items["text"][0]
    result = pack([(4, 0), (4, 1)], [(9, item), (9, item)], [(0, 0), (0, 3)], SPECS, (1, 8))
    assert dict(result.starts) == {(4, 0): (0, 3), (4, 1): (3, 3)}
    assert result.arrays["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert result.arrays["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]


def test_arrays_are_new_each_time() -> None:
    samples = text_samples(2, longest=6)
    one, two = packed(samples)[0], packed(samples)[0]
    assert not any(np.shares_memory(one.arrays[name], two.arrays[name]) for name in one.arrays)
    assert not np.shares_memory(one.arrays["tokens"], samples[0].items["text"][0].arrays["tokens"])


def test_more_places_than_items_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="zip"):
        pack([(0, 0)], [], [(0, 0)], SPECS, SHAPE)
