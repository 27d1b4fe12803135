"""Real processes that are killed at any moment and started again end as if nothing had happened."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import CONFIG, SAMPLES, SETTINGS, log_samples, logged_samples

from maestro_jax.step_policies import SkipLimit
from maestro_jax.train import PREEMPTED, main

STEPS = 24


@dataclasses.dataclass
class Job:
    """A run folder beside its gin file, and the same command each time."""

    folder: Path
    attempts: int = 0  # Each has an output of its own.
    launched: float = 0.0

    @classmethod
    def make(cls, folder: Path) -> Job:
        folder.mkdir()
        (folder / "run.gin").write_text(CONFIG)
        return cls(folder)

    def copy(self, folder: Path) -> Job:
        return Job(shutil.copytree(self.folder, folder), self.attempts)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def arguments(self) -> list[str]:
        return [f"--gin_file={self.folder / 'run.gin'}", f"--workdir={self.run}"]

    def launch(self) -> subprocess.Popen[bytes]:
        """Starts the command in a process of its own."""
        self.attempts, self.launched = self.attempts + 1, time.time()
        environment = {**os.environ, **SETTINGS, SAMPLES: str(self.folder / "samples")}
        command = [sys.executable, "-m", "maestro_jax.train", *self.arguments]
        with (self.folder / f"output-{self.attempts}").open("wb") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the command in a process of its own, and waits until it trains."""
        process = self.launch()
        self.wait(process, lambda: "run folder" in self.output())
        return process

    def here(self, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
        """Runs the command in this process, where it need not begin with imports."""
        monkeypatch.setattr(SkipLimit, "add", SkipLimit.add)  # Only to be put back.
        log_samples(self.folder / "samples")
        code = main([*self.arguments, *more])
        monkeypatch.undo()
        return code

    def wait(self, process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
        """Waits for a moment in the life of a process, which must come before its end."""
        deadline = time.monotonic() + 120
        while not condition():
            assert process.poll() is None, f"the process ended too early:\n{self.output()}"
            assert time.monotonic() < deadline, f"nothing happens:\n{self.output()}"
            time.sleep(0.001)

    def output(self) -> str:
        return (self.folder / f"output-{self.attempts}").read_text()

    def trained(self) -> int:
        return (self.run / "metrics.jsonl").read_bytes().count(b"\n")

    def saved(self) -> int:
        """Step of the newest complete checkpoint."""
        return max((int(path.parent.name) for path in (self.run / "checkpoints").glob("*[0-9]/manifest.json")), default=0)

    def saving(self) -> bool:
        """Whether the newest process is writing a checkpoint, or was when it was killed; earlier ones may have left some of theirs."""
        folder = self.run / "checkpoints"
        unfinished = [path for path in folder.glob("0*") if not (path / "manifest.json").exists()]
        with contextlib.suppress(FileNotFoundError):  # It may be complete, or removed, in just this moment.
            return any(path.stat().st_mtime > self.launched for path in unfinished)
        return False

    def kill(self, generator: random.Random, moment: str) -> bool:
        """Starts the command and kills it at a moment; returns whether a checkpoint was being written.

        Args:
            generator: of numbers of steps and of waits.
            moment: "launch" kills it before it trains, "step" some steps later, "save" while it writes the next checkpoint.
        """
        process = self.launch() if moment == "launch" else self.start()
        try:
            if moment == "launch":
                time.sleep(generator.uniform(0, 2.5))
            else:
                target = min(self.trained() + generator.randint(1, 5), STEPS - 3)
                self.wait(process, lambda: self.trained() >= target)
            if moment == "save":
                self.wait(process, self.saving)
            time.sleep(generator.uniform(0, 0.02))
        finally:
            process.kill()
            assert process.wait() == -signal.SIGKILL
        return self.saving()


def numbers(job: Job) -> list[dict[str, Any]]:
    """What the records say about steps, without times."""
    records = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if "second" not in name} for record in records]


def results(job: Job) -> dict[str, bytes]:
    """Files that must be the same in every byte: evaluations, and final weights."""
    found = [job.run / "evaluations.jsonl", *sorted((job.run / "weights").iterdir())]
    return {path.name: path.read_bytes() for path in found}


def samples(job: Job) -> dict[int, list[str]]:
    return logged_samples(job.folder / "samples")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job.make(tmp_path_factory.mktemp("uninterrupted") / "job")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert job.here(monkeypatch) == 0
    return job


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that was killed after its first checkpoint; not to be changed."""
    job = Job.make(tmp_path_factory.mktemp("killed") / "job")
    process = job.start()
    job.wait(process, lambda: job.saved() == 4)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    return job


def test_a_killed_run_ends_as_if_nothing_had_happened(
    killed: Job, uninterrupted: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, generator = killed.copy(tmp_path / "job"), random.Random(0)
    # A save may be over when the signal comes, so a kill that missed it is not the last.
    assert any(job.kill(generator, "save") for _ in range(4))
    job.kill(generator, "step")
    assert job.here(monkeypatch) == 0
    same_end(job, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_ten_kills_change_nothing(uninterrupted: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    job, generator = Job.make(tmp_path / "job"), random.Random(seed)
    moments = ["launch", "launch", *["save"] * 4, *["step"] * 4]
    generator.shuffle(moments)
    inside = sum(job.kill(generator, moment) for moment in moments)
    assert inside >= 2, "too few kills hit a save"
    assert job.here(monkeypatch) == 0
    same_end(job, uninterrupted)


def same_end(job: Job, uninterrupted: Job) -> None:
    """PEER_CASES 10: same plan, so the same bits."""
    assert [record["step"] for record in numbers(job)] == list(range(1, STEPS + 1))
    assert numbers(job) == numbers(uninterrupted)
    assert results(job) == results(uninterrupted)
    assert samples(job) == samples(uninterrupted)
    kept = [sorted(path.name for path in (each.run / "checkpoints").iterdir()) for each in (job, uninterrupted)]
    assert kept[0] == kept[1]


def test_another_plan_goes_on_with_the_same_samples_and_nearly_the_same_losses(
    killed: Job, uninterrupted: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEER_CASES 10 and 11."""
    job = killed.copy(tmp_path / "job")
    assert job.here(monkeypatch, "--gin.small_run.graph.layout=second") == 0
    shown = capsys.readouterr().out
    assert "note: changed since step 4: small_run.graph.layout = 'first' -> 'second'" in shown
    assert "resuming from step 4 of 24" in shown
    assert samples(job) == samples(uninterrupted)
    for name in ("loss", "gradient_norm"):
        have, want = ([record[name] for record in numbers(each)] for each in (job, uninterrupted))
        np.testing.assert_allclose(have, want, rtol=1e-5)
    assert (job.run / "plan.txt").read_text() != (job.run / "plan-until-4.txt").read_text()


def test_sigterm_leaves_a_checkpoint_and_says_try_again_later(uninterrupted: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.make(tmp_path / "job")
    process = job.start()
    job.wait(process, lambda: job.trained() >= 6)
    process.terminate()
    assert process.wait(timeout=60) == PREEMPTED == 75
    stopped = job.trained()
    assert 6 <= stopped < STEPS
    assert job.saved() == stopped
    assert not job.saving()
    assert f"interrupted after step {stopped}/24" in job.output()
    assert job.output().endswith("ended by SIGTERM; the same command goes on\n")
    assert job.here(monkeypatch) == 0
    assert numbers(job) == numbers(uninterrupted)
    assert results(job) == results(uninterrupted)
