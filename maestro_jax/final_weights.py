"""What a trained section leaves on disk: a folder of Hugging Face where its model came from one, else a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .graph import Section
from .huggingface import Folder, save
from .initial_weights import opened, sources_of
from .models.weights import save_weights


def save_section(
    folder: Path, section: Section, arrays: Mapping[str, np.ndarray], tokenizer: str | None, dtype: str, shard_bytes: int
) -> list[Path]:
    """Writes the parameters of a section that was trained.

    Args:
        folder: where to.
        section: the section.
        arrays: path -> value, of all its parameters.
        tokenizer: fingerprint to record in a safetensors file; a folder has the tokenizer itself.
        dtype: of what is written.
        shard_bytes: most bytes of a file in a folder.

    Returns:
        `folder/SECTION` for the model that came from a folder (of several, `folder/SECTION/PREFIX` each), and `folder/SECTION.safetensors`
        for other parameters that were trained.
    """
    models = {prefix: (model, part) for prefix, (model, part) in _models(section).items() if _trained(section, arrays, prefix)}
    left, written = dict(arrays), []
    for prefix, (model, part) in models.items():
        start = prefix + "/" if prefix else ""
        own = {path: left.pop(path) for path in arrays if path.startswith(start)}
        inside = {f"{part}/{path[len(start) :]}".lstrip("/"): value for path, value in own.items()}
        place = folder / section.name / (prefix if len(models) > 1 else "")
        written.append(save(place, model, inside, dtype=dtype, shard_bytes=shard_bytes))
    if not models or _trained(section, left, ""):
        path = folder / f"{section.name}.safetensors"
        save_weights(path, left, tokenizer=tokenizer, dtype=dtype)
        written.append(path)
    return written


def _models(section: Section) -> dict[str, tuple[Folder, str]]:
    """Path prefix -> folder and part, of what is a whole model of a folder."""
    found = {prefix: (opened(section, name), inside) for prefix, (name, inside) in sources_of(section).items()}
    return {prefix: (file, inside) for prefix, (file, inside) in found.items() if isinstance(file, Folder) and inside in file.models}


def _trained(section: Section, arrays: Mapping[str, np.ndarray], prefix: str) -> bool:
    start = prefix + "/" if prefix else ""
    return any(path.startswith(start) and not section.is_frozen(path) for path in arrays)
