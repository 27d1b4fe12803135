"""Made-up text with images, whose lengths and sizes have long tails: for planning a job and for measuring speed before there is data."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..config import check_fields, configurable
from .dataset import Dataset
from .interleaved import INTERLEAVED_SPECS, Interleaved
from .lazy import Digest, LazySamples
from .patches import patch_places
from .positions import rope_positions
from .samples import ArraySpec, Item, Sample
from .sources import out_of_range

_LEAST = {"samples": 1, "vocab_size": 2, "shortest": 2, "most_images": 0, "patch": 1, "merge": 1, "least_side": 1, "seed": 0}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LongTail:
    """Random tokens and grey images, of which only how many and how long they are means anything; nothing can be learned from them.

    Of the samples that have images, n images come in proportion to 1 / n. Sides of images are log-uniform, so small images are many and
    large ones few; lengths of text are log-uniform too. A sample that would be longer than `longest` gets fewer images. Streams are "text"
    (see `Interleaved`, with "rope_positions") and "image" ("patches" float32 [patch], "coords" int32 [2]).

    Args:
        samples: how many there are; they are made when needed.
        images: share of the samples that have images.
        most_images: in a sample.
        shortest: fewest tokens of a text.
        longest: most units of a sample's text, with the rows of its images.
        least_side: fewest rows, and columns, of blocks of patches in an image.
        most_side: most of them.
        patch: numbers of a patch.
        merge: patches along a side of the block that becomes one row in the text.
        vocab_size: of the tokens.
        seed: another seed is another mix of the same kind.

    Raises:
        ConfigError: a value is out of range.

    >>> data = LongTail(samples=4, longest=64, shortest=8, most_side=4, patch=3, vocab_size=100).load()
    >>> [(sample.items["text"][0].units, [image.units for image in sample.items.get("image", ())]) for sample in data.train]
    [(30, []), (64, [48, 4, 12, 24]), (9, []), (64, [16, 24, 24, 4, 32, 8, 24, 16, 16, 8])]
    """

    samples: int = 100_000
    images: float = 0.5
    most_images: int = 16
    shortest: int = 32
    longest: int = 4096
    least_side: int = 1
    most_side: int = 24
    patch: int = 1176
    merge: int = 2
    vocab_size: int = 152064
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for field, least in _LEAST.items():
            if getattr(self, field) < least:
                raise out_of_range(self, field, f"a number of at least {least}")
        if not 0 <= self.images <= 1:
            raise out_of_range(self, "images", "a share from 0 to 1")
        if self.longest < self.shortest:
            raise out_of_range(self, "longest", f"at least shortest={self.shortest}")
        if self.most_side < self.least_side:
            raise out_of_range(self, "most_side", f"at least least_side={self.least_side}")

    def load(self) -> Dataset:
        """Makes nothing yet.

        Returns:
            The data set, without held-out samples.
        """
        return Dataset(
            train=_Samples(self),
            heldout=(),
            specs={
                "text": {**INTERLEAVED_SPECS, "rope_positions": ArraySpec(shape=(3,))},
                "image": {"patches": ArraySpec(shape=(self.patch,), dtype="float32"), "coords": ArraySpec(shape=(2,))},
            },
            vocab_size=self.vocab_size,
            merges={"image": self.merge**2},
            notes={"corpus": "made up (LongTail): nothing can be learned from it"},
        )


class _Samples(LazySamples):
    def __init__(self, source: LongTail) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.samples

    def read(self, number: int) -> Sample:
        source, random = self._source, np.random.default_rng((self._source.seed, number))
        # Every second sample or so, evenly, so that a short stretch of them is like the whole.
        with_images = math.floor((number + 1) * source.images) > math.floor(number * source.images)
        length = round(_log_uniform(random, source.shortest, source.longest))
        count = 0
        if with_images and source.most_images:
            counts = np.arange(1, source.most_images + 1)
            count = int(random.choice(counts, p=(1 / counts) / (1 / counts).sum()))
        grids, room = [], source.longest - source.shortest
        for _ in range(count):
            rows, columns = (round(_log_uniform(random, source.least_side, source.most_side)) for _ in range(2))
            if rows * columns <= room:
                grids.append((rows, columns))
                room -= rows * columns
        # What text is left is what fits behind the images.
        return self._made(number, random, grids, min(length, room + source.shortest))

    def _made(self, number: int, random: np.random.Generator, grids: list[tuple[int, int]], length: int) -> Sample:
        source, text = self._source, Interleaved()
        for rows, columns in grids:
            text.place("image", rows * columns)
        text.write(random.integers(0, source.vocab_size, length + 1).tolist(), "text")
        item = text.item()
        item = dataclasses.replace(item, arrays={**item.arrays, "rope_positions": rope_positions(item.arrays["image_rows"], grids)})
        images = tuple(_grey(rows, columns, source.merge, source.patch) for rows, columns in grids)
        return Sample(id=f"made-up:{number}", items={"text": (item,), **({"image": images} if images else {})})

    def hash_into(self, digest: Digest) -> None:
        digest.update(repr(self._source).encode())


def _log_uniform(random: np.random.Generator, least: int, most: int) -> float:
    return math.exp(random.uniform(math.log(least), math.log(most)))


def _grey(rows: int, columns: int, merge: int, patch: int) -> Item:
    """An image of so many blocks of patches, all alike, so that it needs no memory."""
    coords = patch_places(rows * merge, columns * merge, merge)
    return Item(units=len(coords), arrays={"patches": np.broadcast_to(np.float32(0.5), (len(coords), patch)), "coords": coords})
