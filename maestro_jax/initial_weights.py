"""Initial parameters that come from files: found, opened and checked before anything is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .config import config_folder, find_file
from .data import Dataset
from .errors import CheckpointError, set_by
from .graph import Section
from .huggingface.folder import CONFIG, Folder
from .models.weights import WeightFile, weights_below
from .runtime import Plan


def sources_of(section: Section) -> dict[str, tuple[str, str]]:
    """Path prefix -> (file or folder, prefix in it): what `Section.weights` names, else what the module's configuration does."""
    named = section.weights if section.weights is not None else weights_below("", section.module)
    sources = {"": named} if isinstance(named, str) else named
    pairs = {prefix: source if isinstance(source, tuple) else _split(source) for prefix, source in sources.items() if source is not None}
    return {prefix: (name, inside) for prefix, (name, inside) in pairs.items() if name is not None}


def opened(section: Section, name: str) -> WeightFile | Folder:
    """Opens a file or folder that a section names.

    Raises:
        MaestroError: there is none, or it cannot be read.
    """
    origin = _origin(section)
    path = find_file(name, near=config_folder(section, "weights"), set_by=origin)
    return Folder(path, origin) if path.is_dir() else WeightFile(path, origin)


def given_weights(section: Section, plan: Plan, dataset: Dataset) -> dict[str, Any]:
    """Opens the weight files of a section.

    Returns:
        Path -> array in a file.

    Raises:
        CheckpointError: a missing file or tensor, another shape or model, or weights made with another tokenizer.
    """
    origin = _origin(section)
    shapes = plan.sections[section.name].shapes.params
    given: dict[str, Any] = {}
    for prefix, (name, inside) in sources_of(section).items():
        file = opened(section, name)
        _check_tokenizer(section, file, dataset, origin)
        stored = file.arrays(inside)
        start = prefix + "/" if prefix else ""
        wanted = {path: shape.shape for path, shape in shapes.items() if path.startswith(start)}
        problems = _other_fields(section, prefix, file, inside)
        problems += [f"{path}: wanted, not in the file" for path in wanted if path[len(start) :] not in stored]
        problems += [
            f"{path}: {list(stored[path[len(start) :]].shape)} in the file, {list(shape)} in the module"
            for path, shape in wanted.items()
            if path[len(start) :] in stored and stored[path[len(start) :]].shape != shape
        ]
        if problems or not wanted:
            raise _weights_do_not_fit(section, file.path, prefix, problems or [f"no parameter of the module lies below {prefix!r}"], origin)
        given |= {path: stored[path[len(start) :]] for path in wanted}
    return given


def _origin(section: Section) -> str:
    """Where the section's weights were named: by itself, or by its module."""
    return set_by(section, "weights" if section.weights is not None else "module")


def _other_fields(section: Section, prefix: str, file: WeightFile | Folder, inside: str) -> list[str]:
    """Where a module is configured otherwise than the model in a folder; it would compute something else from the same weights."""
    if not isinstance(file, Folder) or inside not in file.models:
        return []
    module: Any = section.module
    for name in prefix.split("/") if prefix else []:
        module = getattr(module, name, None)
    module, model = getattr(module, "config", module), file.models[inside]
    if type(module) is not type(model.config):
        return []
    fields = [field.name for field in dataclasses.fields(model.config) if field.name not in model.part.free]
    pairs = {name: (getattr(model.config, name), getattr(module, name)) for name in fields}
    return [f"{name}: {there!r} in {CONFIG}, {here!r} in the module" for name, (there, here) in pairs.items() if there != here]


def as_given(values: Mapping[str, np.ndarray], given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Puts what a file has in more precision in the place of values that are the same, rounded.

    What is frozen is held in compute precision; saved like that, it would no longer be what it was.

    Args:
        values: path -> value.
        given: path -> array in a file.
    """
    found = dict(values)
    for path, value in values.items():
        if path not in given or value.dtype.itemsize >= 4:
            continue
        whole = np.asarray(given[path][(slice(None),) * value.ndim])
        if whole.dtype.itemsize > value.dtype.itemsize and np.array_equal(whole.astype(value.dtype), value):
            found[path] = whole
    return found


def _split(source: str) -> tuple[str, str]:
    """File and prefix of "file" or "file.safetensors:prefix"."""
    name, suffix, inside = source.partition(".safetensors:")
    return (name + ".safetensors", inside) if suffix else (source, "")


def _check_tokenizer(section: Section, file: WeightFile | Folder, dataset: Dataset, origin: str) -> None:
    have, want = file.tokenizer_fingerprint, dataset.tokenizer_fingerprint
    if section.check_tokenizer and have is not None and want is not None and have != want:
        raise CheckpointError(
            f"the weights of section {section.name!r} were trained with another tokenizer.",
            wanted=f"tokenizer {want[:16]}..., which the data uses",
            have=f"tokenizer {have[:16]}... in {file.path}",
            fix="use the model's own tokenizer for the data, or set check_tokenizer=False if token ids agree where it matters",
            anchor="other-tokenizer",
            set_by=origin,
        )


def _weights_do_not_fit(section: Section, path: Path, prefix: str, problems: list[str], origin: str) -> CheckpointError:
    more = f"\nand {len(problems) - 8} more" if len(problems) > 8 else ""
    return CheckpointError(
        f"weights do not fit section {section.name!r}{f' below {prefix!r}' if prefix else ''}.",
        wanted="every parameter there with the module's shape",
        have="\n".join(problems[:8]) + more,
        fix=f"make the module's sizes those of {path.name}, or name the right prefix ('file:prefix in the file')",
        anchor="weights-do-not-fit",
        set_by=origin,
    )
