"""Samples that are read or made when they are asked for, in sequences with random access."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol, overload

from .samples import Sample


class Digest(Protocol):
    """A hash under way, such as `hashlib.sha256()`."""

    def update(self, data: bytes, /) -> None:
        """Takes more bytes in."""
        ...


class LazySamples(Sequence[Sample]):
    """What a data source gives that does not hold its samples in memory.

    Subclasses say how many there are (`__len__`), how one of them comes about (`read`), and what they are (`hash_into`).
    """

    def read(self, number: int) -> Sample:
        """Reads or makes one sample; equal for equal numbers.

        Args:
            number: from 0, below the length.

        Raises:
            DataError: this sample cannot be read; it may be skipped (see `Trainer.on_bad_sample`).
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how its samples are read")

    def hash_into(self, digest: Digest) -> None:
        """Gives a hash all that decides what the samples are, without reading them (see `Dataset.fingerprint`)."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its samples are")

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        # A range knows what slices and negative numbers mean, and which numbers are out of range.
        found = range(len(self))[index]
        return self.read(found) if isinstance(found, int) else [self.read(number) for number in found]


class Joined(LazySamples):
    """Sequences one after another, with the name of each before the ids of its samples.

    Args:
        parts: name and samples of each; an empty name leaves ids as they are.
    """

    def __init__(self, parts: Sequence[tuple[str, Sequence[Sample]]]) -> None:
        self._parts = tuple(parts)
        self._ends = list(itertools.accumulate(len(samples) for _, samples in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, number: int) -> Sample:
        """Reads a sample of the part where it lies.

        Raises:
            DataError: as the part.
        """
        which = bisect.bisect_right(self._ends, number)
        name, samples = self._parts[which]
        return _named(name, samples[number - self._ends[which] + len(samples)])

    def hash_into(self, digest: Digest) -> None:
        """Gives a hash all that decides what the samples of each part are."""
        for name, samples in self._parts:
            if isinstance(samples, LazySamples):
                digest.update(repr((name, len(samples))).encode())
            hash_samples(digest, samples, name)


def hash_samples(digest: Digest, samples: Sequence[Sample], name: str = "") -> None:
    """Gives a hash what samples are: `LazySamples` say so themselves, others are read.

    Args:
        digest: the hash.
        samples: in order.
        name: what comes before their ids; empty for nothing.
    """
    if isinstance(samples, LazySamples):
        samples.hash_into(digest)
        return
    for number in range(len(samples)):
        sample = _named(name, samples[number])
        # What is hashed says where each array begins, so that no two data sets can look alike.
        header, arrays = [sample.id, sorted((stream, len(items)) for stream, items in sample.items.items())], []
        for _, items in sorted(sample.items.items()):
            for item in items:
                for key, array in sorted(item.arrays.items()):
                    header.append((key, array.dtype.str, array.shape))
                    arrays.append(array.tobytes())
        digest.update(repr(header).encode())
        for array in arrays:
            digest.update(array)


def _named(name: str, sample: Sample) -> Sample:
    return dataclasses.replace(sample, id=f"{name}/{sample.id}") if name else sample
