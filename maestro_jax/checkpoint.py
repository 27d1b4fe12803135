"""Checkpoints on disk: written in the background by all processes, committed by one manifest, verified before they are used.

`FOLDER/00000400/` holds the trained sections, in a file for each section and process (`maestro_jax.pieces`), and `FOLDER/frozen/` what is
never updated, written once. A folder counts from the moment when its `manifest.json` has been renamed into place, which the first process
does when every process has told that its files are on the disk; it names every file with its size and SHA-256, so that half a folder, a
missing file or a flipped bit is seen before anything is read. Older checkpoints, and what a killed run left of one, are removed only
after that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError

from .errors import CheckpointError, error_of
from .manifest import MANIFEST, damage, finished, read_manifest, write_manifest
from .meshes import ProcessGroup
from .pieces import HostArray, Pieces, file_name, on_host, write_pieces
from .runtime.snapshot import Snapshot, flat

FROZEN = "frozen"
_STEP = re.compile(r"\d{8}")

_Begun = tuple[Path, dict[str, dict[str, HostArray]], dict[str, Any]]
"""A folder that is being written, what this process writes of each section, and what its manifest will say besides files."""


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
        group: the processes of the run, which see the same folder; all of them save, restore, wait and close together.
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int = 2,
        keep_best: str | None = None,
        *,
        set_by: str = "the calling program: Checkpoints.folder",
        group: ProcessGroup | None = None,
    ) -> None:
        self.folder, self.keep, self.keep_best, self._set_by = Path(folder).absolute(), keep, keep_best, set_by
        self._group = group if group is not None else ProcessGroup(0, 1)
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
        frozen = any(self._group.all_gather("checkpoint frozen", bool(snapshot.frozen)))
        body = {"step": step, "state": dict(state), "heldout": dict(heldout or {}), "frozen": frozen}
        anew = frozen and any(self._group.all_gather("checkpoint anew", read_manifest(self.folder / FROZEN) is None))
        parts = [(self.folder / FROZEN, snapshot.frozen, {})] * anew + [(path, snapshot.trained, body)]
        self._group.lead("checkpoint folders", lambda: self._begin(step, [folder for folder, _, _ in parts]))
        begun = [(folder, {name: on_host(flat(tree)) for name, tree in sections.items()}, told) for folder, sections, told in parts]
        self._pending = self._thread.submit(self._commit, step, begun)

    def _begin(self, step: int, folders: Sequence[Path]) -> None:
        """Makes empty folders, in the place of those that a killed run left or that are damaged."""
        try:
            for folder in folders:
                _remove(folder)
                folder.mkdir(parents=True)
        except OSError as error:
            self._give_up(folders)
            raise self._cannot_write(f"the checkpoint of step {step} cannot be written.", error) from error

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
        with self._reading(commit):
            trained = {name: _placed(_pieces(commit.path, name), tree) for name, tree in shapes.trained.items()}
            frozen = {name: _placed(_pieces(self.folder / FROZEN, name), tree) for name, tree in shapes.frozen.items()}
            return Snapshot(trained=trained, frozen=frozen)

    def parameters(self, commit: Commit, section: str) -> dict[str, np.ndarray]:
        """Reads the parameters of a section to the host, those that are never updated too, whichever processes have them on devices.

        Args:
            commit: the checkpoint.
            section: a trained one.

        Raises:
            CheckpointError: it cannot be read.
        """
        with self._reading(commit):
            start, trained = "parameters/", _pieces(commit.path, section)
            found = {name.removeprefix(start): trained.read(name) for name in trained.shapes if name.startswith(start)}
            if commit.frozen:
                frozen = _pieces(self.folder / FROZEN, section)
                found |= {name: frozen.read(name) for name in frozen.shapes}
            return found

    @contextlib.contextmanager
    def _reading(self, commit: Commit) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint of step {commit.step} cannot be read.",
                wanted="a checkpoint as this version writes it",
                have=f"{type(error).__name__}: {error} ({commit.path})",
                fix="take an earlier checkpoint (move this folder away), or begin anew with --restart",
                anchor="checkpoint-unreadable",
                set_by=self._set_by,
            ) from error

    def _commit(self, step: int, begun: Sequence[_Begun]) -> None:
        """Writes this process's files; when all have written theirs, the first one commits, and removes what is no longer kept."""
        what = f"the checkpoint of step {step} cannot be written."
        problem, files = None, {}
        try:
            files = {folder.name: self._write(folder, sections) for folder, sections, _ in begun}
        except Exception as error:  # told to the other processes, and raised in all
            problem = self._cannot_write(what, error)
        told = self._group.all_gather("checkpoint files", {"files": files, "problem": problem.to_json() if problem else None})
        problem = problem or next((error_of(other["problem"]) for other in told if other["problem"]), None)

        def commit() -> None:
            if problem is not None:
                self._give_up([folder for folder, _, _ in begun])
                raise problem
            try:
                for folder, _, body in begun:
                    write_manifest(folder, body, {name: mark for other in told for name, mark in other["files"][folder.name].items()})
                self._prune()
            except OSError as error:
                self._give_up([folder for folder, _, _ in begun])
                raise self._cannot_write(what, error) from error

        self._group.lead("checkpoint commit", commit)

    def _write(self, folder: Path, sections: Mapping[str, Mapping[str, HostArray]]) -> dict[str, Any]:
        """Writes what this process owns of each section, and returns what the manifest says of its files."""
        marks = {}
        for name, arrays in sections.items():
            path = folder / file_name(name, self._group.index)
            write_pieces(path, arrays)
            marks[path.name] = finished(path)
        return marks

    def _prune(self) -> None:
        kept = {commit.path for commit in self.commits()[: self.keep]}
        best = self.best()
        if best is not None:
            kept.add(best[1].path)
        for path in self.folder.iterdir():
            if _STEP.fullmatch(path.name) and path not in kept:
                _remove(path)

    def _give_up(self, folders: Sequence[Path]) -> None:
        """Removes what was written of a checkpoint that did not become complete: on a full disk it would take the room of the next."""
        for folder in folders:
            if not (folder / MANIFEST).exists():
                _remove(folder)

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


def _remove(path: Path) -> None:
    # Without its manifest, a folder that is only half removed does not count.
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _pieces(folder: Path, section: str) -> Pieces:
    """The arrays of a section in a committed folder."""
    body = read_manifest(folder)
    names = [name for name in (body or {"files": ()})["files"] if name.rsplit(".", 2)[0] == file_name(section, 0).rsplit(".", 2)[0]]
    return Pieces(folder / name for name in names)


def _placed(pieces: Pieces, wanted: Mapping[str, Any]) -> dict[str, Any]:
    return jax.tree.unflatten(jax.tree.structure(wanted), pieces.place(flat(wanted)).values())
