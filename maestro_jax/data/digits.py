"""Handwritten digits: 1,797 small grey images that come with scikit-learn, so nothing is downloaded.

They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998,
https://doi.org/10.24432/C50P49), 8 x 8 pixels each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .extras import import_extra

SIDE = 8
"""Height and width of an image, in pixels."""


class Digits(NamedTuple):
    """Images of digits.

    Args:
        images: float32 `[images, 8, 8]`, brightness of the ink from 0 to 1.
        labels: int64 `[images]`, which digit each one is.
    """

    images: np.ndarray
    labels: np.ndarray


def load_digits(*, set_by: str = "the calling program") -> Digits:
    """Returns all of scikit-learn's digits, in its order.

    Args:
        set_by: what needs them, for the error text.

    Raises:
        DataError: scikit-learn is not installed.
    """
    datasets = import_extra("sklearn.datasets", "scikit-learn", "the images of digits", set_by=set_by)
    found = datasets.load_digits()
    return Digits((found.images / 16).astype(np.float32), found.target)


def split_digits(digits: Digits, fraction: float, seed: int) -> tuple[Digits, Digits]:
    """Splits images at random into those to train on and those that are held out.

    Args:
        digits: two images or more.
        fraction: share that is held out, above 0 and below 1; at least one image stays on each side.
        seed: another seed is another split.
    """
    count = len(digits.labels)
    heldout = min(max(1, round(fraction * count)), count - 1)
    order = np.random.default_rng([seed, count]).permutation(count)
    held, train = np.sort(order[:heldout]), np.sort(order[heldout:])
    return Digits(digits.images[train], digits.labels[train]), Digits(digits.images[held], digits.labels[held])
