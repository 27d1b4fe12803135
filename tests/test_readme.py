"""What the README shows works as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from maestro_jax.train import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_script_with_a_users_own_modules_runs_and_learns(tmp_path: Path) -> None:
    [script] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(script.splitlines()) <= 45
    (tmp_path / "own.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"'loss': ([\d.]+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    assert "'student/distance'" in done.stdout.splitlines()[-1]


def test_every_command_line_of_the_readme_is_understood() -> None:
    commands = [line.split("  #")[0] for line in README.splitlines() if "python -m maestro_jax.train" in line and "&&" not in line]
    assert len(commands) >= 4
    for command in commands:
        flags = shlex.split(command)[3:]
        flags += [] if "--help" in flags or "--dry_run" in flags else ["--dry_run"]
        assert main(flags) == 0, command


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
