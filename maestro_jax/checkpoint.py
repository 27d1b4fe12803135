"""Checkpoints on disk: each process writes what it owns in the background; a manifest commits them, and is verified before they are used.

`FOLDER/00000400/SECTION/00003.safetensors` holds what process 3 owns of a trained section (see `pieces.py`), and `FOLDER/frozen/` what is
never updated, written once. One process and many write the same format, and any number of processes reads it onto any plan. A folder counts
from the moment when its `manifest.json` has been renamed into place, by the first process, after all have told it what they wrote; it names
every file with its size and SHA-256, so that half a folder, a missing file or a flipped bit is seen before anything is read. Older
checkpoints, and what a killed run left of one, are removed only after that.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .errors import CheckpointError, MaestroError, error_of
from .manifest import MANIFEST, damage, read_manifest, to_disk, write_manifest
from .meshes.processes import ProcessGroup
from .pieces import SUFFIX, Piece, StoredTree, to_host, write_pieces
from .runtime.snapshot import Snapshot

FROZEN = "frozen"
READ, WRITE = "checkpoints", "checkpoint writer"
"""Channels of the thread that trains, and of the one that writes."""
SECONDS = 3600.0
"""How long a process waits for what others write, read and hash; one that stopped is found earlier by the watchdog."""

_STEP = re.compile(r"\d{8}")

TRAINED = "parameters/"
"""Where the parameters of a trained section begin, beside its optimizer state."""
LINES = 12
"""Most lines of what is missing that an error shows."""


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

    All its processes save, wait, restore and close together. What looks at the folder alone (`commits`, `best`, `unreadable`, `problem`,
    `disown_newer`, `read_parameters`) is for any process, which tells the others what they must agree on.

    Args:
        folder: where they lie, on a file system that all processes share; made with the first one.
        keep: how many of the newest ones stay.
        keep_best: held-out objective ("section/objective", lower is better) whose best checkpoint stays besides; None keeps none.
        set_by: where the folder was set, for error texts.
        group: the processes of the run.
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
        # Absolute, so that a program may change its working folder.
        self.folder, self.keep, self.keep_best, self._set_by = Path(folder).absolute(), keep, keep_best, set_by
        self._group = group or ProcessGroup(0, 1)
        # One thread: commits happen in the order of the saves, beside training.
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._frozen_written = False

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
            snapshot: the arrays, which may be donated as soon as this returns; of sections that have devices of this process.
            state: JSON values, the same in every process. Where "signature" is among them (see `Snapshot.signature`), the checkpoint
                becomes complete only with every array that it names.
            heldout: an evaluation on held-out data at this very step; None where none was made.

        Raises:
            CheckpointError: this one, or the one before it, cannot be written, in any process.
            ClusterError: another process saves another step.
        """
        self.wait()
        self._group.agreed("checkpoint step", step, "the step of a checkpoint")
        name, frozen = f"{step:08d}", self._frozen_due(snapshot)
        trees = {f"{name}/{section}": tree for section, tree in snapshot.trained.items()}
        trees |= {f"{FROZEN}/{section}": tree for section, tree in snapshot.frozen.items()} if frozen else {}
        held: dict[str, list[Piece]] | Exception
        try:
            held = to_host(trees)
        except Exception as error:  # JAX raises what it likes; the other processes, which go on, are told by the thread
            held = error
        body = {"step": step, "state": dict(state), "heldout": dict(heldout or {}), "frozen": bool(snapshot.frozen)}
        self._pending = self._thread.submit(self._commit, [FROZEN, name] if frozen else [name], held, body)

    def add_heldout(self, step: int, heldout: Mapping[str, float]) -> None:
        """Adds an evaluation to a complete checkpoint that was saved before it could be made; nothing else of it changes.

        Args:
            step: of the checkpoint.
            heldout: the evaluation, at that very step.

        Raises:
            CheckpointError: its manifest cannot be written; it stays as it was.
        """

        def add() -> None:
            path = self.folder / f"{step:08d}"
            body = read_manifest(path)
            if body is None:
                raise OSError(f"{path.name}/{MANIFEST} is missing or damaged")
            write_manifest(path, {**body, "heldout": dict(heldout)})

        self._first(READ, add, lambda error: self._cannot_write(f"the evaluation of step {step} cannot be added to its checkpoint.", error))

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
        """Reads a checkpoint into shapes and shardings of any plan of the same graph, on any number of processes.

        Args:
            commit: which one; verified with `problem` before.
            shapes: what is wanted, as `snapshot_shapes` returns it.

        Returns:
            The sections that have devices of this process.

        Raises:
            CheckpointError: it cannot be read, in any process.
        """
        found = Snapshot(trained={}, frozen={})

        def read() -> None:
            nonlocal found
            frozen = self._read(self.folder / FROZEN, shapes.frozen) if shapes.frozen else {}
            found = Snapshot(trained=self._read(commit.path, shapes.trained), frozen=frozen)

        self._together(READ, read, lambda error: self._cannot_read(commit, error))
        return found

    def read_parameters(self, commit: Commit, section: str) -> dict[str, np.ndarray]:
        """Reads all parameters of a section to the host of this process, whoever owns them; other processes need not call it.

        Args:
            commit: the checkpoint.
            section: its name.

        Returns:
            Path -> array: master copies of what is trained, and what is frozen.

        Raises:
            CheckpointError: they cannot be read, or there are none.
        """
        found: dict[str, np.ndarray] = {}
        try:
            with self._stored(commit.path, section) as stored:
                found |= {path.removeprefix(TRAINED): stored.read(path) for path in stored.arrays if path.startswith(TRAINED)}
            if commit.frozen:
                with self._stored(self.folder / FROZEN, section) as stored:
                    found |= {path: stored.read(path) for path in stored.arrays}
            if not found:
                raise ValueError(f"no parameters of {section!r} are stored")
        except Exception as error:  # the library's own, and the system's
            raise self._cannot_read(commit, error) from error
        return found

    def _frozen_due(self, snapshot: Snapshot) -> bool:
        """Whether what is never updated has to be written with the next checkpoint: the first process looks, all are told."""
        if not self._frozen_written:
            told = self._group.all_gather(READ, [bool(snapshot.frozen), read_manifest(self.folder / FROZEN) is not None])
            self._frozen_written = told[0][1]
            return any(frozen for frozen, _ in told) and not self._frozen_written
        return False

    def _commit(self, folders: list[str], held: dict[str, list[Piece]] | Exception, body: Mapping[str, Any]) -> None:
        """Writes, commits, and then removes what is no longer kept; one stage begins when all processes have ended the one before."""

        def prepare() -> None:
            if isinstance(held, Exception):
                raise held
            for name in folders if self._group.first else ():
                # In the place of one that a killed run left, or that is damaged.
                _remove(self.folder / name)
                (self.folder / name).mkdir(parents=True)

        def write() -> dict[str, Any]:
            return {"frozen": body["frozen"], "files": {} if isinstance(held, Exception) else self._write(held)}

        def commit() -> None:
            whole = {**body, "frozen": any(each["frozen"] for each in written)}
            files = {name: fingerprint for each in written for name, fingerprint in sorted(each["files"].items())}
            for name in folders:
                self._commit_folder(name, files, {} if name == FROZEN else whole, body["state"].get("signature"))

        def failed(error: Exception) -> CheckpointError:
            return self._cannot_write(f"the checkpoint of step {body['step']} cannot be written.", error)

        try:
            self._together(WRITE, prepare, failed)
            written = self._together(WRITE, write, failed)
            self._first(WRITE, commit, failed)
            self._frozen_written |= FROZEN in folders
            self._first(WRITE, self._prune, failed)
        except CheckpointError:
            if self._group.first:
                # All have ended what they were at. On a full disk, what was written would take the room of the next one.
                for name in folders:
                    if not (self.folder / name / MANIFEST).exists():
                        _remove(self.folder / name)
            raise

    def _write(self, held: dict[str, list[Piece]]) -> dict[str, Any]:
        """Writes the pieces of this process; returns file -> size and SHA-256."""
        files = {}
        for name in list(held):
            # Host memory is given back section by section.
            pieces = held.pop(name)
            if pieces:
                folder, file = self.folder / name, f"{self._group.index:05d}{SUFFIX}"
                folder.mkdir(exist_ok=True)
                files[f"{name}/{file}"] = write_pieces(folder / file, pieces)
                to_disk(folder)
        return files

    def _commit_folder(self, name: str, files: Mapping[str, Any], body: Mapping[str, Any], signature: Any) -> None:
        """Commits a folder when every array is in it, in the files that the processes told of."""
        path, start = self.folder / name, f"{name}/"
        files = {file.removeprefix(start): fingerprint for file, fingerprint in files.items() if file.startswith(start)}
        for file, fingerprint in files.items():
            if not (path / file).is_file() or (path / file).stat().st_size != fingerprint["bytes"]:
                raise self._not_shared(path / file)
        missing = _missing(path, files, signature or {}, name == FROZEN)
        if missing:
            raise self._incomplete(path, missing)
        write_manifest(path, {**body, "files": files})

    def _prune(self) -> None:
        kept = {commit.path for commit in self.commits()[: self.keep]}
        best = self.best()
        if best is not None:
            kept.add(best[1].path)
        for path in self._folders():
            if path not in kept:
                _remove(path)

    def _read(self, path: Path, shapes: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for section, tree in shapes.items():
            leaves = jax.tree.leaves(tree)
            if not leaves or any(leaf.sharding.addressable_devices for leaf in leaves):
                with self._stored(path, section) as stored:
                    # Waited for here, so that what fails on a device is told as an error of this checkpoint, in all processes.
                    found[section] = jax.block_until_ready(stored.restore(tree))
        return found

    def _stored(self, path: Path, section: str) -> StoredTree:
        manifest = read_manifest(path)
        if manifest is None:
            raise ValueError(f"{path.name}/{MANIFEST} is missing or damaged")
        return StoredTree(path / file for file in manifest["files"] if file.startswith(f"{section}/"))

    def _first(self, channel: str, action: Callable[[], Any], failed: Callable[[Exception], MaestroError]) -> None:
        """Lets the first process do something for all, and raises in all what it raises."""
        self._together(channel, lambda: action() if self._group.first else None, failed)

    def _together(self, channel: str, action: Callable[[], Any], failed: Callable[[Exception], MaestroError]) -> list[Any]:
        """Does something in every process, and tells all what each one returned; raises in all what was raised in any."""
        result, problem, cause = None, None, None
        try:
            result = action()
        except MaestroError as error:
            problem = error
        except Exception as error:  # whatever file systems, JAX and safetensors raise: the other processes must not wait
            problem, cause = failed(error), error
        told = self._group.all_gather(channel, {"result": result, "problem": problem and problem.to_json()}, SECONDS)
        if problem is not None:
            raise problem from cause
        for each in told:
            if each["problem"]:
                raise error_of(each["problem"])
        return [each["result"] for each in told]

    def _who(self, error: Exception) -> str:
        where = f"process {self._group.index}: " if self._group.count > 1 else ""
        return f"{where}{type(error).__name__}: {error}"

    def _last_good(self) -> str:
        earlier = self.commits()
        return f"last good checkpoint: {earlier[0].step if earlier else 'none'}"

    def _cannot_write(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            what,
            wanted="a folder that can be written, with room for parameters and optimizer state",
            have=f"{self._who(error)} ({self.folder}; {self._last_good()})",
            fix="make room or change permissions, and run the same command again: it goes on from the last good checkpoint",
            anchor="checkpoint-unwritable",
            set_by=self._set_by,
        )

    def _cannot_read(self, commit: Commit, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {commit.step} cannot be read.",
            wanted="a checkpoint as this version writes it",
            have=f"{self._who(error)} ({commit.path})",
            fix="take an earlier checkpoint (move this folder away), or begin anew with --restart",
            anchor="checkpoint-unreadable",
            set_by=self._set_by,
        )

    def _not_shared(self, path: Path) -> CheckpointError:
        return CheckpointError(
            f"the first process does not see what process {int(path.stem)} wrote.",
            wanted="a run folder on a file system that all processes share",
            have=f"{path} is not there, or is of another size; {self._last_good()}",
            fix="put the run folder (--workdir) on a shared file system",
            anchor="checkpoint-not-shared",
            set_by=self._set_by,
        )

    def _incomplete(self, path: Path, missing: list[str]) -> CheckpointError:
        more = [f"and {len(missing) - LINES} more"] if len(missing) > LINES else []
        return CheckpointError(
            f"the checkpoint in {path.name!r} would not be complete.",
            wanted="every parameter and all optimizer state, each written by one of the processes that own it",
            have="\n".join([*missing[:LINES], *more, self._last_good()]),
            fix="save the same step in every process, with all sections that it has devices of",
            anchor="checkpoint-incomplete",
            set_by=self._set_by,
        )


def _missing(folder: Path, files: Iterable[str], signature: Mapping[str, Mapping[str, str]], frozen: bool) -> list[str]:
    """What is not as it should be in the files of a folder, before it is committed."""
    start = "frozen/"
    by_section: dict[str, list[Path]] = {name: [] for name in signature}
    for file in files:
        by_section.setdefault(file.partition("/")[0], []).append(folder / file)
    lines = []
    for section, paths in sorted(by_section.items()):
        wanted = {p.removeprefix(start): form for p, form in signature.get(section, {}).items() if p.startswith(start) == frozen}
        try:
            with StoredTree(paths) as stored:
                have = stored.arrays
        except ValueError as error:
            lines.append(f"{section}: {error}")
            continue
        for path, form in wanted.items():
            whole = have.get(path)
            if whole is None:
                lines.append(f"{section}: {path} was written by no process")
            elif whole.keys is None and form not in (f"{whole.dtype}{list(whole.shape)}", str(list(whole.shape))):
                lines.append(f"{section}: {path} was written as {whole.dtype}{list(whole.shape)}, and is {form}")
    return lines


def _remove(path: Path) -> None:
    # Without its manifest, a folder that is only half removed does not count.
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
