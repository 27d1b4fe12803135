"""What a user sees: the plan as tables, progress of compilation, a line for each step, and a live bar where there is a screen.

In a terminal or a notebook a bar shows the latest values below (in a notebook: above) the lines. Elsewhere (a file, a pipe, a job's log)
the same lines are plain text of 100 columns without colours. A line is broken between values only, never inside one.
"""

from __future__ import annotations

import html
import importlib
import io
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .runtime.compile import Program
from .runtime.plan import EdgePlan, Plan, SectionPlan

WIDTH = 100
"""Columns of plain output."""

COMPILE_LINES = 8
"""Most lines about compilation in plain output, beside the line that ends it."""


def human_count(number: float) -> str:
    """Writes a number with three digits and a unit of thousands.

    >>> human_count(1_900_000), human_count(131_072), human_count(987.4), human_count(999_900)
    ('1.9M', '131k', '987', '1M')
    """
    return _scaled(number, ("", "k", "M", "B", "T"))


def human_bytes(number: float) -> str:
    """Writes a number of bytes with three digits; 1 MB is a million bytes.

    >>> human_bytes(12_345_678), human_bytes(4096), human_bytes(80)
    ('12.3 MB', '4.1 kB', '80 B')
    """
    return _scaled(number, (" B", " kB", " MB", " GB", " TB"))


def plan_table(plan: Plan, mean_units: Mapping[str, float] | None = None) -> list[Table | Text]:
    """Makes the parts of a plan's description.

    Args:
        plan: which devices, axes and micro-batches each section gets.
        mean_units: section -> mean units of a step, over all replicas; sections that are missing have no MB per step.

    Returns:
        A headline, a table with a row for each section, one with a row for each edge if there are any, and a line for each note.
    """
    devices = {device.id: device.platform for section in plan.sections.values() for device in section.submesh.mesh.devices.flat}
    kinds = ", ".join(sorted(set(devices.values())))
    counts = [_counted(len(plan.sections), "section"), _counted(len(plan.edges), "edge"), f"{_counted(len(devices), 'device')} ({kinds})"]
    notes = [*_sharing(plan), *plan.notes]
    parts: list[Table | Text] = [Text("plan: " + ", ".join(counts)), Text(), _section_table(plan)]
    if plan.edges:
        parts += [Text(), _edge_table(plan, mean_units or {})]
    if notes:
        parts.append(Text())
    return parts + [Text.assemble(("note:", "yellow"), f" {note}") for note in notes]


def plan_text(plan: Plan, mean_units: Mapping[str, float] | None = None, width: int = WIDTH) -> str:
    """Writes a plan as plain text.

    Args:
        plan: which devices, axes and micro-batches each section gets.
        mean_units: section -> mean units of a step, over all replicas; sections that are missing have no MB per step.
        width: columns of the tables; they get wider where a word would not fit. Notes are one line each.

    Returns:
        Lines without colours and trailing spaces, which depend on the arguments alone.
    """
    file = io.StringIO()
    _print_plan(Console(file=file, width=width, force_terminal=False, force_jupyter=False, color_system=None), plan, mean_units)
    return "".join(line.rstrip() + "\n" for line in file.getvalue().splitlines())


class Bar(Protocol):
    """A progress bar on a screen."""

    def show(self, done: int, total: int, latest: str) -> None:
        """Moves the bar and writes the latest values beside it."""
        ...

    def close(self) -> None:
        """Ends the bar; lines may follow in its place."""
        ...


