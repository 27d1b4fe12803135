"""Around the steps of a run: what is reported, evaluated, saved and given up, and that a run which goes on knows all of it."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_run
from support import TEXT_SPECS, chain, text_samples

from maestro_jax import checkpoint
from maestro_jax import trainer as trainer_module
from maestro_jax.checkpoint import Checkpoints
from maestro_jax.data import Dataset, Item, Sample
from maestro_jax.errors import CheckpointError, TrainingError
from maestro_jax.pace import Preempted
from maestro_jax.run import Run
from maestro_jax.runtime import Compiled
from maestro_jax.terminal import Terminal
from maestro_jax.trainer import Trainer

GRAPH = small_run.graph()
SGD = optax.sgd(0.05, momentum=0.9)
HUGE = optax.sgd(1e38)
"""After one step with it, nothing is finite any more."""


@pytest.fixture(autouse=True, scope="module")
def compiled_once() -> Iterator[None]:
    """Trainers of the same graph and optimizer share their programs: compiling takes most of the time of such small runs."""
    known: dict[Any, Compiled] = {}

    def compiled(plan: Any, optimizers: Mapping[str, Any], clip_norm: float | None, evaluation: bool, progress: Any) -> Compiled:
        # What is compiled holds on to graph and optimizers, so no other object gets these numbers.
        key = (id(plan.graph), *(id(each) for each in optimizers.values()), clip_norm, evaluation)
        if key not in known:
            known[key] = Compiled(plan, optimizers, clip_norm, evaluation, progress)
        return known[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(trainer_module, "Compiled", compiled)
        yield


class Screen(Terminal):
    """A terminal whose text can be read, and that may send a signal to the run."""

    def __init__(self, *, stop_at: int | None = None, stop_in: int | None = None, number: int = signal.SIGTERM) -> None:
        self._stream = io.StringIO()
        super().__init__(self._stream, interactive=False)
        self._stop_at, self._stop_in, self._number = stop_at, stop_in, number

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def notes(self) -> list[str]:
        """Notes about the run; the plan has one too."""
        found = [line.removeprefix("note: ") for line in self.text.splitlines() if line.startswith("note: ")]
        return [note for note in found if "stay idle" not in note]

    def tick(self, step: int, steps: int) -> None:
        if step == self._stop_at:
            signal.raise_signal(self._number)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        super().evaluation(step, values)
        if step == self._stop_in:
            signal.raise_signal(self._number)


def trainer(**fields: Any) -> Trainer:
    defaults = {"graph": GRAPH, "data": small_run.dataset(), "steps": 8, "batch": 6, "optimizer": SGD, "metrics": None, "log_every": 1000}
    return Trainer(**{**defaults, **fields})


def fit(folder: Path | None, screen: Screen | None = None, **fields: Any) -> tuple[Run, Screen]:
    screen = screen or Screen()
    return trainer(**fields).fit(folder, terminal=screen), screen


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "weights").iterdir())}


def saved_steps(folder: Path) -> list[int]:
    return [commit.step for commit in Checkpoints(folder / "checkpoints").commits()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps from beginning to end, with evaluations every third step."""
    folder = tmp_path_factory.mktemp("whole")
    fit(folder, evaluate_every=3)
    return folder


@pytest.mark.parametrize("where", ["at an evaluation", "in the last step"])
def test_a_run_that_was_stopped_makes_up_for_what_it_missed(whole: Path, tmp_path: Path, where: str) -> None:
    stop_at = {"at an evaluation": 6, "in the last step": 8}[where]
    with pytest.raises(Preempted):
        fit(tmp_path, Screen(stop_at=stop_at), evaluate_every=3)
    assert saved_steps(tmp_path) == [stop_at]
    assert len(records(tmp_path, "evaluations.jsonl")) < 4
    run, screen = fit(tmp_path, evaluate_every=3)
    assert run.step == 8
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert records(tmp_path, name) == records(whole, name)
    assert weights(tmp_path) == weights(whole)
    assert screen.notes == []


