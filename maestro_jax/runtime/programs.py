"""The programs of a section: pure functions that are compiled once per bucket, kind and replica.

Payload slots are filled (a gather) and placed (a scatter) inside the differentiated function, so that autodiff is their
exact transpose. A forward that is followed by a backward returns the residuals of `jax.vjp` as a flat tuple, without
those that are arguments of the program (parameters, data, payloads): the backward takes these from its own arguments,
so that no copy of the weights is kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..meshes.transfers import join, split
from .plan import EdgePlan, Plan, SectionPlan

Tree = Any


@dataclasses.dataclass
class Residuals:
    """How the residuals of one traced forward lie in its VJP: which are arguments, which are returned.

    Args:
        treedef: structure of the VJP.
        from_argument: per leaf, the number of the program argument's leaf that it is, or None when it is returned.
    """

    treedef: Any
    from_argument: list[int | None]

    def refill(self, arguments: list[Any], kept: tuple[Any, ...]) -> Any:
        """Puts arguments and kept residuals back in their places."""
        remaining = iter(kept)
        return jax.tree.unflatten(self.treedef, [next(remaining) if n is None else arguments[n] for n in self.from_argument])


class SectionFunctions:
    """The functions of one section at one bucket; the same objects for every replica."""

    def __init__(self, plan: Plan, section: SectionPlan, bucket: int) -> None:
        self.section = section
        self.shape = section.micro_shape(bucket)
        self.into = plan.into(section.section.name)
        self.out = plan.out_of(section.section.name)
        self.objectives = tuple(section.section.objectives)
        self.residuals: Residuals | None = None
        remat = section.section.remat
        self.recomputes = remat == "inputs"
        apply = section.shapes.adapter.apply
        self._apply = apply if remat in ("none", "inputs") else jax.checkpoint(apply, policy=getattr(jax.checkpoint_policies, remat))

    # -- kinds of program

    def forward(self, params: Tree, frozen: Tree, feed: Tree, slots: Tree, sums: Tree) -> tuple[Tree, Tree, jax.Array]:
        """Runs forward only. Returns (payload, sums with this micro-batch added, marker)."""
        payload, _, found = self._compute(params, frozen, feed, slots)
        return payload, _added(sums, found), _marker()

    def forward_residuals(self, params: Tree, frozen: Tree, feed: Tree, slots: Tree, sums: Tree) -> tuple[Tree, Tree, Tree, jax.Array]:
        """Runs forward and keeps what a backward needs. Returns (payload, sums, residuals, marker)."""
        payload, _, found, vjp = self._vjp(params, frozen, feed, slots)
        leaves, treedef = jax.tree.flatten(vjp)
        arguments = jax.tree.leaves((params, frozen, feed, slots))
        numbers = [next((n for n, a in enumerate(arguments) if a is leaf), None) for leaf in leaves]
        self.residuals = Residuals(treedef, numbers)
        kept = tuple(leaf for leaf, n in zip(leaves, numbers, strict=True) if n is None)
        return payload, _added(sums, found), kept, _marker()

    def backward(
        self, params: Tree, frozen: Tree, feed: Tree, slots: Tree, kept: Tree, cotangents: Tree, gradients: Tree
    ) -> tuple[Tree, Tree, jax.Array]:
        """Returns (cotangents of the slots that lead to something trainable, gradients with this micro-batch added, marker)."""
        if self.recomputes:
            vjp = self._vjp(params, frozen, feed, slots)[3]
        elif self.residuals is not None:
            vjp = self.residuals.refill(jax.tree.leaves((params, frozen, feed, slots)), kept)
        else:
            raise RuntimeError("a backward is traced after its forward")
        found, back = vjp((cotangents, jnp.ones((), jnp.float32)))
        return back, _accumulated(gradients, found), _marker()

    def forward_backward(
        self, params: Tree, frozen: Tree, feed: Tree, slots: Tree, sums: Tree, gradients: Tree
    ) -> tuple[Tree, Tree, Tree, jax.Array]:
        """Both in one program, for micro-batches that nothing consumes. Returns (cotangents, sums, gradients, marker)."""
        payload, _, found, vjp = self._vjp(params, frozen, feed, slots)
        nothing = jax.tree.map(jnp.zeros_like, payload)
        grads, back = vjp((nothing, jnp.ones((), jnp.float32)))
        return back, _added(sums, found), _accumulated(gradients, grads), _marker()

    # -- the section itself

    def _vjp(self, params: Tree, frozen: Tree, feed: Tree, slots: Tree) -> tuple[Tree, jax.Array, Tree, Any]:
        through = {e.edge.label: slots[e.edge.label] for e in self.into if e.backward}

        def loss_of(params: Tree, through: Tree) -> tuple[tuple[Tree, jax.Array], Tree]:
            payload, loss, found = self._compute(params, frozen, feed, {**slots, **through})
            return (payload, loss), found

        (payload, loss), vjp, found = jax.vjp(loss_of, params, through, has_aux=True)
        return payload, loss, found, vjp

    def _compute(self, params: Tree, frozen: Tree, feed: Tree, slots: Tree) -> tuple[Tree, jax.Array, Tree]:
        """Returns (payload, scaled loss, objective sums `[M]`)."""
        padding = feed["batch"]["segment_ids"].reshape(-1) == 0
        inputs = {e.edge.input: self._placed(e, slots[e.edge.label], feed["place"][e.edge.label], padding) for e in self.into}
        returned = self._apply({**params, **frozen}, feed["batch"], inputs)
        payload = {e.edge.label: self._gathered(e, returned[e.edge.output], feed["gather"][e.edge.label]) for e in self.out}
        if not self.objectives:
            return payload, jnp.zeros((), jnp.float32), {}
        sums = jnp.stack([returned[name].astype(jnp.float32) for name in self.objectives])
        # A weight of 0 or a count of 0 makes a scale of 0; such a sum must not turn the loss into NaN.
        loss = jnp.sum(jnp.where(feed["scale"] != 0, sums * feed["scale"], 0.0))
        return payload, loss, {"sums": jax.lax.stop_gradient(sums)}

    def _placed(self, edge: EdgePlan, slots: tuple[tuple[jax.Array, ...], ...], place: jax.Array, padding: jax.Array) -> jax.Array:
        """Slots `[S_in][G, d]` and their rows `[S_in, G]` -> input `[rows, length, d]`, zero where a unit gets nothing.

        Padding is one instead: a module that divides by a row's norm must not make NaN where no loss counts.
        """
        rows, length = self.shape
        # Whole on every device before they are placed: the partitioner finds no way from stripes to a module's own layout.
        values = jax.lax.with_sharding_constraint(jnp.concatenate([join(arrays) for arrays in slots], axis=0), PartitionSpec())
        landing = jnp.broadcast_to(padding[:, None].astype(edge.row.dtype), (rows * length, *edge.row.shape))
        # Every row is named at most once; rows out of range are empty.
        return landing.at[place.reshape(-1)].set(values, mode="drop").reshape(rows, length, *edge.row.shape)

    def _gathered(self, edge: EdgePlan, output: jax.Array, gather: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        """Output `[rows, length, d]` and rows `[S_out, G]` -> slots in the layout of their wires."""
        flat = jax.lax.with_sharding_constraint(output.reshape(-1, *edge.row.shape), PartitionSpec())
        arrays = next(iter(edge.wires.values())).source_arrays
        slots = flat.at[gather].get(mode="fill", fill_value=0)
        return tuple(split(slots[n], arrays) for n in range(edge.fan_out))


def _accumulated(gradients: Tree, found: Tree) -> Tree:
    """Accumulators are `[1, ...]` float32, so that those of all replicas are views of one stack."""
    return {path: total + found[path].astype(jnp.float32)[None] for path, total in gradients.items()}


def _added(sums: Tree, found: Tree) -> Tree:
    return {name: total + found[name][None] for name, total in sums.items()}


def _marker() -> jax.Array:
    """A scalar that is ready when the program has run; it bounds the tasks in flight and is never donated."""
    return jnp.zeros((), jnp.float32)
