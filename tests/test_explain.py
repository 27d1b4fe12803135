"""The command that explains a run: what it reads, what it prints, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from workload_support import raw_file

from maestro_jax.explain import main
from maestro_jax.record import Record
from maestro_jax.schedules import InOrder, Workload
from maestro_jax.schedules.queues import execute, perturbed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records of steps 10 and 20 to 22."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "timelines").mkdir()
    for first, name in ((10, "mllm_tiny_batch"), (20, "kd_three_steps")):
        workload = Workload.from_json(raw_file(name))
        schedule = InOrder().schedule(workload)
        made = execute(workload, schedule, perturbed(schedule, 0.1))
        record = Record(first_step=first, workload=workload, scheduled=schedule, measured=made.measured, issued=made.issued, nominal=True)
        (folder / "timelines" / f"step-{first:06}.json").write_text(json.dumps(record.to_json()))
    return folder


@pytest.mark.quick
def test_programs_get_numbers_that_add_up(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--step=10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    replicas = {name: s["replicas"] for name, s in raw_file("mllm_tiny_batch")["sections"].items()}
    assert {name: sum(spent.values()) for name, spent in found["spent"].items()} == {n: r * found["measured"] for n, r in replicas.items()}
    assert found["bounding"] in replicas
    assert found["advice"]["policy"] == "in_order"
    changes = found["advice"]["changes"]
    assert "schedule by wavefront instead of in_order" in [change["change"] for change in changes if change["gain"] > 0]
    assert all(change["makespan"] + change["gain"] == found["advice"]["makespan"] for change in changes)


def test_people_read_of_the_last_window_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("steps 20 to 22, which are scheduled together\nmeasured ")
    assert "\npredicted " in text
    assert "| predicted to help" in text


def test_any_step_of_a_window_names_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = []
    for step in ("20", "22"):
        assert main([str(run), f"--step={step}", "--json"]) == 0
        first.append(json.loads(capsys.readouterr().out)["first_step"])
    assert first == [20, 20]


def test_mistakes_are_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "timelines").mkdir()
    (tmp_path / "timelines" / "step-000001.json").write_text('{"first_step": 1}')
    for arguments, error in [
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(run.parent)], "train.timelines = (10,)"),
        ([str(run), "--step=15"], "one of 10, 20 to 22"),
        ([str(tmp_path)], "cannot be read"),
    ]:
        assert main(arguments) == 2
        told = capsys.readouterr().err
        assert error in told
        assert "docs/errors.md#no-records" in told


def test_it_loads_no_jax(run: Path) -> None:
    code = f"import sys; from maestro_jax.explain import main; main([{str(run)!r}, '--step=10']); sys.exit('jax' in sys.modules)"
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120).returncode == 0
