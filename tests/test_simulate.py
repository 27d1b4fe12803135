"""The simulator's command: figures, tables, files and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from workload_support import FOLDER, JUDGE, raw_file

from maestro_jax.simulate import main
from maestro_jax.simulation import POLICIES

TINY = str(FOLDER / "workloads" / "mllm_tiny_batch.json")


@pytest.mark.quick
@pytest.mark.parametrize("policy", POLICIES)
def test_figures_are_those_of_the_judge(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "schedule.json"
    assert main(["--workload", TINY, "--policy", policy, "--schedule_out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    judged = JUDGE.check(raw_file("mllm_tiny_batch"), json.loads(out.read_text()))
    assert (found["makespan"], found["lower_bound"]) == (judged["makespan"], judged["lower_bound"])
    assert found["ratio"] == pytest.approx(judged["ratio"])
    assert found["utilization"] == pytest.approx(judged["utilization"])
    assert sum(found["gap"].values()) == found["makespan"] - found["lower_bound"]
    assert found["policy"] == policy
    assert found["scheduling_seconds"] > 0


def test_a_table_compares_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload", TINY, "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(POLICIES)
    ratios = [float(line.split("|")[3]) for line in lines[2:]]
    assert ratios[0] == min(ratios)
    assert len({len(line) for line in lines}) == 1


def test_people_read_every_part_of_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload", TINY]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("makespan", "lower bound", "ratio", "utilization", "vision", "llm", "scheduled in"))
    assert all(f"\n  {part} " in text for part in ("fill", "drain", "padding", "imbalance", "memory", "update"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--workload", "nowhere.json"], "the workload 'nowhere.json' cannot be read"),
        (["--workload", TINY, "--policy", "wavefrnt"], "did you mean 'wavefront'"),
        (["--workload", TINY, "--schedule_out", "nowhere/s.json"], "cannot be written to 'nowhere/s.json'"),
        (["--workload", __file__], "cannot be read"),
    ],
)
def test_mistakes_are_told(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(arguments) == 2
    assert error in capsys.readouterr().err


def test_it_loads_no_jax() -> None:
    code = f"import sys; from maestro_jax.simulate import main; main(['--workload', {TINY!r}]); sys.exit('jax' in sys.modules)"
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60).returncode == 0
