"""The manifest that makes a folder count: every file of it with size and SHA-256, written last and renamed into place."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    """Commits a folder with everything in it; all of it is on the disk when this returns, also if the machine stops in the next moment.

    Args:
        folder: its files must be complete.
        body: more entries, as JSON values. Where "files" is among them (file -> size and SHA-256, see `damage`), it names files that
            are on the disk already; else every file of the folder is read.

    Raises:
        OSError: the manifest cannot be written; the folder then does not count.
    """
    files = body["files"] if "files" in body else {path.relative_to(folder).as_posix(): _settled(path) for path in _files(folder)}
    content = {**body, "files": files}
    temporary = folder / f".{MANIFEST}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"sha256": _digest(content), "content": content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    # Names, too, are on the disk only when their folders are; before the rename, so that a manifest never comes before its files.
    for path in [folder.parent, folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        to_disk(path)
    os.replace(temporary, folder / MANIFEST)
    to_disk(folder)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The content of a folder's manifest; None when there is none, or it is not as it was written."""
    try:
        stored = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        content = stored["content"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return content if stored.get("sha256") == _digest(content) else None


def damage(folder: Path) -> str | None:
    """Reads every file of a folder and compares it with the manifest; says what is wrong, or None."""
    content = read_manifest(folder)
    if content is None:
        return f"{folder.name}/{MANIFEST} is missing or damaged"
    for name, wanted in content["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{folder.name}/{name} is missing"
        try:
            found = _fingerprint(path)
        except OSError as error:
            return f"{folder.name}/{name} cannot be read ({type(error).__name__}: {error})"
        if found != wanted:
            return f"{folder.name}/{name} is not as it was written (size or SHA-256 differs)"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, f".{MANIFEST}.tmp"))


def _settled(path: Path) -> dict[str, Any]:
    to_disk(path)
    return _fingerprint(path)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot do this for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
