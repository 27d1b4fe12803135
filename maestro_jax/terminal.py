"""What a user sees: the plan as tables, progress of compilation, a line for each step, and a live bar where there is a screen.

In a terminal or a notebook a bar shows the latest values beside the lines. Elsewhere (a file, a pipe, a job's log) the same lines are plain
text without colours, one line for each step. On a screen, text that is too long breaks between words and values, never inside a number.
"""

from __future__ import annotations

import html
import importlib
import io
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from .meshes import ProcessGroup
from .plan_table import WIDTH, counted, human_count, plan_table, plan_text, print_memory, print_plan, print_text
from .runtime.compile import Program
from .runtime.memory import MemoryUse
from .runtime.plan import Plan

COMPILE_LINES = 8
"""Most lines about compilation where there is no screen, beside the line that ends it."""

NOTEBOOK_SECONDS = 0.5
"""Least time between two moves of a notebook's bar; each is a message to the browser."""

NOT_FINITE, NOTHING_COUNTED = "skipped (not finite)", "skipped (nothing counted)"
"""Mark the line of a step whose update was not applied."""


class Bar(Protocol):
    """A progress bar on a screen."""

    def show(self, done: int, total: int, latest: Sequence[str]) -> None:
        """Moves the bar, and writes the latest values beside it."""
        ...

    def move(self, done: int, total: int) -> None:
        """Moves the bar; the values beside it stay."""
        ...

    def close(self) -> None:
        """Ends the bar; lines may follow in its place."""
        ...


