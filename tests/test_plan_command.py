"""`python -m maestro_jax.plan`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maestro_jax.config import load
from maestro_jax.plan import main
from maestro_jax.planner import Planner
from maestro_jax.profile import main as profile
from maestro_jax.runtime.hardware import HARDWARE
from maestro_jax.train import main as train
from maestro_jax.trainer import Trainer

KD = ["--gin_file=kd_tiny.gin", "--hardware=cpu"]


def test_a_plan_is_written_that_trains_with_the_layout_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.gin"
    assert main([*KD, "--devices=4", "--json", f"--write={out}", "--gin.steps=30"]) == 0
    told = json.loads(capsys.readouterr().out.partition("\n" + str(out))[0])
    made: Trainer = load(str(out), [], root="train").build()
    assert made.steps == 30
    for section in made.graph.sections:
        wanted = told["plans"][0]["sections"][section.name]
        assert section.replicas == wanted["replicas"]
        assert list(section.buckets) == wanted["buckets"]
    plan = made.setup().plan
    assert len({d for s in plan.sections.values() for d in s.submesh.mesh.devices.flat}) <= 4


def test_the_tables_name_plans_and_both_conventional_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*KD, "--devices=4", "--top=2"]) == 0
    out = capsys.readouterr().out
    assert "| one layout" in out
    assert "| time-shared" in out
    assert "| disjoint" in out
    assert out.count("times the device-hours of plan 1") == 3
    assert "| 2 " in out
    assert "| 3 " not in out.partition("\n\n")[2].partition("\n\n")[0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gin_file=kd_tiny.gin", "--devices=4", "--hardware=h300"], "unknown-hardware"),
        ([*KD, "--devices=0"], "plan-infeasible"),
        (["--gin_file=kd_qwen3_8b_to_1b7.gin", "--devices=2", "--hardware=cpu"], "plan-infeasible"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("config", "devices"), [("kd_tiny.gin", 4), ("omni_tiny.gin", 8)])
def test_memory_of_the_best_plan_is_near_that_of_its_compiled_tasks(config: str, devices: int) -> None:
    trainer: Trainer = load(config, [], root="train").build()
    planner = Planner(trainer, HARDWARE["h200"], devices)
    found = planner.compiled(planner.plans(1).best[0])
    assert found is not None
    for name, (predicted, compiled) in found.items():
        # A tenth is what is aimed at; kd_tiny's student is beyond it: docs/planning.md.
        assert 0.98 * compiled <= predicted <= 1.15 * compiled, name


def test_a_workload_file_stands_for_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumped = tmp_path / "step.json"
    assert train(["--gin_file=kd_tiny.gin", f"--dump_workload={dumped}"]) == 0
    assert main([*KD, "--devices=2", "--top=1", f"--workload={dumped}"]) == 0
    dumped.write_text(dumped.read_text().replace('"student"', '"pupil"'))
    assert main([*KD, "--devices=2", f"--workload={dumped}"]) == 2
    assert "the sections student, teacher" in capsys.readouterr().err


def test_measured_tasks_take_the_place_of_predicted_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "measured.json"
    assert profile(["--gin_file=kd_tiny.gin", f"--out={out}", "--steps=1"]) == 0
    assert set(json.loads(out.read_text())["sections"]) == {"teacher", "student"}
    assert main(["--gin_file=kd_tiny.gin", "--devices=2", "--top=1", f"--hardware={out}"]) == 0
    assert "regret: " in capsys.readouterr().out
    out.write_text("{}")
    assert main(["--gin_file=kd_tiny.gin", "--devices=2", f"--hardware={out}"]) == 2


def test_a_large_job_is_planned_without_its_devices() -> None:
    trainer: Trainer = load("kd_qwen3_8b_to_1b7.gin", [], root="train").build()
    planner = Planner(trainer, HARDWARE["h200"], 8)
    plans = planner.plans(3)
    best = planner.forecast(plans.best[0])
    assert 0.1 < best.mfu < 0.6
    assert plans.best[0].allocation.memory <= planner.problem.memory
