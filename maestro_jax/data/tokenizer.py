"""Tokenizers: trained on the built-in corpus or on text files, loaded from any `tokenizer.json`, and told apart by a fingerprint.

    python -m maestro_jax.data.tokenizer --out configs/tokenizer_tiny.json --vocab_size 1024

makes the small tokenizer that ships with the package: byte-level byte-pair encoding, so that it can write any text
(R. Sennrich, B. Haddow, A. Birch, "Neural Machine Translation of Rare Words with Subword Units", arXiv 1508.07909).

    python -m maestro_jax.data.tokenizer --out mine.json --vocab_size 8000 --text my_texts --pattern '**/*.txt'

makes one for your own text files, chosen as by `TextFolder`.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..config import find_file
from ..errors import DataError, MaestroError

END_OF_TEXT = "<|endoftext|>"

# A tokenizer.json does not say which of its tokens ends a text; these are the names in use, most specific first:
# GPT-2 and most others, Llama 3, DeepSeek, SentencePiece models such as Llama 2 and T5, Gemma.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<eos>")

_SMALLEST = 257  # the 256 bytes and end-of-text
_FLAGS = {"path": "text", "pattern": "pattern"}  # field of TextFolder -> flag of the command


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level byte-pair encoding; the same texts in the same order give the same tokenizer.

    Args:
        texts: what to train on.
        vocab_size: most token ids, the 256 bytes and end-of-text (id 0) included; fewer when the text is small.

    Raises:
        DataError: `vocab_size` has no room for the bytes.

    >>> tokenizer = train(["to be or not to be"], vocab_size=260)
    >>> tokenizer.decode(tokenizer.encode("not to be").ids)
    'not to be'
    """
    if vocab_size < _SMALLEST:
        raise DataError(
            "a tokenizer of this size cannot write every text.",
            wanted=f"vocab_size of at least {_SMALLEST}: the 256 bytes and {END_OF_TEXT}",
            have=f"vocab_size={vocab_size}",
            fix=f"give a vocab_size of {_SMALLEST} or more",
            anchor="tokenizer-too-small",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(name: str | Path, near: Path | None = None, *, set_by: str = "the calling program") -> Tokenizer:
    """Loads a `tokenizer.json`, without the truncation and padding that some of them ask for.

    Args:
        name: a file, the folder of a model that holds a `tokenizer.json`, or the name of one of the shipped configs.
        near: a config file or its folder, where the file is looked for as well.
        set_by: where the name was set, for error texts.

    Raises:
        ConfigError: there is no such file.
        DataError: the file is no tokenizer.
    """
    path = find_file(name, near, set_by=set_by)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for anything that it cannot parse
        raise DataError(
            f"tokenizer {str(path)!r} cannot be read.",
            wanted="a tokenizer.json as Hugging Face tokenizers writes it",
            have=f"{type(error).__name__}: {error}",
            set_by=set_by,
            fix="give the file named tokenizer.json (not tokenizer_config.json or vocab.json), or make one: "
            "python -m maestro_jax.data.tokenizer --out FILE",
            anchor="tokenizer-unreadable",
        ) from error
    # Files of sentence encoders carry both; they would cut every document at 128 or 512 tokens without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Tokenizes whole documents, with the tokenizer's own special tokens and an end-of-text token when it has one.

    Returns:
        Per text, its token ids `[tokens]` int32; the end-of-text token is not doubled.
    """
    end = end_of_text(tokenizer)
    documents = []
    for encoding in tokenizer.encode_batch_fast(list(texts)):
        ids = encoding.ids
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        documents.append(np.asarray(ids, np.int32))
    return documents


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Returns the id of the token that ends a text, or None when the tokenizer has none of the usual names."""
    known = (tokenizer.token_to_id(name) for name in _END_OF_TEXT_NAMES)
    return next((number for number in known if number is not None), None)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Returns the largest token id + 1, added tokens included: the rows that an embedding table needs.

    It is more than the number of tokens when the ids have gaps.
    """
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def fingerprint(tokenizer: Tokenizer) -> str:
    """Returns a hash that is equal for two tokenizers exactly when every id means the same token in both.

    It is the SHA-256 of the sorted (token, id) pairs as JSON, so order and layout of the files do not matter. Models
    that are compared token by token (a teacher and its student) need equal fingerprints.
    """
    pairs = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a tokenizer on text files, or on the built-in corpus, and writes it to a file."""
    parser = argparse.ArgumentParser(prog="python -m maestro_jax.data.tokenizer", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the tokenizer.json to write")
    parser.add_argument("--vocab_size", type=int, default=1024, help="most token ids (default: 1024)")
    parser.add_argument("--text", metavar="FOLDER", help="folder of text files in UTF-8 to train on (default: the built-in corpus)")
    parser.add_argument("--pattern", help="which files of --text; '**/*.txt' looks into folders below as well (default: *.txt)")
    options = parser.parse_args(arguments)
    if options.pattern is not None and options.text is None:
        parser.error("--pattern chooses files of --text FOLDER, which is not given")
    try:
        tokenizer = train(_texts(options.text, options.pattern or "*.txt"), options.vocab_size)
    except MaestroError as error:
        parser.exit(2, f"{type(error).__name__}: {error}\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(tokenizer.to_str() + "\n", encoding="utf-8")
    print(f"{options.out}: {vocabulary_size(tokenizer)} token ids, fingerprint {fingerprint(tokenizer)[:16]}")


def _texts(folder: str | None, pattern: str) -> list[str]:
    """The built-in corpus, or the good files of a folder; the bad ones are logged."""
    # Here, because both load tokenizers through this module.
    from .corpus import corpus_documents
    from .text_folder import TextFolder

    if folder is None:
        return [document.text for document in corpus_documents()]
    source = TextFolder(path=folder, pattern=pattern)
    object.__setattr__(source, "_provenance", {name: f"command line  --{flag}" for name, flag in _FLAGS.items()})
    skipped: collections.Counter[str] = collections.Counter()
    texts = [document.text for document in source.read(skipped)]
    if not texts:
        raise DataError(
            "there is no text to train a tokenizer on.",
            wanted="at least one UTF-8 file with text in it",
            have=", ".join(f"{count} skipped ({reason})" for reason, count in skipped.items()),
            set_by=f"command line  --text {folder}",
            fix="give a folder with such files, or another --pattern",
            anchor="empty-corpus",
        )
    return texts


if __name__ == "__main__":
    main()
