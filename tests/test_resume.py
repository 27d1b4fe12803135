"""Going on with a run: the newest whole checkpoint is taken, what does not fit is refused with a difference, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from damage_support import array_file, flip

from maestro_jax.checkpoint import FROZEN, Checkpoints
from maestro_jax.errors import CheckpointError
from maestro_jax.manifest import MANIFEST
from maestro_jax.resume import Resumed, changed_data, changed_settings, resume
from maestro_jax.run_folder import RunFolder
from maestro_jax.runtime.snapshot import Snapshot

DATA = {"fingerprint": "0123", "seed": 0, "batch": 8}
CONFIG = "# settings\n\n# train\ntrain.steps = 3  # default\ntrain.seed = 0  # default\n"


def snapshot(step: int = 0, width: int = 3, count: int = 1) -> Snapshot:
    parameters = {f"w{number}": jnp.full(width, float(step)) for number in range(count)}
    return Snapshot(trained={"student": {"parameters": parameters, "optimizer": {}}}, frozen={"teacher": {"w": jnp.full(2, 7.0)}})


class Attempt:
    """One process that opens the folder, and what it tells the user."""

    def __init__(self, path: Path) -> None:
        self.files = RunFolder(path)
        self.checkpoints = Checkpoints(path / "checkpoints", keep=3, set_by="--workdir")
        self.notes: list[str] = []

    def resume(
        self, *, shapes: Snapshot | None = None, data: Mapping[str, Any] = DATA, config: str = CONFIG, steps: int = 10**6
    ) -> Resumed | None:
        return resume(self.files, self.checkpoints, shapes or snapshot(), data, config, steps, self.notes.append)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.files.append({"step": step})
            state = {"signature": snapshot().signature(), "data": DATA}
            self.checkpoints.save(step, snapshot(step), state)
            self.checkpoints.wait()

    def close(self) -> None:
        self.checkpoints.close()
        self.files.close()

    def steps(self) -> list[int]:
        return [commit.step for commit in self.checkpoints.commits()]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 4, after three checkpoints; not to be changed."""
    attempt = Attempt(tmp_path_factory.mktemp("resume") / "run")
    attempt.files.write_config(CONFIG)
    attempt.train(1, 2, 3)
    attempt.files.append({"step": 4})
    attempt.close()
    return attempt.files.path


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    """A copy of the killed run; it may lie elsewhere, as after a move to another disk."""
    return shutil.copytree(killed, tmp_path / "run")


