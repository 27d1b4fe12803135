"""Whole runs of several processes: the numbers of one process, and what is left when one of them dies, stops, or is asked to end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from process_support import SECONDS, children, descendants, lives, said, started, waited
from small_run import CONFIG, DEATH, SAMPLES, logged_samples

from maestro_jax.record import read_records
from maestro_jax.runtime.watchdog import EXIT_CODE
from maestro_jax.train import PREEMPTED

LIMIT = 60.0
"""Seconds after which a run has ended everywhere when one of its processes died."""


@dataclasses.dataclass
class Job:
    """A run folder beside its gin file, and its command with any number of processes."""

    folder: Path
    attempts: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir()
        (self.folder / "run.gin").write_text(CONFIG)

    @property
    def attempt(self) -> Path:
        """Folder of what the newest processes wrote."""
        return self.folder / f"attempt-{self.attempts}"

    def started(self, processes: int, devices: int, *flags: str, death: str = "") -> contextlib.AbstractContextManager[Any]:
        """Starts the command.

        Args:
            processes: how many.
            devices: of each.
            flags: of the command.
            death: a moment at which a process kills itself, see `small_run`.
        """
        self.attempts += 1
        arguments = [f"--gin_file={self.folder / 'run.gin'}", f"--workdir={self.folder / 'run'}", *flags]
        layout = f"--processes={processes}", f"--devices_per_process={devices}"
        own = {SAMPLES: str(self.folder / "samples"), **({DEATH: death} if death else {})}
        return started(self.attempt, "maestro_jax.train", arguments, *layout, variables=own)

    def finish(self, processes: int, devices: int, *flags: str) -> None:
        with self.started(processes, devices, *flags) as run:
            assert run.wait(SECONDS) == 0, said(self.attempt)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]

    def until(self, step: int) -> None:
        """Waits for the record of a step."""
        path = self.folder / "run" / "metrics.jsonl"
        assert waited(lambda: path.exists() and path.read_text().count("\n") >= step, SECONDS), said(self.attempt)

    def committed(self) -> list[str]:
        return sorted(path.parent.name for path in (self.folder / "run" / "checkpoints").glob("0*/manifest.json"))


def gone(processes: list[int]) -> bool:
    return not any(map(lives, processes))


def assert_same(job: Job, alone: Job) -> None:
    assert logged_samples(job.folder / "samples") == logged_samples(alone.folder / "samples")
    assert [record["step"] for record in job.records()] == list(range(1, 25))
    for mine, theirs in zip(job.records(), alone.records(), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["objectives"] == pytest.approx(theirs["objectives"], rel=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run in one process."""
    job = Job(tmp_path_factory.mktemp("alone") / "job")
    job.finish(1, 8)
    return job


def test_a_run_that_is_asked_to_end_goes_on_with_other_processes(alone: Job, tmp_path: Path) -> None:
    """Saved by two, gone on by three and then by one: each section is written by the processes that own it."""
    job = Job(tmp_path / "job")
    with job.started(2, 3) as first:
        job.until(6)
        first.send_signal(signal.SIGTERM)
        assert first.wait(SECONDS) == PREEMPTED, said(job.attempt)
    assert "ways between devices of different processes" in (job.attempt / "output").read_text()
    assert 6 <= len(job.records()) < 24
    job.finish(3, 2, "--gin.train.steps=20")
    job.finish(1, 8)
    assert_same(job, alone)
    assert sorted(path.name for path in (job.folder / "run" / "weights").iterdir()) == ["b.safetensors", "c.safetensors"]
    [found] = read_records(job.folder / "run")
    assert found.first_step <= 10 < found.first_step + len(found.workload.steps)
    assert {task.section for task in found.measured.tasks} == {"a", "b", "c"}


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 9, 13])
def test_a_killed_process_ends_the_run_everywhere_and_it_goes_on(alone: Job, tmp_path: Path, step: int) -> None:
    job = Job(tmp_path / "job")
    with job.started(2, 3) as run:
        job.until(step)
        begun, processes = time.monotonic(), descendants(run.pid)
        os.kill(children(run.pid)[step % 2], signal.SIGKILL)
        assert run.wait(SECONDS) != 0
    assert time.monotonic() - begun < LIMIT
    assert waited(lambda: gone(processes), 5)
    job.finish(2, 3)
    assert_same(job, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "moment"), [(1, "write_pieces"), (0, "to_disk"), (0, "write_manifest")], ids=["a file", "files", "before the commit"]
)
def test_a_process_killed_inside_a_save_ends_the_run_everywhere_and_it_goes_on(
    alone: Job, tmp_path: Path, process: int, moment: str
) -> None:
    job = Job(tmp_path / "job")
    with job.started(2, 3, death=f"{process} 8 {moment}") as run:
        job.until(7)
        begun, processes = time.monotonic(), descendants(run.pid)
        assert run.wait(SECONDS) == 128 + signal.SIGKILL, said(job.attempt)
    assert time.monotonic() - begun < LIMIT
    assert waited(lambda: gone(processes), 5)
    assert f"process {process} ended with code 137" in (job.attempt / "errors").read_text()
    assert (job.folder / "run" / "checkpoints" / "00000008").exists()
    assert job.committed() == ["00000004", "00000006"]
    job.finish(2, 3)
    assert "resuming from step 6 of 24" in said(job.attempt)
    assert_same(job, alone)


@pytest.mark.slow
def test_a_process_that_stands_still_is_named_and_ends_the_run(tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    with job.started(2, 3, "--gin.train.steps=100000") as run:
        job.until(5)
        begun, processes = time.monotonic(), descendants(run.pid)
        second = children(run.pid)[1]
        os.kill(second, signal.SIGUSR1)
        time.sleep(2)
        os.kill(second, signal.SIGSTOP)
        assert run.wait(SECONDS) == EXIT_CODE
    assert time.monotonic() - begun < 80
    assert waited(lambda: gone(processes), 5)
    assert "process 1 has said nothing" in said(job.attempt)
    assert "c replica 0: last issued" in said(job.attempt)


@pytest.mark.slow
def test_no_process_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    with job.started(2, 3, "--gin.train.steps=100000") as run:
        job.until(3)
        processes = descendants(run.pid)
        run.kill()
        run.wait()
    assert waited(lambda: gone(processes), 10)
