"""What every data source makes: samples to train on and to evaluate on, and what they are made of."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..errors import DataError
from .lazy import hash_samples
from .samples import ArraySpec, Sample


class Part(NamedTuple):
    """Training samples that lie next to each other and are drawn in epochs of their own (see `Mixture`).

    Args:
        name: for error texts.
        samples: how many they are.
        weight: how often they are drawn, relative to the other parts; above 0.
    """

    name: str
    samples: int
    weight: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples to train on and to evaluate on.

    Args:
        train: training samples, random access; `train[n]` may raise a DataError about a sample that cannot be read.
        heldout: samples that are never trained on; may be empty.
        specs: per stream, the arrays of its items.
        vocab_size: how many token ids there are (the largest id + 1); None for data without tokens.
        tokenizer_fingerprint: equal for equal vocabularies, see `maestro_jax.data.tokenizer.fingerprint`.
        skipped: how many documents or pieces were left out, by reason.
        notes: facts about the origin of the data, such as a hash; written to a run's `env.json`.
        parts: the parts of `train`, in order, when some are drawn more often than others; empty draws all alike.
        merges: stream -> how many units of it become one row of an encoder, as arrays that name rows count them; what is missing is not
            compared with the graph.

    Raises:
        DataError: two samples of a list or tuple have one id (`Batches` looks at other sequences, batch by batch), or
            `parts` are not those of `train`.
    """

    train: Sequence[Sample]
    heldout: Sequence[Sample] = ()
    specs: Mapping[str, Mapping[str, ArraySpec]]
    vocab_size: int | None = None
    tokenizer_fingerprint: str | None = None
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    merges: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for side, samples in (("train", self.train), ("heldout", self.heldout)):
            # Another sequence may read each sample from a disk, which nobody should have to wait for here.
            if isinstance(samples, list | tuple):
                refuse_repeated_ids(samples, f"Dataset.{side}")
        counted = sum(part.samples for part in self.parts)
        if self.parts and not (counted == len(self.train) and all(0 < part.weight < math.inf for part in self.parts)):
            raise DataError(
                "the parts of a data set do not fit it.",
                wanted=f"parts of {len(self.train)} training samples together, each with a finite weight above 0",
                have=", ".join(f"{part.name!r}: {part.samples} samples, weight {part.weight:g}" for part in self.parts),
                fix="count the samples of each part as they lie in Dataset.train, or leave parts empty",
                anchor="dataset-parts",
            )

    def __repr__(self) -> str:
        """Numbers instead of every sample."""
        return f"Dataset({len(self.train)} training samples, {len(self.heldout)} held out, streams {', '.join(self.specs)})"

    def fingerprint(self) -> str:
        """Says what is trained on: equal for equal ids and contents of the training samples in equal order, and equal parts.

        Returns:
            16 hexadecimal digits of a SHA-256. The first call reads every training sample, but for `LazySamples`, which say what they
            are; later ones cost nothing.

        >>> one = Dataset(train=[Sample(id="a", items={})], specs={})
        >>> one.fingerprint() == dataclasses.replace(one, notes={"from": "elsewhere"}).fingerprint()
        True
        >>> one.fingerprint() == dataclasses.replace(one, train=[Sample(id="b", items={})]).fingerprint()
        False
        """
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(repr([(part.name, part.samples, float(part.weight)) for part in self.parts]).encode())
        hash_samples(digest, self.train)
        return digest.hexdigest()[:16]


def refuse_repeated_ids(samples: Iterable[Sample], place: str) -> None:
    """Refuses samples that share an id: they would share dropout masks, and errors could not tell them apart.

    Args:
        samples: of one data set, or of one batch.
        place: where they are, for the error text.

    Raises:
        DataError: names the first id that comes twice.
    """
    ids = [sample.id for sample in samples]
    if len(set(ids)) == len(ids):
        return
    repeated = [name for name, count in collections.Counter(ids).items() if count > 1]
    first = ids.index(repeated[0])
    raise DataError(
        f"two samples have the id {repeated[0]!r}.",
        wanted=f"an id of its own for each of the {len(ids)} samples of {place}: dropout masks depend on it",
        have=f"samples {first} and {ids.index(repeated[0], first + 1)} with this id; ids that come more than once: {len(repeated)}",
        set_by=place,
        fix="make ids from something that differs between samples, such as file name and line number",
        anchor="repeated-sample-id",
    )
