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
        (["--workload", TINY, "--noise=-1"], "--noise is wrong"),
        (["--workload", TINY, "--noise=nan"], "a share of at least 0"),
        (["--workload", TINY, "--noise=0", "--queue", "8", "0"], "--queue is wrong"),
        (["--workload", TINY, "--noise=0", "--call=-1"], "--call is wrong"),
    ],
)
def test_mistakes_are_told(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(arguments) == 2
    assert error in capsys.readouterr().err


def test_it_loads_no_jax() -> None:
    code = f"import sys; from maestro_jax.simulate import main; main(['--workload', {TINY!r}]); sys.exit('jax' in sys.modules)"
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60).returncode == 0


def test_noise_compares_both_rules_at_every_depth(capsys: pytest.CaptureFixture[str]) -> None:
    omni = str(FOLDER / "workloads" / "omni_three_encoders.json")
    arguments = ["--workload", omni, "--policy", "in_order", "--noise=0.3", "--queue", "1", "8"]
    assert main([*arguments, "--json"]) == 0
    found = {(row["rule"], row["queue"]): row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == [("in order", 1), ("in order", 8), ("adaptive", 1), ("adaptive", 8)]
    assert found["adaptive", 8]["makespan"] < found["in order", 8]["makespan"] < found["in order", 1]["makespan"]
    assert all(row["lowest"] < row["makespan"] < row["highest"] for row in found.values())
    assert found["in order", 8]["stalls"] > 0
    assert found["adaptive", 8]["stalls"] == 0
    assert main(["--workload", TINY, *arguments[2:]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [f"{rule}, queue of {queue}" for rule, queue in found]
    assert len({len(line) for line in lines}) == 1


def test_without_noise_dispatch_takes_what_was_scheduled_and_the_host_s_time(capsys: pytest.CaptureFixture[str]) -> None:
    makespans = []
    for call in ("0", "1000000"):
        assert main(["--workload", TINY, "--noise=0", "--call", call, "--json"]) == 0
        makespans.append([row["makespan"] for row in json.loads(capsys.readouterr().out)])
    assert main(["--workload", TINY, "--json"]) == 0
    assert makespans[0] == [json.loads(capsys.readouterr().out)["makespan"]] * 2
    assert min(makespans[1]) > max(makespans[0])
