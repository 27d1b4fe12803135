"""The update: equal parameters on all replicas, state spread over them, memory within its bound, one verdict for all.

Dimensions: R replicas.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from engines import Setup
from support import text_samples, wired

from maestro_jax.graph import SectionGraph

SAMPLES = text_samples(12, longest=14)
WIDTH = 64
"""Wide enough that parameters outweigh scalars and the temporaries of small reductions."""


def layout(dtype: str = "float32", **student: Any) -> SectionGraph:
    return wired("pair", width=WIDTH, a={"replicas": 2, "dtype": dtype}, b={"replicas": 4, "dtype": dtype, **student})


def stepped(setup: Setup, steps: int) -> Setup:
    for step in range(steps):
        setup.engine.step(setup.preparer.prepare(SAMPLES, step))
    return setup


def shard_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def peak(compiled: Any) -> int:
    """Bytes that a program needs on each device."""
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