class Terminal:
    """The user's screen.

    A context manager, so that the bar is closed and the cursor comes back whatever happens:

    >>> with Terminal(sys.stdout) as terminal:
    ...     terminal.step({"step": 40, "steps": 300, "loss": 2.31, "objectives": {"student/kl": 0.8}, "gradient_norm": 1.2})
    step  40/300  loss 2.3100  student: kl 0.8000  norm 1.2000

    Args:
        stream: where to write; None: standard output, or the notebook.
        interactive: whether to show live bars; None: when the stream is a terminal, or in a notebook.
        quiet: write nothing at all.
    """

    def __init__(self, stream: TextIO | None = None, interactive: bool | None = None, quiet: bool = False) -> None:
        in_notebook = stream is None and Console().is_jupyter
        if interactive is None:
            interactive = in_notebook or _is_screen(stream or sys.stdout)
        self._notebook = in_notebook and interactive
        self._live = interactive and not in_notebook
        # Not left to rich, which takes a file for a terminal when FORCE_COLOR is set, as some job runners do.
        width = None if self._live else _columns()
        self._console = Console(file=stream, width=width, force_terminal=self._live, force_jupyter=False, highlight=False, quiet=quiet)
        self._bar: Bar | None = None
        self._title = ""
        self._compile_seconds, self._loaded = 0.0, 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the live bar, if there is one; lines may still be written."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def plan(self, plan: Plan, mean_units: Mapping[str, float] | None = None) -> None:
        """Writes the tables and notes of a plan (see `plan_table`)."""
        print_plan(self._console, plan, mean_units)

    def memory(self, uses: Mapping[str, MemoryUse]) -> None:
        """Writes what each section holds on a device (see `plan_table.print_memory`)."""
        print_memory(self._console, uses)

    def compiling(self, program: Program, done: int, total: int) -> None:
        """Tells that a program was compiled; what `Compiled` takes as `progress`.

        Args:
            program: the program.
            done: number of programs compiled so far, with this one.
            total: number of programs in all.
        """
        if done == 1:
            self._compile_seconds, self._loaded = 0.0, 0
        self._compile_seconds += program.seconds
        self._loaded += program.loaded
        # The update has neither size nor replica.
        place = [str(program.bucket), f"replica {program.replica}"] if program.bucket else []
        latest = [program.section, program.kind, *place]
        if done == total:
            self.close()
            loaded = f" and loaded {self._loaded} for other replicas" if self._loaded else ""
            self._print(f"compiled {counted(total - self._loaded, 'program')}{loaded} in {self._compile_seconds:.1f} s")
        elif self._live or self._notebook:
            self._bar_of("compiling").show(done, total, latest)
        elif done * COMPILE_LINES // total > (done - 1) * COMPILE_LINES // total:
            self._print(f"compiled {done} of {total}: {' '.join(latest)}")

    def reading(self, section: str, done: int, total: int) -> None:
        """Tells that initial weights were read; what `Engine` takes as `reading`.

        Args:
            section: whose.
            done: number of its parameters read so far, with this one.
            total: number of its parameters that come from files.
        """
        if done == total:
            self.close()
            self._print(f"read the weights of {section}: {counted(total, 'parameter')}")
        elif self._live or self._notebook:
            self._bar_of("reading").show(done, total, [section])

    def note(self, text: str) -> None:
        """Writes a sentence that the user should read."""
        self._print(f"note: {text}")

    def table(self, text: str) -> None:
        """Writes lines as they are."""
        for line in text.splitlines():
            self._print(line)

    def start(self, text: str) -> None:
        """Writes the line after which steps begin."""
        self._print(text, style="bold")

    def tick(self, step: int, steps: int) -> None:
        """Moves the bar to a step and leaves the values beside it; writes nothing in a log. Cheap enough for every step."""
        if self._live or self._notebook:
            self._bar_of("training").move(step, steps)

    def step(self, record: Mapping[str, Any]) -> None:
        """Writes the line of a step, and moves the bar, which alone shows the time that is left.

        Args:
            record: as in `metrics.jsonl`: "step" and "steps"; where known "loss", "objectives" ("section/objective" -> value; NaN where
                nothing counted), "gradient_norm", "applied" (false: the update was skipped), "skipped_steps", "tokens_per_second",
                "eta_seconds" and "busy" (section -> scheduled share of its time with a task).
        """
        parts, seconds = _step_parts(record), record.get("eta_seconds")
        left = [f"ETA {_clock(seconds)}"] if seconds is not None else []
        if self._live or self._notebook:
            # First, because values at the end are left out where there is no room for them.
            self._bar_of("training").show(record["step"], record["steps"], [*left, *parts[1:]])
            self._print_values(parts)
        else:
            self._print_values([*parts, *left])

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the line of a held-out evaluation after `step` steps; `values` as a step's "objectives"."""
        self._print_values([f"held-out at step {step}", *_grouped(values)])

    def finish(self, lines: Iterable[str]) -> None:
        """Closes the bar, and writes the last lines."""
        self.close()
        for line in lines:
            self._print(line)

    def _print(self, line: str, style: str = "") -> None:
        print_text(self._console, line, style)

    def _print_values(self, parts: Sequence[str]) -> None:
        # In a log, a step is one line, whatever its length; on a screen it breaks between values.
        width = self._console.width if self._live or self._notebook else sys.maxsize
        text = Text("\n".join(_joined(parts, width)))
        text.highlight_words([NOT_FINITE, NOTHING_COUNTED], "bold yellow")
        self._console.print(text, soft_wrap=True)

    def _bar_of(self, title: str) -> Bar:
        """The bar of this title; another one is closed."""
        if self._bar is None or title != self._title:
            self.close()
            self._bar = _NotebookBar(title) if self._notebook else _TerminalBar(self._console, title)
            self._title = title
        return self._bar


def screen_of(group: ProcessGroup) -> Terminal:
    """The screen of a run: that of its first process; the others write nothing."""
    return Terminal() if group.first else Terminal(io.StringIO(), interactive=False, quiet=True)


