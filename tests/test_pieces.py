"""Pieces: what is written from one sharding is read onto any other bit by bit, and files that do not hold all of it are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from maestro_jax import pieces
from maestro_jax.pieces import Piece, StoredTree, to_host, write_pieces

P = PartitionSpec


def mesh(*sizes: int, names: str = "xyz", first: int = 0, backwards: bool = False) -> Mesh:
    count = int(np.prod(sizes))
    devices = jax.devices()[first : first + count]
    return Mesh(np.array(devices[::-1] if backwards else devices).reshape(sizes), tuple(names[: len(sizes)]))


SHARDINGS: Mapping[str, Any] = {
    "one device": SingleDeviceSharding(jax.devices()[3]),
    "replicated": NamedSharding(mesh(8), P()),
    "rows over 2": NamedSharding(mesh(2, first=5), P("x")),
    "columns over 3": NamedSharding(mesh(3), P(None, "x")),
    "rows and columns": NamedSharding(mesh(2, 3, backwards=True), P("x", "y")),
    "columns, with copies": NamedSharding(mesh(2, 3), P(None, "y")),
    "rows over both": NamedSharding(mesh(2, 2, 2), P(("x", "z"))),
}

ARRAYS: Mapping[str, tuple[tuple[int, ...], str]] = {
    "parameters/wide": ((4, 9), "float32"),
    "parameters/layers/0/odd": ((12, 15, 7), "bfloat16"),
    "optimizer/0/keys": ((8, 3), "uint32"),
    "optimizer/0/none": ((0, 6), "float16"),
    "optimizer/0/also none": ((4, 0), "int8"),
    "optimizer/0/flags": ((4, 6), "bool"),
    "optimizer/0/small": ((4, 3), "float8_e4m3fn"),
    "optimizer/0/tiny": ((4, 3), "int4"),
    "optimizer/ü": ((4, 3), "complex64"),
}


def values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Bits of all kinds, NaN among them."""
    kind = jnp.dtype(dtype)
    random = np.random.default_rng(len(shape)).integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    if dtype in ("bool", "int4"):
        return (random[..., 0] % 2).astype(kind)
    return random.view(kind).reshape(shape)


def tree(sharding: Any) -> dict[str, Any]:
    """All arrays, as far as the sharding can cut them, and two scalars."""
    whole = sharding if isinstance(sharding, SingleDeviceSharding) else NamedSharding(sharding.mesh, P())
    made: dict[str, Any] = {path: jax.device_put(values(*array), sharding) for path, array in ARRAYS.items()}
    return {**made, "count": jax.device_put(np.int32(7), whole), "scale": jax.device_put(jnp.bfloat16(1.5), whole)}


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), tuple(array.shape), np.asarray(array).tobytes()


def copies_agree(array: jax.Array) -> bool:
    """Whether every shard, also a second copy, has the bits of its place in the whole."""
    whole = np.asarray(array)
    return all(np.asarray(shard.data).tobytes() == whole[shard.index].tobytes() for shard in array.addressable_shards)


def written(folder: Path, arrays: Mapping[str, Any], files: int = 1) -> list[Path]:
    """The tree in some files, its pieces dealt out to them."""
    parts = to_host({"it": arrays})["it"]
    paths = [folder / f"{n:05d}.safetensors" for n in range(files)]
    for n, path in enumerate(paths):
        write_pieces(path, parts[n::files])
    return paths


@pytest.mark.parametrize("source", SHARDINGS)
def test_any_sharding_is_restored_onto_any_other(tmp_path: Path, source: str) -> None:
    saved = tree(SHARDINGS[source])
    want = {path: bits(array) for path, array in saved.items()}
    with StoredTree(written(tmp_path, saved, files=3)) as stored:
        for sharding in SHARDINGS.values():
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree(sharding))
            found = stored.restore(shapes)
            assert {path: bits(array) for path, array in found.items()} == want
            assert all(found[path].sharding == shape.sharding and copies_agree(found[path]) for path, shape in shapes.items())


