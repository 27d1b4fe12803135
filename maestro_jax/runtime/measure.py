"""Measures what tasks take on the devices at hand, and fits costs to that.

Tasks are issued one at a time, each waited for, so that what is measured is the task alone and not what it waited for. Parameters do not
change. The numbers differ from run to run, so a run measures once, at its beginning, and its checkpoints keep the costs.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable, Sequence

import jax

from ..schedules import Cost, Task
from .costs import Costs, SectionCosts, fitted_cost
from .dispatcher import Dispatcher
from .engine import Engine
from .feeds import Window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A task that ran alone.

    Args:
        task: as scheduled.
        squares: sum of its items' squared units.
        nanoseconds: wall time from the call to the end on the devices, transfers of its results included.
    """

    task: Task
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
        if task.kind == "update":
            return super().start(task)
        begin = time.perf_counter_ns()
        end = super().start(task)
        jax.block_until_ready((self.latest, [p.arrays for p in self.payloads.values()], self.returned))
        nanoseconds = time.perf_counter_ns() - begin
        units = {sample.id: sample.items for step in self.window.workload.steps for sample in step}
        squares = sum(units[sample][task.section][number] ** 2 for sample, number in task.items)
        self.measured.append(Measured(task=task, squares=squares, nanoseconds=nanoseconds))
        return end


def measure(engine: Engine, windows: Iterable[Window]) -> list[Measured]:
    """Runs windows of one step without their updates, task by task.

    Args:
        engine: its parameters stay as they are.
        windows: the first one only warms up.
    """
    found: list[Measured] = []
    for number, window in enumerate(windows):
        stopwatch = Stopwatch(engine)
        for _ in engine.issue_without_update(stopwatch, window):
            pass  # these gradients are not used
        if number:
            found += stopwatch.measured
    return found


def fitted_costs(counted: Costs, measured: Sequence[Measured]) -> Costs:
    """Fits the costs of sections to measured tasks, by least squares.

    Args:
        counted: costs that give what no task tells: how a fused task splits into forward and backward, what an update takes, and
            sections that did not run.
        measured: tasks.
    """
    by_section: dict[str, list[Measured]] = collections.defaultdict(list)
    for each in measured:
        by_section[each.task.section].append(each)
    sections = {name: _fitted(costs, by_section[name]) if by_section[name] else costs for name, costs in counted.sections.items()}
    return dataclasses.replace(counted, sections=sections)


def _fitted(counted: SectionCosts, measured: Sequence[Measured]) -> SectionCosts:
    share = {each: _forward_share(counted, each.task) for each in measured}
    forwards = [(each, share[each]) for each in measured if each.task.kind != "backward"]
    backwards = [(each, 1 - share[each]) for each in measured if each.task.kind != "forward"]
    forward, backward = _fit(forwards), _fit(backwards)
    before, after = (sum(cost.of(each.task.bucket, ()) for each, _ in forwards) for cost in (counted.forward, forward))
    return SectionCosts(forward=forward, backward=backward, update=round(counted.update * after / before) if before else counted.update)


def _forward_share(counted: SectionCosts, task: Task) -> float:
    """The part of a task that is forward: all, none, or as counted in a fused one."""
    if task.kind != "forward_backward":
        return float(task.kind == "forward")
    forward, backward = counted.forward.of(task.bucket, ()), counted.backward.of(task.bucket, ())
    return forward / (forward + backward)


def _fit(measured: Sequence[tuple[Measured, float]]) -> Cost:
    if not measured:
        return Cost()
    buckets, squares = [m.task.bucket for m, _ in measured], [m.squares for m, _ in measured]
    return fitted_cost(buckets, squares, [m.nanoseconds * share for m, share in measured])