class _TerminalBar:
    """A bar on the last line of a terminal; lines that are printed meanwhile appear above it."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        columns = (
            TextColumn(title, markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[latest]}", markup=False),
        )
        # Twice a second is enough for a clock, and leaves the processor to the dispatcher. Gone when closed: the lines tell it all.
        self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=2)
        self._task: TaskID | None = None
        self._latest = ""

    def show(self, done: int, total: int, latest: Sequence[str]) -> None:
        # What stands before the latest values: title, bar, numbers and clock, with a space after each.
        room = self._console.width - len(self._title) - 20 - len(f"{total}/{total}") - len("0:00:00") - 5
        # As many values as there is room for; rich would shorten every column, the title too.
        text = _joined(latest, room)[0] if latest else ""
        self._latest = text if len(text) <= room else ""
        self.move(done, total)

    def move(self, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task(self._title, completed=done, total=total, latest=self._latest)
            self._progress.start()
        else:
            self._progress.update(self._task, completed=done, total=total, latest=self._latest)

    def close(self) -> None:
        self._progress.stop()


class _NotebookBar:
    """A bar in a notebook's output; needs no widgets. It stays as it last was."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._handle: Any = None
        self._latest: Sequence[str] = ()
        self._drawn = -math.inf

    def show(self, done: int, total: int, latest: Sequence[str]) -> None:
        self._latest = latest
        self._draw(done, total)

    def move(self, done: int, total: int) -> None:
        if time.monotonic() - self._drawn >= NOTEBOOK_SECONDS:
            self._draw(done, total)

    def close(self) -> None:
        pass

    def _draw(self, done: int, total: int) -> None:
        self._drawn = time.monotonic()
        text = "  ".join([f"{done}/{total}", *self._latest])
        page = f'{html.escape(self._title)} <progress value="{done}" max="{total}"></progress> {html.escape(text)}'
        content = {"text/plain": f"{self._title}  {text}", "text/html": page}
        if self._handle is None:
            # rich found a notebook, so IPython is there; this package does not depend on it.
            display: Any = importlib.import_module("IPython.display")
            self._handle = display.display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _is_screen(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _columns() -> int:
    """Columns where there is no screen; a user may set them, as for other programs."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else WIDTH


def _step_parts(record: Mapping[str, Any]) -> list[str]:
    """The values of a step's line, each with its name, without the time that is left."""
    applied, norm = record.get("applied", True), record.get("gradient_norm")
    failed = not applied and (norm is None or not math.isfinite(norm))
    parts = [f"step {record['step']:>{len(str(record['steps']))}}/{record['steps']}"]
    if "loss" in record:
        parts.append(f"loss {_value(record['loss'], failed)}")
    parts += _grouped(record.get("objectives", {}), failed)
    if norm is not None:
        parts.append(f"norm {_value(norm, failed=True)}")
    if not applied:
        skipped = record.get("skipped_steps", 1)
        parts.append((NOT_FINITE if failed else NOTHING_COUNTED) + (f", {skipped} so far" if skipped > 1 else ""))
    if record.get("tokens_per_second") is not None:
        parts.append(f"{human_count(record['tokens_per_second'])} tokens/s")
    return parts + _busy(record.get("busy", {}))


def _busy(shares: Mapping[str, float]) -> list[str]:
    """Predicted utilization and bubble of each section, in percent.

    >>> _busy({"teacher": 0.834, "student": 0.95})
    ['predicted busy/bubble: teacher 83/17%', 'student 95/5%']
    """
    parts = [f"{name} {round(100 * share)}/{100 - round(100 * share)}%" for name, share in shares.items()]
    return [f"predicted busy/bubble: {parts[0]}", *parts[1:]] if parts else []


def _grouped(values: Mapping[str, float | None], failed: bool = False) -> list[str]:
    """The values of objectives, section by section; the first of a section has the section's name before it.

    >>> _grouped({"student/kl": 0.8, "critic/error": 2.0, "student/accuracy": 0.25})
    ['student: kl 0.8000', 'accuracy 0.2500', 'critic: error 2.0000']
    """
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        section, _, objective = name.rpartition("/")
        groups.setdefault(section, []).append(f"{objective} {_value(value, failed)}")
    for section, parts in groups.items():
        parts[0] = f"{section}: {parts[0]}" if section else parts[0]
    return [part for parts in groups.values() for part in parts]


def _joined(parts: Sequence[str], width: int) -> list[str]:
    """Joins values by two spaces, and begins an indented line where the next one would not fit.

    >>> _joined(["step 1/9", "loss 2.3100", "norm 1.20"], 22)
    ['step 1/9  loss 2.3100', '    norm 1.20']
    """
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) > width:
            lines.append("    " + part)
        else:
            lines[-1] += "  " + part
    return lines


def _value(value: float | None, failed: bool = False) -> str:
    """A value with four digits after the point, unless they would be zeros. NaN is '-', for nothing counted, unless the step went wrong."""
    if value is None or (math.isnan(value) and not failed):
        return "-"
    return f"{value:.4f}" if value == 0 or 5e-5 <= abs(value) < 1e5 else f"{value:.3e}"


def _clock(seconds: float) -> str:
    """Writes seconds as minutes and seconds, or hours, minutes and seconds.

    >>> _clock(93.4), _clock(3661), _clock(float("nan"))
    ('1:33', '1:01:01', '-')
    """
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


__all__ = ["Terminal", "plan_table", "plan_text"]
