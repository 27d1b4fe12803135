"""The drawing of a section graph."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import support

from maestro_jax.drawing.graph import COLOURS, graph_html
from maestro_jax.graph import Objective, Section, SectionGraph

SVG = "{http://www.w3.org/2000/svg}"


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def texts(html: str) -> list[str]:
    return [element.text or "" for element in parsed(html).iter(f"{SVG}text")]


def heads(html: str) -> int:
    """Heads of arrows: closed paths."""
    return sum(element.get("d", "").endswith("Z") for element in parsed(html).iter(f"{SVG}path"))


def luminance(colour: str) -> float:
    """Of sRGB, by WCAG 2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_box_names_section_mode_place_and_loss() -> None:
    found = texts(support.chain(student={"replicas": 4, "axes": {"tensor": 2}})._repr_html_())
    assert found[-5:] == ["student", "train", "4 replicas x tensor=2", "micro-batch 32", "loss cross_entropy + 0.1 square"]
    assert {"teacher", "middle", "pass gradient"} < set(found)


def test_frozen_parts_of_a_trained_section_are_named() -> None:
    assert "frozen embed, head" in texts(support.chain(student={"frozen": ("embed", "head")})._repr_html_())


def test_the_colour_of_a_box_is_that_of_its_mode() -> None:
    graph = support.chain(teacher={"trainable": False}, middle={"trainable": True})
    found = [element.get("stroke") for element in parsed(graph._repr_html_()).iter(f"{SVG}rect")]
    assert found == [COLOURS["forward only"], COLOURS["train"], COLOURS["train"]]


def test_arrows_have_a_head_at_the_producer_where_gradients_come_back() -> None:
    assert heads(support.chain()._repr_html_()) == 4
    frozen = support.chain(teacher={"trainable": False})._repr_html_()
    assert heads(frozen) == 2
    assert "gradient back" not in texts(frozen)


def test_an_arrow_has_the_row_where_it_is_known_else_names_only() -> None:
    graph = support.wired("pair", {})
    assert "hidden → from_a" in texts(graph_html(graph))
    assert "float32[8], gradient back" in texts(graph_html(graph, rows={"a.hidden->b.from_a": "float32[8]"}))


def test_facts_stand_in_the_box_of_their_section() -> None:
    found = texts(graph_html(support.chain(), facts={"middle": ["devices 0-1"]}))
    assert found[found.index("middle") : found.index("student")][-1] == "devices 0-1"


def test_names_are_escaped() -> None:
    section = Section(name="a", module=support.teacher_functions(8), objectives={"<script>&'\"": Objective()})
    html = SectionGraph(sections=(section,))._repr_html_()
    assert "<script>" not in html
    assert "loss <script>&'\"" in texts(html)


def test_long_lines_are_cut() -> None:
    objectives = {f"objective_{number}": Objective() for number in range(9)}
    section = Section(name="a", module=support.teacher_functions(8), objectives=objectives)
    [line] = [line for line in texts(SectionGraph(sections=(section,))._repr_html_()) if line.startswith("loss")]
    assert len(line) < 40
    assert line.endswith("…")


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
@pytest.mark.parametrize("colour", COLOURS.values())
def test_colours_can_be_told_from_light_and_from_dark_pages(colour: str, page: str) -> None:
    high, low = sorted((luminance(colour), luminance(page)), reverse=True)
    assert (high + 0.05) / (low + 0.05) > 3.5


def test_shapes_have_no_other_colours_and_no_style_sheet() -> None:
    root = parsed(support.wired("diamond", {})._repr_html_())
    colours = {element.get(name) for element in root.iter() for name in ("fill", "stroke")}
    assert colours <= {None, "none", "currentColor", *COLOURS.values()}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "g", "rect", "path", "text"}
    assert [element.tag for element in root.iter() if "style" in element.attrib] == [f"{SVG}svg"]
