"""Files of JSON Lines: which ones a path means, their lines in order, and lines that cannot be used."""

from __future__ import annotations

import collections
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError

logger = logging.getLogger(__name__)

_LOGGED = 3  # bad lines of each reason that are named in the log; a file of another format would fill the screen


class BadLine(Exception):
    """A line that cannot be used: a reason, by which such lines are counted, and what was found."""

    def __init__(self, reason: str, found: str) -> None:
        self.reason, self.found = reason, found
        super().__init__(f"{reason}: {found}")


class Line(NamedTuple):
    """A line that is not blank.

    Args:
        file: where it is.
        short: the file's path from the folder that its name counts from.
        number: of the line in its file, from 1.
        offset: of the line's first byte in its file.
        content: the line, without white space around it.
    """

    file: Path
    short: str
    number: int
    offset: int
    content: bytes

    @property
    def name(self) -> str:
        """File and number, unique among lines that are read together."""
        return f"{self.short}:{self.number}"

    @property
    def place(self) -> str:
        """Full path and number, for error texts."""
        return f"{self.file}:{self.number}"


class JsonLines:
    """The lines of all files that a path means.

    Args:
        path: a file, a folder (of which all `*.jsonl` are read), or a pattern such as `"chats/**/*.jsonl"`.
        config: folder of the config file, from which the path may count as well; None is only the current folder.
        skip: whether lines that cannot be used are counted; otherwise they raise.
        wanted: what a line should be, for error texts.
        set_by: where the path was set.
    """

    def __init__(self, path: str, config: Path | None, *, skip: bool, wanted: str, set_by: str) -> None:
        self._path, self._config, self._skip, self._wanted, self._set_by = path, config, skip, wanted, set_by

    def files(self) -> tuple[Path, list[Path]]:
        """Returns the folder that names count from, and the files in the order of their paths.

        Raises:
            DataError: there is none.
        """
        given = Path(self._path).expanduser()
        places = [given] if self._config is None else [given, self._config / given]
        for place in places:
            root, files = _matching(place)
            if files:
                return root, files
        looked = "\n".join(str(place.absolute()) for place in places)
        raise self._no_file(f"a folder without such files: {looked}" if any(map(Path.is_dir, places)) else f"nothing at\n{looked}")

    def __iter__(self) -> Iterator[Line]:
        """Reads the files, line by line.

        Raises:
            DataError: there is no such file, or one cannot be read.
        """
        root, files = self.files()
        for file in files:
            # Names reach UTF-8 files and hashes, which refuse the stand-ins for bytes that a file system may hold.
            short = file.relative_to(root).as_posix().encode("utf-8", "backslashreplace").decode()
            yield from self._lines(file, short)

    def _lines(self, file: Path, short: str) -> Iterator[Line]:
        offset = 0
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if content := stripped(line, number):
                        yield Line(file, short, number, offset, content)
                    offset += len(line)
        except OSError as error:
            raise self._no_file(f"{file} cannot be read: {type(error).__name__}: {error.strerror}") from error

    def bad(self, line: Line, skipped: collections.Counter[str], error: BadLine) -> None:
        """Counts a line that cannot be used, and logs the first ones.

        Raises:
            DataError: such lines are not skipped.
        """
        if not self._skip:
            raise DataError(
                f"line {line.place} cannot be used: {error.reason}.",
                wanted=self._wanted,
                have=error.found,
                set_by=line.place,
                fix="mend or remove the line, or set on_bad_line='skip' to count such lines and go on",
                anchor="bad-line",
            ) from error
        skipped[error.reason] += 1
        if skipped[error.reason] <= _LOGGED:
            last = "; further ones are only counted" if skipped[error.reason] == _LOGGED else ""
            logger.warning("skipped %s: %s (%s)%s", line.place, error.reason, error.found, last)

    def _no_file(self, have: str) -> DataError:
        return DataError(
            f"there is no JSON Lines file {self._path!r} to read.",
            wanted="a readable file, a folder with *.jsonl files in it, or a pattern that matches some, such as 'chats/**/*.jsonl'",
            have=have,
            set_by=self._set_by,
            fix="correct the path",
            anchor="jsonl-missing",
        )


def stripped(line: bytes, number: int) -> bytes:
    """Returns a line without white space around it; a byte-order mark is no JSON, but some programs begin a file with it."""
    return line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()


def record_of(line: bytes) -> dict[str, Any]:
    """Reads the object of a line.

    Raises:
        BadLine: it is no JSON object in UTF-8.

    >>> record_of(b'{"text": "1+1=2"}')
    {'text': '1+1=2'}
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", f"byte {line[error.start]:#04x} at offset {error.start}") from None
    except (ValueError, RecursionError) as error:  # a number may have more digits than Python reads, lists be too deep
        array = " (of one JSON array, `jq -c '.[]' FILE` makes JSON Lines)" if line == b"[" else ""
        raise BadLine("not JSON", f"{short(line.decode('utf-8', 'replace'))}, which JSON refuses{array}: {error}") from None
    if not isinstance(record, dict):
        raise BadLine("not an object", short(record))
    return record


def id_of(record: dict[str, Any]) -> str | None:
    """Returns the "id" of a line's object, if it has one.

    Raises:
        BadLine: it is neither a text nor a whole number.
    """
    given = record.get("id")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise BadLine("unusable id", short(given))
    return str(given)


def check_characters(text: str) -> None:
    """Refuses half of a character, which JSON can write and no tokenizer takes.

    Raises:
        BadLine: there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLine("not UTF-8", f"a lone surrogate, {error.object[error.start]!a}") from None


def short(value: Any) -> str:
    """Returns a value as JSON, cut to 80 characters, for error texts."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


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
