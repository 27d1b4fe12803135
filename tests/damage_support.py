"""Harm that tests do to the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from maestro_jax.manifest import MANIFEST


def array_file(folder: Path) -> Path:
    """The largest file below a folder."""
    return max((path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
