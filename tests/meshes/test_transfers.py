"""Rows cross between any two replicas exactly, to the right devices, and without a read by the host.

Dimensions: G rows of a slot, D width, K stripes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import build
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support import text_samples

from maestro_jax.errors import MeshError
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.meshes import Parcel, Wire, on_every_device, transfers
from maestro_jax.meshes import move as move_somewhere

COUNTS = (1, 2, 3, 4)
PAIRS = list(itertools.product(COUNTS, COUNTS))
ROWS = 24


def move(parcels: Sequence[Parcel]) -> list[tuple[jax.Array, ...]]:
    """Inside one process, every parcel arrives here."""
    moved = move_somewhere(parcels)
    assert all(arrays is not None for arrays in moved)
    return [arrays for arrays in moved if arrays is not None]


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
    copy = on_every_device(scalar, cast(NamedSharding, scalar.sharding), sharding)
    assert copy is not None
    jax.block_until_ready(copy)
    assert not was_read(scalar)
    assert (copy.sharding, copy.shape, copy.dtype) == (sharding, (), jnp.float32)
    assert [float(s.data) for s in copy.addressable_shards] == [2.5] * target
    assert [s.device.id for s in copy.addressable_shards] == list(range(4, 4 + target))


SAMPLES = text_samples(16, longest=12)
"""Each counts 1 in the loss; a power of two, so that the division by their number is exact."""


def bilinear(source: int, target: int) -> SectionGraph:
    """Two sections whose loss is <A x, y> / samples: x are the producer's rows, y weighs the consumer's, and A moves rows."""

    def whole_numbers(rows: int) -> Callable[[jax.Array], Any]:
        return lambda key: {"values": jax.random.randint(key, (rows, 3), -4, 5).astype(jnp.float32)}

    def produce(params: Any, batch: Any) -> Any:
        return {"x": params["values"][None]}

    def consume(params: Any, batch: Any, x: jax.Array) -> Any:
        real_RL = (batch["segment_ids"] > 0).astype(jnp.float32)
        return {"product": (x * params["values"][None] * real_RL[..., None]).sum()}

    objectives = {"product": Objective(count=lambda item: 1.0)}
    first = Section(name="a", module=(whole_numbers(36), produce), microbatch=36, axes={"tensor": source})
    inputs = {"x": "a.x"}
    second = (whole_numbers(28), consume)
    return SectionGraph(
        sections=(
            first,
            Section(name="b", module=second, inputs=inputs, objectives=objectives, microbatch=28, axes={"tensor": target}),
        )
    )


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] != pair[1]])
def test_rows_return_by_the_adjoint_of_how_they_came(source: int, target: int) -> None:
    """<A x, y> = <x, A' y> over all micro-batches of a step: A x is the gradient of y, and A' y the gradient of x.

    Numbers are whole and small, so that float32 is exact. A gathers, moves and places; A' comes from the backward programs
    and from sending back.
    """
    setup = build(bilinear(source, target), devices=source + target)
    x, y = (setup.engine.parameters(name)["values"].astype(np.float64) for name in ("a", "b"))
    found = setup.gradients(SAMPLES)
    there, back = found["b"]["values"], found["a"]["values"]
    assert (there * y).sum() == (x * back).sum() != 0
    assert np.abs(there).max() > 0.25, "the rows of several micro-batches add up"


LOOPS = 100


def slow_producer(line: Wire) -> Callable[[int], tuple[jax.Array, ...]]:
    """A program on the wire's source that yields a slot after a number of loops, without communication.

    Wide rows: a CPU device runs a program of few operations within its call.
    """

    @jax.jit
    def program(slot: tuple[jax.Array, ...], loops: int) -> tuple[jax.Array, ...]:
        return jax.lax.fori_loop(0, loops, lambda _, arrays: jax.tree.map(lambda a: a * 0.5 + 1.0, arrays), slot)

    slot = sent(line, rows(line), line.source)
    return lambda loops: program(slot, loops)


def share_of_waiting(produce: Callable[[], tuple[jax.Array, ...]], send: Callable[[tuple[jax.Array, ...]], Any]) -> float:
    """How long producing and sending took the caller, as a share of the time until the slot that is sent was ready."""
    start = time.perf_counter()
    slot = produce()
    send(slot)
    returned = time.perf_counter()
    jax.block_until_ready(slot)
    return (returned - start) / (time.perf_counter() - start)


def loops_for(seconds: float, produce: Callable[[int], tuple[jax.Array, ...]]) -> int:
    """How many loops take this long on this machine, now."""
    loops = LOOPS
    jax.block_until_ready(produce(loops))  # compiles
    while True:
        start = time.perf_counter()
        jax.block_until_ready(produce(loops))
        if (taken := time.perf_counter() - start) > seconds / 10:
            return int(loops * seconds / taken)
        loops *= 4


@pytest.mark.parametrize(("source", "target"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_a_send_does_not_wait_for_its_producer(source: int, target: int) -> None:
    line = wire(source, target, width=256)
    produce = slow_producer(line)
    loops = loops_for(0.6, produce)
    # The best of three: the machine may be busy with something else, but a send that waits does so each time.
    shares = [share_of_waiting(lambda: produce(loops), lambda slot: move([Parcel(line, slot)])) for _ in range(3)]
    assert min(shares) < 0.1


def test_a_send_that_waits_would_be_noticed() -> None:
    line = wire(2, 1, width=256)
    produce = slow_producer(line)
    loops = loops_for(0.6, produce)
    sharding = NamedSharding(line.target, PartitionSpec())
    assert share_of_waiting(lambda: produce(loops), lambda slot: jax.device_put(slot[0], sharding)) > 0.5
