"""Whole runs of several processes: the numbers of one process, and what is left when one of them dies, stops, or is asked to end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from process_support import ENVIRONMENT, launched
from small_run import CONFIG, SETTINGS

from maestro_jax.record import read_records
from maestro_jax.runtime.watchdog import EXIT_CODE
from maestro_jax.train import PREEMPTED

SECONDS = 240


@dataclasses.dataclass
class Job:
    """A run folder beside its gin file, and its command with any number of processes."""

    folder: Path
    attempts: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir()
        (self.folder / "run.gin").write_text(CONFIG)

    def start(self, processes: int, devices: int, *flags: str) -> subprocess.Popen[bytes]:
        self.attempts += 1
        arguments = [f"--gin_file={self.folder / 'run.gin'}", f"--workdir={self.folder / 'run'}", *flags]
        command = launched(processes, devices, *arguments, module="maestro_jax.train")
        command[3:3] = [f"--log_dir={self.folder / f'logs-{self.attempts}'}"]
        settings = {name: value for name, value in SETTINGS.items() if name != "JAX_NUM_CPU_DEVICES"}
        with (self.folder / f"output-{self.attempts}").open("wb") as output:
            return subprocess.Popen(command, env={**ENVIRONMENT, **settings}, stdout=output, stderr=output)

    def finish(self, processes: int, devices: int, *flags: str) -> None:
        assert self.start(processes, devices, *flags).wait(SECONDS) == 0, self.output()

    def output(self) -> str:
        logs = sorted(self.folder.glob(f"logs-{self.attempts}/*.log"))
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in [self.folder / f"output-{self.attempts}", *logs])

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]

    def until(self, step: int) -> None:
        """Waits for the record of a step."""
        path, deadline = self.folder / "run" / "metrics.jsonl", time.monotonic() + SECONDS
        while not (path.exists() and path.read_text().count("\n") >= step):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)


def children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(child) for child in text.split()]


def gone(processes: list[int]) -> bool:
    return not any(Path(f"/proc/{process}").exists() for process in processes)


def assert_same(have: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert [record["step"] for record in have] == [record["step"] for record in want]
    for mine, theirs in zip(have, want, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["objectives"] == pytest.approx(theirs["objectives"], rel=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of the run in one process."""
    job = Job(tmp_path_factory.mktemp("alone") / "job")
    job.finish(1, 8)
    return job.records()


def test_a_run_that_is_asked_to_end_goes_on_with_other_processes(alone: list[dict[str, Any]], tmp_path: Path) -> None:
    """Saved by two, gone on by three and then by one: each section is written by the processes that own it."""
    job = Job(tmp_path / "job")
    first = job.start(2, 3)
    job.until(6)
    first.send_signal(signal.SIGTERM)
    assert first.wait(SECONDS) == PREEMPTED, job.output()
    assert 6 <= len(job.records()) < 24
    job.finish(3, 2, "--gin.train.steps=20")
    job.finish(1, 8)
    assert_same(job.records(), alone)
    assert sorted(path.name for path in (job.folder / "run" / "weights").iterdir()) == ["b.safetensors", "c.safetensors"]
    assert "ways between devices of different processes" in (job.folder / "output-1").read_text()
    [found] = read_records(job.folder / "run")
    assert found.first_step <= 10 < found.first_step + len(found.workload.steps)
    assert {task.section for task in found.measured.tasks} == {"a", "b", "c"}


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 9, 13])
def test_a_killed_process_ends_the_run_everywhere_and_it_goes_on(alone: list[dict[str, Any]], tmp_path: Path, step: int) -> None:
    job = Job(tmp_path / "job")
    run = job.start(2, 3)
    job.until(step)
    processes, begun = children(run.pid), time.monotonic()
    os.kill(processes[step % 2], signal.SIGKILL)
    assert run.wait(SECONDS) != 0
    assert time.monotonic() - begun < 60
    assert gone(processes)
    job.finish(2, 3)
    assert_same(job.records(), alone)


@pytest.mark.slow
def test_a_process_that_stands_still_is_named_and_ends_the_run(tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    run = job.start(2, 3, "--gin.train.steps=100000")
    job.until(5)
    processes, begun = children(run.pid), time.monotonic()
    os.kill(processes[1], signal.SIGUSR1)
    time.sleep(2)
    os.kill(processes[1], signal.SIGSTOP)
    assert run.wait(SECONDS) == EXIT_CODE
    assert time.monotonic() - begun < 80
    assert gone(processes)
    assert "process 1 has said nothing" in job.output()
    assert "c replica 0: last issued" in job.output()


@pytest.mark.slow
def test_no_process_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    run = job.start(2, 3, "--gin.train.steps=100000")
    job.until(3)
    processes = children(run.pid)
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while not gone(processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
