"""Checkpoints: what is saved comes back bit by bit, on any plan; the last complete one survives whatever happens to the next."""

from __future__ import annotations

import dataclasses
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from damage_support import array_file, flip
from engines import Setup, build
from support import chain, text_samples, wired

from maestro_jax import checkpoint
from maestro_jax.checkpoint import FROZEN, Checkpoints
from maestro_jax.errors import CheckpointError
from maestro_jax.manifest import MANIFEST, read_manifest
from maestro_jax.pieces import Piece, Whole, write_pieces
from maestro_jax.runtime import Engine
from maestro_jax.runtime.snapshot import Snapshot, flat, snapshot_shapes

LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "first": {"a": {"replicas": 2}, "b": {"axes": {"tensor": 2}}},
    "second": {"a": {"axes": {"tensor": 4}, "microbatch": 48}, "b": {"replicas": 2, "microbatch": (32, 64)}},
}


def small(value: float = 1.0, section: str = "a", frozen: bool = True) -> Snapshot:
    """A snapshot of a few numbers, which needs no engine."""
    trained = {section: {"parameters": {"w": jnp.full(3, value)}, "optimizer": {}}}
    return Snapshot(trained=trained, frozen={"teacher": {"w": jnp.full(2, 7.0)}} if frozen else {})


def shapes(snapshot: Snapshot) -> Snapshot:
    def shape(value: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)

    return Snapshot(trained=jax.tree.map(shape, dict(snapshot.trained)), frozen=jax.tree.map(shape, dict(snapshot.frozen)))


def copied(snapshot: Snapshot) -> dict[str, np.ndarray]:
    """Every leaf, in memory of its own."""
    return {
        path: np.array(leaf, copy=True) for path, leaf in flat({"trained": {**snapshot.trained}, "frozen": {**snapshot.frozen}}).items()
    }


def same(have: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> bool:
    """Whether all leaves are there and equal in every bit."""
    return have.keys() == want.keys() and all(
        have[path].dtype == value.dtype and have[path].shape == value.shape and have[path].tobytes() == value.tobytes()
        for path, value in want.items()
    )


def trained(setup: Setup, steps: int = 3) -> Setup:
    for step in range(steps):
        setup.engine.step(setup.preparer.prepare(text_samples(6, seed=step), step))
    return setup


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path / "checkpoints", keep=2, keep_best="a/kl")
    yield made
    made.close()


def saved(checkpoints: Checkpoints, *steps: int, heldout: Mapping[str, float] | None = None) -> None:
    for step in steps:
        checkpoints.save(step, small(step), {"step": step}, heldout)
        checkpoints.wait()


def steps(checkpoints: Checkpoints) -> list[int]:
    return [commit.step for commit in checkpoints.commits()]


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


@pytest.mark.quick
def test_adam_goes_on_with_the_same_count_and_moments(checkpoints: Checkpoints) -> None:
    """PEER_CASES 12, on the same plan."""
    setup = trained(build(chain(student={"replicas": 2}), optimizer=optax.adam(0.1)))
    want = copied(setup.engine.snapshot())
    assert want["trained/student/optimizer/0/count"] == 3
    assert any(np.abs(value).max() > 0 for path, value in want.items() if "/optimizer/0/mu/" in path)
    checkpoints.save(3, setup.engine.snapshot(), {})
    checkpoints.wait()
    wanted = snapshot_shapes(setup.engine.plan, setup.engine.compiled.optimizers)
    found = checkpoints.restore(checkpoints.commits()[0], wanted)
    assert same(copied(found), want)
    prepared = [setup.preparer.prepare(text_samples(6, seed=9), 3) for _ in range(2)]
    after = Engine(setup.engine.compiled, seed=1, saved=found)
    reports = [engine.step(each) for engine, each in zip((after, setup.engine), prepared, strict=True)]
    assert reports[0].read(setup.objectives()) == reports[1].read(setup.objectives())
    assert same(copied(after.snapshot()), copied(setup.engine.snapshot()))


