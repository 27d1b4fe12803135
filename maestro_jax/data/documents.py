"""Documents: what text sources read, and how their text becomes tokens with a place in the loss or without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer


class Document(NamedTuple):
    """A text with a name that is unique in its corpus and stays the same between runs.

    Args:
        name: such as the path of its file.
        text: all of it.
        loss_spans: `(start, stop)` of the characters that are trained on, in order and apart from each other; None is all.
    """

    name: str
    text: str
    loss_spans: tuple[tuple[int, int], ...] | None = None


class Tokens(NamedTuple):
    """A document's tokens.

    Args:
        ids: `[tokens]` int32.
        loss: `[tokens]` float32, 1 for a token that is trained on and 0 for the others; None is 1 everywhere.
    """

    ids: np.ndarray
    loss: np.ndarray | None = None


def tokenize(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Tokens]:
    """Tokenizes whole documents, as `maestro_jax.data.tokenizer.encode` does.

    In a document with `loss_spans`, the text inside each span and between two is tokenized on its own: no token lies on
    a border, and a model that is asked for an answer sees the tokens before it exactly as in training. Tokens that the
    tokenizer adds itself, and end-of-text, are not trained on there.
    """
    # Not at the top: `python -m maestro_jax.data.tokenizer` would find itself imported already, and warn.
    from . import tokenizer as vocabulary

    whole = iter(vocabulary.encode(tokenizer, [document.text for document in documents if document.loss_spans is None]))
    end = vocabulary.end_of_text(tokenizer)
    return [Tokens(next(whole)) if document.loss_spans is None else _partly_trained(tokenizer, document, end) for document in documents]


def _partly_trained(tokenizer: Tokenizer, document: Document, end: int | None) -> Tokens:
    stretches = _stretches(document)
    encodings = tokenizer.encode_batch_fast([text for text, _ in stretches], add_special_tokens=False)
    loss = iter([float(trained) for encoding, (_, trained) in zip(encodings, stretches, strict=True) for _ in encoding.ids])
    # The tokenizer's own special tokens go around the whole, not around each stretch; what comes back marks them.
    joined = tokenizer.post_process(Encoding.merge(encodings, False), None, True)
    ids, weights = joined.ids, [0.0 if special else next(loss) for special in joined.special_tokens_mask]
    if end is not None and ids[-1:] != [end]:
        ids, weights = [*ids, end], [*weights, 0.0]
    return Tokens(np.asarray(ids, np.int32), np.asarray(weights, np.float32))


def _stretches(document: Document) -> list[tuple[str, bool]]:
    """The text in order, as (characters, whether they are trained on); none is empty."""
    stretches, done = [], 0
    for start, stop in document.loss_spans or ():
        stretches += [(document.text[done:start], False), (document.text[start:stop], True)]
        done = stop
    return [(text, trained) for text, trained in [*stretches, (document.text[done:], False)] if text]
