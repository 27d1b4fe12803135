"""`python -m benchmarks.testbed`: how well a plan's step time is predicted, on two processes that are pinned to a core each.

The tasks of a config are measured on both, as `maestro_jax.profile` does; `maestro_jax.plan` chooses a plan for two devices by these
figures; the plan is trained, and what its steps take is compared with what was predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from maestro_jax import configurables
from maestro_jax.config import load
from maestro_jax.planner import Planner
from maestro_jax.runtime.hardware import HARDWARE
from maestro_jax.runtime.measured import Measurements
from maestro_jax.schedules.planning import Planned, plan
from maestro_jax.simulation import markdown
from maestro_jax.trainer import make_cpu_devices

from .pinned.conductor import Measured, Processes
from .testbed_worker import STEPS

CONFIGS = ("kd_tiny.gin", "vlm_frozen_vision.gin")
ROUNDS = 5
QUIET = (
    f"train.evaluate_every={STEPS}",
    "train.evaluate_batches=0",
    "train.checkpoint_every=0",
    "train.metrics=None",
    "train.costs='measured'",
    "train.policy=@Wavefront()",
    "Wavefront.effort=0",
)
"""Nothing is evaluated; the run waits at the end of each window, where the clock is stopped. Both cores compute, so little is searched."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.testbed", description="Compares predicted with measured steps of plans.")
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), help="config files")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"windows of {STEPS} steps that are trained; default {ROUNDS}")
    parser.add_argument(
        "--split", action="store_true", help="also plans whose sections or replicas span both processes, where exchange counts"
    )
    args = parser.parse_args(argv)
    make_cpu_devices(2)
    rows = [["config", "plan", "predicted step", "measured step (range)", "predicted is off by"]]
    with tempfile.TemporaryDirectory(prefix="maestro_jax-testbed-") as folder:
        for config in args.configs:
            rows.append(_compared(config, args.rounds, args.split, Path(folder)))
            print(f"{config}: {rows[-1][-1]}", flush=True)
    print("\n" + markdown(rows))
    return 0


def _compared(config: str, rounds: int, split: bool, logs: Path) -> list[str]:
    steps = f"train.steps={STEPS * (rounds + 1)}"
    base = [steps, *QUIET]
    trainer: configurables.trainer.Trainer = load(config, base, root="train").build()
    alone = [f"{s.name}/Section.{field}" for s in trainer.graph.sections for field in ("replicas = 1", "axes = {}")]
    measured = Measurements.from_json(_windows(config, [*base, *alone], "profile", 1, logs)[0].facts["measured"])
    planner = Planner(trainer, measured.corrected(HARDWARE["cpu"]), 2, measured.sections)
    problem = planner.problem
    if not split:
        kept = {name: tuple(c for c in candidates if c.devices == 1) for name, candidates in problem.candidates.items()}
        problem = dataclasses.replace(problem, candidates=kept)
    found = plan(problem, wanted=1)
    best = found.best[0] if split or found.disjoint is None else found.disjoint
    taken = [each.seconds / STEPS for each in _windows(config, [*base, *planner.bindings(best)], "train", rounds, logs)]
    middle, predicted = statistics.median(taken), best.step / 1e9
    spread = f"{1000 * middle:.1f} ms ({1000 * min(taken):.1f} to {1000 * max(taken):.1f})"
    return [config, _layout(best), f"{1000 * predicted:.1f} ms", spread, f"{predicted / middle - 1:+.1%}"]


def _windows(config: str, overrides: Sequence[str], way: str, rounds: int, logs: Path) -> list[Measured]:
    spec = {"case": Path(config).stem, "way": way, "gin_file": config, "overrides": list(overrides), "quick": False}
    with Processes(spec, logs, module="benchmarks.testbed_worker") as processes:
        processes.ready()
        return [processes.window() for _ in range(rounds)]


def _layout(planned: Planned) -> str:
    parts = []
    for name, choice in planned.allocation.choices.items():
        where = f"{choice.first}-{choice.first + choice.devices - 1}" if choice.devices > 1 else str(choice.first)
        parts.append(f"{name} {choice.replicas} x {dict(choice.candidate.key)['axes']} on {where}")
    return ", ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
