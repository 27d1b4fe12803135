"""`python -m benchmarks.planning`: how long planning takes, and what plans lose when costs are wrong; needs no accelerator.

With `--regret N`, for N seeds: everything that costs consist of is off by up to 30 % at random, a plan is chosen with these costs, and its
step by the true costs is compared with that of the plan that is chosen with true costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from maestro_jax import configurables
from maestro_jax.config import load
from maestro_jax.planner import Planner
from maestro_jax.runtime.hardware import HARDWARE
from maestro_jax.schedules.planning import plan, with_errors
from maestro_jax.simulation import markdown

CASES = (
    ("kd_qwen3_8b_to_1b7", 8, 64),
    ("kd_qwen3_8b_to_1b7", 64, 64),
    ("qwen2_5_vl_7b", 64, 256),
    ("qwen2_5_vl_7b", 1024, 4096),
    ("omni_long_tail", 64, 256),
    ("omni_long_tail", 1024, 4096),
)
"""Config, devices, samples of a global batch."""

SMALL = (("kd_qwen3_8b_to_1b7.gin", 8), ("qwen2_5_vl_7b.gin", 8), ("omni_long_tail.gin", 8))
"""Config, devices."""
SHARE = 0.3
"""By which costs are wrong, at most."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=int, default=1024, help="most devices; default 1024")
    parser.add_argument("--regret", type=int, metavar="N", help="measures regret instead, for this many seeds")
    args = parser.parse_args(argv)
    print("\n" + markdown(_speed(args.most) if args.regret is None else _regrets(args.regret)))
    return 0


def _speed(most: int) -> list[list[str]]:
    rows = [["config", "sections", "devices", "batch", "candidates", "s to cost them", "s to search", "step over its lower bound"]]
    for config, devices, batch in (case for case in CASES if case[1] <= most):
        trainer: configurables.trainer.Trainer = load(f"{config}.gin", [f"train.batch={batch}"], root="train").build()
        begin = time.perf_counter()
        planner = Planner(trainer, HARDWARE["h200"], devices)
        costed = time.perf_counter()
        best = planner.plans().best[0]
        searched = time.perf_counter()
        count = sum(map(len, planner.problem.candidates.values()))
        figures = [str(count), f"{costed - begin:.1f}", f"{searched - costed:.1f}", f"{best.step / best.lower_bound:.3f}"]
        rows.append([config, str(len(planner.problem.candidates)), str(devices), str(batch), *figures])
        print(f"{config} for {devices} devices: {searched - begin:.1f} s", flush=True)
    return rows


def _regrets(seeds: int) -> list[list[str]]:
    rows = [["config", "devices", "costs are wrong", "seeds", "mean", "95th percentile", "largest"]]
    for config, devices in SMALL:
        trainer: configurables.trainer.Trainer = load(config, [], root="train").build()
        planner = Planner(trainer, HARDWARE["h200"], devices)
        best = planner.plans(1).best[0]
        for apart in (False, True):
            found = []
            for seed in range(seeds):
                chosen = plan(with_errors(planner.problem, SHARE, seed, apart=apart), wanted=1).best[0].allocation
                found.append(planner.regret(chosen, best))
                print(f"{config} {seed}: {found[-1]:+.1%}", flush=True)
            figures = [f"{value:.1%}" for value in (np.mean(found), np.quantile(found, 0.95), max(found))]
            rows.append([config, str(devices), "each candidate on its own" if apart else "each section's together", str(seeds), *figures])
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
