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
    return [Tokens(next(whole)) if document.loss_spans is None else _partly_trained(tokenizer, document) for document in documents]


def tokenize_stretches(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokenizes a text that is cut into stretches, so that no token lies on a border between two.

    Args:
        tokenizer: what tokenizes.
        texts: the stretches in order, one or more.

    Returns:
        Per stretch, `[tokens]` int32 ids, and float32 0 for those that the tokenizer puts around a text and for end-of-text (which
        are with the first and the last stretch), 1 for the others.
    """
    from . import tokenizer as vocabulary  # here for the reason above

    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    # The tokenizer's own special tokens go around the whole, not around each stretch; what comes back marks them.
    joined = tokenizer.post_process(Encoding.merge(encodings, False), None, True)
    ids, own = list(joined.ids), [1.0 - special for special in joined.special_tokens_mask]
    first = own.index(1.0) if 1.0 in own else 0
    if first and ids[first - 1] == ids[first]:
        # A chat template writes the token itself that the tokenizer puts before a text.
        del ids[first - 1], own[first - 1]
    end = vocabulary.end_of_text(tokenizer)
    if end is not None and ids[-1:] != [end]:
        ids, own = [*ids, end], [*own, 0.0]
    # Cut behind as many tokens of the text as the stretches so far have; special tokens before the text go to the first.
    ends = np.cumsum([len(encoding.ids) for encoding in encodings])[:-1]
    cuts = np.where(ends > 0, np.searchsorted(np.cumsum(own), ends, side="left") + 1, 0)
    return list(zip(np.split(np.asarray(ids, np.int32), cuts), np.split(np.asarray(own, np.float32), cuts), strict=True))


def stretches(document: Document) -> list[tuple[str, bool]]:
    """Returns the text in order, as (characters, whether they are trained on); none is empty."""
    if document.loss_spans is None:
        return [(document.text, True)] if document.text else []
    parts, done = [], 0
    for start, stop in document.loss_spans:
        parts += [(document.text[done:start], False), (document.text[start:stop], True)]
        done = stop
    return [(text, trained) for text, trained in [*parts, (document.text[done:], False)] if text]


def _partly_trained(tokenizer: Tokenizer, document: Document) -> Tokens:
    parts = stretches(document)
    found = tokenize_stretches(tokenizer, [text for text, _ in parts])
    loss = [np.float32(trained) * own for (_, own), (_, trained) in zip(found, parts, strict=True)]
    return Tokens(np.concatenate([ids for ids, _ in found]), np.concatenate(loss))
