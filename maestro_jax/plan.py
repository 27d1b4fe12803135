"""`python -m maestro_jax.plan --gin_file=FILE --devices=N --hardware=h200`: the best plans of a config, without its devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import configurables
from .command_line import split_arguments
from .config import find_file, load
from .errors import ConfigError, MaestroError
from .files import write_output
from .plan_table import human_bytes, human_count
from .planner import Forecast, Planner
from .runtime.hardware import HARDWARE, hardware_named
from .runtime.measured import Measurements
from .simulate import read_workload
from .simulation import markdown
from .trainer import make_cpu_devices

VERIFIED = 32
"""Devices of a plan's replicas, one of each section, up to which its tasks are compiled."""
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
    trainer: configurables.trainer.Trainer = load(args.gin_file, overrides, root="train").build()
    make_cpu_devices(VERIFIED)
    steps = read_workload(args.workload) if args.workload else None
    planner = Planner(trainer, hardware, args.devices, measured.sections if measured is not None else None, steps)
    plans = planner.plans(args.top)
    best = [planner.forecast(each) for each in plans.best]
    others = {"one layout": plans.one_layout, "time-shared": plans.time_shared, "disjoint": plans.disjoint}
    conventional = {name: planner.forecast(each) if each is not None else None for name, each in others.items()}
    regret = None
    if measured is not None:
        unmeasured = Planner(trainer, hardware, args.devices, steps=steps).plans(1).best[0]
        regret = planner.regret(unmeasured.allocation, plans.best[0])
    compiled = planner.compiled(plans.best[0], VERIFIED) if args.verify else None
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


def describe(planner: Planner, best: Sequence[Forecast], conventional: dict[str, Forecast | None]) -> str:
    """Writes plans as tables: first what they do, then what each section gets.

    Args:
        planner: that made them.
        best: the best plans, those with the shortest step first.
        conventional: name -> the best plan of a kind, or None where none fits.
    """
    named = {str(number): each for number, each in enumerate(best, start=1)} | conventional
    rows = [["plan", "step", "tokens/s", "MFU", "device-hours", "memory", "devices"]]
    rows += [_figures(name, each, planner) for name, each in named.items()]
    places = [["plan", "section", "devices", "replicas", "axes", "micro-batch", "remat", "attention", "memory", "busy"]]
    for name, each in named.items():
        places += _places(name, each, planner) if each is not None else []
    lines = [
        f"predictions for {planner.devices} x {planner.hardware.name}: {planner.trainer.steps} steps of {planner.trainer.batch} samples",
        "",
        markdown(rows),
        "",
        markdown(places),
        "",
        *_verdict(best[0], conventional),
    ]
    return "\n".join(lines)


def _figures(name: str, forecast: Forecast | None, planner: Planner) -> list[str]:
    if forecast is None:
        return [name, "does not fit", "", "", "", "", ""]
    planned = forecast.planned
    return [
        name,
        f"{forecast.seconds:.3g} s",
        human_count(forecast.tokens),
        f"{forecast.mfu:.0%}",
        f"{forecast.device_hours:.3g}",
        f"{human_bytes(planned.allocation.memory)} of {human_bytes(planner.problem.memory)}",
        f"{planned.allocation.devices} of {planner.devices}",
    ]


def _places(name: str, forecast: Forecast, planner: Planner) -> list[list[str]]:
    found = []
    for section, choice in forecast.planned.allocation.choices.items():
        key = dict(choice.candidate.key)
        last = choice.first + choice.devices - 1
        found.append(
            [
                name,
                section,
                f"{choice.first}-{last}" if last > choice.first else str(last),
                str(choice.replicas),
                key["axes"],
                ", ".join(map(str, choice.candidate.work.buckets)),
                key["remat"],
                planner.attention(section),
                human_bytes(choice.memory),
                f"{forecast.planned.utilization[section]:.0%}",
            ]
        )
    return found


def verified(found: Mapping[str, tuple[int, int]] | None) -> list[str]:
    """Says how the memory of the best plan was predicted.

    Args:
        found: section -> bytes with one replica, as predicted and as compiled; None where nothing was compiled.
    """
    if found is None:
        return [f"memory of plan 1 is not verified: one replica of each section takes more than {VERIFIED} devices"]
    lines = ["memory of plan 1 with one replica of each section, predicted and as its tasks were compiled (for CPUs: both in float32):"]
    for name, (predicted, compiled) in found.items():
        lines.append(f"  {name}: {human_bytes(predicted)}, compiled {human_bytes(compiled)} ({predicted / compiled - 1:+.1%})")
    return lines


def _verdict(best: Forecast, conventional: dict[str, Forecast | None]) -> list[str]:
    lines = []
    for name, other in conventional.items():
        if other is None:
            lines.append(f"{name}: no such plan fits")
        else:
            lines.append(f"{name}: {other.device_hours / best.device_hours:.2f} times the device-hours of plan 1")
    groups = [" and ".join(group) for group in best.planned.allocation.groups if len(group) > 1]
    if groups:
        lines.append(f"disjoint submeshes lose here: in plan 1, {'; '.join(groups)} take turns on the same devices")
    return lines


def to_json(forecast: Forecast) -> dict[str, Any]:
    """A forecast as JSON values."""
    sections = {}
    for name, choice in forecast.planned.allocation.choices.items():
        sections[name] = {
            "first_device": choice.first,
            "devices": choice.devices,
            "replicas": choice.replicas,
            **dict(choice.candidate.key),
            "buckets": list(choice.candidate.work.buckets),
            "memory": choice.memory,
            "utilization": forecast.planned.utilization[name],
        }
    return {
        "seconds": forecast.seconds,
        "lower_bound_seconds": forecast.planned.lower_bound / 1e9,
        "tokens_per_second": forecast.tokens,
        "mfu": forecast.mfu,
        "device_hours": forecast.device_hours,
        "sections": sections,
    }


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
