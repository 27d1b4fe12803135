"""HTML tables, and the plan's parts as HTML."""

from __future__ import annotations

import re

from rich.table import Table

from maestro_jax.drawing.tables import parts_html, table_html


def rich_table(headers: list[str], rows: list[list[str]]) -> Table:
    table = Table()
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def words(html: str) -> list[str]:
    return re.findall(r">([^<]+)<", html)


def test_cells_and_headers_are_escaped() -> None:
    assert words(table_html(["<a>"], [["x & <b>"]])) == ["&lt;a&gt;", "x &amp; &lt;b&gt;"]


def test_numbers_stand_at_the_right() -> None:
    html = table_html(["name", "count"], [["a", "1"]], numbers=[1])
    assert re.findall(r'<td style="text-align:(\w+)">', html) == ["left", "right"]


def test_a_column_that_says_nothing_is_left_out_with_its_explanation() -> None:
    table = rich_table(["edge", "size", "rows"], [["a", "-", "1"], ["b", "-", "-"]])
    html = parts_html([table, "", "size: of a row", "rows: in a step"])
    assert words(html) == ["edge", "rows", "a", "1", "b", "-", "rows: in a step"]


def test_the_alignment_of_columns_that_stay_is_theirs() -> None:
    html = parts_html([rich_table(["edge", "size", "rows"], [["a", "-", "1"]])])
    assert re.findall(r'<td style="text-align:(\w+)">', html) == ["left", "right"]


def test_lines_that_begin_with_spaces_go_on_with_the_line_before() -> None:
    assert parts_html(["bytes: parameters,", "    without others", "note: <1>", "", "next"]) == (
        "<p>bytes: parameters, without others<br>note: &lt;1&gt;</p><p>next</p>"
    )