def test_evaluations_disturb_neither_random_state_nor_data(whole: Path, tmp_path: Path) -> None:
    fit(tmp_path, data=Dataset(train=small_run.dataset().train, specs=TEXT_SPECS, vocab_size=16), evaluate_every=0)
    assert not (tmp_path / "evaluations.jsonl").exists()
    # How long devices are busy changes: nothing runs ahead over an evaluation.
    assert [{**record, "busy": {}} for record in records(tmp_path)] == [{**record, "busy": {}} for record in records(whole)]
    assert weights(tmp_path) == weights(whole)


def test_a_complete_run_stays_as_it_is(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")}
    (tmp_path / "weights" / "c.safetensors").unlink()
    run, screen = fit(tmp_path, evaluate_every=3)
    assert run.step == 8
    assert "complete: 8 of 8 steps are trained" in screen.text
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")} == before
    assert weights(tmp_path) == weights(whole)
    assert records(tmp_path, "evaluations.jsonl") == records(whole, "evaluations.jsonl")


def test_no_steps_only_evaluate_the_run_of_a_folder(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    data = dataclasses.replace(small_run.dataset(), heldout=text_samples(7, seed=2))
    run, screen = fit(tmp_path, steps=0, data=data)
    assert "evaluating after 8 steps" in screen.text
    assert "complete" not in screen.text
    [found] = re.findall(r"held-out at step 8  c: cross_entropy (\S+)", screen.text)
    assert float(found) == pytest.approx(run.evaluate()["c/cross_entropy"], abs=1e-4)
    assert float(found) != pytest.approx(records(whole, "evaluations.jsonl")[-1]["heldout"]["c/cross_entropy"], abs=1e-4)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_a_stop_kept_from_its_evaluation_can_be_the_best(tmp_path: Path) -> None:
    best = "c/cross_entropy"
    fields = {"evaluate_every": 2, "checkpoint_every": 0, "keep_checkpoints": 1, "keep_best": best}
    with pytest.raises(Preempted):
        fit(tmp_path, Screen(stop_at=4), **fields)
    assert saved_steps(tmp_path) == [4, 2]
    # Whatever comes after it is worse.
    fit(tmp_path, **{**fields, "optimizer": optax.sgd(30.0, momentum=0.9)})
    values = {record["step"]: record["heldout"][best] for record in records(tmp_path, "evaluations.jsonl")[1:]}
    assert min(values, key=lambda step: values[step]) == 4, "the test needs a run that gets worse"
    assert saved_steps(tmp_path) == [8, 4]
    assert Checkpoints(tmp_path / "checkpoints").commits()[-1].heldout[best] == values[4]


def test_without_a_checkpoint_sigterm_still_says_so(tmp_path: Path) -> None:
    screen = Screen(stop_in=0)
    with pytest.raises(Preempted):
        fit(tmp_path, screen)
    assert saved_steps(tmp_path) == []
    assert "interrupted after step 0/8" in screen.text
    assert "checkpoint:" not in screen.text
    run, screen = fit(tmp_path)
    assert run.step == 8
    assert "begins anew" in screen.notes[0]


@pytest.mark.quick
def test_the_best_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = "c/cross_entropy"
    fields = {"optimizer": optax.sgd(30.0), "evaluate_every": 1, "checkpoint_every": 0, "keep_checkpoints": 1, "keep_best": best}
    fit(tmp_path, **fields, steps=4)
    values = {record["step"]: record["heldout"][best] for record in records(tmp_path, "evaluations.jsonl")[1:]}
    lowest = min(values, key=lambda step: values[step])
    assert lowest < 4, "the test needs a run that gets worse"
    assert saved_steps(tmp_path) == [4, lowest]
    # A run that goes on knows how good the best was, and does not save what is worse.
    saved: list[int] = []
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, *more: (saved.append(step), save(self, step, *more)))
    # Without learning, so that nothing better comes.
    fit(tmp_path, **{**fields, "optimizer": optax.sgd(0.0)}, steps=6)
    assert (saved, saved_steps(tmp_path)) == ([6], [6, lowest])


def test_the_end_of_a_run_that_only_skips_has_a_name(tmp_path: Path) -> None:
    screen = Screen()
    with pytest.raises(TrainingError) as caught:
        fit(tmp_path, screen, optimizer=HUGE, clip_norm=None, skip_limit=2, checkpoint_every=1)
    error = caught.value
    assert error.what == "training ends at step 4: objective c/cross_entropy is nan."
    assert error.have.splitlines()[0] == "3 steps skipped: 2-4"
    assert re.search(r"samples of step 4: s\d+, s\d+, s\d+, s\d+ and 2 more", error.have)
    assert (error.anchor, error.set_by) == ("steps-not-finite", "the calling program: Trainer.skip_limit")
    assert [record["applied"] for record in records(tmp_path)] == [True, False, False, False]
    assert records(tmp_path)[1]["not_finite"][0] == "objective c/cross_entropy is nan"
    # After a skipped step nothing is saved: it might be what made it so.
    assert saved_steps(tmp_path) == [1]
    assert screen.notes[0] == "step 2 is skipped in every section: objective c/cross_entropy is nan"
    assert "skipped (not finite)" in screen.text


def test_a_run_that_goes_on_remembers_what_was_skipped(tmp_path: Path) -> None:
    fields = {"optimizer": HUGE, "clip_norm": None, "skip_limit": 3, "checkpoint_every": 1}
    with pytest.raises(Preempted):
        fit(tmp_path, Screen(stop_at=3), **fields)
    with pytest.raises(TrainingError, match="training ends at step 5") as caught:
        fit(tmp_path, **fields)
    assert caught.value.have.startswith("4 steps skipped: 2-5")


def unlearnable(count: int) -> list[Sample]:
    """Samples without a token that counts."""
    return [
        Sample(id=s.id, items={"text": (Item(units=i.units, arrays={**i.arrays, "loss_mask": np.zeros(i.units, np.float32)}),)})
        for s in text_samples(count)
        for i in s.items["text"]
    ]


def test_steps_in_which_nothing_counts_do_not_end_a_run(tmp_path: Path) -> None:
    """PEER_CASES 21, of steps instead of sections: no loss, so none is reported."""
    data = Dataset(train=unlearnable(12), heldout=unlearnable(3), specs=TEXT_SPECS)
    run, screen = fit(tmp_path, data=data, steps=3, skip_limit=0, keep_best="c/cross_entropy", evaluate_every=1)
    assert run.step == 3
    assert [(record["loss"], record["applied"], record["skipped_steps"]) for record in records(tmp_path)] == [
        (None, False, 1),
        (None, False, 2),
        (None, False, 3),
    ]
    assert [record["heldout"] for record in records(tmp_path, "evaluations.jsonl")] == [{"c/cross_entropy": None, "c/square": None}] * 4
    assert "skipped (nothing counted)" in screen.text
    # What cannot be compared is not the best.
    assert saved_steps(tmp_path) == [3]


@pytest.mark.quick
def test_sections_without_a_loss_are_reported_without_one(tmp_path: Path) -> None:
    """PEER_CASES 21."""
    fit(tmp_path, steps=2, evaluate_every=1, metrics=trainer_module.TensorBoard())
    for record in records(tmp_path):
        assert set(record["objectives"]) == {"c/cross_entropy", "c/square"}
        assert set(record["padding"]) == {"a", "b", "c"}
    assert all(set(record["heldout"]) == {"c/cross_entropy", "c/square"} for record in records(tmp_path, "evaluations.jsonl"))


def test_a_loss_that_jumps_is_told_also_after_going_on(tmp_path: Path) -> None:
    def rate(step: Any) -> Any:
        # Losses stand still until step 25, which makes them worse.
        return jnp.where(step == 24, -30.0, 0.0)

    # Every sample in every step, so that the loss moves with the parameters alone.
    fields = {"optimizer": optax.sgd(rate), "batch": 20, "steps": 26, "graph": chain()}
    with pytest.raises(Preempted):
        fit(tmp_path, Screen(stop_at=23), **fields)
    _, screen = fit(tmp_path, **fields)
    [note] = screen.notes
    assert re.match(r"step 26: loss \S+ is \S+ median absolute deviations \(\S+\) above \S+, the median of the last 25 applied steps", note)


def test_samples_that_fit_nowhere_are_named_and_counted_once(tmp_path: Path) -> None:
    fields = {"graph": chain(middle={"microbatch": 20}), "on_bad_sample": "skip", "steps": 6, "checkpoint_every": 2, "evaluate_batches": 0}
    run, screen = fit(tmp_path / "whole", **fields)
    named = [what for record in records(tmp_path / "whole") for what in record.get("bad_samples", [])]
    assert run.skipped_samples.total() == len(named) > 1
    # Twenty samples make three steps of six.
    assert f"samples were skipped {len(named)} times, again in each epoch: sample-too-long {len(named)}" in screen.text
    [note] = screen.notes
    assert f"{named[0]} Have: " in note
    assert note.endswith("It is left out; others of this kind (sample-too-long) are counted.")
    # Samples that were only prepared when the run stopped are not counted twice.
    with pytest.raises(Preempted):
        fit(tmp_path / "stopped", Screen(stop_at=2), **fields)
    again, _ = fit(tmp_path / "stopped", **fields)
    assert again.skipped_samples == run.skipped_samples
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


def test_the_count_of_one_epoch_is_of_samples(tmp_path: Path) -> None:
    run, screen = fit(tmp_path, graph=chain(middle={"microbatch": 20}), on_bad_sample="skip", steps=3, evaluate_batches=0)
    count = run.skipped_samples["sample-too-long"]
    assert f"\n{count} samples were skipped: sample-too-long {count} (explained in docs/errors.md)\n" in screen.text


@pytest.mark.parametrize(("skip_limit", "steps", "ends"), [(2, 8, 1), (8, 8, 2), (100, 2, 2)])
def test_a_run_in_which_every_sample_is_bad_ends_with_the_cause(tmp_path: Path, skip_limit: int, steps: int, ends: int) -> None:
    fields = {"graph": chain(middle={"microbatch": 2}), "on_bad_sample": "skip", "skip_limit": skip_limit, "steps": steps}
    with pytest.raises(TrainingError, match=f"training ends at step {ends}: no sample can be used") as caught:
        fit(tmp_path, **fields)
    assert f"{6 * ends} bad ones in a row: sample-too-long {6 * ends}\n" in caught.value.have
    assert "is longer than the largest micro-batch of section 'middle'" in caught.value.have
    assert not (tmp_path / "weights").exists()


def test_held_out_samples_that_are_left_out_are_told_apart(tmp_path: Path) -> None:
    data = small_run.dataset()
    data = dataclasses.replace(data, heldout=text_samples(2, shortest=30, longest=30) + text_samples(5, shortest=5, longest=9)[2:])
    data = dataclasses.replace(data, train=text_samples(20, longest=20))
    _, screen = fit(tmp_path, graph=chain(middle={"microbatch": 20}), data=data, on_bad_sample="skip", steps=4, evaluate_every=1)
    assert [note.split(":")[0] for note in screen.notes] == ["held out"]
    assert "\n2 held-out samples were skipped: sample-too-long 2 (explained in docs/errors.md)\n" in screen.text
    assert " times" not in screen.text


def failing_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """From the checkpoint of a step on, the disk is full."""
    write: Callable[..., None] = checkpoint.write_manifest

    def full(folder: Path, body: Mapping[str, Any]) -> None:
        if body.get("step", 0) >= step:
            raise OSError(28, "No space left on device")
        write(folder, body)

    monkeypatch.setattr(checkpoint, "write_manifest", full)


@pytest.mark.parametrize("step", [4, 8])
def test_a_full_disk_ends_the_run_and_the_last_checkpoint_stays_good(whole: Path, tmp_path: Path, step: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        failing_after(monkeypatch, step)
        with pytest.raises(CheckpointError, match=f"the checkpoint of step {step} cannot be written") as caught:
            fit(tmp_path, checkpoint_every=2, evaluate_every=3)
    assert caught.value.set_by == "--workdir"
    assert saved_steps(tmp_path) == [step - 2, step - 4][: step // 2 - 1]
    fit(tmp_path, checkpoint_every=2, evaluate_every=3)
    assert [record["loss"] for record in records(tmp_path)] == [record["loss"] for record in records(whole)]
    assert weights(tmp_path) == weights(whole)
