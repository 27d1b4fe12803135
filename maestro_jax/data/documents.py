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


def tokenize_stretches(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Tokenizes a text that is cut into stretches, so that no token lies on a border between two.

    Args:
        tokenizer: what tokenizes.
        texts: the stretches in order, one or more.

    Returns:
        Per stretch its tokens. Those that the tokenizer puts around a text, and end-of-text, are with the first and the last
        stretch; their `loss` is 0, that of the others 1.
    """
    from . import tokenizer as vocabulary  # here for the reason above

    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    # The tokenizer's own special tokens go around the whole, not around each stretch; what comes back marks them.
    joined = tokenizer.post_process(Encoding.merge(encodings, False), None, True)
    ids, loss = list(joined.ids), [1.0 - special for special in joined.special_tokens_mask]
    end = vocabulary.end_of_text(tokenizer)
    if end is not None and ids[-1:] != [end]:
        ids, loss = [*ids, end], [*loss, 0.0]
    # Cut after as many tokens of the text as the stretches before have; special tokens before the text go to the first.
    ends = np.cumsum([len(encoding.ids) for encoding in encodings])[:-1]
    cuts = np.searchsorted(np.cumsum(loss), ends, side="left") + 1
    cuts[ends == 0] = 0
    pieces = zip(np.split(np.asarray(ids, np.int32), cuts), np.split(np.asarray(loss, np.float32), cuts), strict=True)
    return [Tokens(*piece) for piece in pieces]


def _partly_trained(tokenizer: Tokenizer, document: Document) -> Tokens:
    stretches = _stretches(document)
    found = tokenize_stretches(tokenizer, [text for text, _ in stretches])
    loss = [tokens.loss if trained else np.zeros(len(tokens.ids), np.float32) for tokens, (_, trained) in zip(found, stretches, strict=True)]
    return Tokens(np.concatenate([tokens.ids for tokens in found]), np.concatenate(loss))


def _stretches(document: Document) -> list[tuple[str, bool]]:
    """The text in order, as (characters, whether they are trained on); none is empty."""
    stretches, done = [], 0
    for start, stop in document.loss_spans or ():
        stretches += [(document.text[done:start], False), (document.text[start:stop], True)]
        done = stop
    return [(text, trained) for text, trained in [*stretches, (document.text[done:], False)] if text]
