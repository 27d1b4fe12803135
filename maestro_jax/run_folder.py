"""The folder of a run: what was run (config, plan, environment) and what came out (metrics, weights).

Files are written under a temporary name and then renamed, so that a reader or a crash never meets half a file. `metrics.jsonl` (steps)
and `evaluations.jsonl` grow by one line at a time. An earlier run is never overwritten: a restart moves it into `previous-1`,
`previous-2`, ... inside the folder. In a run of several processes, only one of them may have a RunFolder.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .errors import CheckpointError

CONFIG, PLAN, ENVIRONMENT = "config.gin", "plan.txt", "env.json"
METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
PACKAGES = ("maestro_jax", "jax", "jaxlib", "flax", "optax", "numpy")
"""Packages whose versions are recorded."""


class RunFolder:
    """A folder that holds one run.

    Args:
        path: the folder; made when it does not exist, with those above it.
        restart: when the folder holds a run already, move that run into `previous-1` (or the next free number) and begin anew.
        set_by: where the path was set, for error texts.

    Raises:
        CheckpointError: the folder holds a run already and `restart` is off, or it cannot be written.
    """

    def __init__(self, path: Path | str, *, restart: bool = False, set_by: str = "the calling program: RunFolder.path") -> None:
        self.path = Path(path)
        self._set_by = set_by
        with self._writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._claim()
            except FileExistsError:
                if not restart:
                    raise self._in_use() from None
                self._refuse_working_folder()
                self._set_aside([entry for entry in self.path.iterdir() if not entry.name.startswith("previous-")])
                self._claim()
            else:
                # A run that ended before it claimed the folder, or a user's own config of that name: not lost either.
                self._set_aside([entry for entry in map(self.path_of, (CONFIG, PLAN, ENVIRONMENT, EVALUATIONS)) if entry.exists()])

    def _claim(self) -> None:
        """Makes the file that marks a run, or raises FileExistsError: of two runs that begin at once, one gets the folder."""
        self.path_of(METRICS).touch(exist_ok=False)

    def path_of(self, name: str) -> Path:
        """Returns where a file of this run is or will be."""
        return self.path / name

    def write_config(self, text: str) -> None:
        """Writes `config.gin`, the configuration with every value that the run used.

        Raises:
            CheckpointError: the file cannot be written.
        """
        self._write(CONFIG, text)

    def write_plan(self, text: str) -> None:
        """Writes `plan.txt` (see `terminal.plan_text`).

        Raises:
            CheckpointError: the file cannot be written.
        """
        self._write(PLAN, text)

    def write_env(self, extra: Mapping[str, Any]) -> None:
        """Writes `env.json`: versions, devices, flags, the command and the commit of the code.

        Args:
            extra: more entries, such as the corpus hash; they win over entries of the same name.

        Raises:
            CheckpointError: the file cannot be written.
        """
        self._write(ENVIRONMENT, json.dumps(_plain({**_environment(), **extra}), indent=2, allow_nan=False) + "\n")

    def append(self, record: Mapping[str, Any], name: str = METRICS) -> None:
        """Adds a line to a file of records; it is in the file when the call returns.

        Args:
            record: numbers, strings, and dicts and lists of them; numpy and JAX scalars and arrays too. JSON knows neither NaN nor
                infinity: both become null.
            name: the file: `metrics.jsonl` has a line for each step, `evaluations.jsonl` one for each held-out evaluation.

        Raises:
            CheckpointError: the file cannot be written.
        """
        path = self.path_of(name)
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        # Opened each time, so that nothing stays open when a program or a notebook drops the run.
        with self._writing(path), path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _write(self, name: str, text: str) -> None:
        path, temporary = self.path_of(name), self.path_of(f".{name}.{os.getpid()}.tmp")
        with self._writing(path):
            try:
                temporary.write_text(text, encoding="utf-8")
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def _set_aside(self, entries: list[Path]) -> None:
        if not entries:
            return
        target = self._next_previous()
        target.mkdir()
        # The metrics go last: until they have moved, the folder still counts as one that holds a run.
        for entry in sorted(entries, key=lambda entry: (entry.name == METRICS, entry.name)):
            os.replace(entry, target / entry.name)

    def _next_previous(self) -> Path:
        number = 1
        while (target := self.path_of(f"previous-{number}")).exists():
            number += 1
        return target

    def _refuse_working_folder(self) -> None:
        """Everything in the folder is about to move, so it must not be where the program looks for its other files."""
        here = Path.cwd()
        if here.is_relative_to(self.path.resolve()):
            raise CheckpointError(
                f"the run in {str(self.path)!r} cannot be moved aside.",
                wanted="a folder for this run alone, other than the working folder and those above it",
                have=f"working folder {here}",
                fix="start from another folder, or choose another folder for the run",
                anchor="run-folder-is-working-folder",
                set_by=self._set_by,
            )

    def _in_use(self) -> CheckpointError:
        aside = self._next_previous().name
        return CheckpointError(
            f"the folder {str(self.path)!r} holds a run already.",
            wanted=f"a folder without {METRICS}",
            have=f"{METRICS} of {self.path_of(METRICS).stat().st_size} bytes",
            fix=f"choose another folder, or restart (restart=True, --restart), which moves the earlier run into {aside} in it",
            anchor="run-folder-in-use",
            set_by=self._set_by,
        )

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Turns what the file system refuses into an error for the user."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{str(path)!r} cannot be written.",
                wanted="a run folder that can be made and written, with room on its disk",
                have=f"{type(error).__name__}: {error}",
                fix="choose another folder, or change its permissions",
                anchor="run-folder-unwritable",
                set_by=self._set_by,
            ) from error


def default_folder(config_name: str, now: datetime.datetime | None = None) -> Path:
    """Returns a folder name for a run that does not exist yet.

    Args:
        config_name: name or path of the config; its stem begins the name.
        now: when the run begins; None: this moment, in local time.

    >>> default_folder("configs/kd_tiny.gin", datetime.datetime(2026, 1, 31, 9, 5, 7)).as_posix()
    'runs/kd_tiny-20260131-090507'
    """
    name = f"{Path(config_name).stem or 'run'}-{now or datetime.datetime.now():%Y%m%d-%H%M%S}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def _environment() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": {"count": len(devices), "kinds": dict(Counter(device.device_kind for device in devices))},
        "processes": jax.process_count(),
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "commits": {"maestro_jax": _commit(Path(__file__).parent), "working_folder": _commit(Path.cwd())},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """The commit that is checked out in a folder, or None where there is none, or no git."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _plain(value: Any) -> Any:
    """Turns a value into what JSON knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        # Neither kind of small float is one of numpy's own, and Python's json takes neither.
        return _plain((array if array.dtype.kind in "biuUS" else array.astype(np.float64)).tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
