"""The examples run as a user runs them, and do what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent


def test_a_linen_encoder_and_an_nnx_decoder_train_together_exactly(tmp_path: Path) -> None:
    settings = {"PYTHONPATH": str(ROOT), "PJRT_NPROC": "16", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | settings
    command = [sys.executable, str(ROOT / "examples" / "linen_and_nnx.py"), "--steps", "20", "--weights", "own"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^gradients of the plan and of one program on \d+ samples: equal", done.stdout, flags=re.MULTILINE)
    compared = re.findall(r"^(decoder|encoder) +\d+ .* (\S+)$", done.stdout, flags=re.MULTILINE)
    assert sorted(compared) == [("decoder", "ok"), ("encoder", "ok")]
    losses = [float(found) for found in re.findall(r"^step \d+  loss ([\d.]+)", done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 1
    [accuracy] = re.findall(r"^held-out accuracy ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    assert float(accuracy) > 0.5  # a guess is right once in ten times
    assert "Dense_0/kernel" in load_file(tmp_path / "own" / "encoder.safetensors")
    assert "attention/query/kernel" in load_file(tmp_path / "own" / "decoder.safetensors")
