"""`python -m maestro_jax.explain RUN`: says where the time of a recorded step went, and which change would shorten it most.

Reads what a run with `train.timelines` has recorded in its folder; needs no devices and loads no JAX.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import MaestroError, ScheduleError
from .explanation import advise, describe, describe_advice, explain
from .record import Record

RECORDS = "timelines/step-*.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 for a mistake of the user's."""
    args = _parser().parse_args(argv)
    try:
        record = read_record(args.run, args.step)
        found = explain(record)
        if args.json:
            print(json.dumps({**found.to_json(), "advice": advise(record).to_json()}, indent=2))
            return 0
        print(f"{describe(found)}\n", flush=True)  # simulating the changes takes some seconds
        print(describe_advice(advise(record), found.steps))
        return 0
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def read_record(run: str, step: int | None) -> Record:
    """Reads a record of a run.

    Args:
        run: the run's folder.
        step: number of a step in it, from 1; None takes the last window that was recorded.

    Raises:
        ScheduleError: there is none, or it cannot be read.
    """
    paths = sorted(Path(run).glob(RECORDS))
    if not paths:
        raise ScheduleError(
            f"{run!r} holds no record of a step.",
            wanted=f"files {RECORDS} in the folder of a run",
            have="none" if Path(run).is_dir() else "no such folder",
            fix="train with --workdir and train.timelines = (10,) to record the 10th step, or name another run",
            anchor="no-records",
            set_by="command line  RUN",
        )
    if step is None:
        return _read(paths[-1])
    records = [_read(path) for path in paths]
    spans = {record.first_step: record.first_step + len(record.workload.steps) - 1 for record in records}
    for record in records:
        if record.first_step <= step <= spans[record.first_step]:
            return record
    raise ScheduleError(
        f"step {step} of {run!r} is not recorded.",
        wanted=f"one of {', '.join(f'{first} to {last}' if last > first else str(first) for first, last in spans.items())}",
        have=str(step),
        fix=f"name one of these, or train with train.timelines = ({step},)",
        anchor="no-records",
        set_by="command line  --step",
    )


def _read(path: Path) -> Record:
    try:
        return Record.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, MaestroError) as error:
        raise ScheduleError(
            f"the record {str(path)!r} cannot be read.",
            wanted="a file as a run with train.timelines writes it",
            have=f"{type(error).__name__}: {error}",
            fix="remove it, or record the step again",
            anchor="no-records",
            set_by="command line  RUN",
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maestro_jax.explain",
        description="Says where the time of a recorded step went, and what would help.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, as --workdir of maestro_jax.train names it")
    parser.add_argument("--step", type=int, metavar="N", help="a step that was recorded, from 1; default: the last one")
    parser.add_argument("--json", action="store_true", help="print everything as JSON; times in nanoseconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