def test_another_plan_gets_the_same_bits(checkpoints: Checkpoints) -> None:
    first = trained(build(wired("pair", LAYOUTS["first"]), optimizer=optax.adamw(0.1)))
    want = copied(first.engine.snapshot())
    checkpoints.save(3, first.engine.snapshot(), {})
    checkpoints.wait()
    second = build(wired("pair", LAYOUTS["second"]), optimizer=optax.adamw(0.1), seed=5)
    wanted = snapshot_shapes(second.engine.plan, second.engine.compiled.optimizers)
    found = checkpoints.restore(checkpoints.commits()[0], wanted)
    assert same(copied(found), want)
    placed, asked = ({p: leaf.sharding for p, leaf in flat({**each.trained}).items()} for each in (found, wanted))
    assert placed == asked
    assert len({sharding.num_devices for sharding in placed.values()} | {len(first.engine.plan.sections)}) > 1
    engine = Engine(second.engine.compiled, seed=5, saved=found)
    assert same(copied(engine.snapshot()), want)
    assert engine.step(second.preparer.prepare(text_samples(6), 3)).read(second.objectives())["applied"] == 1


def test_arrays_may_be_donated_as_soon_as_save_returns(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.write_pieces

    def slowly(*args: Any) -> Any:
        # Or a loaded machine might write before the next step has been run.
        time.sleep(0.2)
        return write(*args)

    monkeypatch.setattr(checkpoint, "write_pieces", slowly)
    setup = trained(build(chain(width=512), optimizer=optax.adam(0.1)), 1)
    prepared = [setup.preparer.prepare(text_samples(6, seed=step), step) for step in range(6)]
    wanted = snapshot_shapes(setup.engine.plan, setup.engine.compiled.optimizers)
    overlapped = 0
    for step in (1, 3, 5):
        want = copied(setup.engine.snapshot())
        checkpoints.save(step, setup.engine.snapshot(), {})
        for each in prepared[step : step + 2]:
            setup.engine.step(each).wait()
        overlapped += not steps(checkpoints) or steps(checkpoints)[0] < step
        checkpoints.wait()
        assert same(copied(checkpoints.restore(checkpoints.commits()[0], wanted)), want)
    assert overlapped, "no step ran while a checkpoint was written"


@pytest.mark.parametrize("name", ["metrics", "descriptor", "default", "state", "frozen", "ü"])
def test_a_section_may_have_any_name(checkpoints: Checkpoints, name: str) -> None:
    first, second = small(4.0), small(5.0)
    snapshot = Snapshot(trained={name: first.trained["a"], "other": second.trained["a"]}, frozen={name: {"w": jnp.zeros(2)}})
    checkpoints.save(1, snapshot, {})
    checkpoints.wait()
    assert checkpoints.problem(checkpoints.commits()[0]) is None
    assert same(copied(checkpoints.restore(checkpoints.commits()[0], shapes(snapshot))), copied(snapshot))


@pytest.mark.quick
def test_the_newest_ones_and_the_best_stay(checkpoints: Checkpoints) -> None:
    nan = float("nan")
    for step, value in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, 1.0), (60, 5.0), (70, nan), (80, nan)):
        saved(checkpoints, step, heldout=None if value is None else {"a/kl": value, "a/other": -value})
    # Of equals the newest is the best, and NaN is not.
    assert steps(checkpoints) == [80, 70, 50]
    best = checkpoints.best()
    assert best is not None
    assert (best[0], best[1].step) == (1.0, 50)
    assert names(checkpoints) == ["00000050", "00000070", "00000080", FROZEN]


def test_an_evaluation_can_be_added_to_a_checkpoint(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1, heldout={"a/kl": 2.0})
    saved(checkpoints, 2)
    checkpoints.add_heldout(2, {"a/kl": 1.0})
    newest = checkpoints.commits()[0]
    assert (newest.step, newest.heldout, newest.state, checkpoints.problem(newest)) == (2, {"a/kl": 1.0}, {"step": 2}, None)
    saved(checkpoints, 3, 4, 5)
    assert steps(checkpoints) == [5, 4, 2]
    with pytest.raises(CheckpointError, match="the evaluation of step 3 cannot be added"):
        checkpoints.add_heldout(3, {"a/kl": 0.5})


