"""Arrays on disk as pieces: each process writes what lies on its devices, and every process reads the parts that it needs.

One safetensors file holds the pieces of one section that one process owns; its metadata says of which arrays they are, and where in them
they begin. Each number of an array is written once, whatever copies of it there are. So nothing is gathered, neither on a device nor on a
host, and what was written by one number of processes is read by any other, into any shardings.
"""

from __future__ import annotations

import dataclasses
import json
import math
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

INDEX = "pieces"


@dataclasses.dataclass(frozen=True)
class HostArray:
    """What one process owns of an array, on the host.

    Args:
        shape: of the whole array.
        dtype: its name.
        pieces: where each piece begins, and its values.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: list[tuple[tuple[int, ...], np.ndarray]]


def on_host(arrays: Mapping[str, jax.Array]) -> dict[str, HostArray]:
    """Copies what this process owns of arrays to the host; afterwards they may be donated.

    Args:
        arrays: path -> array, of which several processes may have parts.
    """
    owned = {path: [shard for shard in array.addressable_shards if shard.replica_id == 0] for path, array in arrays.items()}
    for shards in owned.values():
        for shard in shards:
            shard.data.copy_to_host_async()
    found = {}
    for path, array in arrays.items():
        # A copy: on CPU what JAX gives is the device's own memory.
        pieces = [(_start(shard.index, array.shape), np.array(shard.data, copy=True)) for shard in owned[path]]
        found[path] = HostArray(shape=array.shape, dtype=str(array.dtype), pieces=pieces)
    return found


def file_name(section: str, process: int) -> str:
    """The file of a section's pieces that a process owns.

    >>> file_name("llm", 3)
    'llm.00003.safetensors'
    """
    return f"{urllib.parse.quote(section, safe='')}.{process:05d}.safetensors"


def write_pieces(path: Path, arrays: Mapping[str, HostArray]) -> None:
    """Writes the pieces of a section that a process owns.

    Args:
        path: of the file.
        arrays: path of a parameter -> what the process owns of it.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    tensors, index = {}, {}
    for name, array in arrays.items():
        index[name] = {"shape": array.shape, "dtype": array.dtype, "starts": [start for start, _ in array.pieces]}
        tensors |= {f"{name}|{n}": np.ascontiguousarray(values).reshape(values.shape) for n, (_, values) in enumerate(array.pieces)}
    save_file(tensors, path, metadata={INDEX: json.dumps(index)})


@dataclasses.dataclass(frozen=True)
class _Piece:
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: Any
    key: str


class Pieces:
    """The arrays of one section in files.

    Args:
        files: all files that hold pieces of it.

    Raises:
        OSError, SafetensorError: a file cannot be read.
        ValueError: the pieces do not make whole arrays.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.shapes: dict[str, jax.ShapeDtypeStruct] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for path in files:
            file = safe_open(path, framework="numpy")
            for name, told in json.loads((file.metadata() or {})[INDEX]).items():
                shape = jax.ShapeDtypeStruct(tuple(told["shape"]), told["dtype"])
                if self.shapes.setdefault(name, shape) != shape:
                    raise ValueError(f"{name} is {shape} in {path.name} and {self.shapes[name]} in another file")
                for n, start in enumerate(told["starts"]):
                    key = f"{name}|{n}"
                    piece = _Piece(tuple(start), tuple(file.get_slice(key).get_shape()), file, key)
                    self._pieces.setdefault(name, []).append(piece)
        for name, shape in self.shapes.items():
            pieces = self._pieces.get(name, [])
            there = sum(math.prod(piece.shape) for piece in pieces)
            if there != math.prod(shape.shape) or len({piece.start for piece in pieces}) != len(pieces):
                raise ValueError(f"{name} has {math.prod(shape.shape)} numbers, and its pieces have {there}")

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a part of an array, from the pieces that hold it.

        Args:
            name: path of the array.
            index: the part, without steps; dimensions that are left out are whole.

        Raises:
            ValueError: no piece holds some of it.
        """
        whole = self.shapes[name]
        bounds = [(0, size) for size in whole.shape]
        bounds[: len(index)] = [part.indices(size)[:2] for part, size in zip(index, whole.shape, strict=False)]
        out = np.empty([stop - start for start, stop in bounds], whole.dtype)
        filled = 0
        for piece in self._pieces.get(name, []):
            inside = [(max(low, at), min(high, at + size)) for (low, high), at, size in zip(bounds, piece.start, piece.shape, strict=True)]
            if any(low >= high for low, high in inside):
                continue
            here = tuple(slice(low - at, high - at) for (low, high), at in zip(inside, piece.start, strict=True))
            there = tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(inside, bounds, strict=True))
            out[there] = piece.file.get_slice(piece.key)[here] if here else piece.file.get_tensor(piece.key)
            filled += math.prod(high - low for low, high in inside)
        if filled != out.size:
            raise ValueError(f"{out.size - filled} numbers of {name} are in no piece")
        return out

    def place(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads arrays onto devices; each process reads what lies on its own.

        Args:
            wanted: path -> shape with sharding; the dtype may be another one.

        Raises:
            ValueError: an array is missing, or has another shape.
        """
        found = {}
        for name, shape in wanted.items():
            have = self.shapes.get(name)
            if have is None or have.shape != shape.shape:
                raise ValueError(f"{name}: {have.shape if have is not None else 'nothing'} in the files, {shape.shape} wanted")

            def read(index: Any, name: str = name, shape: jax.ShapeDtypeStruct = shape) -> np.ndarray:
                return self.read(name, index).astype(shape.dtype)

            found[name] = jax.make_array_from_callback(shape.shape, shape.sharding, read, dtype=shape.dtype)
        return found


def _start(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(part.indices(size)[0] for part, size in zip(index, shape, strict=True))
