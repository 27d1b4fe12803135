"""The programs of an update: sum the replicas' gradients, apply the optimizer, zero the accumulators.

The sum keeps no room of its own: each replica's share of it is written over that share of the replica's own accumulator. So an
update holds the parameters, the optimizer state and one copy of the gradient; while it sums, a replica of several needs room for its
share besides (XLA's CPU scheduler keeps the shares of all parameters; an optimization barrier between them is dropped before).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .plan import SectionPlan

Tree = Any


def make_reduce(section: SectionPlan) -> Any:
    """Returns the reduction of a section's replicas: `(stack, sums) -> (stack, square, total)`."""
    weighted = jnp.array([objective.weight != 0 for objective in section.section.objectives.values()], bool)

    def summed(path: str, stack: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sums `[replica, ...]` into the shards of the master copy: no device ever holds a whole sum beside its accumulator."""
        split = _split(section, path)

        def local(part: jax.Array) -> tuple[jax.Array, jax.Array]:
            if split is None:
                share = jax.lax.psum(part[0], "replica")
                return share[None], share
            share = jax.lax.psum_scatter(part[0], "replica", scatter_dimension=split, tiled=True)
            start = jax.lax.axis_index("replica") * share.shape[split]
            return jax.lax.dynamic_update_slice_in_dim(part, share[None], start, split + 1), share

        return _on_devices(section, path, local, (_stack_spec(section, path), section.master_specs[path]))(stack)

    def reduce(stack: Tree, sums: Tree) -> tuple[Tree, jax.Array, Tree]:
        """Sums gradients `[replica, ...]` in place (see `make_shares`) and objective sums `[replica, M]`.

        Returns (stack, sum of squares of the gradient, objective sums `[M]`). The sum of squares is NaN where a weighted objective
        is not finite, so that one scalar carries the verdict, also of a section that has a loss and nothing to train.
        """
        square, reduced = jnp.zeros((), jnp.float32), {}
        for path, value in stack.items():
            reduced[path], share = summed(path, value) if section.submesh.replicas > 1 else (value, value)
            square += jnp.sum(jnp.square(share))
        total = jax.tree.map(lambda s: s.sum(0), sums)
        for value in jax.tree.leaves(total):
            square = jnp.where((jnp.isfinite(value) | ~weighted).all(), square, jnp.nan)
        return reduced, square, total

    return reduce


def make_shares(section: SectionPlan) -> Any:
    """Returns the reading of a reduced stack: each device's share of the sum, laid out as the master copies are."""

    def shares(stack: Tree) -> Tree:
        return {path: share(path, value) for path, value in stack.items()}

    def share(path: str, stack: jax.Array) -> jax.Array:
        if section.submesh.replicas == 1:
            return stack[0]
        split = _split(section, path)

        def local(part: jax.Array) -> jax.Array:
            if split is None:
                return part[0]
            size = part.shape[split + 1] // section.submesh.replicas
            return jax.lax.dynamic_slice_in_dim(part[0], jax.lax.axis_index("replica") * size, size, split)

        return _on_devices(section, path, local, section.master_specs[path])(stack)

    return shares


def _split(section: SectionPlan, path: str) -> int | None:
    """The dimension of a master copy that is split over replicas, or None where each replica holds all of it."""
    return next((n for n, axis in enumerate(section.master_specs[path]) if axis == "replica"), None)


def _stack_spec(section: SectionPlan, path: str) -> PartitionSpec:
    return PartitionSpec("replica", *section.gradient_specs[path])


def _on_devices(section: SectionPlan, path: str, local: Callable[..., Any], out: Any) -> Any:
    """Runs a function of one device's part of a stack on every device."""
    return jax.shard_map(local, mesh=section.submesh.mesh, in_specs=_stack_spec(section, path), out_specs=out, check_vma=False)


def zero(stack: Tree, sums: Tree) -> tuple[Tree, Tree]:
    """Returns zeros in the place of the donated accumulators; a program of its own, or XLA would copy them before it reads them."""
    return jax.tree.map(jnp.zeros_like, stack), jax.tree.map(jnp.zeros_like, sums)


def make_apply(section: SectionPlan, optimizer: Any, clip_norm: float | None) -> Any:
    """Returns the update of one section: `(master, state, compute, stack, squares, active) -> (..., norm, applied)`."""
    shares = make_shares(section)

    def apply(
        master: Tree, state: Tree, compute: Tree, stack: Tree, squares: Mapping[str, jax.Array], active: jax.Array
    ) -> tuple[Tree, Tree, Tree, jax.Array, jax.Array]:
        """One joint norm decides clipping and one verdict decides skipping, from the same numbers in every section."""
        norm = jnp.sqrt(jnp.sum(jnp.stack([squares[name] for name in sorted(squares)])))
        applied = jnp.isfinite(norm) & active
        gradients = shares(stack)
        if clip_norm is not None:
            factor = jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
            gradients = jax.tree.map(lambda g: g * factor, gradients)
        updates, new_state = optimizer.update(gradients, state, master)
        new_master = jax.tree.map(lambda p, u: p + u.astype(p.dtype), master, updates)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)  # noqa: E731 - used twice
        new_master, new_state = keep(new_master, master), keep(new_state, state)
        cast = {path: value.astype(compute[path].dtype) for path, value in new_master.items()}
        return new_master, new_state, cast, norm, applied

    return apply
