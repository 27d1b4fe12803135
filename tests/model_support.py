"""What tests of models share: pure functions of parameters, packed batches of items, and runs on a mesh."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maestro_jax.data import ArraySpec, Item
from maestro_jax.data.packing import pack
from maestro_jax.graph.section import DEFAULT_RULES

Params = dict[str, Any]
Batch = dict[str, jax.Array]
Apply = Callable[..., dict[str, jax.Array]]


@functools.cache
def parts(config: Any) -> tuple[Params, dict[str, Any], Apply]:
    """Returns parameters and their names by path, and a pure function of parameters, batch and inputs."""
    graph, state = nnx.split(config(nnx.Rngs(0)))
    flat = nnx.to_flat_state(state)
    params = {"/".join(map(str, path)): param.get_value() for path, param in flat}
    names = {"/".join(map(str, path)): param.get_metadata("out_sharding") for path, param in flat}

    def apply(params: Params, batch: Any, **inputs: jax.Array) -> dict[str, jax.Array]:
        new = nnx.from_flat_state([(path, param.replace(params["/".join(map(str, path))])) for path, param in flat])
        return nnx.merge(graph, new)(batch, **inputs)

    return params, names, apply


def image(height: int, width: int, seed: int, merge: int = 2, numbers: int = 4) -> Item:
    """An image of height x width random patches, in blocks of merge x merge, with their coordinates."""
    inside = [(row, column) for row in range(merge) for column in range(merge)]
    blocks = [(row, column) for row in range(0, height, merge) for column in range(0, width, merge)]
    coords = np.array([(top + row, left + column) for top, left in blocks for row, column in inside], np.int32)
    patches = np.random.default_rng(seed).normal(size=(height, width, numbers)).astype(np.float32)
    return Item(units=height * width, arrays={"patches": patches[coords[:, 0], coords[:, 1]], "coords": coords})


def clip(units: int, seed: int, mels: int = 5) -> Item:
    """A clip of random frames."""
    return Item(units=units, arrays={"frames": np.random.default_rng(seed).normal(size=(units, mels)).astype(np.float32)})


def packed(rows: Sequence[Sequence[tuple[int, Item]]], length: int) -> Batch:
    """Packs items, each with the number of its sample, into rows of `length` units."""
    places, flat = [], [pair for row in rows for pair in row]
    for row, pairs in enumerate(rows):
        starts = np.cumsum([0, *(item.units for _, item in pairs)])
        places += [(row, int(start)) for start in starts[:-1]]
    specs = {name: ArraySpec(shape=array.shape[1:], dtype=str(array.dtype)) for name, array in flat[0][1].arrays.items()}
    found = pack([(n, 0) for n in range(len(flat))], flat, places, specs, (len(rows), length))
    return {name: jnp.asarray(value) for name, value in found.arrays.items()}


def of_sample(batch: Mapping[str, jax.Array], output: jax.Array, sample: int) -> np.ndarray:
    """Returns the rows [T, W] of one sample's item, where `output` has one row for each unit or for several."""
    ids, real = np.asarray(batch["sample_ids"]), np.asarray(batch["segment_ids"]) > 0
    merge = ids.shape[1] // output.shape[1]
    return np.asarray(output)[((ids == sample) & real)[:, ::merge]]


def close(have: Any, want: Any, relative: float = 1e-5) -> None:
    """Compares trees, each leaf relative to its own largest value."""
    for path, value in jax.tree_util.tree_leaves_with_path(want):
        name = jax.tree_util.keystr(path)
        found = dict(jax.tree_util.tree_leaves_with_path(have))[path]
        np.testing.assert_allclose(found, value, rtol=0, atol=relative * float(np.max(np.abs(value))), err_msg=name)


def on_mesh(function: Callable[..., Any], params: Params, names: Mapping[str, Any], *batches: Batch) -> tuple[Any, set[str]]:
    """Runs on a mesh of fsdp=2 x tensor=2, with tensor rules and rows over fsdp.

    Returns:
        The results, and the kinds of collectives that move activations or parameters whole.
    """
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rules = {name: axis for name, axis in DEFAULT_RULES.items() if axis == "tensor"}
    with jax.set_mesh(mesh):
        specs = {path: PartitionSpec(*(rules.get(name) for name in names[path])) for path in params}
        placed = {path: jax.device_put(params[path], NamedSharding(mesh, specs[path])) for path in params}
        rows = [
            {
                name: jax.device_put(value, NamedSharding(mesh, PartitionSpec() if name == "key" else PartitionSpec("fsdp")))
                for name, value in b.items()
            }
            for b in batches
        ]
        compiled = jax.jit(function).lower(placed, *rows).compile()
        got = jax.device_get(compiled(placed, *rows))
    return got, set(re.findall(r"(all-gather|all-to-all|collective-permute)\(", compiled.as_text() or "all-gather("))


def copies(function: Callable[[Params], jax.Array], params: Params, path: str) -> int:
    """How many residuals of `function`'s backward have as many elements as the parameter at `path`, beyond the parameters."""
    shapes = jax.eval_shape(lambda p: jax.vjp(function, p)[1], params)
    size = params[path].size
    return sum(leaf.size == size for leaf in jax.tree.leaves(shapes)) - sum(value.size == size for value in params.values())