class Terminal:
    """The user's screen.

    A context manager, so that the bar is closed and the cursor comes back whatever happens:

    >>> import sys
    >>> with Terminal(sys.stdout) as terminal:
    ...     terminal.step({"step": 40, "steps": 300, "loss": 2.31, "objectives": {"student/kl": 0.8}, "gradient_norm": 1.2})
    step  40/300  loss 2.3100  student/kl 0.8000  norm 1.20

    Args:
        stream: where to write; None: standard output, or the notebook.
        interactive: whether to show live bars; None: when the stream is a terminal, or in a notebook.
    """

    def __init__(self, stream: TextIO | None = None, interactive: bool | None = None) -> None:
        in_notebook = stream is None and Console().is_jupyter
        if interactive is None:
            interactive = in_notebook or _is_screen(stream or sys.stdout)
        self._notebook = in_notebook and interactive
        self._live = interactive and not in_notebook
        # Not left to rich, which takes a file for a terminal when FORCE_COLOR is set, as some job runners do.
        width = None if self._live else WIDTH
        self._console = Console(file=stream, width=width, force_terminal=self._live, force_jupyter=False, highlight=False)
        self._bar: Bar | None = None
        self._title = ""
        self._compile_seconds = 0.0

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
        """Writes the tables of a plan (see `plan_table`)."""
        _print_plan(self._console, plan, mean_units)

    def compiling(self, program: Program, done: int, total: int) -> None:
        """Tells that a program was compiled; what `Compiled` takes as `progress`.

        Args:
            program: the program.
            done: number of programs compiled so far, with this one.
            total: number of programs in all.
        """
        self._compile_seconds = program.seconds + (self._compile_seconds if done > 1 else 0.0)
        # The update has neither size nor replica.
        place = f" {program.bucket} replica {program.replica}" if program.bucket else ""
        latest = f"{program.section} {program.kind}{place}"
        if done == total:
            self.close()
            self._line(f"compiled {_counted(total, 'program')} in {self._compile_seconds:.1f} s")
        elif self._live or self._notebook:
            self._show("compiling", done, total, latest)
        elif done * COMPILE_LINES // total > (done - 1) * COMPILE_LINES // total:
            self._line(f"compiling  {done:>{len(str(total))}}/{total}  {latest}")

    def note(self, text: str) -> None:
        """Writes a sentence that the user should read."""
        self._line(Text.assemble(("note:", "yellow"), f" {text}"))

    def start(self, text: str) -> None:
        """Writes the line after which steps begin."""
        self._line(Text(text, style="bold"))

    def step(self, record: Mapping[str, Any]) -> None:
        """Writes the line of a step and moves the bar.

        Args:
            record: as in `metrics.jsonl`: "step" and "steps"; where known "loss", "objectives" ("section/objective" -> value; NaN where
                nothing counted), "gradient_norm", "applied" (false: the update was skipped), "skipped_steps", "tokens_per_second" and
                "eta_seconds".
        """
        parts = _step_parts(record)
        line = Text(_joined(parts, self._console.width))
        line.highlight_words(["skipped (not finite)"], "bold yellow")
        self._line(line)
        if self._live or self._notebook:
            self._show("training", record["step"], record["steps"], "  ".join(parts[1:]))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the line of a held-out evaluation after `step` steps; `values` as a step's "objectives"."""
        parts = [f"held-out at step {step}", *(f"{name} {_value(value)}" for name, value in values.items())]
        self._line(_joined(parts, self._console.width))

    def finish(self, lines: Iterable[str]) -> None:
        """Closes the bar and writes the last lines."""
        self.close()
        for line in lines:
            self._line(line)

    def _line(self, line: str | Text) -> None:
        # Soft wrapping: rich neither breaks nor crops the line.
        self._console.print(line if isinstance(line, Text) else Text(line), soft_wrap=True)

    def _show(self, title: str, done: int, total: int, latest: str) -> None:
        if self._bar is None or title != self._title:
            self.close()
            self._bar = _NotebookBar(title) if self._notebook else _TerminalBar(self._console, title)
            self._title = title
        self._bar.show(done, total, latest)


class _TerminalBar:
    """A bar on the last line of a terminal; lines that are printed meanwhile appear above it."""

    def __init__(self, console: Console, title: str) -> None:
        columns = (
            TextColumn(title, markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[latest]}", markup=False),
        )
        # Twice a second is enough for a clock, and leaves the processor to the dispatcher. Gone when closed: the lines tell it all.
        self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=2)
        self._task = self._progress.add_task(title, latest="")
        self._progress.start()

    def show(self, done: int, total: int, latest: str) -> None:
        self._progress.update(self._task, completed=done, total=total, latest=latest)

    def close(self) -> None:
        self._progress.stop()


class _NotebookBar:
    """A bar in a notebook's output; needs no widgets. It stays as it last was."""

    def __init__(self, title: str) -> None:
        self._title = title
        # rich found a notebook, so IPython is there; this package does not depend on it.
        display: Any = importlib.import_module("IPython.display")
        self._handle = display.display(self._content(0, 1, ""), raw=True, display_id=True)

    def show(self, done: int, total: int, latest: str) -> None:
        self._handle.update(self._content(done, total, latest), raw=True)

    def close(self) -> None:
        pass

    def _content(self, done: int, total: int, latest: str) -> dict[str, str]:
        text = f"{done}/{total}  {latest}"
        page = f'{html.escape(self._title)} <progress value="{done}" max="{total}"></progress> {html.escape(text)}'
        return {"text/plain": f"{self._title}  {text}", "text/html": page}


