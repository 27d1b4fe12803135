"""The folder of a run: what was run (config, plan, environment) and what came out (metrics, weights).

Files are written under a temporary name and then renamed, so that a reader or a crash never meets half a file. `metrics.jsonl` (steps)
and `evaluations.jsonl` grow by one line at a time. A run that was interrupted goes on in its folder; what it wrote after the checkpoint
that it goes on from is taken back first (`go_on`). An earlier run is never overwritten: a restart moves it into `previous-1`,
`previous-2`, ... inside the folder. In a run of several processes, only one of them may have a RunFolder.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .errors import CheckpointError
from .files import writing
from .record import FOLDER as TIMELINES
from .record import Record, read_records
from .timeline_page import timeline_page
from .trace import trace

CONFIG, PLAN, ENVIRONMENT = "config.gin", "plan.txt", "env.json"
METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
LOCK, CHECKPOINTS = ".lock", "checkpoints"
TIMELINE, TRACE = "timeline.html", "trace.json"
OWN = (
    *(CONFIG, PLAN, ENVIRONMENT, METRICS, EVALUATIONS, CHECKPOINTS, TIMELINES, TIMELINE, TRACE),
    *("weights", "tensorboard", "wandb*", "*-until-*", ".*.tmp"),
)
"""What a run makes; whatever else lies in its folder is the user's and stays where it is."""
logger = logging.getLogger(__name__)

PACKAGES = ("maestro_jax", "jax", "jaxlib", "flax", "optax", "safetensors", "numpy")
"""Packages whose versions are recorded."""


class RunFolder:
    """A folder that holds one run.

    Args:
        path: the folder; made when it does not exist, with those above it.
        restart: when the folder holds a run already, move that run into `previous-1` (or the next free number) and begin anew.
        set_by: where the path was set, for error texts.

    Attributes:
        holds_run: whether an earlier run lies in it, which may go on.

    Raises:
        CheckpointError: another process uses the folder, or it cannot be written.
    """

    def __init__(self, path: Path | str, *, restart: bool = False, set_by: str = "the calling program: RunFolder.path") -> None:
        self.path = Path(path)
        self._set_by = set_by
        with self._writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            self.holds_run = self.path_of(METRICS).exists() or self.path_of(CHECKPOINTS).exists()
            if restart and self.holds_run:
                self.begin_anew()
            elif not self.holds_run:
                # A run that ended before it had metrics, or a user's own config of that name: not lost either.
                self._set_aside([entry for entry in map(self.path_of, (CONFIG, PLAN, ENVIRONMENT, EVALUATIONS)) if entry.exists()])
                self.path_of(METRICS).touch()

    def begin_anew(self) -> None:
        """Moves the run that the folder holds into `previous-N`.

        Raises:
            CheckpointError: the folder is the working folder or above it, or cannot be written.
        """
        self._refuse_working_folder()
        with self._writing(self.path):
            self._set_aside(sorted({entry for pattern in OWN for entry in self.path.glob(pattern)}))
            self.path_of(METRICS).touch()
        self.holds_run = False

    def go_on(self, step: int, config: str) -> None:
        """Prepares the folder for a run that goes on.

        What was written of later steps is taken back, and what describes the earlier part is kept as `config-until-400.gin` and the
        like where it changes.

        Args:
            step: of the checkpoint that the run goes on from.
            config: the configuration from here on.

        Raises:
            CheckpointError: a file cannot be read or written.
        """
        for name in (METRICS, EVALUATIONS):
            self._rewind(self.path_of(name), step)
        later = [path for path in self.path_of(TIMELINES).glob("step-*.json") if int(path.stem[len("step-") :]) > step]
        if later:
            with self._writing(self.path_of(TIMELINES)):
                for path in later:
                    path.unlink()
            self._write_pictures()
        if self.config() not in (None, config):
            for name in (CONFIG, PLAN, ENVIRONMENT):
                self._keep(self.path_of(name), step)

    def config(self) -> str | None:
        """The configuration of the run that the folder holds, or None."""
        path = self.path_of(CONFIG)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None

    def close(self) -> None:
        """Lets another process use the folder; nothing more may be written."""
        self._unlock()

    def _lock(self) -> None:
        """Keeps other processes out. The system lets go when this process ends, however it ends."""
        descriptor = os.open(self.path_of(LOCK), os.O_RDWR | os.O_CREAT, 0o644)
        self._unlock = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._unlock()
            raise self._in_use() from None
        except OSError as error:
            # Some network file systems know no locks; there, nothing keeps two processes apart.
            logger.warning("%s cannot be locked against other processes: %s", self.path, error)

    def _rewind(self, path: Path, step: int) -> None:
        """Removes records of later steps, and half a line that a killed process left."""
        if not path.exists():
            return
        with self._writing(path):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
            self._write(path.name, "".join(f"{line}\n" for line in kept))

    def _keep(self, path: Path, step: int) -> None:
        kept = path.with_name(f"{path.stem}-until-{step}{path.suffix}")
        # Where it is there already, an attempt went on from this very step before, and nothing of it is left.
        if path.exists() and not kept.exists():
            with self._writing(path):
                os.replace(path, kept)

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

    def write_timeline(self, record: Record) -> None:
        """Writes a recorded window to `timelines/step-000009.json` and the like, and all windows to `timeline.html` and `trace.json`.

        Raises:
            CheckpointError: a file cannot be written.
        """
        folder = self.path_of(TIMELINES)
        with self._writing(folder):
            folder.mkdir(exist_ok=True)
        self._write(f"{TIMELINES}/step-{record.first_step:06d}.json", json.dumps(record.to_json(), separators=(",", ":")))
        self._write_pictures()

    def _write_pictures(self) -> None:
        with self._writing(self.path_of(TIMELINES)):
            records = read_records(self.path)
        self._write(TIMELINE, timeline_page(records))
        self._write(TRACE, json.dumps(trace(records), separators=(",", ":")))

    def _write(self, name: str, text: str) -> None:
        path = self.path_of(name)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
        return CheckpointError(
            f"the folder {str(self.path)!r} is used by another process.",
            wanted="a folder that no run is writing to",
            have=f"{self.path_of(LOCK)}, which another process holds locked",
            fix="wait for that run to end or end it, or choose another folder",
            anchor="run-folder-in-use",
            set_by=self._set_by,
        )

    def _writing(self, path: Path) -> contextlib.AbstractContextManager[None]:
        return writing(path, set_by=self._set_by)


def default_folder(config_name: str) -> Path:
    """Returns the folder of a config's run: the same one each time, so that the same command goes on with its run.

    Args:
        config_name: name or path of the config.

    >>> default_folder("configs/kd_tiny.gin").as_posix()
    'runs/kd_tiny'
    """
    return Path("runs") / (Path(config_name).stem or "run")


def _step_of(line: str) -> int | None:
    """The step of a record; None for half a line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


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
