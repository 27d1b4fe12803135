"""How text becomes a `Dataset`.

Text: each document is tokenized, an end-of-text token is appended when the tokenizer has one, and the tokens are
cut into pieces of `max_length + 1` that overlap by one. A piece's tokens without the last are a sample's input and
without the first its targets, so every token of a document but its first is a target exactly once. Where only some of
the text is trained on, such as answers, the other targets have weight 0 in the loss.

Documents are split into training and held-out by a hash of their names: the side of a document depends neither on
the order nor on the number of the others, so that a corpus may grow without leaking held-out text into training.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer

from ..config import config_folder
from ..errors import ConfigError, DataError, set_by
from .dataset import Dataset
from .documents import Document, Tokens, tokenize
from .samples import ArraySpec, Item, Sample

logger = logging.getLogger(__name__)

TEXT_SPECS: Mapping[str, Mapping[str, ArraySpec]] = MappingProxyType(
    {"text": MappingProxyType({"tokens": ArraySpec(), "targets": ArraySpec(), "loss_mask": ArraySpec(dtype="float32")})}
)
"""Arrays of a text item, each `[units]`: token ids (int32), the token after each (int32), and its weight in the loss (float32)."""

_DOCUMENTS_AT_ONCE = 64  # bounds the memory of a tokenizer's intermediate results, which are far larger than the ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource:
    """What text sources share; subclasses say where documents come from (`read`).

    Args:
        tokenizer: a `tokenizer.json` of Hugging Face tokenizers, from the current folder, beside the config file that
            names it, or among the shipped configs.
        max_length: most tokens of a sample; longer documents are cut.
        min_length: pieces of fewer tokens are dropped and counted.
        heldout_fraction: expected share of documents held out, at least one when above 0; 0 holds out nothing.
        seed: another seed is another split.
        name: what the ids of its samples begin with in a `Mixture`; in a config file the scope, as in `@chat/Jsonl()`.

    Raises:
        ConfigError: a value is out of range.
    """

    origin: ClassVar[str] = "min_length"  # the field to name when there is no text

    tokenizer: str = "tokenizer_tiny.json"
    max_length: int = 256
    min_length: int = 2
    heldout_fraction: float = 0.1
    seed: int = 0
    name: str | None = None

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise self._bad_value("max_length", "a length of at least 1 token")
        if not 1 <= self.min_length <= self.max_length:
            raise self._bad_value("min_length", f"a length from 1 to max_length={self.max_length} tokens")
        if not 0 <= self.heldout_fraction < 1:
            raise self._bad_value("heldout_fraction", "a fraction of at least 0 and below 1")

    def read(self, skipped: collections.Counter[str]) -> Iterator[Document]:
        """Yields the documents in a fixed order, each name once; counts in `skipped`, by reason, those that it leaves out."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its documents come from")

    def describe(self) -> dict[str, str]:
        """Says where the documents come from, for `Dataset.notes`."""
        return {}

    def load(self) -> Dataset:
        """Reads, tokenizes, cuts and splits the documents.

        When there is only one document with text, its last pieces are held out instead of whole documents.

        Returns:
            The dataset; samples are in the order of the documents, with ids `"{document}:{piece}"`. `notes` has
            the SHA-256 of names and texts (`corpus_sha256`), the number of documents and the kind of split.

        Raises:
            DataError: nothing can be read, two documents have one name, there is no text, or too little of it to hold any out.
            ConfigError: the tokenizer's file was not found.
        """
        from . import tokenizer as vocabulary  # here for the reason below

        tokenizer = self.load_tokenizer()
        skipped: collections.Counter[str] = collections.Counter()
        digest = hashlib.sha256()
        pieces: dict[str, list[Sample]] = {}
        for group in _groups(self.read(skipped), _DOCUMENTS_AT_ONCE):
            for document, tokens in zip(group, tokenize(tokenizer, group), strict=True):
                if document.name in pieces:
                    raise self._repeated_name(document.name)
                digest.update(f"{document.name}\0{document.text}\0".encode())
                pieces[document.name] = self._cut(document.name, tokens, skipped)
        with_text = {name: samples for name, samples in pieces.items() if samples}
        if not with_text:
            raise self._no_text(len(pieces), skipped)
        train, heldout, kind = self._split(with_text)
        notes = {"documents": str(len(pieces)), "split": kind, "corpus_sha256": digest.hexdigest()}
        return Dataset(
            train=train,
            heldout=heldout,
            specs=TEXT_SPECS,
            vocab_size=vocabulary.vocabulary_size(tokenizer),
            tokenizer_fingerprint=vocabulary.fingerprint(tokenizer),
            skipped=dict(skipped),
            notes={**self.describe(), **notes},
        )

    def load_tokenizer(self) -> Tokenizer:
        """Loads the tokenizer.

        Raises:
            DataError: its file is no tokenizer.
            ConfigError: its file was not found.
        """
        # Not at the top: `python -m maestro_jax.data.tokenizer` would find itself imported already, and warn.
        from . import tokenizer as vocabulary

        return vocabulary.load(self.tokenizer, config_folder(self, "tokenizer"), set_by=set_by(self, "tokenizer"))

    def _cut(self, name: str, tokens: Tokens, skipped: collections.Counter[str]) -> list[Sample]:
        samples = cut_pieces(name, tokens.ids, self.max_length, tokens.loss)
        long_enough = [sample for sample in samples if sample.items["text"][0].units >= self.min_length]
        # A document of one token has no target, so no piece at all; it counts as one that is too short.
        if dropped := max(len(samples), 1) - len(long_enough):
            skipped["too short"] += dropped
        kept = [sample for sample in long_enough if sample.items["text"][0].arrays["loss_mask"].any()]
        if dropped := len(long_enough) - len(kept):
            skipped["nothing to learn in the piece"] += dropped
        return kept

    def _split(self, pieces: Mapping[str, list[Sample]]) -> tuple[tuple[Sample, ...], tuple[Sample, ...], str]:
        if self.heldout_fraction == 0:
            return tuple(itertools.chain.from_iterable(pieces.values())), (), "none"
        if len(pieces) == 1:
            return self._split_one(*pieces.items())
        heldout = heldout_names(pieces, self.heldout_fraction, self.seed)
        train = tuple(sample for name, samples in pieces.items() if name not in heldout for sample in samples)
        held = tuple(sample for name, samples in pieces.items() if name in heldout for sample in samples)
        return train, held, "by document"

    def _split_one(self, document: tuple[str, list[Sample]]) -> tuple[tuple[Sample, ...], tuple[Sample, ...], str]:
        name, samples = document
        if len(samples) == 1:
            raise DataError(
                f"the text of document {name!r} is too short to hold any of it out.",
                wanted=f"two documents, or one of more than max_length={self.max_length} tokens",
                have=f"one document in one piece of {samples[0].items['text'][0].units} tokens",
                set_by=set_by(self, "heldout_fraction"),
                fix="add documents, lower max_length, or set heldout_fraction to 0 to train without evaluation",
                anchor="too-little-text",
            )
        first = len(samples) - min(max(1, round(self.heldout_fraction * len(samples))), len(samples) - 1)
        logger.warning("only one document (%s) has text: its last %d of %d pieces are held out", name, len(samples) - first, len(samples))
        return tuple(samples[:first]), tuple(samples[first:]), "by piece of the only document"

    def _bad_value(self, field: str, wanted: str) -> ConfigError:
        return out_of_range(self, field, wanted)

    def _no_text(self, documents: int, skipped: Mapping[str, int]) -> DataError:
        counts = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
        return DataError(
            f"{type(self).__name__} has no text to train on.",
            wanted=f"at least one document with a piece of min_length={self.min_length} tokens",
            have=f"{documents} documents with text, no piece to train on (skipped: {counts or 'nothing'})",
            set_by=set_by(self, self.origin),
            fix="give text that is not empty and is UTF-8, or lower min_length; the log names what was skipped",
            anchor="empty-corpus",
        )

    def _repeated_name(self, name: str) -> DataError:
        return DataError(
            f"two documents are called {name!r}.",
            wanted="a name of its own for each document: the ids of its samples are made from it",
            have="the second of them would take the place of the first",
            set_by=set_by(self, self.origin),
            fix=f"let {type(self).__name__}.read give each document another name",
            anchor="repeated-sample-id",
        )


