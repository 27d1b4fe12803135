"""Figures of a simulated schedule, and how they are told."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .schedules import Gap, InOrder, Lockstep, Policy, Schedule, Sequential, Wavefront, Workload, gap_of, lower_bound, utilization_of

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


def describe(found: Simulation) -> str:
    """Writes the figures of a simulation in lines for people."""
    makespan, bound = found.schedule.makespan, found.lower_bound
    lines = [
        f"policy        {found.policy}, {len(found.schedule.tasks)} tasks, scheduled in {found.scheduling_seconds:.3f} s",
        f"makespan      {_time(makespan)}",
        f"lower bound   {_time(bound)}",
        f"ratio         {found.ratio:.4f}",
        f"utilization   {'  '.join(f'{name} {share:.1%}' for name, share in found.utilization.items())}",
        f"gap           {_time(makespan - bound)}, of which",
    ]
    for part, spent in sorted(dataclasses.asdict(found.gap).items(), key=lambda each: -each[1]):
        lines.append(f"  {part:<11} {_time(spent):>10}  {CAUSES[part]}")
    return "\n".join(lines)


def table(found: Sequence[Simulation]) -> str:
    """Writes a markdown table with a row for each simulation."""
    sections = list(found[0].utilization)
    header = ["policy", "makespan", "ratio", *sections, "scheduling"]
    rows = [
        [
            s.policy,
            _time(s.schedule.makespan),
            f"{s.ratio:.3f}",
            *(f"{s.utilization[n]:.0%}" for n in sections),
            f"{s.scheduling_seconds:.3f} s",
        ]
        for s in found
    ]
    widths = [max(len(row[n]) for row in [header, *rows]) for n in range(len(header))]
    lines = [header, ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])], *rows]
    cells = [[cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(line, widths, strict=True))] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _time(nanoseconds: int) -> str:
    """Writes a time with a unit that fits.

    >>> _time(950), _time(1_234_567), _time(2_500_000_000)
    ('950 ns', '1.235 ms', '2.500 s')
    """
    for size, unit in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if abs(nanoseconds) >= size:
            return f"{nanoseconds / size:.3f} {unit}"
    return f"{nanoseconds} ns"
