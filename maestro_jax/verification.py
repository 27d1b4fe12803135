"""Verification before training: is the gradient that a plan computes that of one program?

A few real samples go through the plan as in training (packing, routes, transfers, replicas, accumulators, their sum) and, every
item in a row of its own, through one program on one CPU device that knows nothing of all this. Both compute in float32, with
parameters cast to it, and receive the same random key, so noise (dropout) is on and must not depend on where a token runs.

What it finds, besides faults of ours: modules whose result depends on how samples are cut and packed, such as attention that ignores
`segment_ids`, objectives that are means instead of sums, and noise that is drawn for a whole array. Gradients are judged, updates
(clipping, optimizer) are not; nor is what both sides share: modules on their own, and what an objective counts in an item.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from .data import ArraySpec, Batches, Dataset, Sample
from .errors import ConfigError, set_by
from .graph import GraphShapes, SectionGraph
from .initial_weights import given_weights
from .meshes import devices_wanted
from .runtime import Compiled, Engine, Plan, Preparer, Window, make_plan, reference_gradients, requests_of
from .runtime.check_sample import check_sample
from .runtime.comparison import Verification, compare
from .runtime.compile import Progress
from .runtime.costs import counted_costs
from .runtime.fewest import enough_samples, fewest_samples, idle_replicas, run_once, several_micro_batches
from .schedules import InOrder, Policy

if TYPE_CHECKING:
    from .run import Run

LIMIT = 1e-4
"""Largest difference, relative to the largest |g| of a leaf, that rounding in float32 may explain."""

MOST_UNITS = 16384
"""Bounds the one program, which holds the activations of all samples at once."""

LOOK = 1024
"""Most training samples of a run or a data set that are read in search of some for every section."""


def verify(
    graph: SectionGraph,
    batch: Sequence[Sample] | Dataset,
    *,
    specs: Mapping[str, Mapping[str, ArraySpec]] | None = None,
    devices: Sequence[Any] | None = None,
    weights: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
    policy: Policy | None = None,
    limit: float = LIMIT,
    most_units: int = MOST_UNITS,
) -> Verification:
    """Compares the gradient of a graph on its plan with that of one program, at its initial parameters.

    Sections with a loss run in two micro-batches or more, so that a mean, which should be a sum, is seen; where there are too few
    samples for that, a note says so.

    Args:
        graph: the sections, with their replicas, axes and micro-batches.
        batch: samples, or a data set, from which they are drawn; the fewest are used that run every section, and every replica where
            possible.
        specs: stream -> array name -> spec; None takes those of the data set, or of the first item of each stream.
        devices: JAX devices; None takes all, and makes CPU devices where there is no accelerator. Sections share too few of them.
        weights: section -> path -> array; None reads the files that sections name. Parameters that are missing are initialised.
        seed: of initial parameters and noise.
        policy: decides what runs where and when; None is `InOrder()`.
        limit: largest relative difference that is right.
        most_units: most units (tokens) of any stream, each item padded to the longest.

    Returns:
        What was found; `require()` raises when gradients differ.

    Raises:
        MaestroError: graph, samples, weights and devices do not fit together, or no sample reaches a section.
    """
    if isinstance(batch, Dataset):
        data, samples = batch, enough_samples(graph, _drawn(batch, seed), most_units, LOOK)
    else:
        samples = enough_samples(graph, batch, most_units, len(batch))
        data = Dataset(train=samples, specs=_specs_of(samples) if specs is None else specs)
    specs = data.specs if specs is None else specs
    exact = _in_float32(graph)
    plan = make_plan(exact, specs, _devices(graph) if devices is None else devices, share=True)
    _check_trained(plan)
    if weights is None:
        weights = {s.name: given_weights(s, plan, data) for s in graph.sections}
    for sample in samples:
        check_sample(plan, specs, sample)
    policy = policy if policy is not None else InOrder()
    costs = counted_costs(plan)
    samples = fewest_samples(plan, samples, policy, most_units, costs)
    policy = several_micro_batches(plan, samples, policy, costs)
    with jax.default_matmul_precision("highest"):
        engine = Engine(_compiled(plan), seed, weights)
        prepared = Preparer(engine.compiled, policy, specs, seed, costs).prepare(samples, 0)
        return _compared(engine, prepared, specs, limit, _origins(graph))


def verify_run(run: Run, *, limit: float = LIMIT, most_units: int = MOST_UNITS, progress: Progress | None = None) -> Verification:
    """Compares the gradient of a run at its present parameters, on samples of its next steps.

    A run that computes in float32 on CPU devices is judged by its own programs. Otherwise its plan is compiled again in float32
    with exact products; while this lasts, the devices hold the run's state and a second copy of the parameters in float32. Sections with
    a loss run in two micro-batches or more, as in `verify`.

    Args:
        run: what is being trained; its parameters stay as they are.
        limit: largest relative difference that is right.
        most_units: most units (tokens) of any stream, each item padded to the longest.
        progress: called after each program that is compiled.

    Returns:
        What was found; `require()` raises when gradients differ.

    Raises:
        MaestroError: nothing is trained, a sample is bad (when `on_bad_sample` is "raise"), or no sample reaches a section.
    """
    trainer, specs, plan = run.trainer, run.dataset.specs, run.engine.plan
    _check_trained(plan)
    samples = enough_samples(trainer.graph, _next_samples(run), most_units, LOOK)
    samples = fewest_samples(plan, samples, trainer.policy, most_units, run.costs)
    policy = several_micro_batches(plan, samples, trainer.policy, run.costs)
    with jax.default_matmul_precision("highest"):
        engine = run.engine if _is_exact(plan) else _rebuilt(run, progress)
        prepared = Preparer(engine.compiled, policy, specs, trainer.seed, run.costs).prepare(samples, run.step)
        return _compared(engine, prepared, specs, limit, _origins(trainer.graph))


def _compared(
    engine: Engine, prepared: Window, specs: Mapping[str, Mapping[str, ArraySpec]], limit: float, origins: Mapping[str, str]
) -> Verification:
    plan = engine.plan
    have = {n: {p: np.asarray(g) for p, g in leaves.items()} for n, leaves in engine.accumulate(prepared).items()}
    params = {name: engine.parameters(name) for name in plan.sections}
    shapes = GraphShapes(
        sections={name: section.shapes for name, section in plan.sections.items()},
        edges={label: edge.row for label, edge in plan.edges.items()},
        merges={label: edge.merge for label, edge in plan.edges.items()},
    )
    _, want = reference_gradients(plan.graph, shapes, specs, params, prepared.steps[0].samples, _keys(prepared))
    leaves = compare(have, want)
    notes = [f"no micro-batch ran on replicas {idle} of section {n!r}" for n, idle in idle_replicas(plan, prepared.schedule).items()]
    once = run_once(plan, prepared.schedule)
    notes += [f"section {n!r} ran in one micro-batch: whether its objectives are sums, and not means, was not seen" for n in once]
    silent = [name for name in want if all(leaf.scale == 0 for leaf in leaves if leaf.section == name)]
    notes += [f"section {name!r} has no gradient on these samples: every element of it is 0" for name in silent]
    ids = tuple(sample.id for sample in prepared.steps[0].samples)
    return Verification(leaves=leaves, limit=limit, samples=ids, notes=tuple(notes), origins=origins)


def _keys(prepared: Window) -> dict[str, np.ndarray]:
    """The key that each section's programs receive for noise; equal for all of a section's micro-batches."""
    feeds = {section: feed.arrays["batch"] for (section, _), feed in prepared.feeds.items()}
    return {section: np.asarray(batch["key"]) for section, batch in feeds.items() if "key" in batch}


def _in_float32(graph: SectionGraph) -> SectionGraph:
    """The graph with every section in float32, and room for residuals of twice the size."""
    if all(section.dtype == "float32" for section in graph.sections):
        return graph
    sections = [
        dataclasses.replace(s, dtype="float32", max_bytes=2 * s.max_bytes if s.max_bytes is not None else None) for s in graph.sections
    ]
    return dataclasses.replace(graph, sections=tuple(sections))


def _is_exact(plan: Plan) -> bool:
    """Whether a plan's programs compute in float32 throughout; accelerators multiply float32 in less unless they are told otherwise."""
    devices = {device for section in plan.sections.values() for device in section.submesh.mesh.devices.flat}
    return all(s.section.dtype == "float32" for s in plan.sections.values()) and all(d.platform == "cpu" for d in devices)


