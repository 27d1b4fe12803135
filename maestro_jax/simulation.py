"""Figures of a simulated schedule, and how they are told."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ScheduleError
from .schedules import Gap, InOrder, Lockstep, Policy, Schedule, Sequential, Wavefront, Workload, gap_of, lower_bound, utilization_of
from .schedules.queues import execute, perturbed
from .schedules.stalls import stalls_of

POLICIES: Mapping[str, type[Policy]] = {"wavefront": Wavefront, "in_order": InOrder, "lockstep": Lockstep, "sequential": Sequential}
"""Names on the command line, in the order of the table."""

CAUSES = {
    "fill": "waiting for forwards upstream",
    "drain": "waiting for backwards downstream, and at the end of a step",
    "padding": "buckets that are not full",
    "imbalance": "waiting for another replica, or for who shares its devices",
    "memory": "waiting for room",
    "update": "updates, and waiting for them",
}
"""Parts of the gap, in words."""

DRAWS = 8
"""Times that durations are drawn; figures are means over these."""


def read_workload(path: str) -> Workload:
    """Reads a workload file.

    Raises:
        ScheduleError: it cannot be read, or is not a workload.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ScheduleError(
            f"the workload {path!r} cannot be read.",
            wanted="a JSON file as --dump_workload of maestro_jax.train writes it",
            have=f"{type(error).__name__}: {error}",
            fix="correct the path, or write the file anew",
            anchor="workload-malformed",
            set_by="command line  --workload",
        ) from error
    return Workload.from_json(raw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """A schedule and its figures; times in nanoseconds.

    Args:
        policy: name of the policy.
        schedule: what it made.
        lower_bound: no schedule of the workload ends sooner.
        utilization: section -> share of the makespan in which its replicas have tasks.
        gap: makespan minus lower bound, by cause.
        scheduling_seconds: wall time of making the schedule.
    """

    policy: str
    schedule: Schedule
    lower_bound: int
    utilization: Mapping[str, float]
    gap: Gap
    scheduling_seconds: float

    @property
    def ratio(self) -> float:
        """Makespan over lower bound; 1 where there is nothing to do."""
        return self.schedule.makespan / self.lower_bound if self.lower_bound else 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON values; "gap" adds up to makespan - lower_bound."""
        return {
            "policy": self.policy,
            "makespan": self.schedule.makespan,
            "lower_bound": self.lower_bound,
            "ratio": self.ratio,
            "utilization": dict(self.utilization),
            "gap": dataclasses.asdict(self.gap),
            "tasks": len(self.schedule.tasks),
            "scheduling_seconds": self.scheduling_seconds,
            "digest": self.schedule.digest(),
        }


def simulate(workload: Workload, policy: str) -> Simulation:
    """Schedules a workload and measures the schedule.

    Args:
        workload: what is to be done.
        policy: a name of `POLICIES`.

    Raises:
        ScheduleError: the policy finds no schedule.
    """
    begin = time.perf_counter()
    schedule = POLICIES[policy]().schedule(workload)
    seconds = time.perf_counter() - begin
    return Simulation(
        policy=policy,
        schedule=schedule,
        lower_bound=lower_bound(workload),
        utilization=utilization_of(workload, schedule),
        gap=gap_of(workload, schedule),
        scheduling_seconds=seconds,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What a schedule takes when tasks do not last as long as scheduled; means over `DRAWS` draws, times in nanoseconds.

    Args:
        rule: "in order", or "adaptive".
        queue: most tasks that a replica has been given and has not ended.
        makespan: until the last task ended.
        lowest: makespan of the luckiest draw.
        highest: makespan of the unluckiest draw.
        stalls: time in which the first task of a queue waited for data while a later one could have run, over all replicas.
    """

    rule: str
    queue: int
    makespan: float
    lowest: int
    highest: int
    stalls: float


def dispatch(workload: Workload, schedule: Schedule, noise: float, depths: Sequence[int], call: int = 0) -> list[Dispatched]:
    """Runs a schedule on simulated queues, in order and adaptively, with durations that differ by chance.

    Args:
        workload: what is to be done.
        schedule: how.
        noise: standard deviation of the logarithm of durations, as a share.
        depths: of the queues, each tried.
        call: nanoseconds of the host for each task.
    """
    found = []
    for in_order, depth in itertools.product((True, False), depths):
        runs = [execute(workload, schedule, perturbed(schedule, noise, seed), depth, in_order, call) for seed in range(DRAWS)]
        spans = [run.measured.makespan for run in runs]
        stalls = [sum(s.nanoseconds for s in stalls_of(workload, run.measured, run.issued).values()) for run in runs]
        found.append(
            Dispatched(
                rule="in order" if in_order else "adaptive",
                queue=depth,
                makespan=statistics.mean(spans),
                lowest=min(spans),
                highest=max(spans),
                stalls=statistics.mean(stalls),
            )
        )
    return found


def describe(found: Simulation) -> str:
    """Writes the figures of a simulation in lines for people."""
    makespan, bound = found.schedule.makespan, found.lower_bound
    lines = [
        f"policy        {found.policy}, {len(found.schedule.tasks)} tasks, scheduled in {found.scheduling_seconds:.3f} s",
        f"makespan      {readable_time(makespan)}",
        f"lower bound   {readable_time(bound)}",
        f"ratio         {found.ratio:.4f}",
        f"utilization   {'  '.join(f'{name} {share:.1%}' for name, share in found.utilization.items())}",
        f"gap           {readable_time(makespan - bound)}, of which",
    ]
    for part, spent in sorted(dataclasses.asdict(found.gap).items(), key=lambda each: -each[1]):
        lines.append(f"  {part:<11} {readable_time(spent):>10}  {CAUSES[part]}")
    return "\n".join(lines)


def table(found: Sequence[Simulation]) -> str:
    """Writes a markdown table with a row for each simulation."""
    sections = list(found[0].utilization)
    rows = [
        [
            s.policy,
            readable_time(s.schedule.makespan),
            f"{s.ratio:.3f}",
            *(f"{s.utilization[n]:.0%}" for n in sections),
            f"{s.scheduling_seconds:.3f} s",
        ]
        for s in found
    ]
    return markdown([["policy", "makespan", "ratio", *sections, "scheduling"], *rows])


def dispatch_table(found: Sequence[Dispatched], makespan: int) -> str:
    """Writes a markdown table with a row for each rule and depth.

    Args:
        found: of one schedule.
        makespan: its own, in nanoseconds.
    """
    rows = [
        [
            f"{each.rule}, queue of {each.queue}",
            readable_time(each.makespan),
            f"{each.makespan / makespan if makespan else 1.0:.3f}",
            readable_time(each.lowest),
            readable_time(each.highest),
            readable_time(each.stalls),
        ]
        for each in found
    ]
    return markdown([["dispatch", "makespan", "of scheduled", "lowest", "highest", "stalls"], *rows])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Writes a markdown table: the first row is its header, the first column stands left, the others right."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [rows[0], ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])], *rows[1:]]
    cells = [[cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(line, widths, strict=True))] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def readable_time(nanoseconds: float) -> str:
    """Writes a time with a unit that fits.

    >>> readable_time(950), readable_time(1_234_567), readable_time(2_500_000_000)
    ('950 ns', '1.235 ms', '2.500 s')
    """
    for size, unit in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if abs(nanoseconds) >= size:
            return f"{nanoseconds / size:.3f} {unit}"
    return f"{nanoseconds:.0f} ns"
