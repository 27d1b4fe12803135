"""A run folder holds one run, loses nothing, lets one process in, and writes whole files and valid JSON."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from record_support import record

from maestro_jax.errors import CheckpointError
from maestro_jax.record import read_records
from maestro_jax.run_folder import RunFolder, default_folder

ROOT = Path(__file__).parent.parent


def files(path: Path) -> dict[str, str]:
    """Every file below a folder with its text, but for the lock."""
    found = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock"]
    return {file.relative_to(path).as_posix(): file.read_text() for file in found}


def finished(path: Path, text: str = "steps = 1\n") -> None:
    """Leaves a run with a metrics line, a config and weights."""
    folder = RunFolder(path, restart=True)
    folder.write_config(text)
    folder.append({"step": 1})
    folder.path_of("weights").mkdir()
    (folder.path_of("weights") / "student.safetensors").write_text(text)
    folder.close()


def another_process(path: Path, then: str = "") -> subprocess.CompletedProcess[str]:
    """Opens the folder in a process of its own, and runs a line there."""
    # Without the rest of the package, which takes seconds to import.
    program = f"from maestro_jax.run_folder import RunFolder\nfolder = RunFolder({str(path)!r})\n{then}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)


def test_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "runs" / "one"))
    assert folder.path.is_dir()
    assert folder.path_of("weights") == tmp_path / "runs" / "one" / "weights"


def test_files_have_their_names_and_nothing_temporary_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config("train.steps = 5\n")
    folder.write_plan("plan: ü\n")
    folder.write_env({})
    folder.append({"step": 1})
    assert set(files(tmp_path)) == {"config.gin", "env.json", "metrics.jsonl", "plan.txt"}
    assert folder.path_of("plan.txt").read_text(encoding="utf-8") == "plan: ü\n"


def test_failed_write_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write_plan("whole")

    def full(self: Path, data: str, encoding: str) -> int:
        with self.open("w") as file:
            file.write(data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match="No space left"):
        folder.write_plan("another")
    monkeypatch.undo()
    assert files(tmp_path) == {"metrics.jsonl": "", "plan.txt": "whole"}


def test_metrics_are_a_json_object_a_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.append({"step": step, "objectives": {"student/kl": 0.5}})
        lines = folder.path_of("metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))


def test_evaluations_have_a_file_of_their_own(tmp_path: Path) -> None:
    RunFolder(tmp_path).append({"step": 1}, name="evaluations.jsonl")
    assert files(tmp_path) == {"evaluations.jsonl": '{"step": 1}\n', "metrics.jsonl": ""}


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        (np.float32(0.5), 0.5),
        (np.float64(math.nan), None),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array([1.0, math.inf]), [1.0, None]),
        (jnp.float32(0.25), 0.25),
        (jnp.bfloat16(0.25), 0.25),
        (jnp.uint32(7), 7),
        (True, True),
        (None, None),
        ({"a": {1: (math.nan, np.int32(3))}}, {"a": {"1": [None, 3]}}),
        (Path("a/b"), "a/b"),
    ],
)
def test_record_becomes_valid_json(value: Any, stored: Any, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append({"value": value})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(folder.path_of("metrics.jsonl").read_text(), parse_constant=refuse)["value"]
    assert found == stored
    assert type(found) is type(stored)


def test_environment_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_flag")
    folder = RunFolder(tmp_path)
    folder.write_env({"corpus": "sha256:abc", "processes": np.int64(3)})
    env = json.loads(folder.path_of("env.json").read_text())
    assert env["versions"]["jax"] == jax.__version__
    assert set(env["versions"]) == {"maestro_jax", "jax", "jaxlib", "flax", "optax", "safetensors", "numpy"}
    assert env["devices"] == {"count": jax.device_count(), "kinds": {"cpu": jax.device_count()}}
    assert (env["xla_flags"], env["corpus"], env["processes"]) == ("--xla_flag", "sha256:abc", 3)


def test_commit_is_recorded_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\necho 0123abcd\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    folder = RunFolder(tmp_path / "run")
    folder.write_env({})
    assert json.loads(folder.path_of("env.json").read_text())["commits"] == {"maestro_jax": "0123abcd", "working_folder": "0123abcd"}


def test_environment_needs_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    folder.write_env({})
    assert json.loads(folder.path_of("env.json").read_text())["commits"] == {"maestro_jax": None, "working_folder": None}


@pytest.mark.quick
def test_a_run_that_lies_in_the_folder_is_kept_for_going_on(tmp_path: Path) -> None:
    assert not RunFolder(tmp_path / "new").holds_run
    finished(tmp_path / "run")
    before = files(tmp_path)
    folder = RunFolder(tmp_path / "run")
    assert folder.holds_run
    assert folder.config() == "steps = 1\n"
    assert files(tmp_path) == before


def test_going_on_takes_back_what_came_after_the_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config("same")
    for step in (1, 2, 3):
        folder.append({"step": step})
        folder.append({"step": step, "heldout": {}}, name="evaluations.jsonl")
    folder.go_on(2, "same")
    found = files(tmp_path)
    assert found["metrics.jsonl"] == '{"step": 1}\n{"step": 2}\n'
    assert found["evaluations.jsonl"] == '{"step": 1, "heldout": {}}\n{"step": 2, "heldout": {}}\n'
    assert set(found) == {"metrics.jsonl", "evaluations.jsonl", "config.gin"}


def test_recorded_windows_have_a_file_each_and_pictures_of_all(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for first in (9, 101):
        folder.write_timeline(record(first))
    assert set(files(tmp_path)) == {
        "metrics.jsonl",
        "timelines/step-000009.json",
        "timelines/step-000101.json",
        "timeline.html",
        "trace.json",
    }
    assert read_records(tmp_path) == [record(9), record(101)]
    assert all(f'"steps {first} to {first + 1}"' in files(tmp_path)["timeline.html"] for first in (9, 101))
    steps = {event["args"]["step"] for event in json.loads(files(tmp_path)["trace.json"])["traceEvents"] if event["ph"] == "X"}
    assert steps == {9, 10, 101, 102}


def test_going_on_takes_back_windows_that_come_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for first in (9, 101):
        folder.write_timeline(record(first))
    folder.go_on(100, "same")
    assert read_records(tmp_path) == [record(9)]
    assert "steps 101" not in files(tmp_path)["timeline.html"]


def test_beginning_anew_moves_timelines_aside(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_timeline(record(9))
    RunFolder(tmp_path).begin_anew()
    assert {path.split("/")[0] for path in files(tmp_path)} == {"metrics.jsonl", "previous-1"}
    assert {"previous-1/timeline.html", "previous-1/trace.json"} < set(files(tmp_path))


@pytest.mark.parametrize("rest", [b'{"step": 2, "los', b'{"step": 2', b"\0\0\0", b"\xff\xfe", b"\n"])
def test_half_a_line_of_a_killed_process_is_removed(tmp_path: Path, rest: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.append({"step": 1})
    with folder.path_of("metrics.jsonl").open("ab") as file:
        file.write(rest)
    folder.go_on(9, "")
    folder.append({"step": 2})
    assert files(tmp_path)["metrics.jsonl"] == '{"step": 1}\n{"step": 2}\n'


def test_what_describes_the_earlier_part_is_kept_where_the_configuration_changes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("first", "second", "third"):
        if folder.config() is not None:
            folder.go_on(5, text)
        folder.write_config(text)
        folder.write_plan(f"plan of {text}")
    # The second attempt left no step behind: it began at step 5, and so did the third.
    kept = {"config-until-5.gin": "first", "plan-until-5.txt": "plan of first"}
    assert files(tmp_path) == {"metrics.jsonl": "", "config.gin": "third", "plan.txt": "plan of third", **kept}


def test_beginning_anew_moves_the_run_aside(tmp_path: Path) -> None:
    finished(tmp_path, "first")
    folder = RunFolder(tmp_path)
    folder.begin_anew()
    assert not folder.holds_run
    moved = {f"previous-1/{name}": text for name, text in (("config.gin", "first"), ("metrics.jsonl", '{"step": 1}\n'))}
    assert files(tmp_path) == {"metrics.jsonl": "", "previous-1/weights/student.safetensors": "first", **moved}
    assert "used by another process" in another_process(tmp_path).stderr


def test_restarts_keep_every_earlier_run(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        finished(tmp_path, text)
    line = '{"step": 1}\n'
    expected = {}
    for place, text in (("previous-1/", "first"), ("previous-2/", "second"), ("", "third")):
        expected |= {f"{place}config.gin": text, f"{place}metrics.jsonl": line, f"{place}weights/student.safetensors": text}
    assert files(tmp_path) == expected


def test_interrupted_restart_still_counts_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path)
    replace, moved = os.replace, []

    def broken(source: Path, target: Path) -> None:
        if moved:
            raise OSError("unplugged")
        moved.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(CheckpointError, match="unplugged"):
        RunFolder(tmp_path, restart=True)
    monkeypatch.undo()
    assert RunFolder(tmp_path).holds_run
    RunFolder(tmp_path, restart=True)
    assert sorted(Path(name).name for name in files(tmp_path)) == ["config.gin", "metrics.jsonl", "metrics.jsonl", "student.safetensors"]


def test_run_that_ended_before_its_first_step_is_kept_without_asking(tmp_path: Path) -> None:
    (tmp_path / "config.gin").write_text("my own")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "evaluations.jsonl").write_text("{}")
    RunFolder(tmp_path).write_config("resolved")
    kept = {"previous-1/config.gin": "my own", "previous-1/evaluations.jsonl": "{}"}
    assert files(tmp_path) == {"config.gin": "resolved", "metrics.jsonl": "", "notes.txt": "mine", **kept}


def test_working_folder_is_never_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path)
    (tmp_path / "project").mkdir()
    before = files(tmp_path)
    for folder in (tmp_path, tmp_path / "project"):
        monkeypatch.chdir(folder)
        with pytest.raises(CheckpointError, match="cannot be moved aside"):
            RunFolder(tmp_path, restart=True)
    assert files(tmp_path) == before


def test_path_that_cannot_be_a_folder_is_an_error_with_its_origin(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError) as caught:
            RunFolder(path, set_by="configs/kd.gin:3  train.workdir")
        assert caught.value.set_by == "configs/kd.gin:3  train.workdir"
        assert str(path) in caught.value.what


@pytest.mark.parametrize("function", ["open", "replace"])
def test_a_folder_without_permission_is_an_error_and_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    finished(tmp_path / "run")
    before = files(tmp_path)

    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, function, forbidden)
    with pytest.raises(CheckpointError, match="run-folder-unwritable") as caught:
        RunFolder(tmp_path / "run", restart=True)
    monkeypatch.undo()
    assert caught.value.have == "PermissionError: [Errno 13] Permission denied"
    assert {name: text for name, text in files(tmp_path).items() if "previous" not in name} == before


def test_folder_that_vanished_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.rmtree(folder.path)
    with pytest.raises(CheckpointError, match="run-folder-unwritable"):
        folder.append({"step": 1})


@pytest.mark.quick
def test_of_two_processes_one_gets_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    refused = another_process(tmp_path)
    text = (
        f"the folder '{tmp_path}' is used by another process.\n"
        "  wanted   a folder that no run is writing to\n"
        f"  have     {tmp_path}/.lock, which another process holds locked\n"
        "  set by   the calling program: RunFolder.path\n"
        "  fix      wait for that run to end or end it, or choose another folder\n"
        "  help     docs/errors.md#run-folder-in-use"
    )
    assert refused.stderr.strip().endswith(text)
    folder.close()
    assert another_process(tmp_path).returncode == 0


def test_a_process_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    killed = another_process(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == -9
    assert RunFolder(tmp_path).holds_run


def test_where_no_locks_are_known_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", unknown)
    assert RunFolder(tmp_path).path.is_dir()
    assert "cannot be locked against other processes" in caplog.text


def test_default_folder_is_the_same_each_time() -> None:
    assert [default_folder(name).as_posix() for name in ("configs/kd_tiny.gin", "kd_tiny")] == ["runs/kd_tiny"] * 2
