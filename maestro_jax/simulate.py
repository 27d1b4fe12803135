"""`python -m maestro_jax.simulate --workload W.json`: schedules a workload in simulated time and says how good the schedule is.

Needs no devices and loads no JAX. Workload files come from `maestro_jax.train --dump_workload`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence

from .errors import MaestroError, ScheduleError, did_you_mean
from .files import write_output
from .simulation import POLICIES, describe, dispatch, dispatch_table, read_workload, simulate, table


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 for a mistake of the user's."""
    args = _parser().parse_args(argv)
    try:
        workload = read_workload(args.workload)
        _check(args)
        if args.compare:
            results = [simulate(workload, name) for name in POLICIES]
            print(json.dumps([each.to_json() for each in results], indent=2) if args.json else table(results))
            return 0
        if args.policy not in POLICIES:
            raise _unknown(args.policy)
        found = simulate(workload, args.policy)
        if args.schedule_out:
            text = json.dumps(found.schedule.to_json())
            write_output(args.schedule_out, text, what="schedule", flag="--schedule_out", kind=ScheduleError)
        if args.noise is None:
            print(json.dumps(found.to_json(), indent=2) if args.json else describe(found))
            return 0
        rows = dispatch(workload, found.schedule, args.noise, args.queue, args.call)
        text = json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
        print(text if args.json else dispatch_table(rows, found.schedule.makespan))
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
    noise = "run the schedule with durations that differ by this share, by chance, in order and adaptively; 0.1 is 10 %%"
    parser.add_argument("--noise", type=float, metavar="SHARE", help=noise)
    queue = "with --noise: most unfinished tasks that a replica is given, one or more to compare; default 8"
    parser.add_argument("--queue", type=int, nargs="+", default=[8], metavar="N", help=queue)
    parser.add_argument("--call", type=int, default=0, metavar="NS", help="with --noise: nanoseconds of the host for each task; default 0")
    parser.add_argument("--compare", action="store_true", help="print a table of all policies")
    return parser


def _check(args: argparse.Namespace) -> None:
    wrong = {
        "noise": ("a share of at least 0", args.noise is not None and not 0 <= args.noise < math.inf),
        "queue": ("at least 1 task", min(args.queue) < 1),
        "call": ("at least 0 nanoseconds", args.call < 0),
    }
    for flag, (wanted, is_wrong) in wrong.items():
        if is_wrong:
            raise ScheduleError(
                f"--{flag} is wrong.",
                wanted=wanted,
                have=str(getattr(args, flag)),
                fix=f"correct --{flag}",
                anchor="simulate-flags",
                set_by=f"command line  --{flag}",
            )


def _unknown(name: str) -> ScheduleError:
    return ScheduleError(
        f"there is no policy {name!r}.",
        wanted=f"one of {', '.join(POLICIES)}{did_you_mean(name, list(POLICIES))}",
        have=repr(name),
        fix="name one of these",
        anchor="unknown-policy",
        set_by="command line  --policy",
    )


if __name__ == "__main__":
    sys.exit(main())
