"""Trees of arrays as files that many processes write, and of which any process reads what it needs.

A process writes those shards on its devices that are the first copy of their part of an array (`replica_id` 0). So each element of each
array is in exactly one file, however the array is spread over processes and devices. A file is a safetensors file, whose metadata says of
each tensor which array it is a piece of: path, dtype and shape of the whole, and where the piece begins. To place an array anywhere, a
process reads for each of its shards the slices of the pieces that overlap with it.

Files are written here and not by the safetensors library: its versions before 0.8 hold Python's lock while they write, and no step could be
dispatched meanwhile (pauses of 1.2 to 1.6 s for 600 MB). So a file is also hashed in the pass that writes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from .graph.adapters import flat

SUFFIX = ".safetensors"
FORMAT = "maestro_jax pieces 1"
_CHUNK = 1 << 24  # bytes that are hashed while the processor's cache still holds them

_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
"""What safetensors calls a dtype; of other dtypes the bits are stored, as unsigned integers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """An array that pieces belong to.

    Args:
        shape: of all of it.
        dtype: its name.
        keys: implementation of the random keys that the array holds (its dtype and shape are those of their data); None for numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    keys: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of an array, on the host.

    Args:
        path: of the array in its tree.
        whole: the array.
        start: where the part begins, for each dimension.
        values: the part.
    """

    path: str
    whole: Whole
    start: tuple[int, ...]
    values: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    """A part of an array, in a file."""

    file: Any
    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        # A slice of nothing, or of a scalar, is refused by the library.
        read = self.file.get_slice(self.tensor)[index] if index else self.file.get_tensor(self.tensor)
        return read if read.dtype == dtype else read.view(dtype)


