"""Initial parameters that come from files: found, opened and checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .config import config_folder, find_file
from .data import Dataset
from .errors import CheckpointError, set_by
from .graph import Section
from .models.weights import WeightFile
from .runtime import Plan


def given_weights(section: Section, plan: Plan, dataset: Dataset) -> dict[str, Any]:
    """Opens the weight files of a section.

    Returns:
        Path -> array in a file.

    Raises:
        CheckpointError: a missing file or tensor, another shape, or weights made with another tokenizer.
    """
    if section.weights is None:
        return {}
    sources = {"": section.weights} if isinstance(section.weights, str) else section.weights
    origin = set_by(section, "weights")
    shapes = plan.sections[section.name].shapes.params
    given: dict[str, Any] = {}
    for prefix, source in sources.items():
        name, inside = _split(source)
        file = WeightFile(find_file(name, near=config_folder(section, "weights"), set_by=origin), origin)
        _check_tokenizer(section, file, dataset, origin)
        stored = file.arrays(inside)
        start = prefix + "/" if prefix else ""
        wanted = {path: shape.shape for path, shape in shapes.items() if path.startswith(start)}
        problems = [f"{path}: wanted, not in the file" for path in wanted if path[len(start) :] not in stored]
        problems += [
            f"{path}: {list(stored[path[len(start) :]].shape)} in the file, {list(shape)} in the module"
            for path, shape in wanted.items()
            if path[len(start) :] in stored and stored[path[len(start) :]].shape != shape
        ]
        if problems or not wanted:
            raise _weights_do_not_fit(section, file.path, prefix, problems or [f"no parameter of the module lies below {prefix!r}"], origin)
        given |= {path: stored[path[len(start) :]] for path in wanted}
    return given


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


def _split(source: str | tuple[str, str]) -> tuple[str, str]:
    """File and prefix of "file", "file.safetensors:prefix" or ("file", "prefix")."""
    if isinstance(source, tuple):
        return source
    name, suffix, inside = source.partition(".safetensors:")
    return (name + ".safetensors", inside) if suffix else (source, "")


def _check_tokenizer(section: Section, file: WeightFile, dataset: Dataset, origin: str) -> None:
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
