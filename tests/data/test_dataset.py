"""A data set knows whether its samples can be told apart, and whether it is the same as another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support import TEXT_SPECS, text_samples

from maestro_jax.data import Dataset, Item, Part, Sample
from maestro_jax.errors import DataError


def dataset(**fields: Any) -> Dataset:
    return Dataset(**{"train": text_samples(5), "heldout": text_samples(2, seed=1), "specs": TEXT_SPECS, **fields})


def changed(**arrays: np.ndarray) -> list[Sample]:
    """The samples of `dataset` with other arrays in the third."""
    samples = text_samples(5)
    (item,) = samples[2].items["text"]
    samples[2] = Sample(id="s2", items={"text": (dataclasses.replace(item, arrays={**item.arrays, **arrays}),)})
    return samples


@pytest.mark.parametrize("side", ["train", "heldout"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_repeated_ids_are_refused(side: str, kind: Callable[[list[Sample]], Sequence[Sample]]) -> None:
    samples = [*text_samples(3), *text_samples(2)]
    with pytest.raises(DataError, match="two samples have the id 's0'") as caught:
        dataset(**{side: kind(samples)})
    assert caught.value.have == "samples 0 and 3 with this id; ids that come more than once: 2"
    assert caught.value.set_by == f"Dataset.{side}"
    assert caught.value.anchor == "repeated-sample-id"


class Lazy(Sequence[Sample]):
    """Samples that are costly to read: it counts how often."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples, self.reads = samples, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return self.samples[index]


def test_samples_that_are_read_when_needed_are_not_read_before() -> None:
    lazy = Lazy(text_samples(3))
    dataset(train=lazy)
    assert lazy.reads == 0


def test_fingerprint_is_that_of_ids_and_contents_of_training_samples() -> None:
    one = dataset()
    same = dataset(train=tuple(text_samples(5)), heldout=(), notes={"made": "elsewhere"}, skipped={"empty": 3})
    assert one.fingerprint() == same.fingerprint()
    assert len(one.fingerprint()) == 16
    assert int(one.fingerprint(), 16) > 0


def test_fingerprint_stays_the_same_in_other_versions() -> None:
    """Checkpoints keep it, so a change of this value makes every checkpoint warn of other data."""
    arrays = {"tokens": np.arange(3, dtype="<i4"), "loss_mask": np.ones(3, "<f4")}
    samples = [Sample(id="a", items={"text": (Item(units=3, arrays=arrays),)})]
    assert Dataset(train=samples, specs={}).fingerprint() == "5c313804608f152e"


TOKENS = text_samples(5)[2].items["text"][0].arrays["tokens"]
OTHERS = {
    "an id": [*text_samples(4), dataclasses.replace(text_samples(5)[4], id="other")],
    "a number": changed(tokens=np.concatenate([TOKENS[:-1], TOKENS[-1:] + 1])),
    "a dtype": changed(tokens=TOKENS.view(np.float32)),
    "a name": changed(labels=TOKENS),
    "a shape": changed(tokens=TOKENS[:, None]),
    "the order": text_samples(5)[::-1],
    "a sample less": text_samples(4),
    "a sample more": text_samples(6),
    "a stream": [*text_samples(4), Sample(id="s4", items={"image": text_samples(5)[4].items["text"]})],
    "an item less": [*text_samples(4), Sample(id="s4", items={"text": ()})],
}


@pytest.mark.parametrize("what", OTHERS)
def test_fingerprint_changes_with(what: str) -> None:
    assert dataset(train=OTHERS[what]).fingerprint() != dataset().fingerprint()


def test_fingerprint_changes_with_the_weights_of_parts() -> None:
    prints = {dataset(parts=(Part("a", 2, 1.0), Part("b", 3, weight))).fingerprint() for weight in (1, 1.0, 2.0)}
    assert len(prints | {dataset().fingerprint()}) == 3


def test_fingerprint_reads_the_samples_once() -> None:
    lazy = Lazy(text_samples(5))
    data = dataset(train=lazy)
    assert data.fingerprint() == data.fingerprint() == dataset().fingerprint()
    assert lazy.reads == 5


def test_fingerprint_does_not_depend_on_the_memory_of_arrays() -> None:
    (item,) = text_samples(1)[0].items["text"]
    mask = np.broadcast_to(np.float32(1), item.arrays["loss_mask"].shape)
    one, two = (
        Dataset(train=[Sample(id="a", items={"text": (dataclasses.replace(item, arrays={"loss_mask": array}),)})], specs={})
        for array in (mask, mask.copy())
    )
    assert one.fingerprint() == two.fingerprint()


@pytest.mark.parametrize("parts", [(Part("a", 4, 1.0),), (Part("a", 3, 1.0), Part("b", 2, 0.0)), (Part("a", 5, float("nan")),)])
def test_parts_that_do_not_fit_are_refused(parts: tuple[Part, ...]) -> None:
    with pytest.raises(DataError, match="parts of a data set do not fit") as caught:
        dataset(parts=parts)
    assert caught.value.anchor == "dataset-parts"
