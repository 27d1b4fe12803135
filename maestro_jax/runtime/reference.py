"""The monolithic program that a step must agree with: every section on every sample, one `jax.grad`, one device.

Independent of packing, routes, replicas and schedules: each item has a row of its own, and item n of a sample in a consumer
takes the row of item n in the producer, or each unit the row that its item names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..data import Sample
from ..data.packing import item_id
from ..graph import SectionGraph
from ..graph.shapes import GraphShapes, Specs

Params = Mapping[str, Mapping[str, Any]]


def reference_gradients(
    graph: SectionGraph,
    shapes: GraphShapes,
    specs: Specs,
    params: Params,
    samples: Sequence[Sample],
    keys: Mapping[str, np.ndarray] | None = None,
) -> tuple[float, dict[str, dict[str, np.ndarray]]]:
    """Computes the loss of a global batch and its gradient in one program.

    Args:
        graph: the sections.
        shapes: their abstract evaluation.
        specs: stream -> array name -> spec.
        params: section -> path -> value, float32.
        samples: the batch; some of them have items in each stream that a section reads.
        keys: section -> uint32[2] that its module receives as `batch["key"]`, for noise while training; None: no noise.

    Returns:
        The loss, and section -> path -> gradient of the parameters that are trained.
    """
    batches = {s.name: _rows(s.reads, specs, samples) for s in graph.sections}
    for name, key in (keys or {}).items():
        batches[name]["key"] = key
    pairs = {
        e.label: _pairs(graph[e.producer].reads, graph[e.consumer].reads, samples, e.rows, shapes.merges[e.label]) for e in graph.edges
    }
    scales = {s.name: {n: _scale(o, s.reads, samples) for n, o in s.objectives.items()} for s in graph.sections}
    trained = {
        s.name: {p: v for p, v in params[s.name].items() if not s.is_frozen(p) and jnp.issubdtype(v.dtype, jnp.floating)}
        for s in graph.sections
        if s.trainable
    }

    def loss_of(trained: Params, params: Params, batches: Any) -> jax.Array:
        returned: dict[str, dict[str, jax.Array]] = {}
        loss = jnp.zeros((), jnp.float32)
        for name in graph.order:
            inputs = {
                e.input: _crossed(returned[e.producer][e.output], pairs[e.label], batches[name]["segment_ids"]) for e in graph.into(name)
            }
            values = {**params[name], **trained.get(name, {})}
            returned[name] = shapes.sections[name].adapter.apply(values, batches[name], inputs)
            for objective, scale in scales[name].items():
                loss += scale * returned[name][objective] if scale else 0.0
        return loss

    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        args = jax.device_put((trained, {n: dict(p) for n, p in params.items()}, batches), device)
        loss, gradients = jax.jit(jax.value_and_grad(loss_of))(*args)
    return float(loss), jax.tree.map(np.asarray, gradients)


def _rows(stream: str, specs: Specs, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """One item a row, padded to the longest; samples without items have no row."""
    found = [(sample.number, n, item) for sample in samples for n, item in enumerate(sample.items.get(stream, ()))]
    length = max(item.units for _, _, item in found)
    shape = (len(found), length)
    batch = {name: np.zeros(shape + spec.shape, spec.dtype) for name, spec in specs[stream].items()}
    batch |= {"segment_ids": np.zeros(shape, np.int32), "positions": np.zeros(shape, np.int32), "sample_ids": np.zeros(shape, np.uint32)}
    for row, (sample, number, item) in enumerate(found):
        for name in specs[stream]:
            batch[name][row, : item.units] = item.arrays[name]
        batch["segment_ids"][row, : item.units] = 1
        batch["positions"][row, : item.units] = np.arange(item.units)
        batch["sample_ids"][row, : item.units] = item_id(sample, number)
    return batch


def _pairs(producer: str, consumer: str, samples: Sequence[Sample], rows: str | None, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """For each unit of the consumer `[items, length]`: the producer's item and the row in it that it takes; beyond them where none is."""
    first: dict[int, int] = {}
    items = 0
    for number, sample in enumerate(samples):
        first[number] = items
        items += len(sample.items.get(producer, ()))
    consumers = [(number, n, item) for number, s in enumerate(samples) for n, item in enumerate(s.items.get(consumer, ()))]
    length = max(item.units for _, _, item in consumers)
    which, row = np.full((len(consumers), length), items, np.int32), np.zeros((len(consumers), length), np.int32)
    for line, (number, n, item) in enumerate(consumers):
        own = samples[number].items.get(producer, ())
        # Every row of the sample as (item, row in it), in order.
        every = [(first[number] + k, r) for k, each in enumerate(own) for r in range(each.units // merge)]
        for unit in range(item.units):
            if rows is not None:
                pointer = int(item.arrays[rows][unit])
                if pointer >= 0:
                    which[line, unit], row[line, unit] = every[pointer]
            elif n < len(own):
                which[line, unit], row[line, unit] = first[number] + n, unit
    return which, row


def _crossed(output: jax.Array, pairs: tuple[np.ndarray, np.ndarray], segment_ids: jax.Array) -> jax.Array:
    """Output `[items, rows, d]` -> input of the consumer: zero where a unit gets nothing, one where it is padding."""
    taken = output.at[pairs].get(mode="fill", fill_value=0)
    return jnp.where(segment_ids[..., None] == 0, 1, taken)


def _scale(objective: Any, stream: str, samples: Sequence[Sample]) -> float:
    count = sum(objective.count_of(item) for sample in samples for item in sample.items.get(stream, ()))
    return objective.weight / count if count else 0.0
