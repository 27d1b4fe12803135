"""The digits of scikit-learn, and their split."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from maestro_jax.data.digits import Digits, load_digits, split_digits
from maestro_jax.errors import DataError


def numbered(count: int) -> Digits:
    return Digits(np.arange(count, dtype=np.float32)[:, None, None] * np.ones((8, 8), np.float32), np.arange(count) % 10)


def test_digits_are_small_images_with_labels() -> None:
    pytest.importorskip("sklearn", reason="the extra examples is not installed")
    digits = load_digits()
    assert digits.images.shape == (1797, 8, 8)
    assert digits.images.dtype == np.float32
    assert (digits.images.min(), digits.images.max()) == (0, 1)
    assert sorted(set(digits.labels.tolist())) == list(range(10))
    # A zero is empty in its middle, a one is not.
    middle = {label: digits.images[digits.labels == label][:, 3:5, 3:5].mean() for label in (0, 1)}
    assert middle[0] < 0.2 < 0.6 < middle[1]


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="the images of digits need") as caught:
        load_digits(set_by="omni.gin:3  Omni.shares")
    assert caught.value.anchor == "extra-missing"
    assert caught.value.set_by == "omni.gin:3  Omni.shares"
    assert "pip install 'maestro_jax[examples]'" in caught.value.fix


@pytest.mark.parametrize(("count", "fraction", "heldout"), [(100, 0.2, 20), (10, 0.01, 1), (3, 0.99, 2)])
def test_each_image_is_on_one_side(count: int, fraction: float, heldout: int) -> None:
    train, held = split_digits(numbered(count), fraction, seed=0)
    assert len(held.labels) == heldout
    assert sorted([*train.images[:, 0, 0], *held.images[:, 0, 0]]) == list(range(count))
    for side in (train, held):
        assert (side.images[:, 0, 0] % 10 == side.labels).all()


def test_the_split_depends_on_the_seed() -> None:
    one, two, other = (split_digits(numbered(100), 0.2, seed)[1].images[:, 0, 0].tolist() for seed in (0, 0, 1))
    assert one == two != other
