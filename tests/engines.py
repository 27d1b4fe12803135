"""Compiled engines for tests, and their comparison with one monolithic program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from hypothesis import HealthCheck, Phase, settings
from support import TEXT_SPECS

from maestro_jax.data import Sample
from maestro_jax.graph import SectionGraph, graph_shapes
from maestro_jax.runtime import Compiled, Engine, Preparer, make_plan, reference_gradients
from maestro_jax.schedules import InOrder, Policy


@dataclasses.dataclass
class Setup:
    """An engine and what made it."""

    graph: SectionGraph
    engine: Engine
    preparer: Preparer

    def parameters(self) -> dict[str, dict[str, np.ndarray]]:
        return {name: self.engine.parameters(name) for name in self.engine.plan.sections}

    def gradients(self, samples: Sequence[Sample], step: int = 0) -> dict[str, dict[str, np.ndarray]]:
        return jax.device_get(self.engine.accumulate(self.preparer.prepare(samples, step)))

    def reference(self, samples: Sequence[Sample], params: Any = None) -> tuple[float, dict[str, dict[str, np.ndarray]]]:
        shapes = graph_shapes(self.graph, self.preparer.specs)
        return reference_gradients(self.graph, shapes, self.preparer.specs, params or self.parameters(), samples)

    def objectives(self) -> dict[str, tuple[str, ...]]:
        return {s.name: tuple(s.objectives) for s in self.graph.sections if s.objectives}


def build(
    graph: SectionGraph,
    *,
    policy: Policy | None = None,
    optimizer: optax.GradientTransformation | None = None,
    clip_norm: float | None = None,
    evaluation: bool = False,
    specs: Any = TEXT_SPECS,
    devices: int = 8,
    seed: int = 0,
    given: Mapping[str, Mapping[str, Any]] | None = None,
    in_flight: int = 8,
    debug: bool = False,
    adaptive: bool = False,
) -> Setup:
    """Compiles a graph on the first `devices` CPU devices."""
    plan = make_plan(graph, specs, jax.devices()[:devices])
    optimizers = {s.name: optimizer or optax.sgd(0.1) for s in graph.sections if s.trainable}
    compiled = Compiled(plan, optimizers, clip_norm, evaluation)
    engine = Engine(compiled, seed, given, in_flight, debug, adaptive=adaptive)
    return Setup(graph, engine, Preparer(compiled, policy or InOrder(), specs, seed))


def worst_leaf(have: Mapping[str, Mapping[str, np.ndarray]], want: Mapping[str, Mapping[str, np.ndarray]]) -> float:
    """Largest difference of any leaf, relative to the largest value of that leaf; both must hold the same leaves."""
    assert {n: set(v) for n, v in have.items()} == {n: set(v) for n, v in want.items()}
    return max(float(np.abs(have[n][p] - g).max() / max(np.abs(g).max(), 1e-30)) for n, leaves in want.items() for p, g in leaves.items())


def bounded(examples: int) -> settings:
    """Always the same examples. None is shrunk: each takes seconds, and a layout is readable as it is."""
    checks = (HealthCheck.too_slow, HealthCheck.data_too_large)
    phases = (Phase.explicit, Phase.generate)
    return settings(max_examples=examples, derandomize=True, deadline=None, phases=phases, suppress_health_check=checks, database=None)
