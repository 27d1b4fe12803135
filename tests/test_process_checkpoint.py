"""Checkpoints of several processes: each writes what it owns, nothing is reported that is not there, and any number of them goes on."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import pytest
from process_checkpoints import PLACES, arrays, differing, differing_on_host, files_of, shapes
from process_support import run_processes, said, started

from maestro_jax.checkpoint import FROZEN, Checkpoints

pytestmark = pytest.mark.xdist_group("processes")

Told = list[dict[str, Any]]


def run(folder: Path, processes: int, jobs: str) -> Told:
    """Runs jobs to their end; returns what each process told."""
    return run_processes(folder, processes, 2, "process_checkpoints.do", str(folder), jobs)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Told]:
    """A folder that two processes wrote, and what each told; not to be changed."""
    folder = tmp_path_factory.mktemp("two")
    return folder, run(folder, 2, "all_is_well")


def test_a_section_of_the_second_process_alone_is_really_there(two: tuple[Path, Told]) -> None:
    """The trap: success is reported, and the data is missing."""
    folder, told = two
    assert [each["saved"] for each in told] == [[None] * 3] * 2
    commit = folder / "checkpoints" / "00000003"
    assert "alone/00001.safetensors" in files_of(commit)
    assert [name for name in files_of(commit) if name.startswith("alone/")] == ["alone/00001.safetensors"]
    checkpoints = Checkpoints(folder / "checkpoints")
    assert differing_on_host(checkpoints.read_parameters(checkpoints.commits()[0], "alone"), "alone", 3) == []
    # The first process has none of it on its devices, and reads it all the same.
    assert told[0]["restored"]["sections"] == ["both", "first"]
    assert told[0]["read"] == {name: [] for name in PLACES[2]}


def test_each_process_writes_what_it_owns(two: tuple[Path, Told]) -> None:
    folder, _ = two
    assert sorted(files_of(folder / "checkpoints" / "00000003")) == [
        "alone/00001.safetensors",
        "both/00000.safetensors",
        "both/00001.safetensors",
        "first/00000.safetensors",
    ]
    assert files_of(folder / "checkpoints" / FROZEN) == ["teacher/00001.safetensors"]


def test_all_processes_see_the_same_checkpoints(two: tuple[Path, Told]) -> None:
    folder, told = two
    path = folder / "checkpoints"
    for each in told:
        assert each["commits"] == [[step, True, str(path / f"{step:08d}")] for step in (3, 2, 1)]
        assert each["best"] == [0.5, 1]
        assert each["problems"] == [None] * 3
    assert sorted(each.name for each in path.iterdir()) == ["00000001", "00000002", "00000003", FROZEN]


def test_two_processes_restore_what_is_theirs(two: tuple[Path, Told]) -> None:
    assert [each["restored"] for each in two[1]] == [
        {"sections": ["both", "first"], "differing": []},
        {"sections": ["alone", "both", "teacher"], "differing": []},
    ]


def test_an_error_of_one_process_is_raised_in_all_and_leaves_nothing(two: tuple[Path, Told]) -> None:
    _, told = two
    assert told[0]["full"] == told[1]["full"]
    assert "the checkpoint of step 4 cannot be written" in told[0]["full"]
    assert "process 1: OSError: [Errno 28] No space left on device" in told[0]["full"]
    assert "last good checkpoint: 3)" in told[0]["full"]
    assert told[0]["kept"] == told[1]["kept"] == [3, 2, 1]


def test_a_section_that_no_process_wrote_is_not_reported_as_saved(two: tuple[Path, Told]) -> None:
    _, told = two
    assert told[0]["left out"] == told[1]["left out"]
    assert "the checkpoint in '00000005' would not be complete" in told[0]["left out"]
    assert "alone: parameters/layer/cut was written by no process" in told[0]["left out"]


def test_one_process_goes_on_with_what_two_saved(two: tuple[Path, Told]) -> None:
    checkpoints = Checkpoints(two[0] / "checkpoints")
    [newest, *_] = checkpoints.commits()
    assert checkpoints.problem(newest) is None
    found = checkpoints.restore(newest, shapes(1))
    assert sorted([*found.trained, *found.frozen]) == sorted(PLACES[1])
    assert differing(found, 3) == []
    assert differing(found, 2) != []


def test_three_processes_go_on_with_what_two_saved(two: tuple[Path, Told], tmp_path: Path) -> None:
    shutil.copytree(two[0] / "checkpoints", tmp_path / "checkpoints")
    told = run(tmp_path, 3, "restore+harmed")
    assert [each["restored"] for each in told] == [
        {"sections": ["alone", "both"], "differing": []},
        {"sections": ["both", "teacher"], "differing": []},
        {"sections": ["both", "first", "teacher"], "differing": []},
    ]
    assert [each["saved"] for each in told] == [None] * 3
    # One bit of what they saved then is damaged: all see it, and take the checkpoint before.
    problem = "00000007/alone/00000.safetensors is not as it was written (size or SHA-256 differs)"
    assert [each["problem"] for each in told] == [problem] * 3
    assert [each["good"] for each in told] == [3] * 3
    assert told[0]["notes"] == [f"the checkpoint of step 7 is not used: {problem}"]
    # Only the first process reads that file, and none goes on without it.
    assert "the checkpoint of step 7 cannot be read" in told[0]["unreadable"]
    assert "process 0: SafetensorError" in told[0]["unreadable"]
    assert [each["unreadable"] for each in told] == [told[0]["unreadable"]] * 3


def killed_inside_a_save(folder: Path, process: int, moment: str) -> None:
    arguments = [str(folder), "process_checkpoints.do", str(folder), "killed", str(process), moment]
    with started(folder, "process_program", arguments, "--devices_per_process=2", hurried=True) as launcher:
        assert launcher.wait(90) == 128 + signal.SIGKILL, said(folder)
    assert f"process {process} ended with code 137" in (folder / "errors").read_text()
    left = folder / "checkpoints" / "00000002"
    assert left.exists()
    checkpoints = Checkpoints(folder / "checkpoints")
    [commit] = checkpoints.commits()
    assert (commit.step, checkpoints.problem(commit), checkpoints.unreadable()) == (1, None, [])
    assert differing(checkpoints.restore(commit, shapes(1)), 1) == []
    checkpoints.save(2, arrays(1, 2), {"signature": shapes(1).signature()})
    checkpoints.close()
    assert sorted(path.name for path in left.rglob("*.safetensors")) == ["00000.safetensors"] * 3
    assert differing(checkpoints.restore(checkpoints.commits()[0], shapes(1)), 2) == []


def test_a_process_killed_inside_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    assert jax.process_count() == 1
    killed_inside_a_save(tmp_path, 1, "write_pieces")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "moment"), [(0, "write_pieces"), (0, "write_manifest"), (1, "to_disk")], ids=["first", "before the commit", "second"]
)
def test_any_process_may_be_killed_at_any_stage_of_a_save(tmp_path: Path, process: int, moment: str) -> None:
    killed_inside_a_save(tmp_path, process, moment)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (1, 2)])
def test_any_number_of_processes_goes_on(tmp_path: Path, before: int, after: int) -> None:
    if before == 1:
        checkpoints = Checkpoints(tmp_path / "checkpoints")
        checkpoints.save(1, arrays(1, 1), {"signature": shapes(1).signature()})
        checkpoints.close()
    else:
        assert all(each["saved"] == [None] * 3 for each in run(tmp_path, before, "all_is_well"))
    told = run(tmp_path, after, "restore")
    assert all((each["problem"], each["restored"]["differing"], each["saved"]) == (None, [], None) for each in told)
    found = Checkpoints(tmp_path / "checkpoints")
    assert differing(found.restore(found.commits()[0], shapes(1)), 7) == []
