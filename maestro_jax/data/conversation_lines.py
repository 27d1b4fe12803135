"""Lines of conversations: what is in one, and where each of them is."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from .chat import conversation, messages_of
from .documents import Document, stretches
from .interleaved import Stream
from .json_lines import BadLine, Line, check_characters, record_of, short, stripped
from .jsonl import Writer, document_in
from .sources import split_place

IMAGE = "<image>"

PLACEHOLDERS: Mapping[str, Stream] = {IMAGE: "image", "<audio>": "audio"}
"""What stands in the text of a line for an image or a clip."""

_PARTS: Mapping[Any, Stream] = {"image": "image", "image_url": "image", "audio": "audio", "audio_url": "audio"}
"""Types of the parts of a content that is a list, beside "text"."""

_VIDEOS = ("video", "video_url", "videos")  # types of parts and keys of lines that nothing reads

_REMOTE = re.compile(r"data:|(?!file:)\w+://")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writing:
    """How a line becomes text, and what stands for images and clips in that text.

    Args:
        messages: writes messages, and says what of their text is trained on.
        text: writes a text that is no conversation.
        placeholders: what stands for an image or a clip in what these two write, and its stream.
    """

    messages: Writer = conversation
    text: Callable[[str], str] = str
    placeholders: Mapping[str, Stream] = dataclasses.field(default_factory=lambda: PLACEHOLDERS)

    def pieces(self, document: Document) -> list[tuple[str, bool]]:
        """Returns the text in order, cut at placeholders, which are pieces of their own; with each, whether it is trained on."""
        # With a group, so that splitting keeps them.
        placeholder = re.compile(f"({'|'.join(map(re.escape, self.placeholders))})")
        return [(piece, trained) for text, trained in stretches(document) for piece in placeholder.split(text) if piece]


class Parsed(NamedTuple):
    """A line.

    Args:
        document: its text, named by its id.
        paths: of the images and clips in it, in order.
    """

    document: Document
    paths: Mapping[Stream, tuple[str, ...]]


def parsed(line: bytes, default_name: str, writing: Writing) -> Parsed:
    """Reads one line.

    Args:
        line: a JSON object in UTF-8.
        default_name: the document's name when the line has no id.
        writing: how it becomes text.

    Raises:
        BadLine: it is no conversation.

    >>> line = b'{"image": "a.png", "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "2"}]}'
    >>> parsed(line, "a:1", Writing()).paths
    {'image': ('a.png',), 'audio': ()}
    """
    record = _with_placeholders(record_of(line))
    for name in _VIDEOS:
        if record.get(name):
            raise BadLine("video", f"{name}: {short(record[name])}, and only images and sound are read")
    if messages_of(record) is None and isinstance(record.get("text"), str):
        record = {**record, "text": writing.text(record["text"])}
    document = document_in(record, default_name, writing.messages)
    if document.loss_spans is not None:
        for piece, trained in writing.pieces(document):
            if trained and piece in writing.placeholders:
                raise BadLine("placeholder in an answer", short(piece))
    paths: dict[Stream, tuple[str, ...]] = {stream: _paths(record, stream) for stream in PLACEHOLDERS.values()}
    for stream, found in paths.items():
        if found and stream not in writing.placeholders.values():
            raise BadLine(f"{stream}, which the model has no place for", short(list(found)))
    return Parsed(document, paths)


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
    if kind in _VIDEOS:
        raise BadLine("video", f"the part {short(part)}, and only images and sound are read")
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
