"""Several data sources as one, each with a weight.

A weight is a share of the *samples* of a run, not of its tokens. Which samples a step takes is decided by `Batches`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..config import check_fields, configurable
from ..errors import ConfigError, DataError, set_by
from .dataset import Dataset, Part
from .lazy import Joined
from .samples import ArraySpec


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Several sources, of which each gives samples in proportion to its weight.

    Each source runs through shuffled epochs of its own: a small one begins anew while a large one has not ended. Sample
    ids begin with the name of their source: its field `name` (in a config file its scope), else its class; where a name
    comes again, with a number. Mixtures may be sources of mixtures.

    Args:
        sources: data sources (with `load()`) or `Dataset`s.
        weights: share of each source in the samples of a run, relative to the others; empty gives all the same share.

    Raises:
        ConfigError: a source is none, or comes twice, or there is not one weight above 0 for each.
    """

    sources: tuple[Any, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.sources:
            self._refuse("sources", "at least one data source", "none", "name the sources, as in (@Corpus(), @Jsonl())")
        for number, source in enumerate(self.sources):
            self._check_source(number, source)
        if self.weights and len(self.weights) != len(self.sources):
            have = f"{len(self.weights)} weights: {self.weights}"
            self._refuse("weights", f"{len(self.sources)} weights, one for each source", have, "give as many, or none for equal shares")
        if not all(0 < weight < math.inf for weight in self.weights):
            self._refuse("weights", "finite weights above 0", str(self.weights), "leave out a source that should not be used")

    def _check_source(self, number: int, source: Any) -> None:
        wanted = "data sources, with a method load(), or Datasets"
        if isinstance(source, type):
            have, fix = f"source {number} is the class {source.__name__} itself", f"write @{source.__name__}(), with parentheses"
            self._refuse("sources", wanted, have, f"in a config file, {fix}")
        if not isinstance(source, Dataset) and not callable(getattr(source, "load", None)):
            self._refuse("sources", wanted, f"source {number} is {source!r}", "name a data source, such as @Jsonl() or Jsonl(path=...)")
        if any(source is other for other in self.sources[:number]):
            kind = type(source).__name__
            fix = f"make another object; in a config file give each its own scope, as in @chat/{kind}() and @code/{kind}()"
            self._refuse("sources", "each source once", f"source {number} is an earlier one again, a {kind}", fix)

    def load(self) -> Dataset:
        """Loads all sources.

        Returns:
            The samples of the sources one after another, as `parts`; the held-out samples likewise. `skipped` and `notes`
            have the source's name before each key.

        Raises:
            DataError: a source cannot be used, or sources disagree about tokenizer or arrays.
        """
        names = list(_names(self.sources))
        datasets = [source if isinstance(source, Dataset) else source.load() for source in self.sources]
        weights = self.weights or (1.0,) * len(datasets)
        vocab_size = self._agreed("vocab_size", names, [dataset.vocab_size for dataset in datasets])
        fingerprint = self._agreed("tokenizer_fingerprint", names, [dataset.tokenizer_fingerprint for dataset in datasets])
        parts = [_parts(name, dataset, weight) for name, dataset, weight in zip(names, datasets, weights, strict=True)]
        return Dataset(
            train=Joined([(name, dataset.train) for name, dataset in zip(names, datasets, strict=True)]),
            heldout=Joined([(name, dataset.heldout) for name, dataset in zip(names, datasets, strict=True)]),
            specs=self._specs(names, datasets),
            vocab_size=vocab_size,
            tokenizer_fingerprint=fingerprint,
            skipped=_keyed(names, [dataset.skipped for dataset in datasets], ": "),
            notes=_notes(names, datasets, weights),
            parts=tuple(itertools.chain.from_iterable(parts)),
            merges=self._merges(names, datasets),
        )

    def _merges(self, names: Sequence[str], datasets: Sequence[Dataset]) -> dict[str, int]:
        """Units in a row of each stream, on which the sources that have it agree."""
        streams = dict.fromkeys(stream for dataset in datasets for stream in dataset.merges)
        return {s: self._agreed(f"units in a row of stream {s!r}", names, [data.merges.get(s) for data in datasets]) for s in streams}

    def _specs(self, names: Sequence[str], datasets: Sequence[Dataset]) -> dict[str, Mapping[str, ArraySpec]]:
        """Streams of all sources; those that several have must consist of the same arrays."""
        streams = dict.fromkeys(stream for dataset in datasets for stream in dataset.specs)
        found = {stream: [dict(dataset.specs[stream]) if stream in dataset.specs else None for dataset in datasets] for stream in streams}
        return {stream: self._agreed(f"the arrays of stream {stream!r}", names, values) for stream, values in found.items()}

    def _agreed(self, what: str, names: Sequence[str], values: Sequence[Any]) -> Any:
        """Returns the value of all sources that have one; None is that of a source without tokens, or without the stream."""
        known = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
        other = next(((name, value) for name, value in known if value != known[0][1]), None)
        if other is None:
            return known[0][1] if known else None
        raise DataError(
            f"the sources {known[0][0]!r} and {other[0]!r} cannot be mixed: they differ in {what}.",
            wanted="sources with the same tokenizer, and with the same arrays in the streams that they share",
            have="\n".join(f"{name}: {value}" for name, value in (known[0], other)),
            set_by=set_by(self, "sources"),
            fix="give the sources the same tokenizer (their field of that name), or make their arrays alike",
            anchor="sources-disagree",
        )

    def _refuse(self, field: str, wanted: str, have: str, fix: str) -> NoReturn:
        raise ConfigError(
            f"the {field} of a mixture are wrong.", wanted=wanted, have=have, set_by=set_by(self, field), fix=fix, anchor="mixture-value"
        )


def _names(sources: Sequence[Any]) -> Iterator[str]:
    taken: set[str] = set()
    for source in sources:
        name = getattr(source, "name", None) or type(source).__name__
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        free = next(each for each in itertools.chain([name], numbered) if each not in taken)
        taken.add(free)
        yield free


def _parts(name: str, dataset: Dataset, weight: float) -> list[Part]:
    """A source as one part, or a mixture with its own parts, which share its weight."""
    if not dataset.parts:
        return [Part(name, len(dataset.train), weight)]
    whole = sum(part.weight for part in dataset.parts)
    return [Part(f"{name}/{part.name}", part.samples, weight * part.weight / whole) for part in dataset.parts]


def _notes(names: Sequence[str], datasets: Sequence[Dataset], weights: Sequence[float]) -> dict[str, str]:
    tokenizers = dict.fromkeys(dataset.notes["tokenizer"] for dataset in datasets if "tokenizer" in dataset.notes)
    shared = {"weights": ", ".join(map(str, weights)), **({"tokenizer": ", ".join(tokenizers)} if tokenizers else {})}
    return {**shared, **_keyed(names, [dataset.notes for dataset in datasets], ".")}


def _keyed(names: Sequence[str], values: Sequence[Mapping[str, Any]], separator: str) -> dict[str, Any]:
    return {f"{name}{separator}{key}": value for name, found in zip(names, values, strict=True) for key, value in found.items()}
