"""Runs steps: dispatches the tasks of a prepared batch, then updates all sections from one norm and one verdict.

Nothing here reads a device. A step's numbers stay on the devices until `StepReport.read` is called, some steps later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ..meshes import on_every_device
from ..schedules import Task
from .checks import refuse_deleted
from .compile import Compiled
from .dispatcher import Dispatcher, InFlight
from .feeds import PreparedStep
from .state import Arrays, SectionState, initial_values, make_states, zeros

DEFAULT_IN_FLIGHT = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step yielded, still on the devices.

    Args:
        prepared: the step.
        sums: section -> objective sums `[M]`, on the section that computes them.
        norm: joint gradient norm before clipping, or None without training.
        applied: whether the update was applied, or None.
    """

    prepared: PreparedStep
    sums: Mapping[str, jax.Array]
    norm: jax.Array | None
    applied: jax.Array | None

    def wait(self) -> StepReport:
        """Waits until the step has run on its devices."""
        jax.block_until_ready((dict(self.sums), self.norm))
        return self

    def read(self, objectives: Mapping[str, Iterable[str]]) -> dict[str, float]:
        """Waits for the step and returns its numbers.

        Args:
            objectives: section -> names of its objectives, in order.

        Returns:
            "section/objective" -> sum / count (NaN where nothing counts), "gradient_norm", and "applied" as 0 or 1.
        """
        found = {}
        for section, names in objectives.items():
            if section in self.sums:
                values = np.asarray(self.sums[section], np.float64).reshape(-1)
                for name, value in zip(names, values, strict=True):
                    count = self.prepared.counts[section, name]
                    found[f"{section}/{name}"] = float(value) / count if count else float("nan")
        if self.norm is not None and self.applied is not None:
            found |= {"gradient_norm": float(self.norm), "applied": float(self.applied)}
        return found


class Engine:
    """A compiled plan with its state.

    Args:
        compiled: programs of the plan.
        seed: of the initial parameters.
        given: section -> path -> array-like, for parameters that come from files.
        in_flight: most unfinished tasks that a replica is given.
        debug: check before every call that no argument was given away.
    """

    def __init__(
        self,
        compiled: Compiled,
        seed: int,
        given: Mapping[str, Mapping[str, Any]] | None = None,
        in_flight: int = DEFAULT_IN_FLIGHT,
        debug: bool = False,
    ) -> None:
        self.debug = debug
        self.compiled, self.plan = compiled, compiled.plan
        values = {n: initial_values(s, compiled.arguments[n], seed, (given or {}).get(n, {})) for n, s in self.plan.sections.items()}
        self.states = make_states(compiled, values)
        self.in_flight = InFlight(in_flight)
        self._zeros = _zero_slots(compiled)
        self.last_tasks: list[Task] = []

    def step(self, prepared: PreparedStep) -> StepReport:
        """Issues a training step and its update; returns at once."""
        dispatcher = self._dispatcher()
        dispatcher.run(prepared)
        self.last_tasks = dispatcher.issued
        return self._update(prepared)

    def accumulate(self, prepared: PreparedStep) -> dict[str, Arrays]:
        """Issues a step without its update and returns every trained section's gradient, summed over replicas.

        For verification: parameters stay as they are, accumulators are zero again afterwards.
        """
        self._dispatcher().run(prepared)
        reduced = {name: self._reduce(name)[0] for name in self.compiled.reduced}
        return {name: reduced[name] for name in self.compiled.trained}

    def evaluate(self, steps: Iterable[PreparedStep]) -> dict[str, float]:
        """Runs forward over batches and returns "section/objective" -> sum / count over all of them.

        Training state is not touched; the sums are read at the end.
        """
        names = {n: tuple(s.section.objectives) for n, s in self.plan.sections.items() if s.section.objectives}
        sums = {(n, r): zeros(self.compiled.arguments[n].sums(r)) for n, s in self.plan.sections.items() for r in range(s.submesh.replicas)}
        counts: dict[tuple[str, str], float] = {}
        for prepared in steps:
            sums = self._dispatcher().run(prepared, sums)
            for key, count in prepared.counts.items():
                counts[key] = counts.get(key, 0.0) + count
        found = {}
        for name, objectives in names.items():
            parts = [np.asarray(sums[name, r]["sums"], np.float64) for r in range(self.plan.sections[name].submesh.replicas)]
            for objective, value in zip(objectives, np.sum(parts, axis=0).reshape(-1), strict=True):
                count = counts.get((name, objective), 0.0)
                found[f"{name}/{objective}"] = float(value) / count if count else float("nan")
        return found

    def parameters(self, section: str) -> dict[str, np.ndarray]:
        """Reads a section's parameters to the host: master copies of what is trained, and what is frozen."""
        state = self.states[section]
        return {path: np.asarray(value) for path, value in {**state.master, **state.frozen}.items()}

    def _dispatcher(self) -> Dispatcher:
        return Dispatcher(self.compiled, self.states, self._zeros, self.in_flight, self.debug)

    def _call(self, kind: str, name: str, *args: Any) -> Any:
        """Calls a program of the update."""
        if self.debug:
            refuse_deleted(kind, name, args)
        return self.compiled[name, kind, 0, 0](*args)

    def _reduce(self, name: str) -> tuple[Arrays, jax.Array, Arrays]:
        """Sums a section's gradients over its replicas; the zeroed stacks become the next accumulators."""
        state = self.states[name]
        # The holders are empty until zeros have taken the place of what they held.
        stack = state.take_stacks()
        gradients, square, sums = self._call("reduce", name, *stack)
        state.put_stacks(*self._call("zero", name, *stack))
        return gradients, square, sums

    def _update(self, prepared: PreparedStep) -> StepReport:
        reduced = {name: self._reduce(name) for name in self.compiled.reduced}
        norm = applied = None
        for name in self.compiled.trained:
            gradients = reduced[name][0]
            state, scalar = self.states[name], self.compiled.arguments[name].scalar().sharding
            squares = {other: r[1] if other == name else on_every_device(r[1], scalar) for other, r in reduced.items()}
            state.drop_views()
            arguments = (state.master, state.optimizer, state.compute, gradients, squares, prepared.active[name])
            state.master, state.optimizer, compute, section_norm, section_applied = self._call("apply", name, *arguments)
            state.set_compute(compute)
            if norm is None:
                norm, applied = section_norm, section_applied
        sums = {name: r[2]["sums"] for name, r in reduced.items() if r[2]}
        return StepReport(prepared=prepared, sums=sums, norm=norm, applied=applied)


def _zero_slots(compiled: Compiled) -> dict[Any, tuple[jax.Array, ...]]:
    """Resident zeros for slots that are not sent: (edge, "in" or "out", replica) -> arrays; never donated."""
    found = {}
    for name, section in compiled.plan.sections.items():
        for replica in range(section.submesh.replicas):
            arguments = compiled.arguments[name]
            for side, slots in (("in", arguments.slots_in(replica)), ("out", arguments.slots_out(replica))):
                for label, shapes in slots.items():
                    found[label, side, replica] = zeros(shapes[0])
    return found


__all__ = ["Engine", "SectionState", "StepReport"]