def test_another_objective_may_decide_later(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1, heldout={"a/kl": 0.5, "a/other": 9.0})
    saved(checkpoints, 2, heldout={"a/kl": 0.7, "a/other": 8.0})
    others = Checkpoints(checkpoints.folder, 1, "a/other")
    saved(others, 3, heldout={"a/kl": 0.1, "a/other": 8.5})
    others.close()
    assert steps(others) == [3, 2]


def test_what_was_saved_beside_arrays_comes_back(checkpoints: Checkpoints) -> None:
    state = {"watch": {"losses": [0.1, 2.5]}, "text": "ü", "none": None}
    checkpoints.save(4, small(frozen=False), state, {"a/kl": 2.0})
    checkpoints.wait()
    [commit] = checkpoints.commits()
    assert (commit.state, commit.heldout, commit.frozen, commit.path.name) == (state, {"a/kl": 2.0}, False, "00000004")


def test_frozen_parameters_are_written_once(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1)
    before = {path: path.stat().st_mtime_ns for path in (checkpoints.folder / FROZEN).rglob("*")}
    saved(checkpoints, 2, 3, 4)
    assert {path: path.stat().st_mtime_ns for path in (checkpoints.folder / FROZEN).rglob("*")} == before


def test_nothing_is_removed_before_the_next_is_complete(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(checkpoints, 1, 2)
    seen: list[list[int]] = []
    write = checkpoint.write_manifest

    def watched(folder: Path, body: Mapping[str, Any]) -> None:
        seen.append(steps(checkpoints))
        write(folder, body)

    monkeypatch.setattr(checkpoint, "write_manifest", watched)
    saved(checkpoints, 3)
    assert (seen, steps(checkpoints)) == ([[2, 1]], [3, 2])


@pytest.mark.quick
def test_frozen_parameters_are_committed_before_what_needs_them(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, bool]] = []
    write = checkpoint.write_manifest

    def watched(folder: Path, body: Mapping[str, Any]) -> None:
        write(folder, body)
        order.append((folder.name, read_manifest(checkpoints.folder / FROZEN) is not None))

    monkeypatch.setattr(checkpoint, "write_manifest", watched)
    saved(checkpoints, 1)
    assert order == [(FROZEN, True), ("00000001", True)]


