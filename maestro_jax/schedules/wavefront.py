"""The wavefront policy: order of samples, replica and bucket of every micro-batch, for all sections together.

docs/scheduling.md explains why it works and what it reaches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ..errors import ScheduleError
from .bounds import lower_bound
from .compact import Compact
from .cutting import Microbatch, cut
from .loop import Clock, Progress, run
from .policies import InOrder, in_order, replay
from .search import Candidate, Search
from .tasks import Schedule, Task
from .trial import Graph, Start, Trial
from .workload import Workload

PER_SAMPLE = 420
"""Microseconds of a search for each sample at an effort of 1, on a core that needs as long for a trial as `_trials` says."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wavefront:
    """Every section starts with what needs nothing upstream and is fed just in time; a local search looks for the shortest.

    Args:
        effort: how much is tried, as a multiple of what takes about 50 ms per 100 samples. The number of trials follows from the
            workload's size, never from a clock.
        seed: of the search; the same seed and workload give the same schedule in every process.
    """

    in_worker: ClassVar[bool] = True

    effort: float = 1.0
    seed: int = 2

    def __post_init__(self) -> None:
        """Refuses an effort below 0."""
        if self.effort < 0:
            raise ScheduleError(
                "a search cannot take less than no time.",
                wanted="an effort of at least 0",
                have=str(self.effort),
                set_by="Wavefront.effort",
                fix="use 0 to compare the rules only, 1 for the default",
                anchor="wavefront-effort",
            )

    def schedule(self, workload: Workload) -> Schedule:
        """Searches with trial runs, and returns the best found or the schedule of `InOrder`, whichever ends sooner.

        Raises:
            ScheduleError: when one sample alone is more than a limit of memory or of fans allows.
        """
        reference = _in_order(workload)
        model = Compact(workload)
        if not any(step.samples for step in model.steps):
            return reference
        found = Search(model, lower_bound(workload), _trials(model, self.effort), self.seed).run()
        if found is None or found.makespan >= reference.makespan:
            return reference
        schedule = replayed(model, found)
        return schedule if schedule.makespan < reference.makespan else reference


def replayed(model: Compact, found: Candidate) -> Schedule:
    """Runs a candidate of the search through the loop that knows the rules: its times are those of the schedule.

    Args:
        model: the workload.
        found: what to run.

    Returns:
        The schedule.

    Raises:
        ScheduleError: when the candidate cannot be run.
    """
    graph = Graph(model, found.parts, found.pairs)
    trial = Trial(model, graph, found.rules, record=True)
    trial.run()
    microbatches = _microbatches(model, found)
    wanted = [_task(model, microbatches, start) for start in trial.started or ()]
    progress = Progress(model.workload, microbatches)
    choose = replay(progress, Schedule(tasks=tuple(wanted)))

    def timed(progress: Progress, now: int) -> Task | None:
        task = choose(progress, now)
        return progress.task(progress.key_of(task), task.replica, now) if task else None

    return Schedule(tasks=tuple(run(progress, timed, Clock())))


def _microbatches(model: Compact, found: Candidate) -> list[Microbatch]:
    """The micro-batches of a candidate in the order in which a graph numbers them."""
    made: list[Microbatch] = []
    for n, name in enumerate(model.names):
        first = len(made)
        for t, parts in enumerate(found.parts):
            pieces, units = model.steps[t].pieces[n], model.steps[t].units[n]
            for items, bucket in zip(parts[n].items, parts[n].buckets, strict=True):
                lengths, named = tuple(units[i] for i in items), tuple(pieces[i] for i in items)
                made.append(Microbatch(section=name, step=t, number=len(made) - first, bucket=bucket, items=named, units=lengths))
    return made


def _task(model: Compact, microbatches: Sequence[Microbatch], start: Start) -> Task:
    now, kind, number, replica = start
    section = model.section_of[replica]
    name, own = model.names[section], replica - model.base[section]
    if kind == "update":
        return Task(section=name, replica=own, kind="update", step=number, start=now, end=now)
    m = microbatches[number]
    return Task(section=name, replica=own, kind=kind, step=m.step, bucket=m.bucket, items=m.items, start=now, end=now)


def _trials(model: Compact, effort: float) -> int:
    """How many trials a workload gets: as many as take a time in proportion to its samples."""
    samples = sum(step.samples for step in model.steps)
    items = sum(len(units) for step in model.steps for units in step.units)
    tasks = 0
    for n, section in enumerate(model.sections):
        full = sum(-(-model.total(n, t) // section.buckets[-1]) for t in range(len(model.steps)))
        tasks += full * (2 if model.runs_backward[n] else 1) + section.replicas * len(model.steps)
    return max(1, int(effort * PER_SAMPLE * samples / (40 + 0.25 * items + 4 * tasks)))


def _in_order(workload: Workload) -> Schedule:
    """The schedule of `InOrder`; where that gets stuck, of samples that are cut one by one."""
    try:
        return InOrder().schedule(workload)
    except ScheduleError as stuck:
        if stuck.anchor != "schedule-stuck":
            raise
    return Schedule(tasks=tuple(run(Progress(workload, cut(workload, alone=True)), in_order, Clock())))