def _rebuilt(run: Run, progress: Progress | None) -> Engine:
    """The plan of a run in float32, with the run's present parameters."""
    trainer = dataclasses.replace(run.trainer, graph=_in_float32(run.trainer.graph))
    params = {name: run.engine.parameters(name) for name in run.engine.plan.sections}
    return Engine(_compiled(trainer.plan(run.dataset), progress), trainer.seed, params, trainer.in_flight)


def _compiled(plan: Plan, progress: Progress | None = None) -> Compiled:
    """Programs of a plan with an optimizer that does nothing and has no state: updates are never called."""
    optimizers = {s.name: optax.set_to_zero() for s in plan.graph.sections if s.trainable}
    return Compiled(plan, optimizers, None, False, progress)


def _next_samples(run: Run) -> Iterator[Sample]:
    """The samples of the next steps, each once."""
    trainer = run.trainer
    batches = Batches(run.dataset, trainer.batch, trainer.seed, set_by=set_by(trainer, "batch"))
    steps, reader = range(run.step, run.step + batches.steps_per_epoch), trainer.reader(run.engine.plan, run.dataset)
    read = (reader.read(run.dataset.train, [batches.places(step)], "verification")[0][0] for step in steps)
    return _once(sample for batch in read for sample in batch.samples)


def _drawn(data: Dataset, seed: int) -> Iterator[Sample]:
    """The training samples of an epoch in the order of a run with this seed, each once."""
    batches = Batches(data, 1, seed, set_by="Dataset.train")
    return _once(sample for step in range(batches.steps_per_epoch) for sample in batches(step))


def _once(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Each sample once: a later epoch brings them again, and a batch holds no sample twice."""
    seen: set[str] = set()
    for sample in samples:
        if sample.id not in seen:
            seen.add(sample.id)
            yield sample


def _specs_of(samples: Sequence[Sample]) -> dict[str, dict[str, ArraySpec]]:
    items = {stream: found[0] for sample in reversed(samples) for stream, found in sample.items.items() if found}
    return {
        stream: {
            name: ArraySpec(shape=array.shape[1:], dtype=str(jax.dtypes.canonicalize_dtype(array.dtype)))
            for name, array in item.arrays.items()
        }
        for stream, item in items.items()
    }


def _devices(graph: SectionGraph) -> list[Any]:
    from .trainer import make_cpu_devices  # here, so that the trainer can import this module

    make_cpu_devices(devices_wanted(requests_of(graph)))
    return jax.devices()


def _origins(graph: SectionGraph) -> dict[str, str]:
    return {section.name: set_by(section, "module") for section in graph.sections}


def _check_trained(plan: Plan) -> None:
    if not any(section.trained for section in plan.sections.values()):
        raise ConfigError(
            "there is no gradient to verify.",
            wanted="a graph that trains some parameter",
            have=f"sections {list(plan.sections)}, all of them frozen",
            fix="leave out --verify_step, or set Section.trainable",
            anchor="verify-samples",
        )


__all__ = ["Verification", "verify", "verify_run"]
