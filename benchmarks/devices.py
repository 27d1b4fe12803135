"""What the devices of one machine make of the two models of `benchmarks.pinned`: work, host, transfers, and plan against measurement.

`python -m benchmarks.devices` takes all GPUs of the machine, half of them for each section, and one GPU for both sections in turns. Without
a GPU it takes as many CPU devices as `--devices` says; `--quick` makes everything tiny, to see whether it works.

*Model FLOPs* are two for each multiplication of the programs that ran, without what they computed on padding.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maestro_jax import Trainer
from maestro_jax.graph import SectionGraph
from maestro_jax.meshes import Parcel, Wire, move, put_whole
from maestro_jax.record import Record
from maestro_jax.run import Run
from maestro_jax.runtime.costs import counted_work
from maestro_jax.schedules import IN_FLIGHT, fitted_call
from maestro_jax.trainer import make_cpu_devices

from .pinned.cases import CLIP_NORM, FULL, QUICK, SEED, Case, Sizes, case_of, optimizer

LARGE = Sizes(
    batch=256,
    embed=2048,
    vision_layers=24,
    llm_layers=16,
    teacher_embed=4096,
    teacher_layers=16,
    student_layers=16,
    vocab=32768,
    row=2048,
    rows=(1, 2, 4),
    sides=(8, 12, 16, 20, 24, 28, 32),
    most_images=6,
    window=3,
)
"""For GPUs, in bfloat16."""

WARM_UP, TRANSFERS = 2, 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description="Measures both cases on the devices of this machine.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether everything works")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices, where there is no GPU (2)")
    parser.add_argument("--cases", default="multimodal,distillation", help="which, separated by commas")
    args = parser.parse_args(argv)
    make_cpu_devices(args.devices)
    on_gpu = jax.devices()[0].platform == "gpu"
    sizes = QUICK if args.quick else LARGE if on_gpu else FULL
    print(f"{len(jax.devices())} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {'bfloat16' if on_gpu else 'float32'}")
    for name in args.cases.split(","):
        case = case_of(name, sizes=sizes)
        run = started(case, on_gpu)
        print(f"\n## {name}\n\n{report(case, run, recorded(case, run))}", flush=True)
    return 0


def started(case: Case, on_gpu: bool) -> Run:
    """Compiles a case for all devices, in equal parts; costs are measured."""
    replicas = max(1, len(jax.devices()) // len(case.sections))
    fields: dict[str, Any] = {"replicas": replicas, "dtype": "bfloat16" if on_gpu else "float32"}
    graph = SectionGraph(sections=tuple(dataclasses.replace(section, **fields) for section in case.sections))
    return Trainer(
        graph=graph,
        data=case.dataset,
        steps=(WARM_UP + 1) * case.window,
        batch=case.batch,
        seed=SEED,
        optimizer=optimizer(),
        clip_norm=CLIP_NORM,
        costs="measured",
        run_ahead=case.window,
        evaluate_every=case.window,
        evaluate_batches=0,
        checkpoint_every=0,
        timelines=(),
        metrics=None,
    ).start()


def recorded(case: Case, run: Run) -> Record:
    """Trains some windows, and one more that is measured."""
    for result in run.steps(lambda: run.step >= WARM_UP * case.window):
        result.report.wait()
    return run.record()


def report(case: Case, run: Run, record: Record) -> str:
    """Writes what was measured."""
    tokens, measured = case.tokens, record.measured.makespan / 1e9
    planned = record.scheduled.makespan / 1e9
    call = fitted_call(record.measured, record.issued, IN_FLIGHT) / 1e3
    seconds = f"measured {measured:.3f} s, planned {planned:.3f} s ({measured / planned - 1:+.1%})"
    lines = [
        *(
            "| section | devices | tasks | busy | padding | model TFLOP/s while busy, each device |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ),
        *(section_row(run, record, section.name) for section in case.sections),
        "",
        f"- {case.window} step{'s' * (case.window > 1)}: {seconds}; {tokens / measured:,.0f} tokens/s",
        f"- host: {call:,.0f} microseconds for each task",
        *(f"- transfers over {label}: {rate}" for label, rate in transfer_rates(run).items()),
    ]
    return "\n".join(lines)


def section_row(run: Run, record: Record, name: str) -> str:
    """What a section did in the recorded window."""
    plan, counted = run.engine.plan.sections[name], counted_work(run.engine.plan, name)
    work, busy, units, scheduled, count = 0.0, 0, 0, 0, 0
    for task, items in zip(record.measured.tasks, record.units, strict=True):
        if task.section == name and task.kind != "update":
            forward, backward = counted[task.bucket]
            multiplications = (task.kind != "backward") * forward.most + (task.kind != "forward") * backward.most
            work += 2 * multiplications * items / task.bucket
            busy, units, scheduled, count = busy + task.end - task.start, units + items, scheduled + task.bucket, count + 1
    devices = plan.submesh.mesh.devices.size
    share = busy / (record.measured.makespan * plan.submesh.replicas)
    rate = work / (busy / 1e9) / 1e12 / len(plan.submesh.replica_devices(0))
    return f"| {name} | {devices} | {count} | {share:.0%} | {1 - units / scheduled:.0%} | {rate:.3g} |"


def transfer_rates(run: Run) -> dict[str, str]:
    """Edge -> gigabytes a second of its first wire, several slots at a time."""
    found = {}
    for label, edge in run.engine.plan.edges.items():
        wire: Wire = next(iter(edge.wires.values()))
        if set(wire.source.devices.flat) == set(wire.target.devices.flat):
            found[label] = "none, both ends are on the same devices"
            continue
        rows = np.zeros((wire.rows, *wire.row.shape), wire.row.dtype)
        shapes = wire.shapes(wire.source)
        slot = tuple(put_whole(part, s.sharding) for part, s in zip(np.split(rows, len(shapes)), shapes, strict=True))
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready(move([Parcel(wire, slot)] * TRANSFERS, run.engine.plan.group.transport, label))
            seconds.append(time.perf_counter() - begin)
        found[label] = f"{TRANSFERS * rows.nbytes / statistics.median(seconds) / 1e9:.3g} GB/s in slots of {rows.nbytes / 1e6:.3g} MB"
    return found


if __name__ == "__main__":
    raise SystemExit(main())
