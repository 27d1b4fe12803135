"""The same modules in one program over all cores, as plain JAX would have it: data parallel, each core with a part of the samples."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maestro_jax.data import Batches
from maestro_jax.graph.shapes import graph_shapes

from .cases import CLIP_NORM, SEED, Case, optimizer
from .layouts import Kind, Layout, balanced, batch_arrays

Tree = dict[str, dict[str, Any]]

LAYOUTS: dict[str, tuple[Kind, int]] = {"one_packed": ("packed", 1), "one_largest": ("largest", 2), "one_slots": ("slots", 8)}
"""Name of a way -> how its images lie, and in how many parts a core computes its gradient, so that activations fit into memory."""


class OneProgram:
    """A program over all devices.

    Args:
        case: what is trained.
        way: one of `LAYOUTS`.
        windows: not needed: nothing is prepared for all of them.
    """

    def __init__(self, case: Case, way: str, windows: int) -> None:
        del windows
        kind, self._parts = LAYOUTS[way]
        self.case, self.graph, self._step = case, case.graph(), 0
        self._shapes = graph_shapes(self.graph, case.dataset.specs)
        most = max(len(sample.items.get("image", ())) for sample in case.dataset.train)
        self._layout = Layout(kind=kind, most=most, row=self.graph.sections[0].row_length or 1)
        self._batches = Batches(case.dataset, case.batch, SEED)
        self._mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
        self._scales = {s.name: {n: o.weight / self._count(s.name, n) for n, o in s.objectives.items()} for s in self.graph.sections}
        self.trained, self.frozen = self._initial()
        self._optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), optimizer().build())
        self._state = jax.jit(self._optimizer.init, out_shardings=NamedSharding(self._mesh, PartitionSpec()))(self.trained)
        self._program = self._compiled()
        self._ready = self._prepared()

    def window(self) -> list[float]:
        """Trains a window of steps; returns their losses when all has ended."""
        losses = []
        for _ in range(self.case.window):
            self.trained, self._state, loss = self._program(self.trained, self.frozen, self._state, self._ready)
            # While the step runs, as a loader's thread would do it.
            self._ready = self._prepared()
            losses.append(loss)
        jax.block_until_ready(self.trained)
        return [float(loss) for loss in losses]

    def facts(self) -> dict[str, Any]:
        """Units of a step with padding."""
        return {"scheduled": {s.name: int(self._ready[s.name]["segment_ids"].size) for s in self.graph.sections}}

    def close(self) -> None:
        """Nothing runs in the background."""

    def _count(self, section: str, objective: str) -> float:
        found = self.graph[section].objectives[objective]
        stream = self.graph[section].reads
        return sum(found.count_of(item) for sample in self.case.dataset.train for item in sample.items.get(stream, ()))

    def _initial(self) -> tuple[Tree, Tree]:
        """The parameters with which the system begins, on every device: those that are trained, and the frozen ones."""
        trained: Tree = {}
        frozen: Tree = {}
        for section in self.graph.sections:
            shapes = self._shapes.sections[section.name]
            bucket = section.buckets[-1]

            def init(section: Any = section, shapes: Any = shapes, bucket: int = bucket) -> dict[str, jax.Array]:
                key = jax.random.fold_in(jax.random.key(SEED), zlib.crc32(section.name.encode()))
                return shapes.adapter.init(key, shapes.batch[bucket], shapes.inputs[bucket])

            values = jax.jit(init, out_shardings=NamedSharding(self._mesh, PartitionSpec()))()
            frozen[section.name] = {path: value for path, value in values.items() if section.is_frozen(path)}
            trained[section.name] = {path: value for path, value in values.items() if not section.is_frozen(path)}
        return {name: values for name, values in trained.items() if values}, frozen

    def _prepared(self) -> Any:
        """Packs the samples of the next step and puts those of this process on its device."""
        samples = [self.case.dataset.train[n] for n in self._batches.places(self._step)]
        self._step += 1
        streams = list(dict.fromkeys(section.reads for section in self.graph.sections))
        bins = balanced(samples, self._layout, streams, self._parts * jax.device_count())
        arrays = batch_arrays(self.graph, self.case.dataset.specs, self._shapes.merges, self._layout, bins)
        sharding = NamedSharding(self._mesh, PartitionSpec("data"))

        def put(array: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        return jax.tree.map(put, arrays)

    def _compiled(self) -> Any:
        whole, split = PartitionSpec(), PartitionSpec("data")

        def local(trained: Tree, frozen: Tree, state: Any, batch: Tree) -> tuple[Any, Any, jax.Array]:
            zeros = jax.tree.map(jnp.zeros_like, trained)

            def part(carry: tuple[jax.Array, Tree], one: Tree) -> tuple[tuple[jax.Array, Tree], None]:
                loss, gradient = jax.value_and_grad(self._loss)(trained, frozen, one)
                return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], gradient)), None

            (loss, gradient), _ = jax.lax.scan(part, (jnp.zeros(()), zeros), batch)
            loss, gradient = jax.lax.psum((loss, gradient), "data")
            updates, state = self._optimizer.update(gradient, state, trained)
            return optax.apply_updates(trained, updates), state, loss

        mapped = jax.shard_map(
            local, mesh=self._mesh, in_specs=(whole, whole, whole, split), out_specs=(whole, whole, whole), check_vma=False
        )
        return jax.jit(mapped, donate_argnums=(0, 2))

    def _loss(self, trained: Tree, frozen: Tree, batch: Tree) -> jax.Array:
        """The part of the loss that a bin adds."""
        returned: dict[str, Mapping[str, jax.Array]] = {}
        loss = jnp.zeros((), jnp.float32)
        for name in self.graph.order:
            inputs = {e.input: _rows(returned[e.producer][e.output], batch[name][e.label]) for e in self.graph.into(name)}
            values = {**frozen[name], **trained.get(name, {})}
            returned[name] = self._shapes.sections[name].adapter.apply(values, batch[name], inputs)
            loss += sum((scale * returned[name][objective] for objective, scale in self._scales[name].items()), jnp.zeros(()))
        return loss


def _rows(output: jax.Array, taken: jax.Array) -> jax.Array:
    """Rows of an output `[rows, length, d]` where each unit of a consumer takes them; zeros where it takes none."""
    return output.reshape(-1, output.shape[-1]).at[taken].get(mode="fill", fill_value=0)
