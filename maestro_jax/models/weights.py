"""Reads and writes parameters as safetensors files.

Only the slices that a device needs are read, so a file may be larger than the host's memory. The fingerprint of the
tokenizer that a model was trained with travels in the file's metadata: equal widths with other tokenizers would train
on garbage without an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import CheckpointError

TOKENIZER_KEY = "tokenizer_fingerprint"

Source = str | tuple[str | None, str] | None
"""A file or folder of weights, or that and a path prefix in it; None: nothing."""


def weights_below(prefix: str, config: object) -> dict[str, Source]:
    """The initial weights that a model's configuration names (see `HuggingFace`), where the model is at `prefix` inside another."""
    own = getattr(config, "initial_weights", None)
    return {f"{prefix}/{path}".strip("/"): source for path, source in own.items()} if isinstance(own, Mapping) else {}


class StoredArray:
    """An array in a file, read slice by slice.

    Attributes:
        shape: dimensions.
    """

    def __init__(self, slice_: Any) -> None:
        self._slice = slice_
        self.shape = tuple(slice_.get_shape())

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads the part that `index` (a tuple of slices) names."""
        return np.asarray(self._slice[index] if self.shape else self._slice[:])


class WeightFile:
    """An open safetensors file.

    Args:
        path: of the file.
        set_by: where it was named, for error texts.

    Raises:
        CheckpointError: when the file cannot be read.
    """

    def __init__(self, path: Path, set_by: str) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"weights cannot be read from {path}.",
                wanted="a safetensors file",
                have=f"{type(error).__name__}: {error}",
                fix="name a file that was written by a run (weights/SECTION.safetensors), or make it again",
                anchor="weights-unreadable",
                set_by=set_by,
            ) from error

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Of the tokenizer that the model was trained with, or None when the file does not say."""
        return (self._file.metadata() or {}).get(TOKENIZER_KEY)

    def arrays(self, prefix: str = "") -> dict[str, StoredArray]:
        """Returns path below `prefix` -> array."""
        start = prefix + "/" if prefix else ""
        names = [name for name in self._file.keys() if name.startswith(start)]  # noqa: SIM118 - a safe_open is no mapping
        return {name[len(start) :]: StoredArray(self._file.get_slice(name)) for name in names}


def placed(value: Any, dtype: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts an array of a file on devices; each slice is read once, however many of this process's devices want it.

    Args:
        value: has a `shape`, and reads what a tuple of slices names.
        dtype: of the array on the devices.
        sharding: which device gets what.
    """
    held: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}
    shape = tuple(value.shape)

    def read(index: Any) -> np.ndarray:
        place = tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
        if place not in held:
            held[place] = np.asarray(value[index]).astype(dtype)
        return held[place]

    return jax.make_array_from_callback(shape, sharding, read, dtype=dtype)


def save_weights(path: Path, arrays: Mapping[str, np.ndarray], *, tokenizer: str | None = None, dtype: str | None = None) -> None:
    """Writes parameters to a safetensors file, atomically, with the permissions that new files have.

    Args:
        path: of the file; its folder is made.
        arrays: path of a parameter -> value.
        tokenizer: fingerprint to record.
        dtype: convert floating-point arrays to this dtype ("float16", "bfloat16", ...); None keeps theirs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {}
    for name, array in arrays.items():
        convert = dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        kept[name] = np.ascontiguousarray(array.astype(jnp.dtype(dtype)) if convert else array)
    write_tensors(path, kept, {TOKENIZER_KEY: tokenizer} if tokenizer else None)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None) -> None:
    """Writes a safetensors file, atomically, with the permissions that new files have.

    Args:
        path: of the file.
        tensors: name -> value, contiguous.
        metadata: of the file.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    # The library's files are for their owner alone; an ordinary new file shows what the umask allows.
    unfinished.unlink(missing_ok=True)
    unfinished.touch()
    permissions = unfinished.stat().st_mode & 0o777
    save_file(dict(tensors), unfinished, metadata=metadata)
    unfinished.chmod(permissions)
    os.replace(unfinished, path)
