"""A user's own text files as a data source."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from ..config import config_folder, configurable
from ..errors import DataError, set_by
from .documents import Document
from .sources import TextSource

logger = logging.getLogger(__name__)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFolder(TextSource):
    """Text files of a folder, one document a file, in UTF-8 (with or without byte-order mark).

    A single file is split into training and held-out text by its pieces, the last ones being held out. The fields that
    are not listed here are those of `TextSource`.

    Args:
        path: the folder, from the current one or from that of the config file that names it.
        pattern: which files, as in `pathlib.Path.glob`; `"**/*.txt"` looks into folders below as well.
        on_bad_sample: what to do with a file that is empty, unreadable or not UTF-8: "skip" (log and count it) or "raise".

    Raises:
        ConfigError: a value is out of range.
    """

    origin: ClassVar[str] = "path"

    path: str
    pattern: str = "*.txt"
    on_bad_sample: Literal["skip", "raise"] = "skip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_bad_sample not in ("skip", "raise"):
            raise self._bad_value("on_bad_sample", "'skip' or 'raise'")

    def describe(self) -> dict[str, str]:
        """Names the folder, the pattern and the tokenizer."""
        return {"corpus": str(self._folder()), "pattern": self.pattern, "tokenizer": self.tokenizer}

    def read(self, skipped: collections.Counter[str]) -> Iterator[Document]:
        """Yields the files in the order of their names, which are paths relative to the folder.

        Raises:
            DataError: the folder is missing, no file matches, or a file is bad and `on_bad_sample` is "raise".
        """
        folder = self._folder()
        for file in self._files(folder):
            # Names reach UTF-8 files and hashes, which refuse the stand-ins for bytes that a file system may hold.
            name = file.relative_to(folder).as_posix().encode("utf-8", "backslashreplace").decode()
            try:
                text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                self._bad_file(file, skipped, "not UTF-8", f"byte {error.object[error.start]:#04x} at offset {error.start}")
                continue
            except OSError as error:
                self._bad_file(file, skipped, "unreadable", f"{type(error).__name__}: {error.strerror}")
                continue
            if text.strip():
                yield Document(name, text)
            else:
                self._bad_file(file, skipped, "empty", "no character but white space")

    def _folder(self) -> Path:
        folder = Path(self.path).expanduser()
        config = config_folder(self, "path")
        return folder if config is None or folder.exists() else config / folder

    def _files(self, folder: Path) -> list[Path]:
        if not folder.is_dir():
            is_file = folder.is_file()
            raise DataError(
                f"text folder {self.path!r} is {'a file' if is_file else 'missing'}.",
                wanted="a folder of text files",
                have=f"a file at {folder.absolute()}" if is_file else f"nothing at {folder.absolute()}",
                set_by=set_by(self, "path"),
                fix=f"set path to {str(folder.parent)!r} and pattern to {folder.name!r}" if is_file else "correct the path",
                anchor="text-folder-missing",
            )
        try:
            files = sorted({file for file in folder.glob(self.pattern) if file.is_file()})
        except (ValueError, NotImplementedError) as error:  # an empty, absolute or malformed pattern
            raise self._no_match(folder, f"a pattern that cannot be used: {error}") from error
        if not files:
            raise self._no_match(folder, f"{sum(1 for _ in folder.iterdir())} other entries in {folder.absolute()}")
        return files

    def _no_match(self, folder: Path, have: str) -> DataError:
        return DataError(
            f"no file in {str(folder)!r} matches {self.pattern!r}.",
            wanted="at least one text file; '*.txt' looks in the folder alone, '**/*.txt' in folders below as well",
            have=have,
            set_by=set_by(self, "pattern"),
            fix="change pattern or path",
            anchor="no-file-matches",
        )

    def _bad_file(self, file: Path, skipped: collections.Counter[str], reason: str, detail: str) -> None:
        if self.on_bad_sample == "raise":
            raise DataError(
                f"text file {str(file)!r} is {reason}.",
                wanted="a readable UTF-8 file with text in it",
                have=detail,
                set_by=set_by(self, "on_bad_sample"),
                fix="mend or remove the file, or set on_bad_sample='skip' to count such files and go on",
                anchor="bad-text-file",
            )
        skipped[reason] += 1
        logger.warning("skipped %s: %s (%s)", file, reason, detail)