def _is_screen(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _print_plan(console: Console, plan: Plan, mean_units: Mapping[str, float] | None) -> None:
    for part in plan_table(plan, mean_units):
        if isinstance(part, Table):
            needed = Measurement.get(console, console.options.update(width=10_000), part).minimum
            # Rather too wide for the screen than a number cut in two.
            part.width = needed if needed > console.width else None
        console.print(part, soft_wrap=True)


def _section_table(plan: Plan) -> Table:
    table = _table(("section", "mode", "devices", "replicas x axes", "micro-batch"), ("trained / frozen", "per device"))
    users = _users(plan)
    for name, section in plan.sections.items():
        devices = list(section.submesh.mesh.devices.flat)
        kinds = " ".join(sorted({device.platform for device in devices}))
        shared = ", shared" if any(len(users[device.id]) > 1 for device in devices) else ""
        table.add_row(
            name,
            plan.graph.mode(name),
            f"{_ranges([device.id for device in devices])} {kinds}{shared}",
            _arrangement(section),
            _ladder(section),
            f"{_parameters(section.trained)} / {_parameters(section.frozen)}",
            human_bytes(section.bytes_per_device()),
        )
    return table


def _edge_table(plan: Plan, mean_units: Mapping[str, float]) -> Table:
    table = _table(("edge", "row", "slots"), ("MB per step", "and back"))
    for label, edge in plan.edges.items():
        units = mean_units.get(edge.edge.producer)
        megabytes = "-" if units is None else _short(units * _row_bytes(edge) / 1e6)
        row = f"{edge.row.dtype}[{','.join(str(size) for size in edge.row.shape)}]"
        slots = f"{edge.fan_out} out, {edge.fan_in} in of {edge.slot_rows} rows"
        table.add_row(label, row, slots, megabytes, megabytes if edge.backward else "-")
    return table


def _table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _users(plan: Plan) -> dict[int, tuple[str, ...]]:
    """Device id -> the sections that run on it."""
    users: dict[int, tuple[str, ...]] = {}
    for name, section in plan.sections.items():
        for device in section.submesh.mesh.devices.flat:
            users[device.id] = (*users.get(device.id, ()), name)
    return users


def _sharing(plan: Plan) -> list[str]:
    """A sentence for each group of sections that take turns on the same devices."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for device, names in _users(plan).items():
        if len(names) > 1:
            groups.setdefault(names, []).append(device)
    return [
        f"sections {', '.join(names[:-1])} and {names[-1]} share device{'s' if len(ids) > 1 else ''} {_ranges(ids)} and take turns"
        for names, ids in groups.items()
    ]


def _ranges(numbers: Iterable[int]) -> str:
    """Writes whole numbers as ranges.

    >>> _ranges([3, 0, 1, 5, 6])
    '0-1, 3, 5-6'
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _arrangement(section: SectionPlan) -> str:
    sizes = {axis: section.submesh.mesh.shape[axis] for axis in section.submesh.axes}
    return " x ".join([str(section.submesh.replicas), *(f"{axis}={size}" for axis, size in sizes.items() if size > 1)])


def _ladder(section: SectionPlan) -> str:
    row = section.section.row_length
    return ", ".join(str(bucket) for bucket in section.section.buckets) + (f" (rows of {row})" if row else "")


def _parameters(shapes: Mapping[str, Any]) -> str:
    total = sum(math.prod(shape.shape) for shape in shapes.values())
    return human_count(total) if total else "-"


def _row_bytes(edge: EdgePlan) -> int:
    return math.prod(edge.row.shape) * edge.row.dtype.itemsize


def _step_parts(record: Mapping[str, Any]) -> list[str]:
    """The values of a step's line, each with its name."""
    applied = bool(record.get("applied", True))
    parts = [f"step {record['step']:>{len(str(record['steps']))}}/{record['steps']}"]
    # In a skipped step NaN is what went wrong, in any other it says that nothing counted.
    if "loss" in record:
        parts.append(f"loss {_value(record['loss'], applied)}")
    parts += [f"{name} {_value(value, applied)}" for name, value in record.get("objectives", {}).items()]
    if record.get("gradient_norm") is not None:
        parts.append(f"norm {_short(record['gradient_norm'])}")
    if not applied:
        skipped = record.get("skipped_steps", 1)
        parts.append("skipped (not finite)" + (f", {skipped} so far" if skipped > 1 else ""))
    if record.get("tokens_per_second") is not None:
        parts.append(f"{human_count(record['tokens_per_second'])} tokens/s")
    if record.get("eta_seconds") is not None:
        parts.append(f"ETA {_clock(record['eta_seconds'])}")
    return parts


def _joined(parts: Sequence[str], width: int) -> str:
    """Joins values by two spaces, and begins an indented line where the next one would not fit."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) > width:
            lines.append("    " + part)
        else:
            lines[-1] += "  " + part
    return "\n".join(lines)


def _value(value: float | None, counted: bool = True) -> str:
    """An objective's value with four digits after the point; '-' where nothing counted."""
    if value is None or (counted and math.isnan(value)):
        return "-"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def _short(value: float) -> str:
    """A number with three digits that keeps its zeros: 1.20, 0.00312, 123, 1.23e+06."""
    return f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:#.3g}"


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


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _scaled(number: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        # From 999.5 on, three digits would read 1e+03.
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"
