"""What the teacher is worth: held-out loss of the teacher, of the distilled student, and of the same student trained alone.

`python -m benchmarks.distillation --seeds 3` runs `configs/kd_tiny.gin` as it is, and again with all weight on the cross-entropy (the
same student, data, steps and optimizer; the teacher still runs but teaches nothing), and prints the table of docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ALONE = ("--gin.kl/Objective.weight=0.0", "--gin.cross_entropy/Objective.weight=1.0")
TEACHER = ("--gin.train.steps=0", "--gin.teacher/Section.weights=teacher_tiny.safetensors")


def evaluations(config: str, flags: Sequence[str]) -> tuple[list[dict[str, float]], float]:
    """Runs a training in a process of its own; returns its held-out evaluations in order, and its wall time in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "maestro_jax.train", f"--gin_file={config}", f"--workdir={run}", *flags], check=True)
        seconds = time.perf_counter() - start
        return [json.loads(line)["heldout"] for line in (run / "evaluations.jsonl").read_text().splitlines()], seconds


def spread(values: Sequence[float]) -> str:
    """Median, and the range where there are several values.

    >>> spread([4.5, 4.4, 4.7])
    '4.500 (4.400 to 4.700)'
    """
    middle = f"{statistics.median(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    [[teacher], _] = evaluations("teacher_tiny.gin", TEACHER)
    rows = [("teacher", "-", f"{teacher['teacher/cross_entropy']:.3f}", f"{teacher['teacher/accuracy']:.3f}")]
    seconds = []
    for name, flags in (("student, distilled", ()), ("student, trained alone", ALONE)):
        runs = [evaluations("kd_tiny.gin", (*flags, f"--gin.train.seed={seed}")) for seed in range(args.seeds)]
        seconds += [taken for _, taken in runs]
        found = [values for values, _ in runs]
        if name == "student, distilled":
            rows.append(("student, before", *_row([f[0] for f in found])))
        rows.append((name, *_row([f[-1] for f in found])))
    print("\n| model | KL to the teacher | cross-entropy | next token right |\n| --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(f"\n{len(seconds)} runs of the main job took {spread(seconds)} s each.")


def _row(values: Sequence[dict[str, float]]) -> tuple[str, str, str]:
    names = ("student/kl", "student/cross_entropy", "student/accuracy")
    kl, cross_entropy, correct = (spread([v[name] for v in values]) for name in names)
    return kl, cross_entropy, correct


if __name__ == "__main__":
    main()
