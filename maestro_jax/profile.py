"""`python -m maestro_jax.profile --gin_file=FILE`: measures the tasks of a config on the devices at hand and writes `measured.json`.

Nothing is trained: the tasks of a few steps run one at a time, each waited for. `maestro_jax.plan --hardware=measured.json` takes the
figures in the place of predicted ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from . import configurables
from .command_line import split_arguments
from .config import load
from .errors import ConfigError, MaestroError
from .files import write_output
from .meshes import put_whole
from .run import Run
from .runtime.hardware import HARDWARE
from .runtime.measured import MeasuredSection, Measurements
from .simulation import markdown, readable_time
from .terminal import Terminal

SIZES = 2**12, 2**24
"""Bytes of the all-gathers that are measured."""
ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 for a mistake of the user's."""
    try:
        rest, overrides = split_arguments(sys.argv[1:] if argv is None else argv)
        args = make_parser().parse_args(rest)
        trainer: configurables.trainer.Trainer = load(args.gin_file, overrides, root="train").build()
        terminal = Terminal(sys.stdout)
        run = trainer.start(progress=terminal.compiling)
        terminal.finish([])
        found = measured(run, args.steps)
        write_output(args.out, json.dumps(found.to_json(), indent=2) + "\n", what="measurements", flag="--out", kind=ConfigError)
        print(describe(found))
        print(f"{args.out}: python -m maestro_jax.plan --gin_file={args.gin_file} --devices=N --hardware={args.out}")
        return 0
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def measured(run: Run, steps: int) -> Measurements:
    """Measures the tasks of a run.

    Args:
        run: that has been started.
        steps: how many are measured, besides one to warm up.
    """
    run.measure_costs(steps + 1)
    device = jax.devices()[0]
    sections = {}
    for name, section in run.engine.plan.sections.items():
        costs = run.costs.sections[name]
        sections[name] = MeasuredSection(
            axes={axis: size for axis, size in section.section.axes.items() if size > 1},
            buckets=section.section.buckets,
            row_length=section.section.row_length or section.section.buckets[-1],
            replicas=section.submesh.replicas,
            forward=costs.forward,
            backward=costs.backward,
            update=costs.update,
        )
    link, latency = exchange() if jax.device_count() > 1 else (None, None)
    kind = device.device_kind
    return Measurements(hardware=hardware_of(kind), device=kind, sections=sections, link=link, latency=latency)


def exchange() -> tuple[float, int]:
    """Measures all-gathers among all devices of all processes, which all call this.

    Returns:
        Bytes per second that a device receives from others, and nanoseconds of a collective however small.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("device", None))
    gather = jax.jit(lambda array: array + 0.0, out_shardings=whole)
    taken = []
    for size in SIZES:
        array = put_whole(np.zeros((jax.device_count(), size // 4 // jax.device_count()), np.float32), split)
        gather(array).block_until_ready()
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter_ns()
            gather(array).block_until_ready()
            times.append(time.perf_counter_ns() - begin)
        taken.append(statistics.median(times))
    small, large = taken
    received = (SIZES[1] - SIZES[0]) * (1 - 1 / jax.device_count())
    return 1e9 * received / max(large - small, 1), int(small)


def hardware_of(kind: str) -> str:
    """The name in the table of what JAX calls a device.

    >>> hardware_of("NVIDIA H200"), hardware_of("cpu"), hardware_of("a new one")
    ('h200', 'cpu', 'cpu')
    """
    return next((name for name in HARDWARE if name in kind.lower()), "cpu")


def describe(found: Measurements) -> str:
    """A table of what the largest micro-batch of each section takes."""
    rows = [["section", "micro-batch", "forward", "backward", "update"]]
    for name, each in found.sections.items():
        bucket = each.buckets[-1]
        items = [each.row_length] * (bucket // each.row_length)
        times = [readable_time(cost.of(bucket, items)) for cost in (each.forward, each.backward)]
        rows.append([name, str(bucket), *times, readable_time(each.update)])
    lines = [f"measured on {found.device}:", "", markdown(rows)]
    if found.link is not None and found.latency is not None:
        lines.append(f"between devices: {found.link / 1e9:.3g} GB/s, {readable_time(found.latency)} a collective")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    parser = argparse.ArgumentParser(prog="python -m maestro_jax.profile", description="Measures the tasks of a config.")
    parser.add_argument("--gin_file", required=True, help="config file; a name without a folder is also found among the shipped ones")
    parser.add_argument("--out", default="measured.json", metavar="FILE", help="what is written; default measured.json")
    parser.add_argument("--steps", type=int, default=3, help="steps that are measured; default 3")
    return parser


if __name__ == "__main__":
    sys.exit(main())
