"""Runs of text, images and sound that are interrupted, or killed, and go on end with the same bits; what is frozen keeps its bits.

The shipped configuration with small widths, a little text of its own, and noise: PEER_CASES 10 and 12.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from test_kill import Job, numbers

from maestro_jax import trainer as trainer_module
from maestro_jax.checkpoint import FROZEN, Checkpoints
from maestro_jax.config import load
from maestro_jax.pace import Preempted
from maestro_jax.run import Run
from maestro_jax.runtime import Compiled
from maestro_jax.runtime.state import initial_values
from maestro_jax.terminal import Terminal
from maestro_jax.trainer import Trainer

STEPS = 12
SECTIONS = {"vision", "audio", "llm", "generator"}

CONFIG = """
include 'omni_tiny.gin'
train.batch = 6
train.evaluate_every = 0
train.evaluate_batches = 0
train.checkpoint_every = 5
train.metrics = None
steps = 12
width = 16
WarmupCosine.warmup = 2
Omni.text = @TextFolder()
TextFolder.path = '{folder}'
TextFolder.max_length = 32
Omni.shares = {{'text': 1, 'images': 2, 'tones': 1, 'both': 1}}
Omni.redraws = 0.7
Omni.most_images = 3
Omni.heldout_samples = 4
vision/Section.microbatch = 128
vision/Section.row_length = 128
vision/Section.trainable = {vision}
audio/Section.microbatch = 256
llm/Section.microbatch = 256
generator/Section.microbatch = 8
VisionTransformer.layers = 1
VisionTransformer.embed = 16
VisionTransformer.heads = 2
VisionTransformer.mlp = 16
VisionTransformer.dropout = 0.1
AudioEncoder.layers = 1
AudioEncoder.embed = 16
AudioEncoder.heads = 2
AudioEncoder.mlp = 16
AudioEncoder.dropout = 0.1
Decoder.layers = 1
Decoder.heads = 2
Decoder.mlp = 16
Decoder.dropout = 0.1
Redraw.mlp = 16
"""


class Screen(Terminal):
    """A terminal that says nothing, and may send SIGTERM to the run."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(io.StringIO(), interactive=False)
        self._stop_at = stop_at

    def tick(self, step: int, steps: int) -> None:
        if step == self._stop_at:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(autouse=True, scope="module")
def compiled_once() -> Iterator[None]:
    """Trainers of the same graph share their programs: compiling takes most of the time."""
    known: dict[int, Compiled] = {}

    def compiled(plan: Any, optimizers: Mapping[str, Any], *more: Any) -> Compiled:
        if id(plan.graph) not in known:
            known[id(plan.graph)] = Compiled(plan, optimizers, *more)
        return known[id(plan.graph)]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(trainer_module, "Compiled", compiled)
        yield


def write_config(folder: Path, vision: bool) -> Path:
    """Writes a configuration and the text that it trains on."""
    text = folder / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number:02}.txt").write_text(f"page {number}: " + "to be or not to be " * 4)
    path = folder / "run.gin"
    path.write_text(CONFIG.format(folder=text, vision=vision))
    return path


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["vision frozen", "all trained"])
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    path = write_config(tmp_path_factory.mktemp("config"), request.param)
    made: Trainer = load(str(path), [], root="train").build()
    # Loaded once. The same graph and optimizer in all runs, so that they share their programs.
    return dataclasses.replace(made, data=made.dataset(), optimizer=optax.adamw(3e-3, weight_decay=0.01))


@pytest.fixture(scope="module")
def whole(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run from beginning to end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, trainer.fit(folder, terminal=Screen())


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "weights").iterdir()}


def bits(tree: Any) -> dict[str, bytes]:
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def state(run: Run) -> dict[str, bytes]:
    snapshot = run.engine.snapshot()
    return bits((dict(snapshot.trained), dict(snapshot.frozen)))