@pytest.mark.quick
def test_each_element_is_written_once() -> None:
    for sharding in SHARDINGS.values():
        arrays = tree(sharding)
        sizes = dict.fromkeys(arrays, 0)
        for piece in to_host({"it": arrays})["it"]:
            sizes[piece.path] += piece.values.size
        assert sizes == {path: array.size for path, array in arrays.items()}


def test_only_the_wanted_slices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), NamedSharding(mesh(4), P("x")))
    read: list[int] = []
    whole = pieces._Stored.read

    def counted(self: Any, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        found = whole(self, index, dtype)
        read.append(found.size)
        return found

    monkeypatch.setattr(pieces._Stored, "read", counted)
    with StoredTree(written(tmp_path, {"w": array})) as stored:
        assert stored.read("w", (slice(3, 5), slice(1, 4))).tolist() == [[25, 26, 27], [33, 34, 35]]
        assert read == [3, 3]
        read.clear()
        # Two copies of each half: the copy is not read again.
        stored.restore({"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh(2, 2), P(None, "x")))})
        assert sum(read) == 64


def test_random_keys_come_back(tmp_path: Path) -> None:
    place = NamedSharding(mesh(2), P())
    saved = {
        "key": jax.device_put(jax.random.key(5), place),
        "keys": jax.device_put(jax.random.split(jax.random.key(6, impl="rbg"), 4), place),
    }
    with StoredTree(written(tmp_path, saved)) as stored:
        found = stored.restore(saved)
        assert {path: (each.dtype, each.shape) for path, each in found.items()} == {p: (e.dtype, e.shape) for p, e in saved.items()}
        assert all(bits(jax.random.key_data(found[path])) == bits(jax.random.key_data(saved[path])) for path in saved)
        with pytest.raises(ValueError, match="key is threefry2x32"):
            stored.restore({**saved, "key": jax.device_put(jnp.zeros(2, jnp.uint32), place)})


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    saved = {"w": jnp.array([1.0, 1.0 + 2**-10], jnp.float32)}
    with StoredTree(written(tmp_path, saved)) as stored:
        assert bits(stored.restore({"w": jnp.zeros(2, jnp.bfloat16)})["w"]) == bits(saved["w"].astype(jnp.bfloat16))


def test_a_tree_keeps_its_form(tmp_path: Path) -> None:
    saved = {"parameters": {"a": {"b": jnp.ones(2)}}, "optimizer": {}}
    with StoredTree(written(tmp_path, saved)) as stored:
        assert jax.tree.structure(stored.restore(saved)) == jax.tree.structure(saved)
    assert StoredTree([]).restore({"parameters": {}}) == {"parameters": {}}


@pytest.mark.quick
def test_a_file_is_what_its_fingerprint_says_and_others_can_read_it(tmp_path: Path) -> None:
    path, array = tmp_path / "00000.safetensors", jnp.arange(12.0).reshape(3, 4)
    fingerprint = write_pieces(path, to_host({"it": {"b": {"w": array}, "flag": jnp.array(True)}})["it"])
    content = path.read_bytes()
    assert fingerprint == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with safe_open(path, framework="numpy") as file:
        assert bits(file.get_tensor("b/w@0,0")) == bits(array)
        assert file.get_tensor("flag@").tolist() is True


def test_large_files_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_CHUNK", 7)
    saved = tree(SHARDINGS["columns over 3"])
    path = tmp_path / "00000.safetensors"
    fingerprint = write_pieces(path, to_host({"it": saved})["it"])
    assert fingerprint["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    with StoredTree([path]) as stored:
        assert {name: bits(stored.read(name)) for name in stored.arrays} == {name: bits(array) for name, array in saved.items()}


def test_what_is_held_does_not_change_with_the_array() -> None:
    """On CPU the host sees the device's own memory, which a donation gives away."""
    array = jax.device_put(np.zeros((4, 256), np.float32), NamedSharding(mesh(4), P("x")))
    held = to_host({"it": {"w": array}})["it"]
    after = jax.jit(lambda a: a + 1, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
    assert float(after.sum()) == 1024
    assert all(not piece.values.any() for piece in held)


def test_pieces_are_stored_once_in_device_memory() -> None:
    array = jax.device_put(np.zeros((4, 256), np.float32), NamedSharding(mesh(2, 2), P("x")))
    own = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    before = on_single_devices()
    held = to_host({"it": {"w": array}})["it"]
    assert [piece.start for piece in held] == [(0, 0), (2, 0)]
    # The shards of the array itself are wrapped, and nothing else.
    assert on_single_devices() - before <= own


def on_single_devices() -> set[int]:
    """Addresses of all arrays of one device."""
    return {array.unsafe_buffer_pointer() for array in jax.live_arrays() if len(array.devices()) == 1}


def parts_of(count: int = 4) -> list[Piece]:
    array = jax.device_put(np.arange(24, dtype=np.float32).reshape(8, 3), NamedSharding(mesh(count), P("x")))
    return to_host({"it": {"w": array}})["it"]


def moved(piece: Piece, *start: int) -> Piece:
    return dataclasses.replace(piece, start=start)


def shaped(piece: Piece, *shape: int) -> Piece:
    return dataclasses.replace(piece, whole=dataclasses.replace(piece.whole, shape=shape))


HARM: Mapping[str, tuple[Callable[[list[Piece]], list[list[Piece]]], str]] = {
    "missing": (lambda p: [p[:2], p[3:]], "w: 18 of 24 elements are there"),
    "twice": (lambda p: [p, p[1:2]], "w: pieces overlap"),
    "overlapping, with as many elements": (lambda p: [p[:1], [moved(p[1], 1, 0), *p[2:]]], "w: pieces overlap"),
    "beyond": (lambda p: [[*p[:3], moved(p[3], 7, 0)]], "w: a piece reaches beyond the array"),
    "before": (lambda p: [[*p[1:], moved(p[0], -1, 0)]], "w: a piece reaches beyond the array"),
    "of another array": (lambda p: [p[:3], [shaped(p[3], 9, 3)]], "another file Whole"),
    "of another rank": (lambda p: [[*p[:3], moved(p[3], 6)]], "another number of dimensions"),
}


@pytest.mark.parametrize("harm", HARM)
def test_pieces_that_do_not_cover_an_array_once_are_refused(tmp_path: Path, harm: str) -> None:
    make, says = HARM[harm]
    paths = [tmp_path / f"{n:05d}.safetensors" for n in range(2)]
    for path, parts in itertools.zip_longest(paths, make(parts_of()), fillvalue=[]):
        assert isinstance(path, Path)
        write_pieces(path, parts)
    with pytest.raises(ValueError, match=says):
        StoredTree(paths)


def test_two_scalars_overlap(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        write_pieces(path, to_host({"it": {"count": jnp.int32(1)}})["it"])
    with pytest.raises(ValueError, match="count: pieces overlap"):
        StoredTree(paths)


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_a_file_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "00000.safetensors"
    write_pieces(path, parts_of())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises((SafetensorError, OSError)):
        StoredTree([path])


def test_other_safetensors_files_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"weights\.safetensors was written by another version: no format"):
        StoredTree([tmp_path / "weights.safetensors"])


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"w": jnp.zeros((3, 8))}, r"w is float32\[8, 3\], wanted float32\[3, 8\]"),
        ({"w": jnp.zeros((8, 3)), "b": jnp.zeros(1)}, "b is wanted, and not stored"),
        ({}, "w is stored, and not wanted"),
    ],
)
def test_another_tree_is_refused(tmp_path: Path, shapes: dict[str, Any], says: str) -> None:
    write_pieces(tmp_path / "00000.safetensors", parts_of())
    with StoredTree([tmp_path / "00000.safetensors"]) as stored, pytest.raises(ValueError, match=says):
        stored.restore(shapes)