def out_of_range(source: Any, field: str, wanted: str) -> ConfigError:
    """Says that a field of a data source has a wrong value.

    Args:
        source: the data source.
        field: its name.
        wanted: what would be right, as in "a length of at least 1 token".
    """
    return ConfigError(
        f"{type(source).__name__}.{field} is out of range.",
        wanted=wanted,
        have=f"{field}={getattr(source, field)}",
        set_by=set_by(source, field),
        fix=f"set {field} to {wanted}",
        anchor="data-value-out-of-range",
    )


def cut_pieces(name: str, ids: np.ndarray, max_length: int, loss: np.ndarray | None = None) -> list[Sample]:
    """Cuts a document's tokens into samples; neighbouring pieces share one token.

    Args:
        name: the document's name.
        ids: `[tokens]` int32, made read-only because the samples are views of it.
        max_length: most tokens of a sample.
        loss: `[tokens]` float32, weight of each token as a target, made read-only as well; None is 1 everywhere.

    Returns:
        Samples `"{name}:{n}"`, n from 0; none when there are fewer than two tokens.

    >>> first, second = cut_pieces("a", np.arange(5, dtype=np.int32), 3)
    >>> second.id, second.items["text"][0].arrays["tokens"].tolist(), second.items["text"][0].arrays["targets"].tolist()
    ('a:1', [3], [4])
    """
    loss = loss if loss is not None else np.broadcast_to(np.float32(1), ids.shape)  # a view of one number
    samples = []
    for array in (ids, loss):
        array.flags.writeable = False
    for number, start in enumerate(range(0, len(ids) - 1, max_length)):
        inputs, targets = slice(start, min(start + max_length, len(ids) - 1)), slice(start + 1, start + max_length + 1)
        arrays = {"tokens": ids[inputs], "targets": ids[targets], "loss_mask": loss[targets]}
        samples.append(Sample(id=f"{name}:{number}", items={"text": (Item(units=len(ids[inputs]), arrays=arrays),)}))
    return samples


