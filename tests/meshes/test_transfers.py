"""Rows cross between any two replicas exactly, to the right devices, and without a read by the host.

Dimensions: G rows of a slot, D width, K stripes.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maestro_jax.errors import MeshError
from maestro_jax.meshes import Parcel, Wire, move, on_every_device, transfers

COUNTS = (1, 2, 3, 4)
PAIRS = list(itertools.product(COUNTS, COUNTS))
ROWS = 24


def mesh(first: int, count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[first : first + count]), ("tensor",), axis_types=(AxisType.Auto,))


def wire(source: int, target: int, rows: int = ROWS, width: int = 3, dtype: str = "float32", first: int = 4) -> Wire:
    return Wire(mesh(0, source), mesh(first, target), rows, jax.ShapeDtypeStruct((width,), jnp.dtype(dtype)), "a.x->b.y")


def rows(wire: Wire, seed: int = 0) -> np.ndarray:
    values_GD = np.random.default_rng(seed).normal(size=(wire.rows, *wire.row.shape))
    return values_GD.astype(wire.row.dtype)


def sent(wire: Wire, values_GD: np.ndarray, mesh: Mesh) -> tuple[jax.Array, ...]:
    """The rows as a section's program returns them: consecutive parts, each striped over the devices of `mesh`."""
    shapes = wire.shapes(mesh)
    parts = np.split(values_GD, len(shapes))
    return tuple(jax.device_put(part, shape.sharding) for part, shape in zip(parts, shapes, strict=True))


def read(slot: tuple[jax.Array, ...]) -> np.ndarray:
    return np.concatenate([np.asarray(jax.device_get(array)) for array in slot])


def was_read(array: jax.Array) -> bool:
    """Whether the host holds a copy of an array's values: set by any read, also by one inside `device_put`."""
    return array._npy_value is not None  # type: ignore[attr-defined]


@pytest.mark.quick
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_rows_arrive_exactly_and_return_exactly(source: int, target: int) -> None:
    line = wire(source, target)
    values_GD, gradients_GD = rows(line), rows(line, seed=1)
    (there,) = move([Parcel(line, sent(line, values_GD, line.source))])
    np.testing.assert_array_equal(read(there), values_GD)
    (back,) = move([Parcel(line, sent(line, gradients_GD, line.target), back=True)])
    np.testing.assert_array_equal(read(back), gradients_GD)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_program_joins_what_arrived(source: int, target: int) -> None:
    line = wire(source, target)
    values_GD = rows(line)
    (there,) = move([Parcel(line, sent(line, values_GD, line.source))])
    joined_GD = jax.jit(transfers.join, out_shardings=NamedSharding(line.target, PartitionSpec()))(there)
    np.testing.assert_array_equal(np.asarray(joined_GD), values_GD)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_no_source_array_or_piece_is_read_by_the_host(source: int, target: int) -> None:
    line = wire(source, target)
    for back in (False, True):
        slot = sent(line, rows(line), line.target if back else line.source)
        pieces = line.pieces(slot, back)[0]
        (arrived,) = move([Parcel(line, slot, back)])
        jax.block_until_ready(arrived)
        assert not any(map(was_read, (*slot, *pieces, *arrived)))


def test_a_read_by_the_host_would_be_noticed() -> None:
    line = wire(2, 1)
    (array,) = sent(line, rows(line), line.source)
    jax.device_put(array, NamedSharding(line.target, PartitionSpec()))
    assert was_read(array)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_arrays_lie_as_the_wire_says(source: int, target: int) -> None:
    line = wire(source, target)
    (there,) = move([Parcel(line, sent(line, rows(line), line.source))])
    assert [(a.shape, a.dtype) for a in there] == [(s.shape, s.dtype) for s in line.shapes(line.target)]
    assert all(a.sharding == NamedSharding(line.target, PartitionSpec("tensor")) for a in there)
    assert (len(there), line.stripes) == (line.target_arrays, line.target_arrays * target)
    assert line.stripes == line.source_arrays * source


def test_every_piece_crosses_once() -> None:
    line = wire(2, 3)
    pieces, devices = line.pieces(sent(line, rows(line), line.source), back=False)
    assert [next(iter(p.devices())).id for p in pieces] == [0, 1, 0, 1, 0, 1]
    assert [next(iter(d.device_set)).id for d in devices] == [4, 5, 6, 4, 5, 6]
    assert sum(p.size for p in pieces) == ROWS * 3


