"""A plan as tables: which devices, axes, micro-batches and parameters each section gets, and what crosses each edge."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .runtime.memory import MemoryUse
from .runtime.plan import EdgePlan, Plan, SectionPlan

WIDTH = 100
"""Columns of tables where nothing says how many there are."""

LEGEND = (
    "micro-batch: units in one program call; the smallest size that fits is taken",
    "bytes per device: parameters, their float32 masters and gradient accumulators,",
    "    without optimizer state and activations",
)
EDGE_LEGEND = "MB per step: rows sent forward in a mean step; returning gradients add as much"
"""What the words over the columns mean, in lines that fit a narrow screen."""


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


def plan_table(plan: Plan, mean_units: Mapping[str, float] | None = None, *, slots: bool = False) -> list[Table | str]:
    """Makes the parts of a plan's description.

    Args:
        plan: which devices, axes and micro-batches each section gets.
        mean_units: section -> mean units of a step, over all replicas; sections that are missing have no MB per step.
        slots: whether to tell how many slots of how many rows a micro-batch has at both ends of an edge.

    Returns:
        A headline, two tables with a row for each section (its place, its parameters), one with a row for each edge if there are any, the
        lines of the legend, and a line for each note.
    """
    devices = {device.id: device.platform for section in plan.sections.values() for device in section.submesh.mesh.devices.flat}
    kinds = ", ".join(sorted(set(devices.values())))
    counts = [counted(len(plan.sections), "section"), counted(len(plan.edges), "edge"), f"{counted(len(devices), 'device')} ({kinds})"]
    notes = [*_sharing(plan), *plan.notes]
    parts: list[Table | str] = ["plan: " + ", ".join(counts), "", _place_table(plan), "", _parameter_table(plan), ""]
    if plan.edges:
        parts += [_edge_table(plan, mean_units or {}, slots), ""]
    parts += [*LEGEND, *([EDGE_LEGEND] if plan.edges else [])]
    if notes:
        parts.append("")
    return parts + [f"note: {note}" for note in notes]


def plan_text(plan: Plan, mean_units: Mapping[str, float] | None = None, width: int = WIDTH) -> str:
    """Writes a plan as plain text.

    Args:
        plan: which devices, axes and micro-batches each section gets.
        mean_units: section -> mean units of a step, over all replicas; sections that are missing have no MB per step.
        width: columns of the tables; they get wider where their words do not fit. Legend and notes are one line each.

    Returns:
        Lines with the slots of edges, without colours and trailing spaces, which depend on the arguments alone.
    """
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=False, force_jupyter=False, color_system=None)
    print_plan(console, plan, mean_units, slots=True)
    return file.getvalue()


MEMORY_LEGEND = "predicted: state, optimizer and micro-batches in flight, on one device"
PROGRAM_LEGEND = "largest program: arguments, results and scratch, as XLA reports them"
UNCOMPILED_LEGEND = "    before compilation: residuals for the backward are counted whole on each device of a replica"


def memory_text(uses: Mapping[str, MemoryUse], width: int = WIDTH) -> str:
    """Writes what each section holds on a device as plain text (see `print_memory`)."""
    file = io.StringIO()
    print_memory(Console(file=file, width=width, force_terminal=False, force_jupyter=False, color_system=None), uses)
    return file.getvalue()


def print_memory(console: Console, uses: Mapping[str, MemoryUse]) -> None:
    """Prints bytes per device: predicted from shapes and, once programs are compiled, the largest one as XLA reports it."""
    compiled = any(use.program is not None for use in uses.values())
    columns = ["state", "optimizer", "micro-batch", "in flight", "predicted", *(["largest program"] if compiled else [])]
    table = _table(["section"], columns)
    for name, use in uses.items():
        cells = [human_bytes(n) for n in (use.state, use.optimizer, use.microbatch, use.in_flight, use.predicted)]
        if compiled:
            cells.append("-" if use.program is None else human_bytes(use.program))
        table.add_row(name, *cells)
    console.print()
    _print_table(console, table)
    console.print()
    for line in (MEMORY_LEGEND, PROGRAM_LEGEND if compiled else UNCOMPILED_LEGEND):
        print_text(console, line, "dim")


def print_plan(console: Console, plan: Plan, mean_units: Mapping[str, float] | None = None, *, slots: bool = False) -> None:
    """Writes the parts of a plan (see `plan_table`) to a console, as wide as the console where that is possible."""
    for part in plan_table(plan, mean_units, slots=slots):
        if isinstance(part, Table):
            _print_table(console, part)
        else:
            print_text(console, part)


def print_text(console: Console, line: str, style: str = "") -> None:
    """Writes a line: broken between words on a screen, and never elsewhere; a leading "note:" stands out."""
    if console.is_terminal and line:
        # Not left to rich, which cuts a word that is too long, such as a path; this way it can still be copied.
        line = "\n".join(textwrap.wrap(line, console.width, break_long_words=False, break_on_hyphens=False))
    text = Text(line, style=style)
    if line.startswith("note:"):
        text.stylize("yellow", 0, len("note:"))
    console.print(text, soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """Writes a number with a noun: '1 section', '2 sections'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short(value: float) -> str:
    """Writes a number with three digits, zeros at the end included.

    >>> short(1.2), short(0.003124), short(123.4), short(1_234_000.0)
    ('1.20', '0.00312', '123', '1.23e+06')
    """
    return f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:#.3g}"


