"""Text with images and clips in it: tokens, rows and masks."""

from __future__ import annotations

import numpy as np
import pytest

from maestro_jax.data.interleaved import INTERLEAVED_SPECS, Interleaved, plain_text
from maestro_jax.data.samples import Item
from maestro_jax.data.sources import cut_pieces


def example() -> Item:
    text = Interleaved()
    text.write([5])
    text.place("image", 2)
    text.write([6], "image")
    text.place("audio", 1)
    text.place("image", 1)
    text.write([7, 8], "audio")
    text.write([9], "text")
    text.write([4])
    return text.item()


def test_tokens_and_targets_are_one_apart() -> None:
    arrays = example().arrays
    assert arrays["tokens"].tolist() == [5, 0, 0, 6, 0, 0, 7, 8, 9]
    assert arrays["targets"].tolist() == [0, 0, 6, 0, 0, 7, 8, 9, 4]


def test_rows_are_counted_through_all_images_and_all_clips() -> None:
    arrays = example().arrays
    assert arrays["image_rows"].tolist() == [-1, 0, 1, -1, -1, 2, -1, -1, -1]
    assert arrays["audio_rows"].tolist() == [-1, -1, -1, -1, 0, -1, -1, -1, -1]


def test_each_target_counts_for_its_kind() -> None:
    arrays = example().arrays
    assert {kind: np.flatnonzero(arrays[f"{kind}_mask"]).tolist() for kind in ("image", "audio", "text")} == {
        "image": [2],
        "audio": [5, 6],
        "text": [7],
    }
    assert arrays["loss_mask"].tolist() == (arrays["image_mask"] + arrays["audio_mask"] + arrays["text_mask"]).tolist()


@pytest.mark.parametrize("item", [example(), plain_text(cut_pieces("a", np.arange(9, dtype=np.int32), 8)[0].items["text"][0])])
def test_arrays_are_those_of_the_specs(item: Item) -> None:
    found = {name: (array.dtype.name, array.shape) for name, array in item.arrays.items()}
    assert found == {name: (spec.dtype, (item.units,)) for name, spec in INTERLEAVED_SPECS.items()}


def test_plain_text_takes_no_rows_and_keeps_its_loss() -> None:
    loss = np.array([1, 0, 1, 1], np.float32)
    (sample,) = cut_pieces("a", np.arange(4, dtype=np.int32), 8, loss)
    arrays = plain_text(sample.items["text"][0]).arrays
    assert arrays["text_mask"].tolist() == arrays["loss_mask"].tolist() == [0, 1, 1]
    assert {*arrays["image_rows"].tolist(), *arrays["audio_rows"].tolist()} == {-1}
    assert not arrays["image_mask"].any()
    assert not arrays["audio_mask"].any()
