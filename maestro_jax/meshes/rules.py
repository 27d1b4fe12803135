"""From logical axis names to partition specs."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import PartitionSpec


def partition_spec(
    shape: tuple[int, ...], names: tuple[str | None, ...] | None, rules: Mapping[str, str | None], sizes: Mapping[str, int]
) -> tuple[PartitionSpec, list[str]]:
    """Maps the dimensions of a parameter to mesh axes.

    Args:
        shape: of the parameter.
        names: logical name of each dimension, or None for a parameter that declares none (kept whole).
        rules: logical name -> mesh axis; a name without a rule is not split.
        sizes: mesh axis -> its size.

    Returns:
        The spec, and the dimensions that stay whole because their size is not divisible by the axis
        ("dimension 0 (kv_heads, 1) by tensor=2"). A mesh axis is used for the first dimension that asks for it.
    """
    axes: list[str | None] = []
    whole = []
    for n, (size, name) in enumerate(zip(shape, names or (None,) * len(shape), strict=True)):
        axis = rules.get(name) if name is not None else None
        if axis is None or sizes.get(axis, 1) == 1 or axis in axes:
            axes.append(None)
        elif size % sizes[axis]:
            whole.append(f"dimension {n} ({name}, {size}) by {axis}={sizes[axis]}")
            axes.append(None)
        else:
            axes.append(axis)
    return PartitionSpec(*axes), whole


def spread(shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]) -> PartitionSpec:
    """Splits a parameter over more mesh axes: each goes to the first dimension that it divides and that no axis splits yet.

    Master parameters and optimizer state need not be whole on every replica (ZeRO stage 1, Rajbhandari et al.,
    arXiv 1910.02054), nor gradients on every device of one. A parameter without such a dimension stays whole.

    Args:
        shape: of the parameter.
        spec: how it lies already.
        axes: names and sizes of the axes to add; those that the spec names, and those of size 1, are left out.

    >>> tuple(spread((6, 8), PartitionSpec(None, "tensor"), {"replica": 3}))
    ('replica', 'tensor')
    """
    taken = list(spec) + [None] * (len(shape) - len(spec))
    for axis, count in axes.items():
        free = [n for n, size in enumerate(shape) if taken[n] is None and size and size % count == 0]
        if count > 1 and axis not in taken and free:
            taken[free[0]] = axis
    return PartitionSpec(*taken)
