"""Where the numbers of a run go besides `metrics.jsonl`: TensorBoard event files, or Weights & Biases.

A configuration object (`TensorBoard`, `WeightsAndBiases`) describes a writer; `open` makes it. A writer takes the same records as
`RunFolder.append`. What a record lacks (a section without a loss, no norm in an evaluation) is not written; NaN and infinity are, as
they are: both programs mark them.

Event files are written here rather than by tensorboardX's `SummaryWriter`, whose protocol buffers and checksums they use. Its thread ends
at a full disk, and then the training loop waits for ever for room in its queue; two runs that begin in one second overwrite each other's
file; and what is in its queue is lost when the process is killed.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import socket
import struct
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from .config import check_fields, configurable
from .errors import ConfigError, set_by
from .files import writing

PLAIN = ("loss", "gradient_norm", "tokens_per_second", "seconds", "applied", "skipped_steps")
"""Entries of a step's record that are written under their own name."""

EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
"""Name of an event file; TensorBoard reads the files of a folder in the order of their names."""


class Writer(Protocol):
    """Takes the numbers of one run, from one process."""

    def steps(self, record: Mapping[str, Any]) -> None:
        """Writes a step.

        Args:
            record: a line of `metrics.jsonl`, with "step"; see `scalars` for what is taken from it.
        """
        ...

    def heldout(self, step: int, values: Mapping[str, float]) -> None:
        """Writes an evaluation on held-out data.

        Args:
            step: number of steps that were trained before it.
            values: "section/objective" -> mean.
        """
        ...

    def close(self) -> None:
        """Ends the writer; a second call does nothing."""
        ...


class Metrics(Protocol):
    """Describes a writer."""

    def open(self, folder: Path, *, step: int, config_text: str) -> Writer:
        """Makes the writer.

        Args:
            folder: the run folder.
            step: 0, or the step that a resumed run goes on from; what an earlier attempt wrote of later steps is not shown twice.
            config_text: the resolved configuration; may be empty.
        """
        ...


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Event files for TensorBoard, in `tensorboard` in the run folder.

    `tensorboard --logdir RUNS` shows them while the run goes on. What was written is in the file at once, so a process that is killed
    loses nothing.

    Args:
        every: steps between points; a step that was skipped is always written.
    """

    every: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        _check_every(self)

    def open(self, folder: Path, *, step: int, config_text: str) -> Writer:
        """Begins a new event file (see `Metrics.open`).

        Raises:
            CheckpointError: the file cannot be written.
        """
        return _EventFile(Path(folder) / "tensorboard", step, config_text, self.every)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsAndBiases:
    """A run at Weights & Biases; needs `pip install 'maestro_jax[wandb]'`, and an account unless it is offline.

    A resumed run goes on in the same W&B run, which keeps what it has: a step that an earlier attempt has sent is not sent again. Offline,
    each attempt is a W&B run of its own, since what the earlier one has written can not be known. All files are in the run folder.

    Args:
        project: of the account.
        entity: user or team; None is the account's default.
        name: of the run; None is the name of the run folder.
        tags: labels of the run.
        mode: None follows WANDB_MODE and `wandb offline`, else is online; "disabled" writes nothing.
        every: steps between points; a step that was skipped is always written.
    """

    project: str = "maestro_jax"
    entity: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        _check_every(self)
        # Now rather than in `open`, which comes after the plan and minutes of compilation.
        _wandb(set_by(self, "mode"))

    def open(self, folder: Path, *, step: int, config_text: str) -> Writer:
        """Begins a run, or resumes the one that `wandb_run_id` in the folder names (see `Metrics.open`).

        Raises:
            ConfigError: wandb is missing, or refuses (not logged in, no connection).
            CheckpointError: the folder cannot be written.
        """
        origin = set_by(self, "mode")
        wandb = _wandb(origin)
        id_file = Path(folder) / "wandb_run_id"
        with writing(id_file, set_by="the run folder"):
            id_file.parent.mkdir(parents=True, exist_ok=True)
            known = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
        name = (self.name if self.name is not None else Path(folder).resolve().name) + (f" from step {step}" if step else "")
        try:
            run = wandb.init(
                project=self.project,
                entity=self.entity,
                # A run that is resumed keeps its name, also one that it was given in the browser.
                name=None if known else name,
                tags=self.tags,
                mode=self.mode,
                dir=str(folder),
                id=known or None,
                resume="allow",
                config=_settings(config_text),
                allow_val_change=True,
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                "Weights & Biases refuses the run.",
                wanted="an account and a connection, or mode 'offline' or 'disabled'",
                have=f"{type(error).__name__}: {error}",
                fix="log in with `wandb login`, or set WeightsAndBiases.mode = 'offline' and send the run later with `wandb sync`",
                anchor="wandb-refused",
                set_by=origin,
            ) from error
        if not (run.offline or run.disabled):
            with writing(id_file, set_by="the run folder"):
                id_file.write_text(run.id + "\n", encoding="utf-8")
        return _WandbRun(run, self.every)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a step's record under the names that writers give them.

    >>> scalars({"step": 3, "loss": 2.5, "objectives": {"student/kl": 2.5}, "tokens_per_second": None, "padding": {"student": 0.1}})
    {'loss': 2.5, 'padding/student': 0.1, 'student/kl': 2.5}

    Args:
        record: a line of `metrics.jsonl`; entries that are missing or None are left out.

    Returns:
        Those of `PLAIN`, "padding/section", and "section/objective".
    """
    found = {name: record.get(name) for name in PLAIN}
    found |= {f"padding/{section}": share for section, share in (record.get("padding") or {}).items()}
    found |= record.get("objectives") or {}
    return {name: float(value) for name, value in found.items() if value is not None}


