"""Harm that tests do to the files of a checkpoint, and to what writes them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from maestro_jax import checkpoint
from maestro_jax.manifest import MANIFEST


def array_file(folder: Path) -> Path:
    """The largest file below a folder."""
    return max((path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def die_inside_a_save(moment: str) -> None:
    """The next save of this process kills it.

    Args:
        moment: "write_pieces" in the midst of a file, "to_disk" when its files are there, "write_manifest" before the commit.
    """
    setattr(checkpoint, moment, _die)


def _die(path: Path, *_: Any) -> None:
    if path.suffix:
        path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
