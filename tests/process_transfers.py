"""What tests of groups of processes and of transfers run in each of three processes, a, b and c, of four devices."""

from __future__ import annotations

import functools
import random
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maestro_jax.errors import ClusterError, DataError, MaestroError
from maestro_jax.meshes import Parcel, ProcessGroup, Wire, move, on_every_device, processes_of, put_whole
from maestro_jax.meshes.transfers import rewrapped
from maestro_jax.meshes.transport import Transport
from maestro_jax.runtime.startup import exercise

ROUNDS = 250
IN_FLIGHT = 25
LOOPS = 100_000
WARM, LARGE = 5, 75

LAYOUTS: dict[str, tuple[str, str, str]] = {
    "three to two": ("a0 a1 b0", "b1 c0", "float32"),
    "one to four": ("a2", "b2 b3 c1 c2", "bfloat16"),
    "two to two": ("a3 b0", "b1 c3", "float32"),
    "onto itself": ("a0 b0", "a0 b0", "int32"),
    "in one process": ("c1", "c2 c3", "float32"),
}
"""Name of a wire -> devices of its ends, each its process (a, b, c) and its number there, and the dtype of a row."""


def mesh(places: str) -> Mesh:
    devices = [[d for d in jax.devices() if d.process_index == "abc".index(place[0])][int(place[1])] for place in places.split()]
    return Mesh(np.array(devices), ("tensor",), axis_types=(AxisType.Auto,))


@functools.cache
def wires() -> dict[str, Wire]:
    row = {dtype: jax.ShapeDtypeStruct((3,), jnp.dtype(dtype)) for _, _, dtype in LAYOUTS.values()}
    return {name: Wire(mesh(source), mesh(target), 24, row[dtype], name) for name, (source, target, dtype) in LAYOUTS.items()}


def values(wire: Wire, number: int, back: bool) -> np.ndarray:
    """Rows of one transfer; no two transfers have equal ones. Small whole numbers are exact in every dtype."""
    names = list(wires())
    seed = [number, int(back), next((n for n, name in enumerate(names) if wires()[name] is wire), len(names))]
    return np.random.default_rng(seed).integers(0, 256, (wire.rows, *wire.row.shape)).astype(wire.row.dtype)


def parcel(wire: Wire, number: int, back: bool) -> Parcel:
    here = wire.target if back else wire.source
    if jax.process_index() not in processes_of(here):
        return Parcel(wire, None, back)
    shapes = wire.shapes(here)
    parts = np.split(values(wire, number, back), len(shapes))
    return Parcel(wire, tuple(put_whole(part, shape.sharding) for part, shape in zip(parts, shapes, strict=True)), back)


def misplaced(wire: Wire, arrived: Sequence[jax.Array], number: int, back: bool) -> int:
    """Shards of a slot on this process's devices that hold other rows than those of their place."""
    parts = np.split(values(wire, number, back), len(arrived))
    shards = [(shard, part) for array, part in zip(arrived, parts, strict=True) for shard in array.addressable_shards]
    return sum(not np.array_equal(np.asarray(shard.data), part[shard.index]) for shard, part in shards)


def told(group: ProcessGroup) -> dict[str, Any]:
    """What processes tell one another."""
    found: dict[str, Any] = {"order": [group.all_gather("order", [group.index, n]) for n in range(50)]}
    lists: dict[str, list[Any]] = {"a": [], "b": []}

    def talk(channel: str) -> None:
        lists[channel] = [group.all_gather(channel, f"{channel}{n}") for n in range(30)]

    threads = [threading.Thread(target=talk, args=(channel,)) for channel in lists]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["threads"] = lists
    group.agreed("same", {"x": 1}, "x")
    found["disagree"] = anchor_of(lambda: group.agreed("different", group.index, "the index"))

    def fail() -> None:
        raise DataError("no.", wanted="a", have="b", fix="c", anchor="d")

    found["lead"] = [group.lead("good", lambda: "done"), anchor_of(lambda: group.lead("bad", fail))]
    if group.index == 0:
        found["silent"] = anchor_of(lambda: group.all_gather("silent", None, seconds=1.5))
    return found


def anchor_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except MaestroError as error:
        return error.anchor
    return "no error"


def many(group: ProcessGroup) -> dict[str, Any]:
    """Both ways over all wires at once, in every process in another order, many calls in flight."""
    found = {"shards": 0, "misplaced": 0, "wrongly here": 0, "wrongly not here": 0}
    for first in range(0, ROUNDS, IN_FLIGHT):
        order = list(range(first, first + IN_FLIGHT))
        random.Random(group.index).shuffle(order)
        kept = []
        for number in order:
            parcels = [parcel(wire, number, back) for wire in wires().values() for back in (False, True)]
            kept.append((number, parcels, move(parcels, group.transport, f"many {number}")))
        for number, parcels, moved in kept:
            for one, arrived in zip(parcels, moved, strict=True):
                concerns = group.index in processes_of(one.wire.source if one.back else one.wire.target)
                found["wrongly here"] += arrived is not None and not concerns
                found["wrongly not here"] += arrived is None and concerns
                if arrived is not None:
                    found["shards"] += sum(len(array.addressable_shards) for array in arrived)
                    found["misplaced"] += misplaced(one.wire, arrived, number, one.back)
    return found