def to_host(trees: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """Copies what this process has to write of some trees to the host.

    Args:
        trees: name -> tree of JAX arrays. They may be donated as soon as this returns.

    Returns:
        Name -> pieces; empty where other processes hold all first copies.
    """
    found: dict[str, list[tuple[str, Whole, Any]]] = {}
    for name, tree in trees.items():
        found[name] = []
        for path, leaf in flat(tree).items():
            keys = str(jax.random.key_impl(leaf)) if _holds_keys(leaf) else None
            array = jax.random.key_data(leaf) if keys else leaf
            whole = Whole(shape=tuple(array.shape), dtype=str(array.dtype), keys=keys)
            found[name] += [(path, whole, shard) for shard in array.addressable_shards if shard.replica_id == 0]
    # All copies are under way before one is waited for.
    for shards in found.values():
        for _, _, shard in shards:
            shard.data.copy_to_host_async()
    return {name: [_piece(*each) for each in shards] for name, shards in found.items()}


def _piece(path: str, whole: Whole, shard: Any) -> Piece:
    start = tuple(part.indices(size)[0] for part, size in zip(shard.index, whole.shape, strict=True))
    values = np.asarray(shard.data, order="C")
    # On CPU this is the device's own memory, which the next step donates.
    if shard.device.platform == "cpu" or shard.data.sharding.memory_kind != "device":
        values = values.copy()
    return Piece(path=path, whole=whole, start=start, values=values)


def write_pieces(path: Path, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Writes pieces to a file, which is on the disk when this returns.

    Args:
        path: of the file; its folder is there.
        pieces: any number, of one tree.

    Returns:
        Size and SHA-256 of what was to be written, as a manifest has them: {"bytes": ..., "sha256": ...}.
    """
    # Wide elements first, so that each lies at a multiple of its size.
    ordered = sorted(pieces, key=lambda piece: -piece.values.dtype.itemsize)
    tensors, places, end = {}, {}, 0
    for piece in ordered:
        tensor = f"{piece.path}@{','.join(map(str, piece.start))}"
        begin, end = end, end + piece.values.nbytes
        tensors[tensor] = {"dtype": _stored_as(piece.values.dtype), "shape": piece.values.shape, "data_offsets": [begin, end]}
        places[tensor] = {"path": piece.path, "start": piece.start, **dataclasses.asdict(piece.whole)}
    metadata = {"format": FORMAT, "pieces": json.dumps(places)}
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in (len(header).to_bytes(8, "little"), header, *(piece.values for piece in ordered)):
            for chunk in _chunks(part):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


class StoredTree:
    """A tree of arrays in files; reads the parts that are asked for. To be closed, best as a context.

    Args:
        files: all files of the tree.

    Raises:
        ValueError: they do not hold each element of each array exactly once.
        SafetensorError, OSError: one of them cannot be read.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.arrays: dict[str, Whole] = {}
        self._pieces: dict[str, list[_Stored]] = {}
        with contextlib.ExitStack() as stack:
            for path in files:
                self._add(path, stack.enter_context(safe_open(path, framework="numpy")))
            for path, whole in self.arrays.items():
                pieces = self._pieces[path]
                problem = _problem(whole.shape, tuple(piece.start for piece in pieces), tuple(piece.shape for piece in pieces))
                if problem is not None:
                    raise ValueError(f"{path}: {problem}")
            self.close = stack.pop_all().close

    def __enter__(self) -> StoredTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, path: Path, file: Any) -> None:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path.name} was written by another version: {metadata.get('format', 'no format')}, not {FORMAT}")
        places = json.loads(metadata["pieces"])
        if places.keys() != set(file.keys()):
            raise ValueError(f"{path.name} holds other tensors than its metadata names")
        for tensor, place in places.items():
            whole = Whole(shape=tuple(place["shape"]), dtype=place["dtype"], keys=place["keys"])
            known = self.arrays.setdefault(place["path"], whole)
            if known != whole:
                raise ValueError(f"{place['path']}: {path.name} says {whole}, another file {known}")
            stored = _Stored(file=file, tensor=tensor, start=tuple(place["start"]), shape=tuple(file.get_slice(tensor).get_shape()))
            if len(stored.start) != len(whole.shape) or len(stored.shape) != len(whole.shape):
                raise ValueError(f"{place['path']}: a piece in {path.name} has another number of dimensions")
            self._pieces.setdefault(place["path"], []).append(stored)

    def read(self, path: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Reads a part of an array to the host.

        Args:
            path: of the array.
            index: a slice for each dimension, with steps of 1; None reads all of it.
        """
        whole = self.arrays[path]
        dtype = np.dtype(jnp.dtype(whole.dtype))
        ranges = [part.indices(size)[:2] for part, size in zip(index or (slice(None),) * len(whole.shape), whole.shape, strict=True)]
        shape = tuple(max(0, stop - start) for start, stop in ranges)
        found = np.empty(shape, dtype)
        for piece in self._pieces[path] if found.size else ():
            overlap = [(max(a, begin), min(b, begin + n)) for (a, b), begin, n in zip(ranges, piece.start, piece.shape, strict=True)]
            if any(a >= b for a, b in overlap):
                continue
            part = piece.read(tuple(slice(a - begin, b - begin) for (a, b), begin in zip(overlap, piece.start, strict=True)), dtype)
            if part.shape == shape:
                return part
            found[tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(overlap, ranges, strict=True))] = part
        return found

    def restore(self, shapes: Any) -> Any:
        """Places the arrays of the tree; only what lies on this process's devices is read.

        Args:
            shapes: a tree with the same paths, of arrays or shapes, each with its dtype and sharding.

        Returns:
            The same tree, of arrays.

        Raises:
            ValueError: paths or shapes differ.
        """
        wanted = flat(shapes)
        differ = sorted(wanted.keys() ^ self.arrays.keys())
        if differ:
            path = differ[0]
            raise ValueError(f"{path} is {'wanted, and not stored' if path in wanted else 'stored, and not wanted'} ({len(differ)} differ)")
        return jax.tree.unflatten(jax.tree.structure(shapes), [self._place(path, leaf) for path, leaf in wanted.items()])

    def _place(self, path: str, leaf: Any) -> jax.Array:
        whole, keys = self.arrays[path], _holds_keys(leaf)
        data = jax.eval_shape(jax.random.key_data, leaf) if keys else leaf
        if tuple(data.shape) != whole.shape or keys != (whole.keys is not None):
            raise ValueError(f"{path} is {whole.keys or whole.dtype}{list(whole.shape)}, wanted {leaf.dtype}{list(data.shape)}")

        @functools.cache
        def part(*ranges: tuple[int | None, int | None]) -> np.ndarray:
            # Replicas on several devices of this process share what is read once.
            return self.read(path, tuple(slice(*each) for each in ranges)).astype(data.dtype, copy=False)

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            return part(*((each.start, each.stop) for each in index or ()))

        made = jax.make_array_from_callback(whole.shape, leaf.sharding, read, dtype=data.dtype)
        return jax.random.wrap_key_data(made, impl=whole.keys) if keys else made


@functools.lru_cache(maxsize=256)  # The parameters of equal layers are cut alike.
def _problem(shape: tuple[int, ...], starts: tuple[tuple[int, ...], ...], sizes: tuple[tuple[int, ...], ...]) -> str | None:
    """Says why pieces do not cover an array exactly once, or None."""
    filled = [(start, size) for start, size in zip(starts, sizes, strict=True) if math.prod(size)]
    first = np.array([start for start, _ in filled], dtype=np.int64).reshape(len(filled), len(shape))
    last = first + np.array([size for _, size in filled], dtype=np.int64).reshape(first.shape)
    if (first < 0).any() or (last > np.array(shape, dtype=np.int64)).any():
        return "a piece reaches beyond the array"
    for n in range(1, len(filled)):
        if ((first[n] < last[:n]) & (first[:n] < last[n])).all(axis=1).any():
            return "pieces overlap"
    elements = sum(math.prod(size) for _, size in filled)
    return None if elements == math.prod(shape) else f"{elements} of {math.prod(shape)} elements are there"


def _stored_as(dtype: np.dtype) -> str:
    return _NAMES.get(dtype.name) or _NAMES[f"uint{8 * dtype.itemsize}"]


def _holds_keys(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _chunks(part: bytes | np.ndarray) -> Iterable[memoryview]:
    # As bytes, because Python knows no bfloat16.
    content = memoryview(part) if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data
    return (content[begin : begin + _CHUNK] for begin in range(0, len(content), _CHUNK))