def contents(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def value(resumed: Resumed | None) -> float:
    assert resumed is not None
    return float(np.asarray(resumed.snapshot.trained["student"]["parameters"]["w0"])[0])


def test_a_new_folder_begins(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "run")
    assert attempt.resume() is None
    assert attempt.notes == []


@pytest.mark.quick
def test_the_newest_checkpoint_is_taken_and_later_records_are_taken_back(run: Path) -> None:
    attempt = Attempt(run)
    resumed = attempt.resume()
    assert resumed is not None
    assert (resumed.commit.step, value(resumed), attempt.notes) == (3, 3.0, [])
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_run_without_a_checkpoint_is_kept_and_the_next_begins(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / "00000001.orbax-checkpoint-tmp").mkdir(parents=True)
    attempt = Attempt(run)
    assert attempt.resume() is None
    assert attempt.notes == ["the folder holds a run without a checkpoint; it is kept in it as previous-N, and this one begins anew"]
    assert (run / "previous-1" / "metrics.jsonl").read_text().count("\n") == 4
    assert (run / "metrics.jsonl").read_text() == ""


FAULTS: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "a flipped byte": (lambda folder: flip(array_file(folder)), "is not as it was written (size or SHA-256 differs)"),
    "a file cut off": (lambda folder: os.truncate(array_file(folder), 10), "is not as it was written"),
    "a missing file": (lambda folder: array_file(folder).unlink(), "is missing"),
    "a missing section": (lambda folder: shutil.rmtree(folder / "student"), "is missing"),
    "a flipped byte in the manifest": (
        lambda folder: flip(folder / MANIFEST),
        "a checkpoint is not used: 00000003: its manifest is damaged",
    ),
    "half a manifest": (lambda folder: os.truncate(folder / MANIFEST, 300), "its manifest is damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_not_used_and_the_one_before_is(run: Path, fault: str) -> None:
    harm, says = FAULTS[fault]
    harm(run / "checkpoints" / "00000003")
    attempt = Attempt(run)
    resumed = attempt.resume()
    assert value(resumed) == 2.0
    [note] = attempt.notes
    assert says in note
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    # The damaged one counts no longer, and is written anew.
    assert attempt.steps() == [2, 1]
    attempt.train(3)
    assert [attempt.checkpoints.problem(commit) for commit in attempt.checkpoints.commits()] == [None] * 3
    attempt.close()
    assert value(Attempt(run).resume()) == 3.0


def test_a_half_written_folder_does_not_count(run: Path) -> None:
    (run / "checkpoints" / "00000003" / MANIFEST).unlink()
    attempt = Attempt(run)
    assert value(attempt.resume()) == 2.0
    assert attempt.notes == []


def test_two_damaged_ones_leave_the_third(run: Path) -> None:
    flip(array_file(run / "checkpoints" / "00000003"))
    flip(run / "checkpoints" / "00000002" / MANIFEST)
    attempt = Attempt(run)
    assert value(attempt.resume()) == 1.0
    assert len(attempt.notes) == 2


def test_when_all_are_damaged_nothing_is_touched(run: Path) -> None:
    missing = {}
    for name in ("00000001", "00000002"):
        file = array_file(run / "checkpoints" / name)
        missing[name] = file.relative_to(run / "checkpoints").as_posix()
        file.unlink()
    flip(run / "checkpoints" / "00000003" / MANIFEST)
    before = contents(run)
    with pytest.raises(CheckpointError) as caught:
        Attempt(run).resume()
    assert str(caught.value) == (
        "no checkpoint of the run is whole.\n"
        "  wanted   a checkpoint whose files are as they were written\n"
        "  have     00000003: its manifest is damaged\n"
        f"           step 2: {missing['00000002']} is missing\n"
        f"           step 1: {missing['00000001']} is missing\n"
        "  set by   --workdir\n"
        "  fix      bring back the damaged files from a copy, or begin anew with --restart, which keeps the earlier run in previous-N\n"
        "  help     docs/errors.md#checkpoint-damaged"
    )
    assert contents(run) == before


def test_damaged_frozen_parameters_are_an_error(run: Path) -> None:
    flip(array_file(run / "checkpoints" / FROZEN))
    attempt = Attempt(run)
    with pytest.raises(CheckpointError, match="no checkpoint of the run is whole") as caught:
        attempt.resume()
    assert caught.value.have.count(f"{FROZEN}/teacher/") == 3
    assert attempt.steps() == [3, 2, 1]


@pytest.mark.quick
def test_other_shapes_are_refused_with_the_difference(run: Path) -> None:
    before = contents(run)
    other = Snapshot(trained={"student": snapshot(width=4).trained["student"], "critic": snapshot().trained["student"]}, frozen={})
    with pytest.raises(CheckpointError) as caught:
        Attempt(run).resume(shapes=other, config=CONFIG.replace("steps = 3", "steps = 5"))
    assert str(caught.value) == (
        "the run cannot go on from its checkpoint of step 3: shapes have changed.\n"
        "  wanted   the sections, parameters and optimizer state of the checkpoint; replicas, axes and devices may change\n"
        "  have     critic: parameters/w0 is not there in the checkpoint, float32[3] now\n"
        "           student: parameters/w0 is float32[3] in the checkpoint, float32[4] now\n"
        "           teacher: frozen/w is [2] in the checkpoint, not there now\n"
        "           changed setting: train.steps = 3 -> 5\n"
        "  set by   --workdir\n"
        "  fix      restore these settings, choose another run folder (--workdir), or begin anew with --restart\n"
        "  help     docs/errors.md#resume-shapes"
    )
    assert contents(run) == before


def test_long_differences_are_cut(run: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Attempt(run).resume(shapes=snapshot(count=40))
    assert caught.value.have.count("\n") == 12
    assert caught.value.have.endswith("and 27 more")


def test_changed_settings_and_data_are_told_and_the_earlier_configuration_is_kept(run: Path) -> None:
    attempt = Attempt(run)
    config = CONFIG.replace("steps = 3", "steps = 5").replace("seed = 0", "seed = 1")
    assert attempt.resume(data={**DATA, "seed": 1}, config=config) is not None
    assert attempt.notes == [
        "changed since step 3: train.seed = 0 -> 1",
        "changed since step 3: train.steps = 3 -> 5",
        "changed since step 3: the seed (0 -> 1); the order of samples is a new one, and some may come again",
    ]
    assert (run / "config-until-3.gin").read_text() == CONFIG


def test_the_restart_of_a_run_keeps_its_checkpoints(run: Path) -> None:
    files = RunFolder(run, restart=True)
    assert resume(files, Checkpoints(run / "checkpoints"), snapshot(), DATA, CONFIG, 5, pytest.fail) is None
    assert [commit.step for commit in Checkpoints(run / "previous-1" / "checkpoints").commits()] == [3, 2, 1]


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (CONFIG, CONFIG.replace("# default", "# configs/a.gin:3  train.steps"), []),
        (CONFIG, CONFIG + "train.more = 'a = b'\n", ["train.more = (not set) -> 'a = b'"]),
        (CONFIG + "student/Section.axes = {'tensor': 2}\n", CONFIG, ["student/Section.axes = {'tensor': 2} -> (not set)"]),
        (None, CONFIG, []),
        (CONFIG, "", []),
    ],
)
def test_settings_are_compared_without_where_they_were_set(before: str | None, now: str, found: list[str]) -> None:
    assert changed_settings(before, now) == found


def test_data_that_is_the_same_is_not_worth_a_word() -> None:
    assert changed_data(DATA, dict(DATA), 3) == []
    [line] = changed_data(DATA, {"fingerprint": "4567", "seed": 0, "batch": 4}, 3)
    assert line.startswith("changed since step 3: the training data (0123 -> 4567), the number of samples in a step (8 -> 4);")


def test_a_complete_run_is_not_mixed_with_another_one(run: Path) -> None:
    """Nothing would be trained with the new settings, although the command looks as if it were."""
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    changes: list[Any] = [{"config": CONFIG.replace("seed = 0", "seed = 1")}, {"data": {**DATA, "fingerprint": "another"}}]
    for changed in changes:
        attempt = Attempt(run)
        with pytest.raises(CheckpointError, match="is complete, and another one is configured now") as caught:
            attempt.resume(steps=3, **changed)
        assert caught.value.anchor == "run-complete"
        attempt.close()
    attempt = Attempt(run)
    assert attempt.resume(steps=3) is not None
    # Without steps, it is only evaluated.
    assert attempt.resume(steps=0, config=CONFIG.replace("seed = 0", "seed = 1")) is not None
    attempt.close()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_a_folder_with_checkpoints_alone_goes_on(run: Path) -> None:
    """Copied to another place without its metrics, for example: it must not be mixed with a run that begins."""
    (run / "metrics.jsonl").unlink()
    attempt = Attempt(run)
    resumed = attempt.resume()
    assert resumed is not None
    assert resumed.commit.step == 3
