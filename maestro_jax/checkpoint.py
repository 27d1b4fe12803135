"""Checkpoints on disk: written in the background by Orbax, committed by a manifest of our own, verified before they are used.

`FOLDER/00000400/` holds one Orbax item for each trained section, and `FOLDER/frozen/` what is never updated, written once. A folder
counts from the moment when its `manifest.json` has been renamed into place; it names every file with its size and SHA-256, so that half
a folder, a missing file or a flipped bit is seen before anything is read. Older checkpoints, and what a killed run left of one, are
removed only after that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .errors import CheckpointError
from .manifest import MANIFEST, damage, read_manifest, write_manifest
from .runtime.snapshot import Snapshot

FROZEN = "frozen"
_STEP = re.compile(r"\d{8}")
_UNFINISHED = re.compile(r"(\d{8}|frozen)\.orbax-checkpoint-tmp.*")
"""What Orbax calls a folder until all files are in it."""

_Begun = tuple[ocp.AsyncCheckpointer, Path, dict[str, Any]]
"""A folder that is being written, and what its manifest will say besides files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """A checkpoint that is complete.

    Args:
        step: steps that were trained.
        path: its folder.
        state: what the run saved beside arrays, as JSON values.
        heldout: "section/objective" -> mean over held-out data at that very step; empty where none was taken.
        frozen: whether the parameters in the folder `frozen` belong to it.
    """

    step: int
    path: Path
    state: Mapping[str, Any]
    heldout: Mapping[str, float]
    frozen: bool


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie; made with the first one.
        keep: how many of the newest ones stay.
        keep_best: held-out objective ("section/objective", lower is better) whose best checkpoint stays besides; None keeps none.
        set_by: where the folder was set, for error texts.
    """

    def __init__(
        self, folder: Path | str, keep: int = 2, keep_best: str | None = None, *, set_by: str = "the calling program: Checkpoints.folder"
    ) -> None:
        # Orbax takes absolute paths only.
        self.folder, self.keep, self.keep_best, self._set_by = Path(folder).absolute(), keep, keep_best, set_by
        # One thread: commits happen in the order of the saves, beside training.
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def commits(self) -> list[Commit]:
        """All complete checkpoints, the newest first; their files are not verified (see `problem`)."""
        found = []
        for path in self._folders():
            body = read_manifest(path)
            if body is not None:
                found.append(Commit(path=path, **{name: body[name] for name in ("step", "state", "heldout", "frozen")}))
        return sorted(found, key=lambda commit: -commit.step)

    def best(self) -> tuple[float, Commit] | None:
        """The lowest value of `keep_best` that a complete checkpoint has, with that checkpoint, the newest of several; None without one."""
        values = [(commit.heldout.get(self.keep_best or "", math.nan), commit) for commit in self.commits()]
        return min([pair for pair in values if math.isfinite(pair[0])], key=lambda pair: pair[0], default=None)

    def unreadable(self) -> list[Path]:
        """Folders whose manifest is damaged; one without a manifest is what a killed run left, and does not count."""
        return [path for path in self._folders() if (path / MANIFEST).exists() and read_manifest(path) is None]

    def _folders(self) -> list[Path]:
        return sorted(p for p in self.folder.iterdir() if _STEP.fullmatch(p.name)) if self.folder.is_dir() else []

    def problem(self, commit: Commit) -> str | None:
        """Reads every file of a checkpoint, and of what it needs; says what is wrong, or None."""
        return damage(commit.path) or (damage(self.folder / FROZEN) if commit.frozen else None)

    def disown_newer(self, commit: Commit) -> None:
        """Makes checkpoints newer than the one that a run goes on from count no longer.

        They are damaged, and would be kept in the place of whole ones. Their files stay until the next checkpoint is complete.

        Args:
            commit: what the run goes on from.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        try:
            for path in self._folders():
                if int(path.name) > commit.step and (path / MANIFEST).exists():
                    os.replace(path / MANIFEST, path / f"damaged-{MANIFEST}")
        except OSError as error:
            raise self._cannot_write("damaged checkpoints cannot be set aside.", error) from error

    def save(self, step: int, snapshot: Snapshot, state: Mapping[str, Any], heldout: Mapping[str, float] | None = None) -> None:
        """Begins to write a checkpoint; returns when the arrays have been copied to the host, before they are on disk.

        Args:
            step: steps that were trained.
            snapshot: the arrays, which may be donated as soon as this returns.
            state: JSON values.
            heldout: an evaluation on held-out data at this very step; None where none was made.

        Raises:
            CheckpointError: this one, or the one before it, cannot be written.
        """
        self.wait()
        path = self.folder / f"{step:08d}"
        body = {"step": step, "state": dict(state), "heldout": dict(heldout or {}), "frozen": bool(snapshot.frozen)}
        begun: list[_Begun] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if snapshot.frozen and read_manifest(self.folder / FROZEN) is None:
                begun.append((_begin(self.folder / FROZEN, snapshot.frozen), self.folder / FROZEN, {}))
            begun.append((_begin(path, snapshot.trained), path, body))
        except Exception as error:  # Orbax passes on whatever its file systems raise
            self._give_up(begun)
            raise self._cannot_write(f"the checkpoint of step {step} cannot be written.", error) from error
        self._pending = self._thread.submit(self._commit, step, begun)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: it cannot be written; the one before it is still good.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Waits as `wait` does, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def restore(self, commit: Commit, shapes: Snapshot) -> Snapshot:
        """Reads a checkpoint into shapes and shardings of any plan of the same graph.

        Args:
            commit: which one; verified with `problem` before.
            shapes: what is wanted, as `snapshot_shapes` returns it.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            return Snapshot(
                trained=_read(commit.path, shapes.trained),
                frozen=_read(self.folder / FROZEN, shapes.frozen) if shapes.frozen else {},
            )
        except Exception as error:  # Orbax passes on whatever its file systems and readers raise
            raise CheckpointError(
                f"the checkpoint of step {commit.step} cannot be read.",
                wanted="a checkpoint as this version writes it",
                have=f"{type(error).__name__}: {error} ({commit.path})",
                fix="take an earlier checkpoint (move this folder away), or begin anew with --restart",
                anchor="checkpoint-unreadable",
                set_by=self._set_by,
            ) from error

    def _commit(self, step: int, begun: list[_Begun]) -> None:
        """Waits for the files, commits them, and then removes what is no longer kept. Runs in the thread."""
        try:
            for writer, path, body in begun:
                writer.wait_until_finished()
                writer.close()
                write_manifest(path, body)
            self._prune()
        except Exception as error:  # as above
            self._give_up(begun)
            raise self._cannot_write(f"the checkpoint of step {step} cannot be written.", error) from error

    def _prune(self) -> None:
        kept = {commit.path for commit in self.commits()[: self.keep]}
        best = self.best()
        if best is not None:
            kept.add(best[1].path)
        for path in self.folder.iterdir():
            if (_STEP.fullmatch(path.name) and path not in kept) or _UNFINISHED.fullmatch(path.name):
                _remove(path)

    def _give_up(self, begun: list[_Begun]) -> None:
        """Removes what was written of a checkpoint that did not become complete: on a full disk it would take the room of the next."""
        for writer, _, _ in begun:
            # Its threads must have ended before their files are removed; what they raise is why this is called.
            with contextlib.suppress(Exception):
                writer.close()
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            incomplete = path in [folder for _, folder, _ in begun] and not (path / MANIFEST).exists()
            if incomplete or _UNFINISHED.fullmatch(path.name):
                _remove(path)

    def _cannot_write(self, what: str, error: Exception) -> CheckpointError:
        earlier = [commit.step for commit in self.commits()]
        return CheckpointError(
            what,
            wanted="a folder that can be written, with room for parameters and optimizer state",
            have=f"{type(error).__name__}: {error} ({self.folder}; last good checkpoint: {earlier[0] if earlier else 'none'})",
            fix="make room or change permissions, and run the same command again: it goes on from the last good checkpoint",
            anchor="checkpoint-unwritable",
            set_by=self._set_by,
        )


def _begin(path: Path, items: Mapping[str, Any]) -> ocp.AsyncCheckpointer:
    """Begins to write a folder, in the place of one that a killed run left or that is damaged."""
    _remove(path)
    writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
    writer.save(path, args=ocp.args.Composite(**{name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}))
    return writer


def _remove(path: Path) -> None:
    # Without its manifest, a folder that is only half removed does not count.
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _read(path: Path, shapes: Mapping[str, Any]) -> dict[str, Any]:
    wanted = {
        name: ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)) for name, tree in shapes.items()
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        restored = reader.restore(path, args=ocp.args.Composite(**wanted))
    return {name: jax.block_until_ready(restored[name]) for name in wanted}