@pytest.mark.quick
def test_parcels_of_several_wires_cross_in_one_put(monkeypatch: pytest.MonkeyPatch) -> None:
    puts = []
    put = jax.device_put
    monkeypatch.setattr(transfers.jax, "device_put", lambda *args: puts.append(len(args[0])) or put(*args))
    lines = [wire(2, 3), wire(1, 4, width=5), wire(4, 2, rows=8, dtype="bfloat16"), wire(2, 3)]
    backs = [False, True, False, True]
    values = [rows(line, seed) for seed, line in enumerate(lines)]
    slots = [sent(line, each, line.target if back else line.source) for line, each, back in zip(lines, values, backs, strict=True)]
    puts.clear()
    arrived = move([Parcel(*parts) for parts in zip(lines, slots, backs, strict=True)])
    assert puts == [6 + 4 + 4 + 6]
    for slot, each in zip(arrived, values, strict=True):
        np.testing.assert_array_equal(read(slot), each)


def test_bfloat16_rows_arrive_bit_for_bit() -> None:
    line = wire(3, 2, dtype="bfloat16")
    values_GD = rows(line)
    (there,) = move([Parcel(line, sent(line, values_GD, line.source))])
    assert there[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(read(there).view(np.uint16), values_GD.view(np.uint16))


def test_rows_cross_between_sections_that_share_devices() -> None:
    line = wire(2, 4, first=0)
    values_GD = rows(line)
    (there,) = move([Parcel(line, sent(line, values_GD, line.source))])
    np.testing.assert_array_equal(read(there), values_GD)


def test_the_source_stays_usable() -> None:
    line = wire(2, 4, first=0)
    slot = sent(line, rows(line), line.source)
    move([Parcel(line, slot)])
    np.testing.assert_array_equal(read(slot), rows(line))


def test_replicas_of_several_axes_are_striped_over_all_their_devices() -> None:
    square = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    line = Wire(square, mesh(4, 3), 12, jax.ShapeDtypeStruct((2,), jnp.float32), "a.x->b.y")
    values_GD = rows(line)
    slot = sent(line, values_GD, square)
    assert [s.data.shape for s in slot[0].addressable_shards] == [(1, 2)] * 4
    (there,) = move([Parcel(line, slot)])
    np.testing.assert_array_equal(read(there), values_GD)


def test_nothing_moves_without_parcels() -> None:
    assert move([]) == []


@pytest.mark.quick
def test_rows_that_the_stripes_do_not_divide_are_refused() -> None:
    with pytest.raises(MeshError) as caught:
        wire(2, 3, rows=8)
    assert str(caught.value) == (
        "edge a.x->b.y cannot cross from 2 to 3 devices.\n"
        "  wanted   at most 256 stripes, dividing the 8 rows of a slot (the smaller of the two largest micro-batches)\n"
        "  have     6 stripes, the least common multiple of 2 and 3\n"
        "  set by   the calling program\n"
        "  fix      choose device counts with a smaller common multiple, or micro-batches that it divides\n"
        "  help     docs/errors.md#wire-stripes"
    )


def test_too_many_stripes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "MAX_STRIPES", 11)
    assert wire(2, 3).stripes == 6
    with pytest.raises(MeshError, match="at most 11 stripes") as caught:
        wire(3, 4)
    assert caught.value.have == "12 stripes, the least common multiple of 3 and 4"


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_scalar_reaches_every_device_without_a_host_read(source: int, target: int) -> None:
    scalar = jax.device_put(np.float32(2.5), NamedSharding(mesh(0, source), PartitionSpec()))
    sharding = NamedSharding(mesh(4, target), PartitionSpec())
    copy = on_every_device(scalar, sharding)
    jax.block_until_ready(copy)
    assert not was_read(scalar)
    assert (copy.sharding, copy.shape, copy.dtype) == (sharding, (), jnp.float32)
    assert [float(s.data) for s in copy.addressable_shards] == [2.5] * target
    assert [s.device.id for s in copy.addressable_shards] == list(range(4, 4 + target))
