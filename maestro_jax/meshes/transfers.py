"""Moves rows between the meshes of two replicas without a host read, for any pair of device counts.

`jax.device_put` between meshes reads a sharded array to the host, and blocks, when a destination shard's index is not
the index of some source shard. So rows cross in a *wire layout*: G rows are cut into K = lcm(source devices,
destination devices) stripes. The producer's program returns K / source arrays, each striped over its devices; the
consumer's program takes K / destination arrays striped over its own. Stripe k lies on device k mod source and goes to
device k mod destination: one batched put of single-device pieces moves them all, each byte once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..errors import MeshError

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
        """What one put has to move for a slot, and where to; `back` is from consumer to producer."""
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
        n = there.count
        return tuple(
            jax.make_array_from_single_device_arrays(there.shape, sharding, list(moved[j * n : (j + 1) * n]))
            for j, sharding in enumerate(there.shardings)
        )


class _End:
    """What a wire knows of one of its ends; made once, because a put per task uses it."""

    def __init__(self, mesh: Mesh, wire: Wire) -> None:
        shapes = wire.shapes(mesh)
        devices = list(mesh.devices.flat)
        self.count = mesh.size
        self.shape = shapes[0].shape
        self.shardings = [striped(mesh)] * len(shapes)
        self.stripe_shardings = [SingleDeviceSharding(devices[k % mesh.size]) for k in range(wire.stripes)]


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One slot on its way.

    Args:
        wire: between the two replicas.
        slot: the arrays at the sending end.
        back: whether it goes from consumer to producer (gradients).
    """

    wire: Wire
    slot: Arrays
    back: bool = False


def move(parcels: Sequence[Parcel]) -> list[Arrays]:
    """Sends slots, over any number of wires, in one batched put; returns their arrays at the other end, at once."""
    pieces: list[jax.Array] = []
    targets: list[Any] = []
    ends = []
    for parcel in parcels:
        some, places = parcel.wire.pieces(parcel.slot, parcel.back)
        pieces += some
        targets += places
        ends.append(len(pieces))
    if not pieces:
        return []
    # The one device transfer between sections. Not donated: donation between meshes crashes on CPU, and on a shared
    # submesh the result aliases the source.
    moved: list[jax.Array] = jax.device_put(pieces, targets)
    starts = [0, *ends[:-1]]
    return [p.wire.assemble(moved[start:end], p.back) for p, start, end in zip(parcels, starts, ends, strict=True)]


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


def on_every_device(scalar: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Copies a replicated array to every device of another mesh, from one of its shards, without a host read.

    Args:
        scalar: any small array that is whole on each of its devices.
        sharding: replicated sharding on the destination mesh.
    """
    devices = devices_of(sharding)
    piece = scalar.addressable_shards[0].data
    copies = jax.device_put([piece] * len(devices), [SingleDeviceSharding(d) for d in devices])
    return jax.make_array_from_single_device_arrays(scalar.shape, sharding, copies)


def rewrapped(wanted: jax.ShapeDtypeStruct, arrays: Iterable[jax.Array]) -> jax.Array:
    """Wraps existing shards as one array, without a copy; all wrappers of a buffer share its fate when one is donated.

    Args:
        wanted: shape and sharding of the result.
        arrays: arrays whose shards lie on the devices of that sharding; shards on other devices are left out.
    """
    by_device = {s.device: s.data for array in arrays for s in array.addressable_shards}
    sharding = cast(NamedSharding, wanted.sharding)
    return jax.make_array_from_single_device_arrays(wanted.shape, sharding, [by_device[d] for d in devices_of(sharding)])


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
