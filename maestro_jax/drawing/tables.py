"""Tables as HTML."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterator, Sequence

from rich.table import Table

Rows = Sequence[Sequence[str]]


def table_html(header: Sequence[str], rows: Rows, numbers: Collection[int] = ()) -> str:
    """Writes a table.

    Args:
        header: a word over each column.
        rows: the cells, as plain text.
        numbers: positions of the columns that are aligned to the right.

    >>> table_html(["a", "b"], [["<x>", "1"]], numbers=[1]).count("&lt;x&gt;")
    1
    """

    def line(cells: Sequence[str], tag: str) -> str:
        places = ["right" if position in numbers else "left" for position in range(len(cells))]
        return "<tr>" + "".join(_cell(cell, tag, place) for cell, place in zip(cells, places, strict=True)) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"


def parts_html(parts: Sequence[Table | str]) -> str:
    """Writes tables and lines of text, as they are made for the terminal.

    A line that begins with spaces goes on with the line before. A column without any value ("-" throughout) is left out, and so is the
    line that explains it ("header: meaning").

    Args:
        parts: tables, whose cells are text, and lines; empty lines separate.
    """
    absent = {header for part in parts if isinstance(part, Table) for header, cells in _columns(part) if _says_nothing(cells)}
    lines: list[str] = []
    found: list[str] = []
    for part in [*parts, ""]:
        if isinstance(part, str) and part:
            lines.append(part)
            continue
        if lines:
            found.append(_paragraph(lines, absent))
            lines = []
        if isinstance(part, Table):
            found.append(_rich_table(part))
    return "".join(found)


def _cell(words: str, tag: str, place: str) -> str:
    return f'<{tag} style="text-align:{place}">{html.escape(words)}</{tag}>'


def _columns(table: Table) -> Iterator[tuple[str, list[str]]]:
    for column in table.columns:
        yield str(column.header), [str(cell) for cell in column.cells]


def _says_nothing(cells: Sequence[str]) -> bool:
    return all(cell == "-" for cell in cells)


def _rich_table(table: Table) -> str:
    shown = [position for position, (_, cells) in enumerate(_columns(table)) if not _says_nothing(cells)]
    columns = list(_columns(table))
    numbers = [place for place, position in enumerate(shown) if table.columns[position].justify == "right"]
    rows = list(zip(*(columns[position][1] for position in shown), strict=True))
    return table_html([columns[position][0] for position in shown], rows, numbers)


def _paragraph(lines: Sequence[str], absent: Collection[str]) -> str:
    sentences: list[str] = []
    for line in lines:
        if line.startswith(" ") and sentences:
            sentences[-1] += " " + line.strip()
        else:
            sentences.append(line)
    kept = [sentence for sentence in sentences if sentence.partition(":")[0] not in absent]
    return "<p>" + "<br>".join(map(html.escape, kept)) + "</p>" if kept else ""
