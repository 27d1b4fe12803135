"""Runs steps: dispatches the tasks of a prepared batch, then updates all sections from one norm and one verdict.

Nothing here reads a device. A step's numbers stay on the devices until `StepReport.read` is called, some steps later.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..meshes import on_every_device, processes_of
from ..schedules import IN_FLIGHT, Task
from .arguments import shardings
from .checks import refuse_deleted
from .compile import Compiled
from .completions import Completions
from .dispatcher import Dispatcher, InFlight
from .feeds import PreparedStep, Window
from .plan import Plan
from .snapshot import Snapshot, flat, optimizer_of, take_snapshot
from .state import Arrays, Reading, SectionState, initial_values, make_states, whole, zeros
from .update import make_shares
from .watchdog import Standing


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step yielded, still on the devices of this process; `shared` gives what all know.

    Args:
        prepared: the step.
        sums: section -> objective sums `[M]`, on the section that computes them.
        squares: section -> sum of squares of its gradient; NaN where a weighted objective of it is not finite.
        norm: joint gradient norm before clipping, or None without training.
        applied: whether the update was applied, or None.
    """

    prepared: PreparedStep
    sums: Mapping[str, Any]
    squares: Mapping[str, Any]
    norm: Any
    applied: Any

    def wait(self) -> StepReport:
        """Waits until the step has run on this process's devices."""
        jax.block_until_ready((dict(self.sums), self.norm))
        return self

    def shared(self, plan: Plan) -> StepReport:
        """Waits for the step, and returns its numbers as every process knows them: each section's are told by the first of its processes.

        With one process, nothing is waited for.
        """
        group = plan.group
        if group.count == 1:
            return self
        mine = [name for name, section in plan.local.items() if section.submesh.processes[0] == group.index]
        told = {
            "sums": {name: np.asarray(self.sums[name], np.float64).reshape(-1).tolist() for name in mine if name in self.sums},
            "squares": {name: float(np.asarray(self.squares[name])) for name in mine if name in self.squares},
            "verdict": None if self.norm is None else [float(np.asarray(self.norm)), bool(np.asarray(self.applied))],
        }
        parts = group.all_gather("numbers", told)
        verdict = next((part["verdict"] for part in parts if part["verdict"] is not None), None)
        return dataclasses.replace(
            self,
            sums={name: np.array(sums) for part in parts for name, sums in part["sums"].items()},
            squares={name: np.float32(square) for part in parts for name, square in part["squares"].items()},
            norm=None if verdict is None else np.float32(verdict[0]),
            applied=None if verdict is None else np.bool_(verdict[1]),
        )

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

    def not_finite(self, objectives: Mapping[str, Iterable[str]], weights: Mapping[str, float]) -> tuple[str, ...]:
        """Waits for the step and says what kept its update from being applied; nothing where nothing counted.

        Args:
            objectives: section -> names of its objectives, in order.
            weights: "section/objective" -> weight in the loss.
        """
        values = self.read(objectives)
        counted = {f"{section}/{name}" for (section, name), count in self.prepared.counts.items() if count}
        wrong = [n for n, weight in weights.items() if weight and n in counted and n in values and not math.isfinite(values[n])]
        if wrong:
            return tuple(f"objective {name} is {values[name]}" for name in wrong)
        squares = {name: float(np.asarray(value)) for name, value in self.squares.items()}
        return tuple(f"the gradient of section {name!r} is not finite" for name, value in squares.items() if not math.isfinite(value))


