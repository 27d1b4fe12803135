"""Moves rows between the meshes of two replicas without a host read, for any pair of device counts.

`jax.device_put` between meshes reads a sharded array to the host, and blocks, when a destination shard's index is not
the index of some source shard. So rows cross in a *wire layout*: G rows are cut into K = lcm(source devices,
destination devices) stripes. The producer's program returns K / source arrays, each striped over its devices; the
consumer's program takes K / destination arrays striped over its own. Stripe k lies on device k mod source and goes to
device k mod destination: one batched put of single-device pieces moves them all, each byte once.

Between processes the same stripes cross (see `maestro_jax.meshes.transport`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..errors import MeshError
from .transport import Transport

MAX_STRIPES = 256
"""Pairs of device counts with more stripes than this are refused: their pieces would be too small to be worth moving."""

Arrays: TypeAlias = tuple[jax.Array, ...]


class Wire:
    """The layout of one slot of rows between two replicas.

    Args:
        source: devices of the producer's replica.
        target: devices of the consumer's replica.
        rows: rows in a slot (G); a multiple of the number of stripes.
        row: shape `[d]` and dtype of a row.
        label: names the edge in error texts.

    Raises:
        MeshError: when the pair of device counts has too many stripes, or `rows` is not a multiple of them.
    """

    def __init__(self, source: Mesh, target: Mesh, rows: int, row: jax.ShapeDtypeStruct, label: str) -> None:
        self.stripes = stripes(source.size, target.size)
        if self.stripes > MAX_STRIPES or rows % self.stripes:
            raise _refused(label, source.size, target.size, rows, self.stripes)
        self.rows, self.row = rows, row
        self.source, self.target = source, target
        self.source_arrays, self.target_arrays = self.stripes // source.size, self.stripes // target.size
        self._ends = _End(source, self), _End(target, self)

    def shapes(self, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays of one slot as they lie on `mesh`, either end of the wire, with their sharding."""
        count = self.stripes // mesh.size
        shape = (self.rows // count, *self.row.shape)
        return (jax.ShapeDtypeStruct(shape, self.row.dtype, sharding=striped(mesh)),) * count

    def pieces(self, slot: Arrays, back: bool) -> tuple[Sequence[jax.Array], Sequence[Any]]:
        """What one put has to move for a slot inside a process, and where to; `back` is from consumer to producer."""
        here, there = self._ends[back], self._ends[not back]
        if here.count == there.count:
            # Every shard's index is that of a shard at the other end: whole arrays move without a host read.
            return slot, there.shardings
        pieces = [slot[k // here.count].addressable_data(k % here.count) for k in range(self.stripes)]
        return pieces, there.stripe_shardings

    def assemble(self, moved: Sequence[jax.Array], back: bool) -> Arrays:
        """Makes the arrays of a slot from what has arrived; no copy."""
        here, there = self._ends[back], self._ends[not back]
        if here.count == there.count:
            return tuple(moved)
        return self._joined(dict(enumerate(moved)), there)

    @functools.cached_property
    def in_one_process(self) -> bool:
        """Whether all devices of both ends are this process's."""
        return all(all(end.local) for end in self._ends)

    def sent(self, slot: Arrays, back: bool) -> Iterator[tuple[int, jax.Array, Any]]:
        """Yields the stripes of a slot that this process sends: number, piece, the device that it goes to."""
        here, there = self._ends[back], self._ends[not back]
        for j, array in enumerate(slot):
            own = {shard.device: shard.data for shard in array.addressable_shards}
            for n, device in enumerate(here.devices):
                k = j * here.count + n
                if device in own:
                    yield k, own[device], there.devices[k % there.count]

    def expected(self, back: bool) -> Iterator[tuple[int, Any, Any]]:
        """Yields the stripes of a slot that this process receives: number, the device that it is on, the device that it goes to."""
        here, there = self._ends[back], self._ends[not back]
        for k in range(self.stripes):
            if there.local[k % there.count]:
                yield k, here.devices[k % here.count], there.devices[k % there.count]

    def received(self, moved: Mapping[int, jax.Array], back: bool) -> Arrays | None:
        """Makes the arrays of a slot from the stripes that arrived at devices of this process; None where it has none of them."""
        there = self._ends[not back]
        return self._joined(moved, there) if any(there.local) else None

    def _joined(self, moved: Mapping[int, jax.Array], end: _End) -> Arrays:
        n = end.count
        parts = ([moved[k] for k in range(j * n, (j + 1) * n) if end.local[k % n]] for j in range(len(end.shardings)))
        return tuple(
            jax.make_array_from_single_device_arrays(end.shape, sharding, found, dtype=self.row.dtype)
            for found, sharding in zip(parts, end.shardings, strict=True)
        )

    @property
    def stripe(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a stripe."""
        return jax.ShapeDtypeStruct((self.rows // self.stripes, *self.row.shape), self.row.dtype)


class _End:
    """What a wire knows of one of its ends; made once, because a put per task uses it."""

    def __init__(self, mesh: Mesh, wire: Wire) -> None:
        shapes = wire.shapes(mesh)
        devices = self.devices = list(mesh.devices.flat)
        self.local = [device.process_index == device.client.process_index() for device in devices]
        self.count = mesh.size
        self.shape = shapes[0].shape
        self.shardings = [striped(mesh)] * len(shapes)
        self.stripe_shardings = [SingleDeviceSharding(devices[k % mesh.size]) for k in range(wire.stripes)]


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One slot on its way.

    Args:
        wire: between the two replicas.
        slot: the arrays at the sending end; None in a process that has no devices there.
        back: whether it goes from consumer to producer (gradients).
    """

    wire: Wire
    slot: Arrays | None
    back: bool = False


def move(parcels: Sequence[Parcel], transport: Transport | None = None, name: str = "") -> list[Arrays | None]:
    """Sends slots, over any number of wires; returns their arrays at the other end, at once.

    Inside a process everything goes in one batched put. A parcel between processes is moved by all processes that have devices of either
    end, each of which calls this with the parcels that it takes part in, in the same order.

    Args:
        parcels: what is sent.
        transport: to other processes; None where there are none.
        name: of this call, the same in all processes that take part, and no other call's.

    Returns:
        The arrays of each parcel at the receiving end, or None where this process has no devices of it.
    """
    pieces: list[jax.Array] = []
    targets: list[Any] = []
    spans: dict[int, slice] = {}
    for number, parcel in enumerate(parcels):
        if parcel.wire.in_one_process and parcel.slot is not None:
            some, places = parcel.wire.pieces(parcel.slot, parcel.back)
            spans[number] = slice(len(pieces), len(pieces) + len(some))
            pieces += some
            targets += places
    # The one device transfer between sections of a process. Not donated: donation between meshes crashes on CPU, and on a shared
    # submesh the result aliases the source.
    moved: list[jax.Array] = jax.device_put(pieces, targets) if pieces else []
    arrived: dict[int, Arrays | None] = {}
    if len(spans) < len(parcels):
        if transport is None:
            raise RuntimeError("a payload goes to another process, and there is no transport")
        arrived = _move_between({number: parcel for number, parcel in enumerate(parcels) if number not in spans}, transport, name)
    for number, span in spans.items():
        arrived[number] = parcels[number].wire.assemble(moved[span], parcels[number].back)
    return [arrived[number] for number in range(len(parcels))]


def _move_between(parcels: Mapping[int, Parcel], transport: Transport, name: str) -> dict[int, Arrays | None]:
    """Moves parcels whose ends are not all in this process: one offer to, and one fetch from, each process that takes part."""
    found: dict[int, dict[int, jax.Array]] = {number: {} for number in parcels}
    offers: dict[int, list[jax.Array]] = {}
    fetches: dict[int, list[tuple[int, int, jax.ShapeDtypeStruct, Any]]] = {}
    inside: list[tuple[int, int, jax.Array, Any]] = []
    for number, parcel in parcels.items():
        for k, piece, target in parcel.wire.sent(parcel.slot, parcel.back) if parcel.slot is not None else ():
            if target.process_index == transport.index:
                inside.append((number, k, piece, target))
            else:
                offers.setdefault(target.process_index, []).append(piece)
        for k, source, target in parcel.wire.expected(parcel.back):
            if source.process_index != transport.index:
                fetches.setdefault(source.process_index, []).append((number, k, parcel.wire.stripe, target))
    for process, pieces in offers.items():
        transport.offer(name, process, pieces)
    for process, wanted in fetches.items():
        arrays = transport.fetch(name, process, [(shape, target) for _, _, shape, target in wanted])
        for (number, k, _, _), array in zip(wanted, arrays, strict=True):
            found[number][k] = array
    if inside:
        puts = jax.device_put([piece for _, _, piece, _ in inside], [SingleDeviceSharding(target) for _, _, _, target in inside])
        for (number, k, _, _), array in zip(inside, puts, strict=True):
            found[number][k] = array
    return {number: parcel.wire.received(found[number], parcel.back) for number, parcel in parcels.items()}


def stripes(source: int, target: int) -> int:
    """Number of stripes between replicas of `source` and `target` devices.

    >>> stripes(2, 3)
    6
    """
    return math.lcm(source, target)


def striped(mesh: Mesh) -> NamedSharding:
    """Rows split over all devices of a mesh, in the mesh's own order."""
    return NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))


def split(rows: jax.Array, arrays: int) -> Arrays:
    """Inside a producer's program: cuts a slot `[G, d]` into the arrays of its wire."""
    return tuple(jnp.split(rows, arrays, axis=0))


def join(arrays: Arrays) -> jax.Array:
    """Inside a consumer's program: puts the arrays of a slot together again, `[G, d]`."""
    return jnp.concatenate(arrays, axis=0)


def on_every_device(
    scalar: jax.Array | None, source: NamedSharding, sharding: NamedSharding, transport: Transport | None = None, name: str = ""
) -> jax.Array | None:
    """Copies a replicated array to every device of another mesh, from one of its shards, without a host read.

    All processes that have devices of either mesh call this.

    Args:
        scalar: a float32 scalar that is whole on each of its devices; None where this process has none of them.
        source: its sharding.
        sharding: replicated sharding on the destination mesh.
        transport: to other processes; None where there are none.
        name: of this call, see `move`.

    Returns:
        The copy; None where this process has no devices of the destination.
    """
    sources, targets = devices_of(source), devices_of(sharding)
    here = sources[0].client.process_index()
    mine = [device for device in targets if device.process_index == here]
    own = scalar.addressable_shards[0].data if scalar is not None else None
    first, senders = sources[0].process_index, {device.process_index for device in sources}
    if transport is not None and own is not None and first == here:
        # The first process of the source serves those that have no copy of their own.
        for process in sorted({device.process_index for device in targets} - senders):
            transport.offer(name, process, [own])
    if not mine:
        return None
    if own is None:
        if transport is None:
            raise RuntimeError("a number comes from another process, and there is no transport")
        [own] = transport.fetch(name, first, [(jax.ShapeDtypeStruct((), jnp.float32), mine[0])])
    copies = jax.device_put([own] * len(mine), [SingleDeviceSharding(device) for device in mine])
    return jax.make_array_from_single_device_arrays((), sharding, copies, dtype=jnp.float32)


def put_whole(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Puts a host value on the devices of a sharding that are this process's; unlike `device_put`, asks no other process about it."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)


def rewrapped(wanted: jax.ShapeDtypeStruct, arrays: Iterable[jax.Array]) -> jax.Array:
    """Wraps existing shards as one array, without a copy; all wrappers of a buffer share its fate when one is donated.

    Args:
        wanted: shape and sharding of the result.
        arrays: arrays whose shards lie on the devices of that sharding; shards on other devices are left out.
    """
    by_device = {s.device: s.data for array in arrays for s in array.addressable_shards}
    sharding = cast(NamedSharding, wanted.sharding)
    found = [by_device[device] for device in devices_of(sharding) if device in by_device]
    return jax.make_array_from_single_device_arrays(wanted.shape, sharding, found, dtype=wanted.dtype)


def devices_of(sharding: NamedSharding) -> list[Any]:
    """The devices of a sharding in the order of its mesh."""
    return list(np.asarray(sharding.mesh.devices).flat)


def _refused(label: str, source: int, target: int, rows: int, stripes: int) -> MeshError:
    return MeshError(
        f"edge {label} cannot cross from {source} to {target} devices.",
        wanted=f"at most {MAX_STRIPES} stripes, dividing the {rows} rows of a slot (the smaller of the two largest micro-batches)",
        have=f"{stripes} stripes, the least common multiple of {source} and {target}",
        fix="choose device counts with a smaller common multiple, or micro-batches that it divides",
        anchor="wire-stripes",
    )
