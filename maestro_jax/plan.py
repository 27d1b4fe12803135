"""`python -m maestro_jax.plan --gin_file=FILE --devices=N --hardware=h200`: the best plans of a config, without its devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import configurables
from .command_line import split_arguments
from .config import find_file, load
from .errors import ConfigError, MaestroError
from .files import write_output
from .forecast_table import describe, to_json, verified
from .planner import VERIFIED, Planner
from .runtime.hardware import HARDWARE, hardware_named
from .runtime.measured import Measurements
from .simulation import read_workload
from .trainer import make_cpu_devices

HARDWARE_FLAG = "command line  --hardware"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 for a mistake of the user's."""
    try:
        rest, overrides = split_arguments(sys.argv[1:] if argv is None else argv)
        args = make_parser().parse_args(rest)
        return _plan(args, overrides)
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _plan(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    if args.devices < 1:
        raise ConfigError(
            "there is nothing to plan for.",
            wanted="at least 1 device",
            have=str(args.devices),
            set_by="command line  --devices",
            fix="say how many devices there will be",
            anchor="plan-infeasible",
        )
    measured = Measurements.read(Path(args.hardware), set_by=HARDWARE_FLAG) if args.hardware.endswith(".json") else None
    hardware = hardware_named(args.hardware if measured is None else measured.hardware, set_by=HARDWARE_FLAG)
    corrected = hardware if measured is None else measured.corrected(hardware)
    trainer: configurables.trainer.Trainer = load(args.gin_file, overrides, root="train").build()
    make_cpu_devices(VERIFIED)
    steps = read_workload(args.workload) if args.workload else None
    planner = Planner(trainer, corrected, args.devices, measured.sections if measured is not None else None, steps)
    plans = planner.plans(args.top)
    best = [planner.forecast(each) for each in plans.best]
    others = {"one layout": plans.one_layout, "time-shared": plans.time_shared, "disjoint": plans.disjoint}
    conventional = {name: planner.forecast(each) if each is not None else None for name, each in others.items()}
    regret = None
    if measured is not None:
        unmeasured = Planner(trainer, hardware, args.devices, steps=steps).plans(1).best[0]
        regret = planner.regret(unmeasured.allocation, plans.best[0])
    compiled = planner.compiled(plans.best[0]) if args.verify else None
    if args.json:
        told = {"plans": [to_json(each) for each in best], **{k: to_json(v) if v else None for k, v in conventional.items()}}
        print(json.dumps({**told, "regret": regret, "compiled_bytes": {k: size for k, (_, size) in (compiled or {}).items()}}, indent=2))
    else:
        print(describe(planner, best, conventional))
        if regret is not None:
            print(f"regret: the plan that is chosen without these measurements takes {regret:+.1%} of plan 1's time, by measured costs")
        if args.verify:
            print("\n".join(verified(compiled)))
    if args.write:
        text = gin_text(args.gin_file, [*overrides, *planner.bindings(plans.best[0])], f"{args.devices} x {args.hardware}")
        write_output(args.write, text, what="plan", flag="--write", kind=ConfigError)
        print(f"{args.write}: python -m maestro_jax.train --gin_file={args.write}")
    return 0


def gin_text(base: str, bindings: Sequence[str], made_for: str) -> str:
    """A gin file that changes a config to a plan."""
    file = str(find_file(base).resolve())
    return "\n".join([f"# A plan for {made_for}, by python -m maestro_jax.plan.", "", f"include {file!r}", "", *bindings, ""])


def make_parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    parser = argparse.ArgumentParser(prog="python -m maestro_jax.plan", description="Plans a config for devices that need not be there.")
    parser.add_argument("--gin_file", required=True, help="config file; a name without a folder is also found among the shipped ones")
    parser.add_argument("--devices", type=int, required=True, help="how many devices there will be")
    parser.add_argument("--hardware", required=True, help=f"kind of device: {', '.join(HARDWARE)}, or measured.json")
    parser.add_argument("--top", type=int, default=5, help="how many plans are shown; default 5")
    parser.add_argument("--write", metavar="FILE", help="write the best plan as a gin file that maestro_jax.train takes")
    parser.add_argument(
        "--workload", metavar="FILE", help="samples of some steps, as train --dump_workload writes them, instead of the data"
    )
    parser.add_argument("--verify", action="store_true", help="compile the tasks of the best plan, and compare the memory that they need")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
