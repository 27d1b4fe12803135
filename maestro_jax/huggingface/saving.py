"""Writes a model as a folder that transformers opens: shards with an index, `config.json`, and the tokenizer's files."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..models.weights import write_tensors
from .folder import CONFIG, INDEX, SINGLE, Folder

SHARD_BYTES = 5_000_000_000
"""Most bytes of a file, as transformers' own default; a tensor that is larger has a file of its own."""

BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files that are copied as they are."""

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def save(path: Path, source: Folder, arrays: Mapping[str, np.ndarray], *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Writes a model in the form of the folder that it came from.

    Args:
        path: of the folder; weights that it held are replaced when all has been written, and other files stay.
        source: where the model came from: its `config.json` and the tokenizer's files are taken over.
        arrays: path of a parameter -> value. Those that are not given are read from `source`.
        dtype: of all floating-point tensors ("bfloat16", ...); None keeps that of each.
        shard_bytes: most bytes of a file.

    Returns:
        The path.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    held, total, places = 0, 0, {}
    for name, value in _tensors(source, arrays, dtype):
        if held and held + value.nbytes > shard_bytes:
            _write(unfinished / _shard(len(shards)), shards[-1])
            # Its tensors are on disk; only their names are still needed.
            shards[-1] = {}
            shards.append({})
            held = 0
        shards[-1][name] = value
        held, total, places[name] = held + value.nbytes, total + value.nbytes, len(shards)
    _write(unfinished / _shard(len(shards)), shards[-1])
    _name_shards(unfinished, len(shards), places, total)
    kept = dtype or source.values.get("dtype") or source.values.get("torch_dtype")
    # Both names: transformers before version 5 reads the older one.
    known = {key: kept for key in ("dtype", "torch_dtype") if kept is not None and (key in source.values or key == "torch_dtype")}
    (unfinished / CONFIG).write_text(json.dumps({**source.values, **known}, indent=2) + "\n", encoding="utf-8")
    for file in BESIDE:
        if (source.path / file).is_file():
            shutil.copyfile(source.path / file, unfinished / file)
    _move(unfinished, path)
    return path


def _move(unfinished: Path, path: Path) -> None:
    """Moves files into the folder where they belong, and removes the weights of a model that was there before."""
    path.mkdir(parents=True, exist_ok=True)
    new = {file.name for file in unfinished.iterdir()}
    for file in list(path.iterdir()):
        if _WEIGHTS.fullmatch(file.name) and file.name not in new:
            file.unlink()
    for name in sorted(new):
        os.replace(unfinished / name, path / name)
    unfinished.rmdir()


def _tensors(source: Folder, arrays: Mapping[str, np.ndarray], dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of all tensors, layer by layer."""
    stored: Mapping[str, Any] = {}
    for part, model in source.models.items():
        start = part + "/" if part else ""
        if any(start + tensor.path not in arrays for tensor in model.tensors):
            stored = stored or source.arrays()
        # Parameters that lie in one tensor are neighbours in the list.
        for _, together in itertools.groupby(model.tensors, lambda tensor: tensor.name):
            pieces = [(tensor, arrays[path] if (path := start + tensor.path) in arrays else stored[path]) for tensor in together]
            for place, name in enumerate(pieces[0][0].names(model.sizes)):
                written = []
                for tensor, values in pieces:
                    one = values[place : place + 1][0] if tensor.stacked else values[:]
                    written.append(tensor.written(np.asarray(one), model.sizes))
                value = np.ascontiguousarray(np.concatenate(written) if len(written) > 1 else written[0])
                convert = dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
                yield name, value.astype(jnp.dtype(dtype)) if convert else value


def _write(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    # transformers refuses files that do not say of which library their tensors are.
    write_tensors(file, tensors, {"format": "pt"})


def _shard(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _name_shards(folder: Path, count: int, places: Mapping[str, int], total: int) -> None:
    """Gives files their final names, which tell how many there are."""
    if count == 1:
        os.replace(folder / _shard(1), folder / SINGLE)
        return
    names = {number: f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)}
    for number, name in names.items():
        os.replace(folder / _shard(number), folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[number] for name, number in sorted(places.items())}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