def _place_table(plan: Plan) -> Table:
    table = _table(("section", "mode", "devices", "replicas x axes", "micro-batch"), ("row length",))
    users = _users(plan)
    for name, section in plan.sections.items():
        devices = list(section.submesh.mesh.devices.flat)
        kinds = " ".join(sorted({device.platform for device in devices}))
        shared = ", shared" if any(len(users[device.id]) > 1 for device in devices) else ""
        cells = (
            name,
            plan.graph.mode(name),
            f"{_ranges([device.id for device in devices])} {kinds}{shared}",
            _arrangement(section),
            ", ".join(map(str, section.section.buckets)),
            str(section.section.row_length or "-") + ("" if section.section.packed else ", one item"),
        )
        # As Text, because rich looks for markup in strings.
        table.add_row(*map(Text, cells))
    return table


def _parameter_table(plan: Plan) -> Table:
    table = _table(("section", "dtype"), ("trained parameters", "frozen parameters", "bytes per device"))
    for name, section in plan.sections.items():
        counts = (_parameters(section.trained), _parameters(section.frozen))
        table.add_row(*map(Text, (name, section.section.dtype, *counts, human_bytes(section.bytes_per_device()))))
    return table


def _edge_table(plan: Plan, mean_units: Mapping[str, float], slots: bool) -> Table:
    table = _table(("edge", "row", *(["slots"] if slots else [])), ("MB per step", "gradient"))
    for label, edge in plan.edges.items():
        units = mean_units.get(edge.edge.producer)
        cells = [label, f"{edge.row.dtype}[{','.join(str(size) for size in edge.row.shape)}]"]
        if slots:
            cells.append(f"{edge.fan_out} out, {edge.fan_in} in x {edge.slot_rows} rows")
        cells.append("-" if units is None else short(units * _row_bytes(edge) / 1e6))
        table.add_row(*map(Text, (*cells, "yes" if edge.backward else "no")))
    return table


def _table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _print_table(console: Console, table: Table) -> None:
    """Writes a table without the spaces that rich puts at the end of lines."""
    width = _fit(table, console.width)
    for segments in console.render_lines(table, console.options.update_width(width)):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)


def _fit(table: Table, width: int) -> int:
    """Narrows columns, the widest first, until a table fits: headers and words break between words, numbers keep their unit.

    Rich alone would also cut words and numbers.

    Returns:
        The width of the table; where even single words do not fit, it is wider than the screen.
    """
    widths, least = [], []
    for column in table.columns:
        header, cells = str(column.header), [str(cell) for cell in column.cells]
        pieces = cells if column.justify == "right" else [word for cell in cells for word in cell.split()]
        widths.append(max(map(cell_len, [header, *cells])))
        least.append(max(map(cell_len, [*header.split(), *pieces])))
    between = 2 * (len(widths) - 1)
    while sum(widths) + between > width and widths != least:
        widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
        widths[widest] -= 1
    for column, column_width in zip(table.columns, widths, strict=True):
        column.width = column_width
    table.width = sum(widths) + between
    return table.width


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
    sentences = []
    for names, ids in groups.items():
        sections = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
        sentences.append(f"sections {sections} share device{'s' if len(ids) > 1 else ''} {_ranges(ids)} and take turns")
    return sentences


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


def _parameters(shapes: Mapping[str, Any]) -> str:
    total = sum(math.prod(shape.shape) for shape in shapes.values())
    return human_count(total) if total else "-"


def _row_bytes(edge: EdgePlan) -> int:
    return math.prod(edge.row.shape) * edge.row.dtype.itemsize


def _scaled(number: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        # From 999.5 on, three digits would read 1e+03.
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"
