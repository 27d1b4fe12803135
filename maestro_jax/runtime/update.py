"""The programs of an update: sum the replicas' gradients, zero the accumulators, apply the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .plan import SectionPlan

Tree = Any


def make_reduce(section: SectionPlan) -> Any:
    """Returns the reduction of a section's replicas: `(stack, sums) -> (gradients, square, total)`."""
    mesh = section.submesh.mesh
    weighted = jnp.array([objective.weight != 0 for objective in section.section.objectives.values()], bool)

    def summed(path: str, stack: jax.Array) -> jax.Array:
        """Sums `[replica, ...]` straight into the shards of the master copy: no device ever holds a whole sum."""
        spec = section.master_specs[path]
        split = next((n for n, axis in enumerate(spec) if axis == "replica"), None)

        def local(part: jax.Array) -> jax.Array:
            if split is None:
                return jax.lax.psum(part[0], "replica")
            return jax.lax.psum_scatter(part[0], "replica", scatter_dimension=split, tiled=True)

        before = PartitionSpec("replica", *section.gradient_specs[path])
        return jax.shard_map(local, mesh=mesh, in_specs=before, out_specs=spec, check_vma=False)(stack)

    def reduce(stack: Tree, sums: Tree) -> tuple[Tree, jax.Array, Tree]:
        """Sums gradients `[replica, ...]` and objective sums `[replica, M]`.

        Returns (gradients, their sum of squares, objective sums `[M]`). The sum of squares is NaN where a weighted objective is
        not finite, so that one scalar carries the verdict, also of a section that has a loss and nothing to train.
        """
        gradients = {path: summed(path, value) for path, value in stack.items()}
        total = jax.tree.map(lambda s: s.sum(0), sums)
        square = sum((jnp.sum(jnp.square(g)) for g in gradients.values()), jnp.zeros((), jnp.float32))
        for value in jax.tree.leaves(total):
            square = jnp.where((jnp.isfinite(value) | ~weighted).all(), square, jnp.nan)
        return gradients, square, total

    return reduce


def zero(stack: Tree, sums: Tree) -> tuple[Tree, Tree]:
    """Returns zeros in the place of the donated accumulators; a program of its own, or XLA would copy them before it reads them."""
    return jax.tree.map(jnp.zeros_like, stack), jax.tree.map(jnp.zeros_like, sums)


def make_apply(optimizer: Any, clip_norm: float | None) -> Any:
    """Returns the update of one section: `(master, state, compute, gradients, squares, active) -> (..., norm, applied)`."""

    def apply(
        master: Tree, state: Tree, compute: Tree, gradients: Tree, squares: Mapping[str, jax.Array], active: jax.Array
    ) -> tuple[Tree, Tree, Tree, jax.Array, jax.Array]:
        """One joint norm decides clipping and one verdict decides skipping, from the same numbers in every section."""
        norm = jnp.sqrt(jnp.sum(jnp.stack([squares[name] for name in sorted(squares)])))
        applied = jnp.isfinite(norm) & active
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
