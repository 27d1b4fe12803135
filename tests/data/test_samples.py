"""A sample says at once what is wrong with its items."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from maestro_jax.data import INTERLEAVED_SPECS, Interleaved, Item, Sample, image_item, image_specs
from maestro_jax.errors import DataError

ITEM = Item(units=2, arrays={"tokens": np.zeros(2, np.int32)})


@pytest.mark.parametrize(("items", "have"), [(ITEM, "Item"), ({"tokens": ITEM}, "dict"), (None, "NoneType")], ids=["item", "dict", "none"])
def test_items_that_are_no_tuple_are_refused(items: Any, have: str) -> None:
    with pytest.raises(DataError) as caught:
        Sample(id="a/1", items={"image": (ITEM,), "text": items})
    assert str(caught.value) == (
        "sample 'a/1' has no tuple of items in stream 'text'.\n"
        "  wanted   a tuple, also of one item: a sample may have several in a stream\n"
        f"  have     {have}\n"
        "  set by   the data, sample 'a/1'\n"
        "  fix      write items={'text': (item,)}\n"
        "  help     docs/errors.md#sample-items"
    )


@pytest.mark.parametrize("items", [(), (ITEM, ITEM), [ITEM]], ids=["none", "two", "list"])
def test_tuples_and_lists_are_fine(items: Any) -> None:
    assert Sample(id="a", items={"text": items}).items["text"] == items


def test_a_text_with_an_image_is_made_of_public_names() -> None:
    image, text = image_item(np.zeros((4, 4, 1)), patch_size=1, merge=2), Interleaved()
    text.place("image", 4)
    text.write([7], "image")
    sample = Sample(id="a", items={"image": (image,), "text": (text.item(),)})
    [found] = sample.items["text"]
    assert found.arrays.keys() == INTERLEAVED_SPECS.keys()
    assert image.arrays.keys() == image_specs(patch_size=1, channels=1).keys()
    assert (image.units, found.arrays["image_rows"].tolist()) == (16, [0, 1, 2, 3])