def unfinished(group: ProcessGroup) -> dict[str, Any]:
    """Rows that are still computed when they are sent."""
    # Wide rows: a CPU device runs a program of few operations within its call.
    wire = Wire(mesh("a2"), mesh("b2 b3 c1 c2"), 24, jax.ShapeDtypeStruct((256,), jnp.dtype("float32")), "wide")

    @jax.jit
    def later(slot: tuple[jax.Array, ...], loops: int) -> tuple[jax.Array, ...]:
        return jax.lax.fori_loop(0, loops, lambda _, arrays: jax.tree.map(lambda a: 255.0 - a, arrays), slot)

    if group.index == 0:
        slot = parcel(wire, 0, False).slot
        assert slot is not None
        jax.block_until_ready(later(slot, 2))
        # An even number of loops gives back what was.
        slot = later(slot, LOOPS)
        move([Parcel(wire, slot)], group.transport, "unfinished")
        early = not any(array.is_ready() for array in slot)
        return {"sent early": early, "misplaced": None}
    [arrived] = move([Parcel(wire, None)], group.transport, "unfinished")
    assert arrived is not None
    return {"sent early": None, "misplaced": misplaced(wire, arrived, 0, False)}


def large(group: ProcessGroup) -> dict[str, int]:
    """Megabytes that this process takes more after many transfers both ways of eight megabytes each."""
    wire = Wire(mesh("a2"), mesh("b2 b3 c1 c2"), 8, jax.ShapeDtypeStruct((2**18,), jnp.dtype("float32")), "large")
    taken = []
    for number in range(LARGE + WARM):
        parcels = [parcel(wire, 0, back) for back in (False, True)]
        jax.block_until_ready([arrived for arrived in move(parcels, group.transport, f"large {number}") if arrived is not None])
        # All have what they fetched, so nothing that was offered is needed any more.
        group.all_gather("large", None)
        taken.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20)
    return {"more": taken[-1] - taken[WARM - 1]}


def numbers(group: ProcessGroup) -> dict[str, list[float] | None]:
    """A number from devices of two processes to others, in the first of them, in the second and in neither."""
    found: dict[str, list[float] | None] = {}
    places = {
        "a b to c": ("a0 b0", "c0 c1"),
        "a b to b c": ("a0 b0", "b1 b2 c0"),
        "c to a b": ("c0", "a0 a1 b0"),
        "b to b": ("b0", "b1 b2"),
    }
    for name, ends in places.items():
        source, target = (NamedSharding(mesh(end), PartitionSpec()) for end in ends)
        mine = group.index in processes_of(source.mesh)
        # Each process's own copy differs, so that it shows whose was used.
        scalar = put_whole(np.full((), 10 + group.index, np.float32), source) if mine else None
        copy = on_every_device(scalar, source, target, group.transport, f"numbers {name}")
        found[name] = [float(np.asarray(shard.data)) for shard in copy.addressable_shards] if copy is not None else None
    return found


def wrapped(group: ProcessGroup) -> dict[str, Any]:
    """Host values on devices of all processes, put there by each for itself and wrapped again."""
    sharding = NamedSharding(mesh("a0 a1 b0 c0"), PartitionSpec("tensor"))
    whole = np.arange(24, dtype=np.float32).reshape(8, 3)
    array = put_whole(whole, sharding)
    again = rewrapped(jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding), [array])
    return {
        "shape": list(again.shape),
        "whole here": again.is_fully_addressable,
        "shards": [[shard.device.id, np.array_equal(np.asarray(shard.data), whole[shard.index])] for shard in again.addressable_shards],
    }


def tried(group: ProcessGroup) -> dict[str, Any]:
    """The exercise before training: what it counts, and what it says of transfers that deliver to the wrong places."""
    plan: Any = SimpleNamespace(group=group, edges=dict(edges("three to two", "one to four", "in one process", "two to two")))
    found: dict[str, Any] = {"pairs": exercise(plan).pairs}
    right = Transport.fetch

    def rotated(self: Transport, *args: Any) -> list[jax.Array]:
        arrays = right(self, *args)
        return [jax.device_put(other, array.device) for other, array in zip([*arrays[1:], arrays[0]], arrays, strict=True)]

    earlier: list[list[jax.Array]] = []

    def late(self: Transport, *args: Any) -> list[jax.Array]:
        earlier.append(right(self, *args))
        return earlier[-2:][0]

    # Who found nothing goes on; who did would end, and does not wait for the others.
    alone = SimpleNamespace(index=group.index, count=group.count, transport=group.transport, all_gather=lambda _, value: [value])
    for name, fetch, used in (("rotated", rotated, ("one to four",)), ("late", late, ("two to two", "two to two"))):
        damaged: Any = SimpleNamespace(group=alone, edges=dict(edges(*used)))
        with mock.patch.object(Transport, "fetch", fetch):
            try:
                exercise(damaged)
                found[name] = "nothing"
            except ClusterError as error:
                found[name] = [error.anchor, error.what, error.wanted]
        group.all_gather("damaged", None)
    return found


def everything(group: ProcessGroup) -> dict[str, Any]:
    """All of the above, one after the other: processes that start anew take longer than any of them."""
    return {each.__name__: each(group) for each in (told, many, unfinished, large, numbers, wrapped, tried)}


def edges(*names: str) -> Iterator[tuple[str, Any]]:
    for number, name in enumerate(names):
        label = f"edge{number}"
        yield label, SimpleNamespace(edge=SimpleNamespace(label=label), wires={(0, 0): wires()[name]}, backward=name == "three to two")
