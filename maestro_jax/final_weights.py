"""What trained sections leave on disk: a folder of Hugging Face where a model came from one, else a safetensors file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from .graph import Section
from .huggingface import Folder, save
from .initial_weights import opened, sources_of
from .models.weights import save_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trained:
    """A trained model that came from a folder.

    Args:
        section: that holds it.
        prefix: of its paths in the section.
        source: the folder.
        part: which of the folder's models it is.
        arrays: path in the folder -> value.
    """

    section: str
    prefix: str
    source: Folder
    part: str
    arrays: Mapping[str, np.ndarray]


def save_sections(
    folder: Path,
    sections: Iterable[Section],
    read: Callable[[str], Mapping[str, np.ndarray]],
    tokenizer: str | None,
    dtype: str,
    shard_bytes: int,
) -> list[Path]:
    """Writes the parameters of sections that were trained.

    Args:
        folder: where to.
        sections: the sections.
        read: name of a section -> path -> value, of all its parameters; called once for each, and forgotten when they are written.
        tokenizer: fingerprint to record in a safetensors file; a folder has the tokenizer itself.
        dtype: of what is written.
        shard_bytes: most bytes of a file in a folder.

    Returns:
        `folder/SECTION` for the model that came from a folder (of several, `folder/SECTION/PREFIX` each), and `folder/SECTION.safetensors`
        for other parameters that were trained. Sections that hold different parts of one folder make one, `folder/SECTION_SECTION`.
    """
    waiting: dict[Path, list[_Trained]] = {}
    written = []

    def write(place: Path, models: list[_Trained]) -> None:
        arrays = {path: value for model in models for path, value in model.arrays.items()}
        written.append(save(place, models[0].source, arrays, dtype=dtype, shard_bytes=shard_bytes))

    for section in sections:
        arrays = read(section.name)
        models, left = _models(section, arrays)
        for model in models:
            if len(model.source.models) > 1 and len(models) == 1:
                waiting.setdefault(model.source.path, []).append(model)
            else:
                write(folder / section.name / (model.prefix if len(models) > 1 else ""), [model])
        if not models or _is_trained(section, left, ""):
            path = folder / f"{section.name}.safetensors"
            save_weights(path, left, tokenizer=tokenizer, dtype=dtype)
            written.append(path)
    for models in waiting.values():
        apart = len({model.part for model in models}) < len(models)
        for together in [[model] for model in models] if apart else [models]:
            write(folder / "_".join(model.section for model in together), together)
    return written


def _models(section: Section, arrays: Mapping[str, np.ndarray]) -> tuple[list[_Trained], dict[str, np.ndarray]]:
    """The trained models of a section that are whole models of a folder, and what is left besides."""
    found, left = [], dict(arrays)
    for prefix, (name, part) in sources_of(section).items():
        source = opened(section, name)
        if isinstance(source, Folder) and part in source.models and _is_trained(section, arrays, prefix):
            start = prefix + "/" if prefix else ""
            own = {path[len(start) :]: left.pop(path) for path in arrays if path.startswith(start)}
            inside = {f"{part}/{path}".lstrip("/"): value for path, value in own.items()}
            found.append(_Trained(section=section.name, prefix=prefix, source=source, part=part, arrays=inside))
    return found, left


def _is_trained(section: Section, arrays: Mapping[str, np.ndarray], prefix: str) -> bool:
    start = prefix + "/" if prefix else ""
    return any(path.startswith(start) and not section.is_frozen(path) for path in arrays)