def same_end(folder: Path, run: Run, whole: tuple[Path, Run]) -> None:
    assert [record["step"] for record in records(folder)] == list(range(1, STEPS + 1))
    assert records(folder) == records(whole[0])
    assert state(run) == state(whole[1])
    assert weights(folder) == weights(whole[0])


def test_an_interrupted_run_ends_with_the_same_bits(trainer: Trainer, whole: tuple[Path, Run], tmp_path: Path) -> None:
    """SIGTERM: a checkpoint of its own, then the rest."""
    with pytest.raises(Preempted):
        trainer.fit(tmp_path, terminal=Screen(stop_at=3))
    saved = [commit.step for commit in Checkpoints(tmp_path / "checkpoints").commits()]
    assert 3 <= saved[0] < STEPS
    run = trainer.fit(tmp_path, terminal=Screen())
    same_end(tmp_path, run, whole)


def test_a_run_that_lost_its_newest_steps_ends_with_the_same_bits(trainer: Trainer, whole: tuple[Path, Run], tmp_path: Path) -> None:
    """As after a kill: it goes on from a checkpoint that lies steps back, and what came after it is trained again."""
    folder = shutil.copytree(whole[0], tmp_path / "run")
    steps = [commit.step for commit in Checkpoints(folder / "checkpoints").commits()]
    assert steps == [12, 10]
    shutil.rmtree(folder / "checkpoints" / "00000012")
    shutil.rmtree(folder / "weights")
    run = trainer.fit(folder, terminal=Screen())
    same_end(folder, run, whole)


def test_the_run_sees_every_kind_of_sample_and_learns(whole: tuple[Path, Run]) -> None:
    """Else equal bits would say little."""
    found = records(whole[0])
    assert all(record["applied"] for record in found)
    assert len({record["loss"] for record in found}) == STEPS
    counted = {name for record in found for name, value in record["objectives"].items() if value is not None}
    assert {"llm/text", "llm/digits", "llm/tones", "generator/redraw"} <= counted


def test_what_is_frozen_keeps_its_bits_and_is_saved_once(trainer: Trainer, whole: tuple[Path, Run]) -> None:
    folder, run = whole
    trained = {section.name for section in trainer.graph.sections if section.trainable}
    engine = run.engine
    for name in SECTIONS:
        first = initial_values(engine.plan.sections[name], engine.compiled.arguments[name], trainer.seed, {})
        last = engine.parameters(name)
        assert all((np.asarray(first[path]).tobytes() == last[path].tobytes()) == (name not in trained) for path in first)
        assert (engine.states[name].optimizer is None) == (name not in trained)
    assert {path.stem for path in (folder / "weights").iterdir()} == trained
    checkpoint = folder / "checkpoints" / "00000012"
    assert {path.name for path in checkpoint.iterdir() if path.is_dir()} >= trained
    assert SECTIONS & {path.name for path in checkpoint.iterdir()} == trained
    frozen = folder / "checkpoints" / FROZEN
    assert frozen.exists() == (trained != SECTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("vision", [False, True], ids=["vision frozen", "all trained"])
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, vision: bool) -> None:
    """SIGKILL after its first checkpoint, in the midst of the steps that follow; another process goes on."""
    jobs = [Job(tmp_path / name) for name in ("whole", "killed")]
    for job in jobs:
        job.folder.mkdir()
        # The same path of the text in both: it is part of what is configured.
        shutil.copy(tmp_path / "run.gin" if (tmp_path / "run.gin").exists() else write_config(tmp_path, vision), job.folder / "run.gin")
    whole, killed = jobs
    assert whole.launch().wait(timeout=300) == 0, whole.output()
    process = killed.start()
    killed.wait(process, lambda: killed.saved() == 5 and killed.trained() > 5)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert killed.trained() < STEPS
    assert killed.launch().wait(timeout=300) == 0, killed.output()
    assert "resuming from step" in killed.output()
    assert numbers(killed) == numbers(whole)
    assert weights(killed.run) == weights(whole.run)
