"""Lines of conversations: what is in one, and where each of them is."""

from __future__ import annotations

import array
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from .chat import messages_of
from .documents import Document, stretches
from .interleaved import Stream
from .json_lines import BadLine, Line, check_characters, record_of, short, stripped
from .jsonl import document_in
from .sources import split_place

PLACEHOLDERS: Mapping[str, Stream] = {"<image>": "image", "<audio>": "audio"}
"""What stands in a text for an image or a clip."""

_PARTS: Mapping[Any, Stream] = {"image": "image", "image_url": "image", "audio": "audio", "audio_url": "audio"}
"""Types of the parts of a content that is a list, beside "text"."""

_REMOTE = re.compile(r"data:|(?!file:)\w+://")
_PLACEHOLDER = re.compile(f"({'|'.join(PLACEHOLDERS)})")  # with a group, so that splitting keeps them


class Parsed(NamedTuple):
    """A line.

    Args:
        document: its text, named by its id.
        paths: of the images and clips in it, in order.
    """

    document: Document
    paths: Mapping[Stream, tuple[str, ...]]


def parsed(line: bytes, default_name: str) -> Parsed:
    """Reads one line.

    Args:
        line: a JSON object in UTF-8.
        default_name: the document's name when the line has no id.

    Raises:
        BadLine: it is no conversation.

    >>> line = b'{"image": "a.png", "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "2"}]}'
    >>> parsed(line, "a:1").paths
    {'image': ('a.png',), 'audio': ()}
    """
    record = _with_placeholders(record_of(line))
    document = document_in(record, default_name)
    for text, trained in stretches(document):
        if trained and document.loss_spans is not None and _PLACEHOLDER.search(text):
            raise BadLine("placeholder in an answer", short(text))
    return Parsed(document, {stream: _paths(record, stream) for stream in PLACEHOLDERS.values()})


def pieces_of(document: Document) -> list[tuple[str, bool]]:
    """Returns the text in order, cut at placeholders, which are pieces of their own; with each, whether it is trained on."""
    return [(piece, trained) for text, trained in stretches(document) for piece in _PLACEHOLDER.split(text) if piece]


class Index:
    """Where lines are, in a few numbers each.

    Args:
        seed: of the split.

    Attributes:
        images: whether any line has one.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._digest = seed, hashlib.sha256()
        self._files: list[tuple[Path, str]] = []
        self._file, self._number, self._offset, self._place = array.array("q"), array.array("q"), array.array("q"), array.array("d")
        self.images = False

    def __len__(self) -> int:
        return len(self._number)

    def add(self, line: Line, found: Parsed) -> None:
        """Takes a line in."""
        if self._files[-1:] != [(line.file, line.short)]:
            self._files.append((line.file, line.short))
        self._file.append(len(self._files) - 1)
        self._number.append(line.number)
        self._offset.append(line.offset)
        self._place.append(split_place(found.document.name, self._seed))
        self._digest.update(repr((line.name, line.content)).encode())
        self.images = self.images or bool(found.paths["image"])

    def name(self, which: int) -> str:
        """Returns file and number of a line."""
        return f"{self._files[self._file[which]][1]}:{self._number[which]}"

    def line(self, which: int) -> Line:
        """Reads a line again.

        Raises:
            OSError: its file cannot be read any more.
        """
        file, short_name = self._files[self._file[which]]
        number, offset = self._number[which], self._offset[which]
        with file.open("rb") as lines:
            lines.seek(offset)
            return Line(file, short_name, number, offset, stripped(lines.readline(), number))

    def split(self, fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Chooses lines to train on and lines to hold out, by their names as `heldout_names` does; both are in order.

        Returns:
            Their numbers; nothing to train on where some should be held out and there is only one name.
        """
        places = np.array(self._place)
        different = np.unique(places)
        if not fraction or not len(different):
            return np.arange(len(places)), np.arange(0)
        count = min(max(int((different < fraction).sum()), 1), max(len(different) - 1, 1))
        held = places <= different[count - 1]
        return np.flatnonzero(~held), np.flatnonzero(held)

    def digest(self) -> str:
        """Returns the SHA-256 of all lines."""
        return self._digest.hexdigest()


def _with_placeholders(record: dict[str, Any]) -> dict[str, Any]:
    """Writes parts of images and sound, in contents that are lists, as placeholders, and their paths as those of the line."""
    messages, found = messages_of(record), dict[str, list[Any]]()
    if not isinstance(messages, list) or not any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in messages):
        return record
    contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
    written = [
        {**message, "content": [_placeholder(part, found) for part in content]} if isinstance(content, list) else message
        for message, content in zip(messages, contents, strict=True)
    ]
    twice = [name for stream in found for name in (stream, f"{stream}s") if record.get(name) is not None]
    if twice:
        raise BadLine("paths in two places", f"in parts of a content, and {twice[0]}: {short(record[twice[0]])}")
    return {**record, "messages": written, **{f"{stream}s": paths for stream, paths in found.items()}}


def _placeholder(part: Any, found: dict[str, list[Any]]) -> Any:
    """An image or clip as text, and its path, where the part has one, in `found`; other parts stay."""
    kind = part.get("type") if isinstance(part, dict) else None
    stream = _PARTS.get(kind) if isinstance(kind, str) else None
    if stream is None:
        return part
    path = next((part[name] for name in (kind, "path", "url") if part.get(name) is not None), None)
    if path is not None:
        found.setdefault(stream, []).append(path.get("url") if isinstance(path, dict) else path)
    return {"type": "text", "text": f"<{stream}>"}


def _paths(record: Mapping[str, Any], stream: Stream) -> tuple[str, ...]:
    """What a line has under "images" or, where it has none, "image"; likewise for sound."""
    given = record.get(f"{stream}s", None)
    given = record.get(stream) if given is None else given
    paths = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise BadLine("unusable path", f"{stream}: {short(given)}")
    for path in paths:
        check_characters(path)
        if _REMOTE.match(path):
            raise BadLine("unusable path", f"{stream}: {short(path)}, and only local files are read")
    return tuple(unquote(path.removeprefix("file://")) if path.startswith("file://") else path for path in paths)
