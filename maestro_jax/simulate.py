"""`python -m maestro_jax.simulate --workload W.json`: schedules a workload in simulated time and says how good the schedule is.

Needs no devices and loads no JAX. Workload files come from `maestro_jax.train --dump_workload`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import MaestroError, ScheduleError, did_you_mean
from .schedules import Gap, InOrder, Lockstep, Policy, Schedule, Sequential, Wavefront, Workload, gap_of, lower_bound

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
    busy = dict.fromkeys(workload.order, 0)
    for task in schedule.tasks:
        busy[task.section] += task.end - task.start
    makespan = schedule.makespan
    return Simulation(
        policy=policy,
        schedule=schedule,
        lower_bound=lower_bound(workload),
        utilization={n: busy[n] / (s.replicas * makespan) if makespan else 0.0 for n, s in workload.sections.items()},
        gap=gap_of(workload, schedule),
        scheduling_seconds=seconds,
    )


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 for a mistake of the user's."""
    args = _parser().parse_args(argv)
    try:
        workload = read_workload(args.workload)
        if args.compare:
            results = [simulate(workload, name) for name in POLICIES]
            print(json.dumps([each.to_json() for each in results], indent=2) if args.json else table(results))
            return 0
        if args.policy not in POLICIES:
            raise _unknown(args.policy)
        found = simulate(workload, args.policy)
        if args.schedule_out:
            _write(args.schedule_out, found.schedule)
        print(json.dumps(found.to_json(), indent=2) if args.json else describe(found))
        return 0
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maestro_jax.simulate", description="Schedules a workload in simulated time.", allow_abbrev=False
    )
    parser.add_argument("--workload", required=True, metavar="FILE", help="JSON, as `maestro_jax.train --dump_workload` writes it")
    parser.add_argument("--policy", default="wavefront", help=f"one of {', '.join(POLICIES)}; default wavefront")
    parser.add_argument("--schedule_out", metavar="FILE", help="write the schedule as JSON")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON; times in nanoseconds")
    parser.add_argument("--compare", action="store_true", help="print a table of all policies")
    return parser


def _write(path: str, schedule: Schedule) -> None:
    try:
        Path(path).write_text(json.dumps(schedule.to_json()), encoding="utf-8")
    except OSError as error:
        raise ScheduleError(
            f"the schedule cannot be written to {path!r}.",
            wanted="a file in a folder that exists and can be written",
            have=f"{type(error).__name__}: {error}",
            fix="choose another file",
            anchor="file-unwritable",
            set_by="command line  --schedule_out",
        ) from error


def _unknown(name: str) -> ScheduleError:
    return ScheduleError(
        f"there is no policy {name!r}.",
        wanted=f"one of {', '.join(POLICIES)}{did_you_mean(name, list(POLICIES))}",
        have=repr(name),
        fix="name one of these",
        anchor="unknown-policy",
        set_by="command line  --policy",
    )


def _time(nanoseconds: int) -> str:
    """Writes a time with a unit that fits.

    >>> _time(950), _time(1_234_567), _time(2_500_000_000)
    ('950 ns', '1.235 ms', '2.500 s')
    """
    for size, unit in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if abs(nanoseconds) >= size:
            return f"{nanoseconds / size:.3f} {unit}"
    return f"{nanoseconds} ns"


if __name__ == "__main__":
    sys.exit(main())
