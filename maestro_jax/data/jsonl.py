"""A user's own JSON Lines files as a data source: texts, or conversations of which only the answers are trained on.

Conversations are written in one plain template, that of ChatML, which many models know (those whose tokenizer has
`<|im_start|>` and `<|im_end|>` as single tokens; any other tokenizer writes them in several). A turn is

    <|im_start|>ROLE
    CONTENT<|im_end|>

with a line break at its end. Trained on are the content of the assistant's turns and the `<|im_end|>` after it, by which
a model says that its answer is complete. The template of a model's own `tokenizer_config.json` is not looked at.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..config import config_folder, configurable
from ..errors import DataError, set_by
from .documents import Document
from .sources import TextSource

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

_WANTED = """a JSON object in one line, in UTF-8: {"text": "..."}, or
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
with the roles system, user and assistant; an "id" is a text or a whole number"""
_LOGGED = 3  # bad lines of each reason that are named in the log; a file of another format would fill the screen


class BadLine(Exception):
    """A line that is no document: a reason, by which such lines are counted, and what was found."""

    def __init__(self, reason: str, found: str) -> None:
        self.reason, self.found = reason, found
        super().__init__(f"{reason}: {found}")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl(TextSource):
    """JSON Lines files, one document a line: `{"text": ...}`, or `{"messages": [{"role": ..., "content": ...}, ...]}`.

    Of messages only the assistant's are trained on, see this module for how they are written. Where a line has both,
    the messages count. An `"id"` names the document (so that it stays in training or held out when lines move), else
    its file and line number do. Lines of white space alone do not count. The fields that are not listed here are those
    of `TextSource`.

    Args:
        path: a file, a folder (of which all `*.jsonl` are read), or a pattern such as `"chats/**/*.jsonl"`, from the
            current folder or from that of the config file that names it.
        on_bad_line: what to do with a line that is no such object, or has no text: "raise", or "skip" (count it).

    Raises:
        ConfigError: a value is out of range.
    """

    origin: ClassVar[str] = "path"

    path: str
    on_bad_line: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_bad_line not in ("raise", "skip"):
            raise self._bad_value("on_bad_line", "'raise' or 'skip'")

    def describe(self) -> dict[str, str]:
        """Names the path and the tokenizer."""
        return {"corpus": self.path, "tokenizer": self.tokenizer}

    def read(self, skipped: collections.Counter[str]) -> Iterator[Document]:
        """Yields the lines of the files, which are in the order of their paths.

        Raises:
            DataError: there is no such file, one cannot be read, an id comes twice, or a line is bad and `on_bad_line` is
                "raise".
        """
        places: dict[str, str] = {}
        root, files = self._files()
        for file in files:
            # Names reach UTF-8 files and hashes, which refuse the stand-ins for bytes that a file system may hold.
            short = file.relative_to(root).as_posix().encode("utf-8", "backslashreplace").decode()
            for number, line in self._lines(file):
                place = f"{file}:{number}"
                try:
                    document = document_of(line, f"{short}:{number}")
                except BadLine as error:
                    self._bad_line(place, skipped, error)
                    continue
                if document.name in places:
                    raise _repeated_id(document.name, places[document.name], place)
                places[document.name] = place
                yield document

    def _lines(self, file: Path) -> Iterator[tuple[int, bytes]]:
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    # A byte-order mark is no JSON, but some programs begin a file with it.
                    content = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                    if content:
                        yield number, content
        except OSError as error:
            raise self._no_file(f"{file} cannot be read: {type(error).__name__}: {error.strerror}") from error

    def _files(self) -> tuple[Path, list[Path]]:
        """The folder from which names count, and the files in order."""
        given, config = Path(self.path).expanduser(), config_folder(self, "path")
        places = [given] if config is None else [given, config / given]
        for place in places:
            root, files = _matching(place)
            if files:
                return root, files
        looked = "\n".join(str(place.absolute()) for place in places)
        raise self._no_file(f"a folder without such files: {looked}" if any(map(Path.is_dir, places)) else f"nothing at\n{looked}")

    def _no_file(self, have: str) -> DataError:
        return DataError(
            f"there is no JSON Lines file {self.path!r} to read.",
            wanted="a readable file, a folder with *.jsonl files in it, or a pattern that matches some, such as 'chats/**/*.jsonl'",
            have=have,
            set_by=set_by(self, "path"),
            fix="correct the path",
            anchor="jsonl-missing",
        )

    def _bad_line(self, place: str, skipped: collections.Counter[str], error: BadLine) -> None:
        if self.on_bad_line == "raise":
            raise DataError(
                f"line {place} cannot be used: {error.reason}.",
                wanted=_WANTED,
                have=error.found,
                set_by=place,
                fix="mend or remove the line, or set on_bad_line='skip' to count such lines and go on",
                anchor="bad-line",
            ) from error
        skipped[error.reason] += 1
        if skipped[error.reason] <= _LOGGED:
            last = "; further ones are only counted" if skipped[error.reason] == _LOGGED else ""
            logger.warning("skipped %s: %s (%s)%s", place, error.reason, error.found, last)


def document_of(line: bytes, default_name: str) -> Document:
    """Reads one line.

    Args:
        line: a JSON object in UTF-8.
        default_name: the document's name when the line has no id.

    Raises:
        BadLine: it is no document.

    >>> document_of(b'{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}', "a:1").loss_spans
    ((54, 65),)
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", f"byte {line[error.start]:#04x} at offset {error.start}") from None
    except (ValueError, RecursionError) as error:  # a number may have more digits than Python reads, lists be too deep
        raise BadLine("not JSON", f"{_short(line.decode('utf-8', 'replace'))}, which JSON refuses: {error}") from None
    if not isinstance(record, dict):
        raise BadLine("not an object", _short(record))
    name = _name(record.get("id"), default_name)
    if record.get("messages") is not None:
        text, spans = conversation(record["messages"])
        document = Document(name, text, spans)
    elif isinstance(record.get("text"), str):
        document = Document(name, record["text"])
    else:
        found = f"text is {_short(record['text'])}" if "text" in record else f"an object with the keys {_short(list(record))}"
        raise BadLine("no text", found)
    if not document.text.strip():
        raise BadLine("empty", "no character but white space")
    try:
        (document.name + document.text).encode()
    except UnicodeEncodeError as error:  # JSON can write half of a character, which no tokenizer takes
        raise BadLine("not UTF-8", f"a lone surrogate, {error.object[error.start]!a}") from None
    return document


def conversation(messages: Any) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Writes messages in the template of this module.

    Args:
        messages: what a line has under that key.

    Returns:
        The text, and `(start, stop)` of the characters in it that are trained on.

    Raises:
        BadLine: they are no conversation, or there is no answer in it.

    >>> text, ((start, stop),) = conversation([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}])
    >>> print(text, end="")
    <|im_start|>user
    1+1?<|im_end|>
    <|im_start|>assistant
    2<|im_end|>
    >>> text[start:stop]
    '2<|im_end|>'
    """
    if not isinstance(messages, list):
        raise BadLine("no text", f"messages is {_short(messages)}")
    text, spans = "", []
    for number, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES:
            raise BadLine("unknown role", f"message {number}: {_short(message if role is None else role)}")
        if not isinstance(content, str):
            raise BadLine("no text", f"message {number} with content {_short(content)}")
        if role == "assistant" and not content.strip():
            raise BadLine("empty", f"message {number}: an answer with no character but white space")
        text += f"{TURN_START}{role}\n"
        if role == "assistant":
            spans.append((len(text), len(text) + len(content) + len(TURN_END)))
        text += f"{content}{TURN_END}\n"
    if not spans:
        raise BadLine("no answer", f"{len(messages)} messages, none of them the assistant's")
    return text, tuple(spans)


def _name(given: Any, default: str) -> str:
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise BadLine("unusable id", _short(given))
    return str(given)


def _matching(place: Path) -> tuple[Path, list[Path]]:
    """The files that a path means, sorted, and the folder that they are named from, which no other file's coming changes."""
    if place.is_file():
        return place.parent, [place]
    if place.is_dir():
        root, pattern = place, "*.jsonl"
    else:
        fixed = next((number for number, part in enumerate(place.parts) if any(sign in part for sign in "*?[")), None)
        if fixed is None:
            return place, []
        root, pattern = Path(*place.parts[:fixed]), "/".join(place.parts[fixed:])
    try:
        return root, sorted({file for file in root.glob(pattern) if file.is_file()})
    except ValueError:  # such as '**.jsonl', which older versions of Python refuse
        return root, []


def _repeated_id(name: str, first: str, second: str) -> DataError:
    return DataError(
        f"two lines have the id {name!r}.",
        wanted="an id of its own for each line, over all files that are read together",
        have=f"{first} and {second}",
        set_by=second,
        fix='remove one of the lines, change its id, or remove "id" from all lines: file and line number then name them',
        anchor="repeated-sample-id",
    )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
