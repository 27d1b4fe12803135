"""What the file system refuses, as errors for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .errors import CheckpointError, MaestroError


@contextlib.contextmanager
def writing(path: Path, *, set_by: str) -> Iterator[None]:
    """Turns what the file system refuses in a run folder into an error.

    Args:
        path: what is made or written inside.
        set_by: where the folder was set.

    Raises:
        CheckpointError: with the system's own words.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be written.",
            wanted="a run folder that can be made and written, with room on its disk",
            have=f"{type(error).__name__}: {error}",
            fix="choose another folder, or change its permissions",
            anchor="run-folder-unwritable",
            set_by=set_by,
        ) from error


def write_output(path: str, text: str, *, what: str, flag: str, kind: type[MaestroError]) -> None:
    """Writes a file that a flag of a command asks for.

    Args:
        path: of the file.
        text: its content.
        what: word for the content, in the error.
        flag: of the command, in the error.
        kind: class of the error.

    Raises:
        MaestroError: of that kind; the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise kind(
            f"the {what} cannot be written to {path!r}.",
            wanted="a file in a folder that exists and can be written",
            have=f"{type(error).__name__}: {error}",
            fix="choose another file",
            anchor="file-unwritable",
            set_by=f"command line  {flag}",
        ) from error
