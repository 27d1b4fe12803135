"""Lines of conversations and the files that they name, as samples that are read when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ..errors import DataError
from .conversation_lines import PLACEHOLDERS, Index, Parsed, parsed, pieces_of
from .documents import tokenize_stretches
from .interleaved import Interleaved, Kind, Stream
from .json_lines import BadLine, short
from .lazy import Digest, LazySamples
from .media import Unusable, find_below, read_clip, read_image
from .mel import audio_item
from .patches import image_item
from .samples import Item, Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How a conversation becomes a sample.

    Args:
        max_length: most units of a sample's text, with those that images and sound take.
        patch_size: pixels along a side of a patch.
        merge: patches along a side of the block that becomes one row in the text.
        max_patches: most patches of an image; a larger one is scaled down.
        max_pixels: most pixels of an image in its file.
        mels: frequency bands of a frame of sound.
        stride: frames, of 10 ms each, that become one row in the text.
        band: lowest and highest frequency that is heard, in hertz.
        max_seconds: longest clip.
    """

    max_length: int = 2048
    patch_size: int = 14
    merge: int = 2
    max_patches: int = 1024
    max_pixels: int = 2**26
    mels: int = 80
    stride: int = 4
    band: tuple[float, float] = (0.0, 8000.0)
    max_seconds: float = 60.0


class Reader:
    """Makes samples of lines and files.

    Args:
        reading: how.
        root: the folder that no path may leave, resolved.
        tokenizer: what tokenizes.
        index: the lines.
    """

    def __init__(self, reading: Reading, root: Path, tokenizer: Tokenizer, index: Index) -> None:
        self._reading, self._root, self._tokenizer, self._index = reading, root, tokenizer, index

    def read(self, which: int) -> Sample:
        """Reads the line of that number and its files.

        Raises:
            DataError: one of them cannot be used.
        """
        try:
            line = self._index.line(which)
            found = parsed(line.content, line.name)
        except (OSError, BadLine) as error:
            changed = Unusable("bad-line", "it has changed", wanted="the line that was there when the run began", have=str(error))
            raise _refused(self._index.name(which), "the files of the data", changed) from error
        try:
            return self._sample(line.name, found)
        except Unusable as error:
            raise _refused(line.name, line.place, error) from error

    def _sample(self, name: str, found: Parsed) -> Sample:
        pieces = pieces_of(found.document)
        _check_placeholders(pieces, found.paths)
        items: dict[Stream, tuple[Item, ...]] = {
            "image": tuple(map(self._image, found.paths["image"])),
            "audio": tuple(map(self._clip, found.paths["audio"])),
        }
        text = self._text(pieces, items, whole=found.document.loss_spans is None)
        return Sample(id=name, items={"text": (text,), **{stream: some for stream, some in items.items() if some}})

    def _image(self, path: str) -> Item:
        how = self._reading
        block, most = how.patch_size * how.merge, how.max_patches // how.merge**2
        image = read_image(find_below(self._root, path), block=block, most_blocks=most, max_pixels=how.max_pixels)
        return image_item(image, how.patch_size, how.merge)

    def _clip(self, path: str) -> Item:
        sound, rate = read_clip(find_below(self._root, path), max_seconds=self._reading.max_seconds)
        return audio_item(sound, rate, mels=self._reading.mels, stride=self._reading.stride, band=self._reading.band)

    def _text(self, pieces: Sequence[tuple[str, bool]], items: Mapping[Stream, Sequence[Item]], *, whole: bool) -> Item:
        """The text item; `whole` is whether special tokens count as well, as in text that is no conversation."""
        texts = [piece for piece, _ in pieces if piece not in PLACEHOLDERS]
        tokens = iter(tokenize_stretches(self._tokenizer, texts) if texts else ())
        units = {"image": self._reading.merge**2, "audio": self._reading.stride}
        waiting = {stream: iter(some) for stream, some in items.items()}
        text = Interleaved()
        kind: Kind = "text"
        for piece, trained in pieces:
            if piece in PLACEHOLDERS:
                stream = kind = PLACEHOLDERS[piece]
                text.place(stream, next(waiting[stream]).units // units[stream])
                continue
            for token, own in zip(*next(tokens), strict=True):
                text.write([int(token)], kind if trained and (own or whole) else None)
        if text.units > self._reading.max_length:
            raise Unusable(
                "sample-too-long",
                "its text is too long",
                wanted=f"at most max_length={self._reading.max_length} units, of tokens and of rows for images and sound",
                have=f"{text.units} units",
                fix="raise max_length, or lower max_patches or shorten the conversation",
            )
        item = text.item() if text.units else None
        if item is None or not item.arrays["loss_mask"].any():
            have = "no token of an answer"
            raise Unusable("nothing-to-learn", "there is nothing to learn in it", wanted="an answer of at least one token", have=have)
        return item


class ConversationSamples(LazySamples):
    """Samples of some lines.

    Args:
        reader: what reads them.
        lines: their numbers.
        facts: all else that decides what they are.
    """

    def __init__(self, reader: Reader, lines: np.ndarray, facts: str) -> None:
        self._reader, self._lines, self._facts = reader, lines, facts

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, number: int) -> Sample:
        """Reads a sample.

        Raises:
            DataError: it cannot be used.
        """
        return self._reader.read(int(self._lines[number]))

    def hash_into(self, digest: Digest) -> None:
        """Gives a hash the lines and how they are read; what is in the files of images and sound does not count."""
        digest.update(self._facts.encode())
        digest.update(self._lines.astype("<i8").tobytes())


def _check_placeholders(pieces: Sequence[tuple[str, bool]], paths: Mapping[Stream, Sequence[str]]) -> None:
    for placeholder, stream in PLACEHOLDERS.items():
        count = sum(piece == placeholder for piece, _ in pieces)
        if count != len(paths[stream]):
            raise Unusable(
                "placeholders-unmatched",
                f"its placeholders {placeholder} do not match its paths",
                wanted=f"as many {placeholder} in the text as there are paths",
                have=f"{count} {placeholder}, and {len(paths[stream])} paths: {short(list(paths[stream]))}",
                fix="add or remove placeholders or paths",
            )


def _refused(name: str, place: str, error: Unusable) -> DataError:
    return DataError(
        f"sample {name!r}: {error.what}.",
        wanted=error.wanted,
        have=error.have,
        set_by=place,
        fix=f"{error.fix}, or set train.on_bad_sample to 'skip'",
        anchor=error.anchor,
    )
