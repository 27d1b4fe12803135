"""Samples that are made when asked for: as a sequence, joined with others, and in fingerprints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from support import TEXT_SPECS, text_samples

from maestro_jax.data import Dataset, LazySamples, Mixture, Sample
from maestro_jax.data.lazy import Digest, Joined


class Made(LazySamples):
    """Samples that say what they are by `facts`, and count how often they are made."""

    def __init__(self, count: int, facts: str = "facts") -> None:
        self.length, self.facts, self.made = count, facts, 0

    def __len__(self) -> int:
        return self.length

    def read(self, number: int) -> Sample:
        self.made += 1
        return Sample(id=f"m{number}", items={})

    def hash_into(self, digest: Digest) -> None:
        digest.update(self.facts.encode())


def ids(samples: Sequence[Sample]) -> list[str]:
    return [sample.id for sample in samples]


def fingerprint(train: Sequence[Sample]) -> str:
    return Dataset(train=train, specs=TEXT_SPECS).fingerprint()


def test_they_are_a_sequence() -> None:
    made = Made(4)
    assert ids(made) == ids(made[:]) == ["m0", "m1", "m2", "m3"]
    assert (made[-1].id, ids(made[1:3]), ids(made[::-2])) == ("m3", ["m1", "m2"], ["m3", "m1"])
    for out in (4, -5):
        with pytest.raises(IndexError):
            made[out]


@pytest.mark.parametrize("kinds", [(list, Made), (Made, Made), (list, list)])
def test_joined_samples_lie_one_after_another_under_their_names(kinds: tuple[Any, Any]) -> None:
    parts = [text_samples(count) if kind is list else Made(count) for kind, count in zip(kinds, (3, 2), strict=True)]
    joined = Joined([("a", parts[0]), ("", []), ("", parts[1])])
    assert len(joined) == 5
    assert ids(joined) == [f"a/{name}" for name in ids(parts[0])] + ids(parts[1])
    assert joined[4].id == joined[-1].id == parts[1][1].id


def test_nothing_joined_is_empty() -> None:
    assert list(Joined([])) == []


def test_a_fingerprint_makes_no_sample() -> None:
    made = Made(10)
    fingerprint(made)
    fingerprint(Joined([("a", made), ("b", made)]))
    assert made.made == 0


def test_a_fingerprint_is_that_of_the_facts() -> None:
    one, two = Made(3), text_samples(2)
    same = fingerprint(Joined([("a", Made(3)), ("b", text_samples(2))]))
    assert fingerprint(Joined([("a", one), ("b", two)])) == same
    others = [
        Joined([("a", Made(3, "others")), ("b", two)]),
        Joined([("a", Made(4)), ("b", two)]),
        Joined([("c", one), ("b", two)]),
        Joined([("a", one), ("b", two[::-1])]),
        Joined([("a", one), ("b", [*two[:1], dataclasses.replace(two[1], id="x")])]),
        Joined([("b", two), ("a", one)]),
    ]
    assert len({same, *map(fingerprint, others)}) == 1 + len(others)


def test_joined_lists_have_the_fingerprint_of_their_samples() -> None:
    samples = text_samples(5)
    renamed = [dataclasses.replace(sample, id=f"a/{sample.id}") for sample in samples]
    assert fingerprint(Joined([("a", samples[:3]), ("a", samples[3:])])) == fingerprint(renamed)


def test_a_mixture_makes_its_samples_when_needed() -> None:
    made = Made(1000)
    data = Mixture(sources=(Dataset(train=made, heldout=text_samples(2), specs={}), Dataset(train=text_samples(5), specs={}))).load()
    assert len(data.train) == 1005
    data.fingerprint()
    assert made.made == 0
    assert data.train[999].id == "Dataset/m999"
    assert ids(data.heldout) == ["Dataset/s0", "Dataset/s1"]