def test_commits_come_in_the_order_of_the_saves(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = checkpoint.write_manifest

    def slow(folder: Path, body: Mapping[str, Any]) -> None:
        time.sleep(0.05 if folder.name == "00000001" else 0)
        write(folder, body)
        order.append(folder.name)

    monkeypatch.setattr(checkpoint, "write_manifest", slow)
    for step in (1, 2, 3):
        checkpoints.save(step, small(step), {})
    checkpoints.wait()
    assert order == [FROZEN, "00000001", "00000002", "00000003"]


def test_what_a_killed_run_left_is_removed_after_the_next_commit(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1)
    left = ["00000002", "00000003", "00000009"]
    for name in left:
        (checkpoints.folder / name / "a").mkdir(parents=True)
        (checkpoints.folder / name / "a" / "half").write_text("half")
    (checkpoints.folder / "notes of the user").mkdir()
    assert steps(checkpoints) == [1]
    assert checkpoints.unreadable() == []
    # One of them lies where the next one goes.
    saved(checkpoints, 3)
    assert names(checkpoints) == ["00000001", "00000003", FROZEN, "notes of the user"]
    assert [checkpoints.problem(commit) for commit in checkpoints.commits()] == [None, None]


def test_damaged_newer_ones_do_not_take_the_place_of_whole_ones(checkpoints: Checkpoints) -> None:
    """A run that goes on from step 1 because 2 and 3 are damaged: were they counted, its own checkpoint of step 2 would be removed."""
    saved(checkpoints, 1)
    whole = checkpoints.commits()[0]
    for step in (3, 4):
        checkpoints.keep = 3
        saved(checkpoints, step)
    checkpoints.keep = 1
    checkpoints.disown_newer(whole)
    assert steps(checkpoints) == [1]
    assert names(checkpoints) == ["00000001", "00000003", "00000004", FROZEN]
    saved(checkpoints, 2)
    assert names(checkpoints) == ["00000002", FROZEN]


@pytest.mark.parametrize("folder", ["00000002", FROZEN])
@pytest.mark.parametrize(("harm", "says"), [(flip, "is not as it was written"), (Path.unlink, "is missing")])
def test_damage_is_seen(checkpoints: Checkpoints, folder: str, harm: Callable[[Path], None], says: str) -> None:
    saved(checkpoints, 1, 2)
    harm(array_file(checkpoints.folder / folder))
    newest, older = checkpoints.commits()
    assert says in str(checkpoints.problem(newest))
    assert (checkpoints.problem(older) is None) is (folder != FROZEN)


def test_a_flipped_byte_in_a_manifest_makes_it_unreadable(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1, 2)
    flip(checkpoints.folder / "00000002" / MANIFEST)
    assert steps(checkpoints) == [1]
    assert [path.name for path in checkpoints.unreadable()] == ["00000002"]


def test_what_cannot_be_read_into_these_shapes_is_an_error(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1)
    with pytest.raises(CheckpointError, match="the checkpoint of step 1 cannot be read") as caught:
        checkpoints.restore(checkpoints.commits()[0], shapes(small(section="b")))
    assert str(checkpoints.folder / "00000001") in caught.value.have
    assert caught.value.anchor == "checkpoint-unreadable"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def overwrite(path: Path) -> None:
    path.write_bytes(b"{}")


def without_last(path: Path) -> None:
    """A file of the same form, in which one piece is missing."""
    rewritten(path, lambda pieces: pieces[:-1])


def overlapping(path: Path) -> None:
    """As many numbers as the array has, and one of them twice."""
    rewritten(path, lambda pieces: [*pieces[:-1], dataclasses.replace(pieces[-1], start=(1,))])


def rewritten(path: Path, change: Callable[[list[Piece]], list[Piece]]) -> None:
    whole = Whole(shape=(4,), dtype="float32")
    halves = [Piece(path="parameters/w", whole=whole, start=(start,), values=np.ones(2, np.float32)) for start in (0, 2)]
    write_pieces(path, change(halves))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (cut, "SafetensorError: "),
        (overwrite, "SafetensorError: "),
        (Path.unlink, "FileNotFoundError: "),
        (without_last, "ValueError: parameters/w: 2 of 4 elements are there"),
        (overlapping, "ValueError: parameters/w: pieces overlap"),
    ],
)
def test_what_does_not_hold_every_array_once_is_an_error(checkpoints: Checkpoints, harm: Callable[[Path], None], says: str) -> None:
    saved(checkpoints, 1)
    [commit] = checkpoints.commits()
    harm(array_file(commit.path))
    assert checkpoints.problem(commit) is not None
    for read in (lambda: checkpoints.restore(commit, shapes(small())), lambda: checkpoints.read_parameters(commit, "a")):
        with pytest.raises(CheckpointError, match="the checkpoint of step 1 cannot be read") as caught:
            read()
        assert caught.value.have.startswith(says)


