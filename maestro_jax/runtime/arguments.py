"""Shapes, dtypes and shardings of everything that a section's programs take, made in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .plan import Plan, SectionPlan

REPLICATED = PartitionSpec()


class Arguments:
    """Shapes, dtypes and shardings of what the programs of one section take."""

    def __init__(self, plan: Plan, section: SectionPlan) -> None:
        self.plan = plan
        self.section = section
        self.into = plan.into(section.section.name)
        self.out = plan.out_of(section.section.name)

    def params(self, replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Compute parameters that are updated."""
        return self._in_replica(self.section.compute, replica)

    def frozen(self, replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Parameters that are not updated."""
        return self._in_replica(self.section.frozen, replica)

    def _in_replica(self, shapes: Mapping[str, jax.ShapeDtypeStruct], replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        place = self.section.submesh.in_replica
        return {p: shaped(s.shape, s.dtype, place(replica, self.section.specs[p])) for p, s in shapes.items()}

    def gradients(self, replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Accumulators `[1, ...]` of one replica."""
        place = self.section.submesh.in_replica
        return {
            p: shaped((1, *s.shape), jnp.float32, place(replica, PartitionSpec(None, *self.section.gradient_specs[p])))
            for p, s in self.section.trained.items()
        }

    def sums(self, replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Objective sums `[1, M]` of one replica; empty without objectives."""
        count = len(self.section.section.objectives)
        sharding = self.section.submesh.in_replica(replica, REPLICATED)
        return {"sums": shaped((1, count), jnp.float32, sharding)} if count else {}

    def feed(self, bucket: int, replica: int, training: bool) -> dict[str, Any]:
        """Data, routes and scales of one micro-batch."""
        place = self.section.submesh.in_replica
        whole = place(replica, REPLICATED)
        rows = place(replica, PartitionSpec("fsdp"))
        batch = {name: shaped(s.shape, s.dtype, rows) for name, s in self.section.shapes.batch[bucket].items()}
        if training and self.section.section.trainable:
            batch["key"] = shaped((2,), jnp.uint32, whole)
        return {
            "batch": batch,
            "place": {e.edge.label: shaped((e.fan_in, e.slot_rows), jnp.int32, whole) for e in self.into},
            "gather": {e.edge.label: shaped((e.fan_out, e.slot_rows), jnp.int32, whole) for e in self.out},
            "scale": shaped((len(self.section.section.objectives),), jnp.float32, whole),
        }

    def slots_in(self, replica: int) -> dict[str, tuple[tuple[jax.ShapeDtypeStruct, ...], ...]]:
        """Payloads that arrive: per edge S_in slots."""
        mesh = self.section.submesh.replica_meshes[replica]
        return {e.edge.label: (e.wires[0, replica].shapes(mesh),) * e.fan_in for e in self.into}

    def slots_out(self, replica: int) -> dict[str, tuple[tuple[jax.ShapeDtypeStruct, ...], ...]]:
        """Payloads that leave, and the gradients that come back for them: per edge S_out slots."""
        mesh = self.section.submesh.replica_meshes[replica]
        return {e.edge.label: (e.wires[replica, 0].shapes(mesh),) * e.fan_out for e in self.out}

    def master(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Master parameters over the section's mesh."""
        return {
            p: shaped(s.shape, s.dtype, self.section.submesh.whole(self.section.master_specs[p])) for p, s in self.section.trained.items()
        }

    def compute(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Compute parameters over the section's mesh, equal on all replicas."""
        return {p: shaped(s.shape, s.dtype, self.section.submesh.whole(self.section.specs[p])) for p, s in self.section.compute.items()}

    def gradient_stack(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Accumulators of all replicas `[replica, ...]`."""
        mesh = self.section.submesh
        return {
            p: shaped((mesh.replicas, *s.shape), jnp.float32, mesh.whole(PartitionSpec("replica", *self.section.gradient_specs[p])))
            for p, s in self.section.trained.items()
        }

    def sums_stack(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Objective sums of all replicas `[replica, M]`."""
        mesh, count = self.section.submesh, len(self.section.section.objectives)
        return {"sums": shaped((mesh.replicas, count), jnp.float32, mesh.whole(PartitionSpec("replica")))} if count else {}

    def optimizer_state(self, optimizer: Any) -> Any:
        """Optimizer state; leaves that belong to a parameter lie as its master copy does."""
        master = self.master()
        whole = self.section.submesh.whole(REPLICATED)

        def placed(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
            owner = next((k.key for k in reversed(path) if isinstance(k, jax.tree_util.DictKey) and k.key in master), None)
            if owner is None or master[owner].shape != leaf.shape:
                return shaped(leaf.shape, leaf.dtype, whole)
            return shaped(leaf.shape, leaf.dtype, master[owner].sharding)

        return jax.tree_util.tree_map_with_path(placed, jax.eval_shape(optimizer.init, master))

    def bytes_in_flight(self, bucket: int, residuals: Any) -> int:
        """Bytes that a micro-batch holds on a device from its forward on: data, payloads at both ends, residuals."""
        held = self.feed(bucket, 0, True), self.slots_in(0), self.slots_out(0), residuals
        return sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(held))

    def scalar(self, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        """A number that is whole on every device of the section."""
        return shaped((), dtype, self.section.submesh.whole(REPLICATED))


def shaped(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """A shape with dtype and sharding: the contract of one argument."""
    # Residuals may hold typed random keys, whose dtype is none of numpy's.
    known = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.dtype(dtype)
    return jax.ShapeDtypeStruct(shape, known, sharding=sharding)


def shardings(tree: Any) -> Any:
    """The shardings of a tree of shapes."""
    return jax.tree.map(lambda s: s.sharding, tree)


def bytes_on_a_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on each device of its sharding; of all of it where that is not known."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
