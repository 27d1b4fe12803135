"""`python -m benchmarks.planning`: how long planning takes, for shipped configs and up to 1,024 devices; needs no accelerator."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from maestro_jax import configurables
from maestro_jax.config import load
from maestro_jax.planner import Planner
from maestro_jax.runtime.hardware import HARDWARE
from maestro_jax.simulation import markdown

CASES = (
    ("kd_qwen3_8b_to_1b7", 8, 64),
    ("kd_qwen3_8b_to_1b7", 64, 256),
    ("qwen2_5_vl_7b", 64, 256),
    ("qwen2_5_vl_7b", 1024, 4096),
    ("omni_long_tail", 64, 256),
    ("omni_long_tail", 1024, 4096),
)
"""Config, devices, samples of a global batch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--most", type=int, default=1024, help="most devices; default 1024")
    most = parser.parse_args(argv).most
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
    print("\n" + markdown(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
