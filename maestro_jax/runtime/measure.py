"""Measures what tasks take on the devices at hand, and fits costs to that.

Tasks are issued one at a time, each waited for, so that what is measured is the task alone and not what it waited for. Parameters do not
change. The numbers differ from run to run, so a run measures once, at its beginning, and its checkpoints keep the costs.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence

import jax

from ..schedules import Cost, Task
from ..schedules.tasks import Kind
from .costs import Costs, SectionCosts, fitted_cost
from .dispatcher import Dispatcher
from .engine import Engine
from .feeds import Window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A task that ran alone.

    Args:
        section: whose it is.
        kind: of the task.
        bucket: size of its micro-batch in units; 0 for an update.
        squares: sum of its items' squared units.
        nanoseconds: wall time from the call, when all that it needs was there, to the end on the devices.
    """

    section: str
    kind: Kind
    bucket: int
    squares: int
    nanoseconds: int


class Stopwatch(Dispatcher):
    """A dispatcher that waits for each task and notes what it took."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(
            engine.compiled, engine.states, engine.zeros, engine.in_flight, engine.debug, engine.next_number(), engine.standing
        )
        self.measured: list[Measured] = []

    def start(self, task: Task) -> int:
        """Issues a task and waits for it."""
        if task.kind == "update" or not self.plan.is_local(task.section, task.replica):
            return super().start(task)
        self._settle()
        begin = time.perf_counter_ns()
        end = super().start(task)
        self._settle()
        nanoseconds = time.perf_counter_ns() - begin
        units = {sample.id: sample.items for step in self.window.workload.steps for sample in step}
        squares = sum(units[sample][task.section][number] ** 2 for sample, number in task.items)
        self.measured.append(Measured(section=task.section, kind=task.kind, bucket=task.bucket, squares=squares, nanoseconds=nanoseconds))
        return end

    def _settle(self) -> None:
        """Waits for the latest task, and for all that is on its way."""
        jax.block_until_ready((self.latest, [p.arrays for p in self.payloads.values()], self.returned))


def measure(engine: Engine, windows: Iterable[Window]) -> list[Measured]:
    """Runs windows of one step task by task, with updates that are not applied; all processes call this.

    Args:
        engine: its parameters stay as they are.
        windows: the first one only warms up.

    Returns:
        The tasks of all processes, each process's in the order in which they ran.
    """
    found: list[Measured] = []
    for number, window in enumerate(windows):
        stopwatch = Stopwatch(engine)
        for step in stopwatch.issue(window):
            updates = [
                Measured(section=name, kind="update", bucket=0, squares=0, nanoseconds=taken)
                for name, taken in engine.time_update(window.steps[step], step).items()
            ]
            found += [*stopwatch.measured, *updates] if number else []
    told = engine.plan.group.all_gather("measured", [dataclasses.asdict(each) for each in found])
    return [Measured(**each) for part in told for each in part]


def fitted_costs(counted: Costs, measured: Sequence[Measured], delays: Mapping[str, int] | None = None) -> Costs:
    """Fits the costs of sections to measured tasks, by least squares.

    Args:
        counted: costs that give what no task tells: how a fused task splits into forward and backward, and sections that did not run.
        measured: tasks.
        delays: edge label -> measured nanoseconds of a transfer; others are as counted.
    """
    by_section: dict[str, list[Measured]] = collections.defaultdict(list)
    for each in measured:
        by_section[each.section].append(each)
    sections = {name: _fitted(costs, by_section[name]) if by_section[name] else costs for name, costs in counted.sections.items()}
    return Costs(sections=sections, delays={**counted.delays, **(delays or {})})


def _fitted(counted: SectionCosts, measured: Sequence[Measured]) -> SectionCosts:
    tasks, updates = ([m for m in measured if (m.kind == "update") is wanted] for wanted in (False, True))
    share = {n: _forward_share(counted, each) for n, each in enumerate(tasks)}
    forward = _fit([(each, share[n]) for n, each in enumerate(tasks) if each.kind != "backward"])
    backward = _fit([(each, 1 - share[n]) for n, each in enumerate(tasks) if each.kind != "forward"])
    update = round(statistics.median(m.nanoseconds for m in updates)) if updates else counted.update
    return SectionCosts(forward=forward, backward=backward, update=update)


def _forward_share(counted: SectionCosts, task: Measured) -> float:
    """The part of a task that is forward: all, none, or as counted in a fused one."""
    if task.kind != "forward_backward":
        return float(task.kind == "forward")
    forward, backward = counted.forward.of(task.bucket, ()), counted.backward.of(task.bucket, ())
    return forward / (forward + backward)


def _fit(measured: Sequence[tuple[Measured, float]]) -> Cost:
    if not measured:
        return Cost()
    buckets, squares = [m.bucket for m, _ in measured], [m.squares for m, _ in measured]
    return fitted_cost(buckets, squares, [m.nanoseconds * share for m, share in measured])