def test_parameters_are_read_without_devices(checkpoints: Checkpoints) -> None:
    """Those that are trained and those that are not, and no optimizer state."""
    trained = {"a": {"parameters": {"x": {"w": jnp.full((2, 3), 4.0)}, "b": jnp.bfloat16(2)}, "optimizer": {"0": {"mu": jnp.zeros(3)}}}}
    checkpoints.save(1, Snapshot(trained=trained, frozen={"a": {"head": jnp.arange(3)}, "teacher": {"w": jnp.ones(1)}}), {})
    checkpoints.wait()
    [commit] = checkpoints.commits()
    want = {"x/w": np.full((2, 3), 4, np.float32), "b": np.asarray(jnp.bfloat16(2)), "head": np.arange(3, dtype=np.int32)}
    assert same(checkpoints.read_parameters(commit, "a"), want)
    assert same(checkpoints.read_parameters(commit, "teacher"), {"w": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match="no parameters of 'b' are stored"):
        checkpoints.read_parameters(commit, "b")


@pytest.mark.parametrize(
    ("name", "path", "form", "says"),
    [
        ("b", "parameters/w", "float32[3]", "b: parameters/w was written by no process"),
        ("a", "optimizer/0/count", "int32[]", "a: optimizer/0/count was written by no process"),
        ("a", "parameters/w", "float32[4]", "a: parameters/w was written as float32[3], and is float32[4]"),
        ("teacher", "frozen/v", "[3]", "teacher: v was written by no process"),
    ],
)
def test_what_the_signature_names_must_have_been_written(checkpoints: Checkpoints, name: str, path: str, form: str, says: str) -> None:
    """Success must not be reported without the data."""
    signature = small().signature()
    checkpoints.save(1, small(), {"signature": {**signature, name: {**signature.get(name, {}), path: form}}})
    with pytest.raises(CheckpointError, match="would not be complete") as caught:
        checkpoints.wait()
    assert (caught.value.have.splitlines()[0], caught.value.anchor) == (says, "checkpoint-incomplete")
    assert steps(checkpoints) == []
    checkpoints.save(2, small(), {"signature": signature})
    checkpoints.wait()
    assert steps(checkpoints) == [2]


def test_a_folder_that_the_first_process_does_not_see_is_an_error(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(checkpoints, 1)
    monkeypatch.setattr(checkpoint, "write_pieces", lambda *_: {"bytes": 1000, "sha256": ""})
    checkpoints.save(2, small(), {})
    with pytest.raises(CheckpointError, match="the first process does not see what process 0 wrote") as caught:
        checkpoints.wait()
    assert caught.value.anchor == "checkpoint-not-shared"
    assert names(checkpoints) == ["00000001", FROZEN]


def refused(checkpoints: Checkpoints, step: int, snapshot: Snapshot | None = None) -> CheckpointError:
    def save() -> None:
        checkpoints.save(step, snapshot or small(step), {})
        checkpoints.wait()

    with pytest.raises(CheckpointError, match=f"the checkpoint of step {step} cannot be written") as caught:
        save()
    return caught.value


def test_on_a_full_disk_the_last_one_stays_good(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1)
    random = np.random.default_rng(0).random(100_000).astype(np.float32)
    large = Snapshot(trained={"a": {"parameters": {"w": jax.device_put(random)}, "optimizer": {}}}, frozen={})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system refuses to write more than this into one file, as it does when a disk is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        error = refused(checkpoints, 2, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in error.have
    assert error.have.endswith("last good checkpoint: 1)")
    assert (error.anchor, error.set_by) == ("checkpoint-unwritable", "the calling program: Checkpoints.folder")
    # What did not become complete takes no room, and the next one is written as if nothing had happened.
    assert names(checkpoints) == ["00000001", FROZEN]
    assert checkpoints.problem(checkpoints.commits()[0]) is None
    saved(checkpoints, 3)
    assert steps(checkpoints) == [3, 1]


def test_a_disk_that_fills_up_at_the_manifest_is_an_error(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(checkpoints, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maestro_jax.manifest.os.replace", full)
    assert "No space left on device" in refused(checkpoints, 2).have
    assert names(checkpoints) == ["00000001", FROZEN]


@pytest.mark.parametrize("where", [(Path, "mkdir"), (checkpoint, "to_host"), (checkpoint, "write_pieces")])
def test_a_folder_that_cannot_be_written_is_an_error(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    saved(checkpoints, 1)

    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(*where, forbidden)
    assert "PermissionError: [Errno 13] Permission denied" in refused(checkpoints, 2).have
    monkeypatch.undo()
    assert checkpoints.problem(checkpoints.commits()[0]) is None
    saved(checkpoints, 3)
    assert steps(checkpoints) == [3, 1]


def test_an_error_of_the_thread_is_raised_at_the_next_save(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(checkpoints, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", full)
    checkpoints.save(2, small(), {})
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 cannot be written"):
        checkpoints.save(3, small(), {})
    monkeypatch.undo()
    checkpoints.save(4, small(), {})
    checkpoints.wait()
    assert steps(checkpoints) == [4, 1]


def test_a_folder_is_made_with_the_first_checkpoint(checkpoints: Checkpoints) -> None:
    assert not checkpoints.folder.exists()
    assert checkpoints.commits() == checkpoints.unreadable() == []
    assert checkpoints.best() is None
    saved(checkpoints, 1)
    assert steps(checkpoints) == [1]
