"""Costs from measured times, by least squares."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .ledger import BACKWARD, FORWARD, Ledger
from .tasks import Schedule, Task
from .workload import Cost, EdgeWork, SectionWork, Workload


def fitted_cost(buckets: Sequence[int], squares: Sequence[int], nanoseconds: Sequence[float]) -> Cost:
    """Fits a cost to tasks by least squares; no part is negative.

    Args:
        buckets: size of each task's micro-batch.
        squares: sum of its items' squared units.
        nanoseconds: what it took.

    >>> fitted_cost([100, 200, 400], [0, 0, 0], [1100.0, 2100.0, 4100.0])
    Cost(fixed=100, per_unit=10, per_unit_squared=0)
    """
    wanted = np.asarray(nanoseconds, np.float64)
    columns = np.stack([np.ones(len(wanted)), np.asarray(buckets, np.float64), np.asarray(squares, np.float64) / 1000], axis=1)
    # Columns are scaled alike, or the squares would decide what counts as zero.
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-12)
    found = _nonnegative(columns / scale, wanted) / scale
    fixed, per_unit, squared = (round(float(value)) for value in found)
    return Cost(fixed=fixed, per_unit=per_unit, per_unit_squared=squared)


def fitted_workload(workload: Workload, measured: Schedule) -> Workload:
    """Gives a workload the costs that its measured tasks show.

    Sections that ran no task keep their costs, as far as nothing was measured: how a fused task splits into forward and backward is as
    before. A transfer takes no longer than its consumers were seen to wait after what they needed had been computed.

    Args:
        workload: what was done.
        measured: its tasks with the times at which they ran.
    """
    units = {sample.id: sample.items for step in workload.steps for sample in step}
    sections = {}
    for name, section in workload.sections.items():
        tasks = [t for t in measured.tasks if t.section == name]
        squares = {t: sum(units[s][name][i] ** 2 for s, i in t.items) for t in tasks}
        sections[name] = _fitted(section, tasks, squares)
    return dataclasses.replace(workload, sections=sections, edges=_edges(workload, measured))


def fitted_call(measured: Schedule, issued: Sequence[int], depth: int) -> int:
    """Nanoseconds of the host for each task: the mean time between two tasks that it issued without waiting for a full queue.

    Args:
        measured: tasks with the times at which they ran.
        issued: nanoseconds at which each was given to its devices.
        depth: most unfinished tasks that a replica is given.
    """
    ends: dict[tuple[str, int], list[int]] = defaultdict(list)
    taken, before = [], None
    for now, task in sorted(zip(issued, measured.tasks, strict=True), key=lambda each: each[0]):
        # The update of a step is issued together with what is made of its numbers.
        if before is not None and task.kind != "update":
            taken.append(now - before)
        queue = ends[task.section, task.replica]
        queue.append(task.end)
        waits = len(queue) > depth and queue[-1 - depth] > now
        before = None if waits or task.kind == "update" else now
    return round(statistics.fmean(taken)) if taken else 0


def _fitted(section: SectionWork, tasks: Sequence[Task], squares: dict[Task, int]) -> SectionWork:
    updates = [t.end - t.start for t in tasks if t.kind == "update"]
    return dataclasses.replace(
        section,
        forward=_refitted(section.forward, section.backward, [t for t in tasks if t.kind in FORWARD], squares),
        backward=_refitted(section.backward, section.forward, [t for t in tasks if t.kind in BACKWARD], squares),
        update=round(statistics.median(updates)) if updates else section.update,
    )


def _refitted(cost: Cost, other: Cost, tasks: Sequence[Task], squares: dict[Task, int]) -> Cost:
    """One of a section's two costs, from the tasks that contain it; of a fused task its part of both as they were."""
    if not tasks:
        return cost
    taken, before = [], []
    for task in tasks:
        own, rest = cost.of(task.bucket, ()), other.of(task.bucket, ())
        share = 1.0 if task.kind != "forward_backward" else own / (own + rest) if own + rest else 0.5
        taken.append((task.end - task.start) * share)
        before.append(own)
    if len({task.bucket for task in tasks}) == 1 and sum(before):
        # One size tells nothing of others: the cost keeps its form.
        factor = sum(taken) / sum(before)
        return Cost(**{name: round(value * factor) for name, value in dataclasses.asdict(cost).items()})
    return fitted_cost([t.bucket for t in tasks], [squares[t] for t in tasks], taken)


def _edges(workload: Workload, measured: Schedule) -> tuple[EdgeWork, ...]:
    """Devices tell when a task has ended, not when its result has arrived, so a consumer's time may contain the transfer."""
    found = []
    for edge in workload.edges:
        alone = dataclasses.replace(workload, edges=(dataclasses.replace(edge, delay=0),))
        ledger = Ledger(alone, measured)
        waited = [t.start - ledger.arrival(t) for t in measured.tasks if t.section == edge.consumer and t.kind in FORWARD]
        found.append(dataclasses.replace(edge, delay=max(0, min([edge.delay, *waited]))))
    return tuple(found)


def _nonnegative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with the columns of negative parts left out, one after the other; exact for so few columns in practice."""
    used = [n for n in range(matrix.shape[1]) if np.abs(matrix[:, n]).max() > 0]
    while used:
        solved = np.linalg.lstsq(matrix[:, used], wanted, rcond=1e-9)[0]
        if (solved >= 0).all():
            result = np.zeros(matrix.shape[1])
            result[used] = solved
            return result
        used.pop(int(np.argmin(solved)))
    return np.zeros(matrix.shape[1])