class _EventFile:
    """A file of events, each one written to the operating system at once."""

    def __init__(self, folder: Path, step: int, config_text: str, every: int) -> None:
        # tensorboardX imports PyTorch where there is one, so only a run that uses it does.
        self._events: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboardX.summary")
        self._checksum: Any = importlib.import_module("tensorboardX.record_writer").masked_crc32c
        self._every = every
        with writing(folder, set_by="the run folder"):
            folder.mkdir(parents=True, exist_ok=True)
            # Later than every other file, also when two begin within a second or on machines whose clocks differ.
            others = [int(match[1]) for path in folder.iterdir() if (match := EVENT_FILE.fullmatch(path.name))]
            number = max([int(time.time()), *(other + 1 for other in others)])
            self._path = folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}"
            # Without a buffer of ours there is nothing that a kill could lose, nor that could fail once more when the file is closed.
            self._file = self._path.open("xb", buffering=0)
        try:
            self._begin(step, config_text)
        except BaseException:
            self._file.close()
            raise

    def steps(self, record: Mapping[str, Any]) -> None:
        """Writes a step."""
        if _is_due(record, self._every):
            self._write_scalars(record["step"], scalars(record))

    def heldout(self, step: int, values: Mapping[str, float]) -> None:
        """Writes an evaluation."""
        self._write_scalars(step, _heldout(values))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _begin(self, step: int, config_text: str) -> None:
        """Writes the mark by which TensorBoard forgets what files before this one say of steps that are to come.

        TensorBoard takes no notice of the first mark in a folder, which it takes for the beginning of the run: so a new run has one too.
        """
        first = step + 1 if step else 0  # The initial evaluation is at step 0.
        self._write(step=first, file_version="brain.Event:2")
        self._write(step=first, session_log=self._events.SessionLog(status=self._events.SessionLog.START))
        if config_text:
            # Four spaces make it code in Markdown, which TensorBoard reads.
            self._write(step=step, summary=self._summaries.text("config", textwrap.indent(config_text, "    ")))

    def _write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        if values:
            kind = self._summaries.Summary
            entries = [kind.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._write(step=step, summary=kind(value=entries))

    def _write(self, **fields: Any) -> None:
        """Appends one event in the framing of TFRecord: length, its checksum, content, its checksum, little-endian."""
        content = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(content))
        rest = memoryview(b"".join((length, self._sum(length), content, self._sum(content))))
        with writing(self._path, set_by="the run folder"):
            while rest:
                # Where the disk is nearly full, a write may take a part; the next one then says why.
                rest = rest[self._file.write(rest) :]

    def _sum(self, data: bytes) -> bytes:
        return struct.pack("<I", self._checksum(data))


class _WandbRun:
    """A run of W&B; its own process sends what it is given."""

    def __init__(self, run: Any, every: int) -> None:
        self._run, self._every = run, every
        # The step after those that W&B has; it would refuse earlier ones, each with a warning on the screen.
        self._first = int(run.step)
        self._closed = False

    def steps(self, record: Mapping[str, Any]) -> None:
        """Sends a step."""
        if _is_due(record, self._every):
            self._send(record["step"], scalars(record))

    def heldout(self, step: int, values: Mapping[str, float]) -> None:
        """Sends an evaluation."""
        self._send(step, _heldout(values))

    def close(self) -> None:
        """Waits until everything has been sent."""
        if not self._closed:
            self._closed = True
            self._run.finish()

    def _send(self, step: int, values: dict[str, float]) -> None:
        if values and step >= self._first:
            self._run.log(values, step=step)


def _heldout(values: Mapping[str, float]) -> dict[str, float]:
    return {f"heldout/{name}": float(value) for name, value in values.items()}


def _is_due(record: Mapping[str, Any], every: int) -> bool:
    return record["step"] % every == 0 or not record.get("applied", True)


def _settings(config_text: str) -> dict[str, str]:
    """Setting -> value as text, from the lines of a resolved configuration, without comments."""
    lines = [line.split(" = ", 1) for line in config_text.splitlines() if " = " in line and not line.startswith("#")]
    return {name: value.rsplit("  # ", 1)[0] for name, value in lines}


def _wandb(origin: str) -> Any:
    """Imports wandb.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        module: Any = importlib.import_module("wandb")
        # A folder `wandb`, such as earlier runs of W&B leave behind, can be imported as well; it has nothing in it.
        have = None if hasattr(module, "init") else "a folder of that name, and no package"
    except ImportError as error:
        module, have = None, f"{type(error).__name__}: {error}"
    if have is not None:
        raise ConfigError(
            "Weights & Biases cannot be used.",
            wanted="the package wandb",
            have=have,
            fix="pip install 'maestro_jax[wandb]', or use TensorBoard",
            anchor="wandb-missing",
            set_by=origin,
        )
    return module


def _check_every(owner: TensorBoard | WeightsAndBiases) -> None:
    if owner.every < 1:
        raise ConfigError(
            f"{type(owner).__name__} has a wrong every.",
            wanted="a whole number, at least 1",
            have=str(owner.every),
            fix="correct every; 1 writes each step",
            anchor="metrics-every",
            set_by=set_by(owner, "every"),
        )