def heldout_names(names: Iterable[str], fraction: float, seed: int) -> set[str]:
    """Chooses the documents to hold out, each by a hash of its own name.

    Only when that would leave one side empty do other documents matter: then the nearest one changes sides.

    Args:
        names: two or more different names.
        fraction: expected share, above 0 and below 1.
        seed: another seed is another choice.

    >>> chosen = heldout_names((f"page {n}" for n in range(1000)), 0.1, seed=0)
    >>> 80 < len(chosen) < 120, chosen == heldout_names((f"page {n}" for n in reversed(range(1000))), 0.1, seed=0)
    (True, True)
    """
    place = {name: split_place(name, seed) for name in names}
    order = sorted(place, key=place.__getitem__)
    count = sum(value < fraction for value in place.values())
    return set(order[: min(max(count, 1), len(order) - 1)])


def check_vocabulary(dataset: Dataset, vocab_size: int, section: str, *, set_by: str = "the calling program") -> None:
    """Refuses token ids that a section's embedding table does not have; JAX would clamp them silently.

    Args:
        dataset: the data; without a vocabulary there is nothing to check.
        vocab_size: rows of the section's embedding table.
        section: the section's name, for the error text.
        set_by: where the section's vocabulary size was set.

    Raises:
        DataError: the data has token ids of `vocab_size` or more.
    """
    if dataset.vocab_size is None or dataset.vocab_size <= vocab_size:
        return
    raise DataError(
        f"the data's vocabulary does not fit into section {section!r}.",
        wanted=f"token ids below {vocab_size}, the section's vocabulary size",
        have=f"a tokenizer with {dataset.vocab_size} token ids ({dataset.notes.get('tokenizer', 'unknown file')})",
        set_by=set_by,
        fix=f"use the tokenizer that section {section!r} was made with, or a vocabulary size of at least {dataset.vocab_size}",
        anchor="foreign-vocabulary",
    )


def split_place(name: str, seed: int) -> float:
    """Returns a number from 0 to 1 that the name and the seed alone decide; `hash` would differ between processes.

    What has a place below some fraction is held out. The prefix was chosen so that seed 0 holds out about a tenth of the built-in
    corpus in tokens too, not in documents alone.
    """
    digest = hashlib.sha256(f"split:{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _groups(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    while group := list(itertools.islice(documents, size)):
        yield group
