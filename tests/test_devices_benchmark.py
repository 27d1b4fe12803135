"""The benchmark of a machine's devices runs, and reports every section, transfer and prediction."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_every_section_and_edge_is_reported(devices: int) -> None:
    command = [sys.executable, "-m", "benchmarks.devices", "--quick", f"--devices={devices}", "--cases=multimodal"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "16"}
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for section in ("vision", "llm"):
        [row] = re.findall(rf"^\| {section} \| (.*) \|$", done.stdout, re.M)
        count, tasks, busy, padding, rate = (cell.strip() for cell in row.split("|"))
        assert int(count) == max(1, devices // 2)
        assert int(tasks) > 0
        assert busy != "0%"
        assert padding.endswith("%")
        assert float(rate) > 0
    assert re.search(r"measured \d+\.\d+ s, planned \d+\.\d+ s", done.stdout)
    assert re.search(r"host: [\d,]+ microseconds", done.stdout)
    assert ("same devices" in done.stdout) == (devices == 1)
    assert ("GB/s" in done.stdout) == (devices > 1)