class Engine:
    """A compiled plan with its state.

    Args:
        compiled: programs of the plan.
        seed: of the initial parameters.
        given: section -> path -> array-like, for parameters that come from files.
        in_flight: most unfinished tasks that a replica is given.
        debug: check before every call that no argument was given away.
        saved: parameters and optimizer state that go on, on the plan's shardings; seed and given are not used then.
        standing: told where this process stands.
        adaptive: whether replicas may overtake what waits for its inputs; one process only.
        reading: called after each part of `given` that was read.

    Attributes:
        dispatcher: what issues the tasks of windows; a subclass may watch or wait.
    """

    dispatcher: type[Dispatcher] = Dispatcher

    def __init__(
        self,
        compiled: Compiled,
        seed: int,
        given: Mapping[str, Mapping[str, Any]] | None = None,
        in_flight: int = IN_FLIGHT,
        debug: bool = False,
        saved: Snapshot | None = None,
        standing: Standing | None = None,
        adaptive: bool = False,
        reading: Reading | None = None,
    ) -> None:
        self.debug, self.adaptive, self._number = debug, adaptive, 0
        self.compiled, self.plan = compiled, compiled.plan
        if saved is None:
            arguments = compiled.arguments
            values = {n: initial_values(s, arguments[n], seed, (given or {}).get(n, {}), reading) for n, s in self.plan.local.items()}
            self.states = make_states(compiled, values)
        else:
            parts = {n: (saved.trained.get(n, {}).get("parameters", {}), saved.frozen.get(n, {})) for n in self.plan.local}
            values = {n: {**flat(trained), **flat(frozen)} for n, (trained, frozen) in parts.items()}
            optimizers = {n: optimizer_of(saved.trained[n], compiled.optimizer_states[n]) for n in compiled.trained if n in self.plan.local}
            self.states = make_states(compiled, values, optimizers)
        self.standing = standing if standing is not None else Standing()
        self.in_flight = InFlight(in_flight, self.standing)
        self.zeros = _zero_slots(compiled)
        self.last_tasks: list[Task] = []

    def step(self, window: Window) -> StepReport:
        """Issues a window of one step and its update; returns at once."""
        [report] = self.run(window)
        return report

    def run(self, window: Window, completions: Completions | None = None) -> Iterator[StepReport]:
        """Issues a window of training steps; yields each one when its update has been issued, without waiting for it.

        Args:
            window: the steps.
            completions: watch the tasks of this window, which then begins when the devices have nothing else to do.
        """
        dispatcher = self._dispatcher(completions)
        if completions is not None:
            self._wait()
            completions.open()
        try:
            for number in dispatcher.issue(window):
                yield self._update(window.steps[number], number, completions)
        finally:
            if completions is not None:
                completions.close()
        self.last_tasks = dispatcher.issued

    def _wait(self) -> None:
        """Waits until this process's devices have run all that was issued."""
        self.standing.waiting = "what was issued before the steps that are recorded"
        jax.block_until_ready([state.compute for state in self.states.values()])
        self.in_flight.wait()
        self.standing.waiting = ""

    def accumulate(self, window: Window) -> dict[str, Arrays]:
        """Issues a window of one step without its update and returns every trained section's gradient, summed over replicas.

        For verification: parameters stay as they are, accumulators are zero again afterwards.
        """
        found = {}
        for number in self._dispatcher().issue(window):
            for name in (n for n in self.compiled.reduced if n in self.states):
                stack, sums, _, _ = self._reduce(name, number)
                if name in self.compiled.trained:
                    section, places = self.plan.sections[name], shardings(self.compiled.arguments[name].master())
                    with jax.set_mesh(section.submesh.mesh):
                        found[name] = jax.jit(make_shares(section), out_shardings=places)(stack)
                self._zero(name, stack, sums)
        return found

    def evaluate(self, windows: Iterable[Window]) -> dict[str, float]:
        """Runs forward over batches and returns "section/objective" -> sum / count over all of them.

        Training state is not touched; the sums are read at the end.
        """
        names = {n: tuple(s.section.objectives) for n, s in self.plan.sections.items() if s.section.objectives}
        sums = {(n, r): zeros(self.compiled.arguments[n].sums(r)) for n, s in self.plan.local.items() for r in s.submesh.local_replicas}
        counts: dict[tuple[str, str], float] = {}
        for window in windows:
            dispatcher = self._dispatcher()
            for _ in dispatcher.issue(window, sums):
                raise RuntimeError("an evaluation has no updates")
            sums = dispatcher.sums
            for key, count in (item for step in window.steps for item in step.counts.items()):
                counts[key] = counts.get(key, 0.0) + count
        found, totals = {}, self._summed(names, sums)
        for name, objectives in names.items():
            for objective, value in zip(objectives, totals[name], strict=True):
                count = counts.get((name, objective), 0.0)
                found[f"{name}/{objective}"] = value / count if count else float("nan")
        return found

    def _summed(self, names: Iterable[str], sums: Mapping[tuple[str, int], Arrays]) -> dict[str, list[float]]:
        """Adds up the objective sums of all replicas, those of other processes too."""
        mine = {
            f"{name}/{replica}": np.asarray(sums[name, replica]["sums"], np.float64).reshape(-1).tolist()
            for name in names
            for replica, mesh in enumerate(self.plan.sections[name].submesh.replica_meshes)
            if processes_of(mesh)[0] == self.plan.group.index
        }
        told = {key: values for part in self.plan.group.all_gather("evaluation", mine) for key, values in part.items()}
        replicas = {name: range(self.plan.sections[name].submesh.replicas) for name in names}
        return {name: np.sum([told[f"{name}/{r}"] for r in of_section], axis=0).tolist() for name, of_section in replicas.items()}

    def time_update(self, prepared: PreparedStep, number: int) -> dict[str, int]:
        """Runs the update of a step whose tasks have ended, without applying it; returns nanoseconds of each section's on this process.

        Sections wait for each other's norm, so each takes as long as the slowest one.
        """
        begin = time.perf_counter_ns()
        active = {name: whole(self.plan.sections[name], np.bool_(False)) for name in prepared.active}
        self._update(dataclasses.replace(prepared, active=active), number, None).wait()
        jax.block_until_ready([state.compute for state in self.states.values()])
        taken = time.perf_counter_ns() - begin
        return {name: taken for name in self.compiled.trained if name in self.states}

    def parameters(self, section: str) -> dict[str, np.ndarray]:
        """Reads a section's parameters to the host: master copies of what is trained, and what is frozen."""
        state = self.states[section]
        return {path: np.asarray(value) for path, value in {**state.master, **state.frozen}.items()}

    def snapshot(self) -> Snapshot:
        """Parameters and optimizer state as they are between two steps; the next step donates these arrays, so do not keep them."""
        return take_snapshot(self.states, tuple(n for n in self.compiled.trained if n in self.states))

    def _dispatcher(self, completions: Completions | None = None) -> Dispatcher:
        kept = self.compiled, self.states, self.zeros, self.in_flight, self.debug
        return self.dispatcher(*kept, self.next_number(), self.standing, completions, self.adaptive)

    def next_number(self) -> int:
        """Numbers windows and updates, for the names of transfers; all processes run the same ones in the same order."""
        self._number += 1
        return self._number

    def _call(self, kind: str, name: str, *args: Any) -> Any:
        """Calls a program of the update."""
        if self.debug:
            refuse_deleted(kind, name, args)
        return self.compiled[name, kind, 0, 0](*args)

    def _reduce(self, name: str, number: int) -> tuple[Arrays, Arrays, jax.Array, Arrays]:
        """Sums a section's accumulators of a step of the window over its replicas, in place.

        Returns:
            Reduced accumulators, objective sums of each replica, sum of squares, objective sums.
        """
        stack, sums = self.states[name].take_stacks(number)
        reduced, square, total = self._call("reduce", name, stack, sums)
        return reduced, sums, square, total

    def _zero(self, name: str, stack: Arrays, sums: Arrays) -> None:
        """Makes zeros in the place of what was reduced: the next accumulators."""
        self.states[name].put_stacks(*self._call("zero", name, stack, sums))

    def _update(self, prepared: PreparedStep, number: int, completions: Completions | None) -> StepReport:
        issued = time.monotonic_ns()
        reduced = {name: self._reduce(name, number) for name in self.compiled.reduced if name in self.states}
        norm = applied = None
        update = self.next_number()
        for name in self.compiled.trained:
            squares = self._squares(name, {other: found[2] for other, found in reduced.items()}, update)
            if name not in self.states:
                continue
            state = self.states[name]
            state.drop_views()
            arguments = (state.master, state.optimizer, state.compute, reduced[name][0], squares, prepared.active[name])
            state.master, state.optimizer, compute, section_norm, section_applied = self._call("apply", name, *arguments)
            state.set_compute(compute)
            if completions is not None:
                completions.watch_update(name, number, issued, squares, section_norm)
            if norm is None:
                norm, applied = section_norm, section_applied
        for name, (stack, sums, _, _) in reduced.items():
            self._zero(name, stack, sums)
        return StepReport(
            prepared=prepared,
            sums={name: r[3]["sums"] for name, r in reduced.items() if r[3]},
            squares={name: r[2] for name, r in reduced.items()},
            norm=norm,
            applied=applied,
        )

    def _squares(self, name: str, squares: Mapping[str, jax.Array], update: int) -> dict[str, jax.Array]:
        """Brings every section's sum of squares to the devices of one."""
        scalar, found, transport = self.compiled.arguments[name].scalar().sharding, {}, self.plan.group.transport
        for other in self.compiled.reduced:
            source = self.compiled.arguments[other].scalar().sharding
            label = f"{update} {other} to {name}"
            same = other == name
            arrived = squares.get(name) if same else on_every_device(squares.get(other), source, scalar, transport, label)
            if arrived is not None:
                found[other] = arrived
        return found


def _zero_slots(compiled: Compiled) -> dict[Any, tuple[jax.Array, ...]]:
    """Resident zeros for slots that are not sent: (edge, "in" or "out", replica) -> arrays; never donated."""
    found = {}
    for name, section in compiled.plan.local.items():
        for replica in section.submesh.local_replicas:
            arguments = compiled.arguments[name]
            for side, slots in (("in", arguments.slots_in(replica)), ("out", arguments.slots_out(replica))):
                for label, shapes in slots.items():
                    found[label, side, replica] = zeros(shapes[0])
    return found


__all__ = ["Engine", "SectionState", "StepReport"]
