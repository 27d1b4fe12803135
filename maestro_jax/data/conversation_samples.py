"""Lines of conversations and the files that they name, as samples that are read when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from ..errors import DataError
from .conversation_lines import PLACEHOLDERS, Index, Parsed, Writing, parsed
from .documents import tokenize_stretches
from .interleaved import PLACEHOLDER, Interleaved, Kind, Stream
from .json_lines import BadLine, short
from .lazy import Digest, LazySamples
from .media import Unusable, find_below, read_clip, read_image
from .mel import audio_item
from .patches import image_item
from .positions import rope_positions
from .samples import Item, Sample

if TYPE_CHECKING:
    from .vision_language import VisionLanguage


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
        model: the vision-language model that they are written for, if there is one.
    """

    def __init__(self, reading: Reading, root: Path, tokenizer: Tokenizer, index: Index, model: VisionLanguage | None = None) -> None:
        self._reading, self._root, self._tokenizer, self._index, self._model = reading, root, tokenizer, index, model
        self._writing = Writing() if model is None else model.writing

    def read(self, which: int) -> Sample:
        """Reads the line of that number and its files.

        Raises:
            DataError: one of them cannot be used.
        """
        try:
            line = self._index.line(which)
            found = parsed(line.content, line.name, self._writing)
        except (OSError, BadLine) as error:
            changed = Unusable("bad-line", "it has changed", wanted="the line that was there when the run began", have=str(error))
            raise _refused(self._index.name(which), "the files of the data", changed) from error
        try:
            return self._sample(line.name, found)
        except Unusable as error:
            raise _refused(line.name, line.place, error) from error

    def _sample(self, name: str, found: Parsed) -> Sample:
        pieces = self._writing.pieces(found.document)
        self._check_placeholders(pieces, found.paths)
        items: dict[Stream, tuple[Item, ...]] = {
            "image": tuple(map(self._image, found.paths["image"])),
            "audio": tuple(map(self._clip, found.paths["audio"])),
        }
        text = self._text(pieces, items, whole=found.document.loss_spans is None)
        return Sample(id=name, items={"text": (text,), **{stream: some for stream, some in items.items() if some}})

    def _image(self, path: str) -> Item:
        how, file = self._reading, find_below(self._root, path)
        if self._model is not None:
            return self._model.image_item(file, max_patches=how.max_patches, max_pixels=how.max_pixels)
        block, most = how.patch_size * how.merge, how.max_patches // how.merge**2
        image = read_image(file, block=block, most_blocks=most, max_pixels=how.max_pixels)
        return image_item(image, how.patch_size, how.merge)

    def _clip(self, path: str) -> Item:
        sound, rate = read_clip(find_below(self._root, path), max_seconds=self._reading.max_seconds)
        return audio_item(sound, rate, mels=self._reading.mels, stride=self._reading.stride, band=self._reading.band)

    def _text(self, pieces: Sequence[tuple[str, bool]], items: Mapping[Stream, Sequence[Item]], *, whole: bool) -> Item:
        """The text item; `whole` is whether special tokens count as well, as in text that is no conversation."""
        placeholders = self._writing.placeholders
        texts = [piece for piece, _ in pieces if piece not in placeholders]
        tokens = iter(tokenize_stretches(self._tokenizer, texts) if texts else ())
        units = {"image": self._reading.merge**2, "audio": self._reading.stride}
        waiting = {stream: iter(some) for stream, some in items.items()}
        text, place = Interleaved(), PLACEHOLDER if self._model is None else self._model.image_token_id
        kind: Kind = "text"
        for piece, trained in pieces:
            if piece in placeholders:
                stream = kind = placeholders[piece]
                text.place(stream, next(waiting[stream]).units // units[stream], place)
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
        return item if self._model is None else self._with_rope_positions(item, items["image"])

    def _with_rope_positions(self, text: Item, images: Sequence[Item]) -> Item:
        """The text item with the places of its units in time, height and width."""
        # The last patch of an image is in its last row and column.
        grids = [((image.arrays["coords"][-1] + 1) // self._reading.merge).tolist() for image in images]
        return dataclasses.replace(text, arrays={**text.arrays, "rope_positions": rope_positions(text.arrays["image_rows"], grids)})

    def _check_placeholders(self, pieces: Sequence[tuple[str, bool]], paths: Mapping[Stream, Sequence[str]]) -> None:
        for placeholder, stream in PLACEHOLDERS.items():
            count = sum(self._writing.placeholders.get(piece) == stream for piece, _ in pieces)
            if count != len(paths[stream]):
                raise Unusable(
                    "placeholders-unmatched",
                    f"its placeholders {placeholder} do not match its paths",
                    wanted=f"as many {placeholder} in the text as there are paths",
                    have=f"{count} {placeholder}, and {len(paths[stream])} paths: {short(list(paths[stream]))}",
                    fix="add or remove placeholders or paths",
                )


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


def _refused(name: str, place: str, error: Unusable) -> DataError:
    return DataError(
        f"sample {name!r}: {error.what}.",
        wanted=error.wanted,
        have=error.have,
        set_by=place,
        fix=f"{error.fix}, or set train.on_bad_sample to 'skip'",
        anchor=error.anchor,
    )
