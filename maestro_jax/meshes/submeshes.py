"""Carves disjoint submeshes from a device list; sections that name one submesh share it and take turns.

Every section has one mesh `(replica, fsdp, ..., tensor)` over its devices and one mesh `(fsdp, ..., tensor)` per
replica. Axes inside a replica are ordinary SPMD axes of type Auto; replicas are separate programs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..errors import MeshError
from .processes import local, processes_of

AXES = ("fsdp", "sequence", "expert", "tensor")
"""Axes that every replica mesh has, outermost first; other names that a section gives stand before them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """How many devices a section asks for, and how it arranges them.

    Args:
        section: its name.
        submesh: name of the submesh; sections with equal names share devices.
        replicas: data-parallel copies.
        axes: axis sizes inside a replica.
        origin: where replicas and axes were set, for error texts.
    """

    section: str
    submesh: str
    replicas: int
    axes: Mapping[str, int]
    origin: str = "the calling program"

    @property
    def per_replica(self) -> int:
        """Devices of one replica."""
        return math.prod(self.axes.values())

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.replicas * self.per_replica

    def describe(self) -> str:
        """For people: 'replica=2 x tensor=2 = 4 devices'."""
        parts = [f"replica={self.replicas}", *(f"{axis}={size}" for axis, size in self.axes.items() if size > 1)]
        return f"{' x '.join(parts)} = {self.devices} device{'s' if self.devices > 1 else ''}"


@dataclasses.dataclass(frozen=True, eq=False)
class Submesh:
    """The devices of one section.

    Args:
        section: its name.
        mesh: all replicas, axes `(replica, ...)`.
    """

    section: str
    mesh: Mesh

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.mesh.devices.shape[0]

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """Axis names inside a replica, outermost first."""
        return tuple(self.mesh.axis_names[1:])

    @functools.cached_property
    def replica_meshes(self) -> tuple[Mesh, ...]:
        """One mesh per replica, over its share of the devices."""
        return tuple(_mesh(devices, self.axes) for devices in self.mesh.devices)

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether this process has devices of the section."""
        return local(self.mesh)

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """The replicas of which this process has devices."""
        return tuple(n for n, mesh in enumerate(self.replica_meshes) if local(mesh))

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that have devices of the section, in order; the first one speaks for it."""
        return processes_of(self.mesh)

    def replica_devices(self, replica: int) -> list[Any]:
        """The devices of one replica, in the order in which rows are striped over them."""
        return list(self.mesh.devices[replica].flat)

    def whole(self, spec: PartitionSpec) -> NamedSharding:
        """A sharding over all replicas."""
        return NamedSharding(self.mesh, spec)

    def in_replica(self, replica: int, spec: PartitionSpec) -> NamedSharding:
        """A sharding over one replica."""
        return NamedSharding(self.replica_meshes[replica], spec)


def devices_wanted(requests: Sequence[Request]) -> int:
    """Returns how many devices disjoint submeshes need; sections on one submesh count once.

    >>> a = Request(section="a", submesh="a", replicas=1, axes={"tensor": 2})
    >>> b = Request(section="b", submesh="a", replicas=3, axes={})
    >>> devices_wanted([a, b])
    3
    """
    return sum(_sizes(requests).values())


def carve(requests: Sequence[Request], devices: Sequence[Any]) -> dict[str, Submesh]:
    """Gives each submesh the next devices of the list, in the order of the requests.

    Args:
        requests: one per section.
        devices: JAX devices; later ones stay unused.

    Returns:
        Section name -> its devices.

    Raises:
        MeshError: when the devices do not suffice; the text says who took how many.
    """
    start, taken = 0, {}
    ranges: dict[str, range] = {}
    for name, size in _sizes(requests).items():
        if start + size > len(devices):
            raise _too_small(max((r for r in requests if r.submesh == name), key=lambda r: r.devices), taken, len(devices))
        ranges[name] = range(start, start + size)
        taken[name] = ranges[name]
        start += size
    placed = {}
    for request in requests:
        mine = [devices[i] for i in ranges[request.submesh]][: request.devices]
        placed[request.section] = Submesh(request.section, _section_mesh(request, mine))
    return placed


def shrink(requests: Sequence[Request], available: int) -> tuple[list[Request], list[str]]:
    """Fits a plan onto fewer devices: replicas and axes are lowered where they must be, and sections share one submesh.

    Gradients do not depend on replicas, axes or sharing, so the run computes the same; it only takes longer.

    Args:
        requests: one per section, asking for more devices than there are.
        available: number of devices.

    Returns:
        The new requests and a sentence for each change. Unchanged requests when the devices suffice.
    """
    if devices_wanted(requests) <= available:
        return list(requests), []
    there = f"there {'is' if available == 1 else 'are'} {available}"
    notes = [f"the plan asks for {devices_wanted(requests)} devices and {there}: sections share them and take turns"]
    fitted = []
    for request in requests:
        axes, room = {}, available
        for axis, size in request.axes.items():
            axes[axis] = max(d for d in range(1, size + 1) if size % d == 0 and d <= room)
            room //= axes[axis]
        replicas = min(request.replicas, room)
        new = dataclasses.replace(request, submesh="shared", replicas=replicas, axes=axes)
        lowered = [f"{axis}={size} lowered to {axes[axis]}" for axis, size in request.axes.items() if axes[axis] != size]
        lowered += [f"replicas={request.replicas} lowered to {replicas}"] if replicas != request.replicas else []
        notes += [f"section {request.section!r}: {', '.join(lowered)}"] if lowered else []
        fitted.append(new)
    return fitted, notes


def _sizes(requests: Sequence[Request]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for request in requests:
        sizes[request.submesh] = max(sizes.get(request.submesh, 0), request.devices)
    return sizes


def _section_mesh(request: Request, devices: list[Any]) -> Mesh:
    names = (*(a for a in request.axes if a not in AXES), *AXES)
    shape = (request.replicas, *(request.axes.get(a, 1) for a in names))
    return _mesh(np.array(devices, dtype=object).reshape(shape), ("replica", *names))


def _mesh(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return jax.sharding.Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def _too_small(request: Request, taken: Mapping[str, range], available: int) -> MeshError:
    used = ", ".join(f"'{name}' took {r.start}" + (f"-{r.stop - 1}" if len(r) > 1 else "") for name, r in taken.items())
    left = available - sum(len(r) for r in taken.values())
    have = f"{left or 'no'} device{'s' if left > 1 else ''}"
    return MeshError(
        f"section {request.section!r} cannot be placed.",
        wanted=request.describe(),
        have=f"{have} left after {used} of {available}" if used else have,
        fix="lower replicas or an axis, let sections name one submesh, or give them fewer devices; --dry_run shows the plan",
        anchor="mesh-too-small",
        set_by=request.origin,
    )
