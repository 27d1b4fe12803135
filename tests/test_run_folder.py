"""A run folder holds one run, loses nothing, and writes whole files and valid JSON."""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.errors import CheckpointError
from maestro_jax.run_folder import RunFolder, default_folder


def files(path: Path) -> dict[str, str]:
    """Every file below a folder with its text."""
    return {file.relative_to(path).as_posix(): file.read_text() for file in sorted(path.rglob("*")) if file.is_file()}


def finished(path: Path, text: str = "steps = 1\n") -> None:
    """Leaves a run with a metrics line, a config and weights."""
    folder = RunFolder(path, restart=True)
    folder.write_config(text)
    folder.append({"step": 1})
    folder.path_of("weights").mkdir()
    (folder.path_of("weights") / "student.safetensors").write_text(text)


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
    assert set(env["versions"]) == {"maestro_jax", "jax", "jaxlib", "flax", "optax", "numpy"}
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


def test_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    before = files(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path / "run", set_by="--workdir")
    assert str(caught.value) == (
        f"the folder '{tmp_path}/run' holds a run already.\n"
        "  wanted   a folder without metrics.jsonl\n"
        "  have     metrics.jsonl of 12 bytes\n"
        "  set by   --workdir\n"
        "  fix      choose another folder, or restart (restart=True, --restart), which moves the earlier run into previous-1 in it\n"
        "  help     docs/errors.md#run-folder-in-use"
    )
    assert files(tmp_path) == before


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
    with pytest.raises(CheckpointError, match="holds a run already"):
        RunFolder(tmp_path)
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


def test_folder_that_vanished_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.rmtree(folder.path)
    with pytest.raises(CheckpointError, match="run-folder-unwritable"):
        folder.append({"step": 1})


def test_of_two_runs_that_begin_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    RunFolder(tmp_path)
    with pytest.raises(CheckpointError, match="holds a run already"):
        RunFolder(tmp_path)


def test_default_folder_is_one_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime.datetime(2026, 1, 31, 9, 5, 7)
    found = []
    for _ in range(3):
        found.append(default_folder("configs/kd_tiny.gin", now))
        RunFolder(found[-1])
    assert [path.as_posix() for path in found] == [f"runs/kd_tiny-20260131-090507{end}" for end in ("", "-2", "-3")]


def test_default_folder_is_named_after_this_moment() -> None:
    before = datetime.datetime.now().replace(microsecond=0)
    stamp = default_folder("kd_tiny").name.removeprefix("kd_tiny-")
    assert before <= datetime.datetime.strptime(stamp, "%Y%m%d-%H%M%S") <= datetime.datetime.now()
