"""A plan in a notebook."""

from __future__ import annotations

import re

import jax
import support

from maestro_jax.runtime.plan import Plan, make_plan


def plan() -> Plan:
    graph = support.chain(teacher={"trainable": False}, student={"replicas": 2, "frozen": ("head",)})
    return make_plan(graph, support.TEXT_SPECS, jax.devices())


def texts(html: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}[^>]*>([^<]+)<", html)


def test_the_drawing_has_devices_parameters_and_rows() -> None:
    drawn = texts(plan()._repr_html_(), "text")
    teacher, student = drawn.index("teacher"), drawn.index("student")
    assert drawn[teacher:][4:6] == ["devices 0 cpu", "parameters 192 frozen"]
    assert drawn[student:][-2:] == ["devices 2-3 cpu", "parameters 192 trained, 128 frozen"]
    assert drawn.count("float32[8]") == 2


def test_the_tables_are_those_of_the_terminal_without_what_is_not_known() -> None:
    html = plan()._repr_html_()
    headers = texts(html, "th")
    assert headers[:5] == ["section", "mode", "devices", "replicas x axes", "micro-batch"]
    assert headers[-3:] == ["edge", "row", "gradient"]
    assert "MB per step" not in html


def test_notes_are_told() -> None:
    shared = make_plan(support.chain(), support.TEXT_SPECS, jax.devices()[:2], share=True)
    assert "note: " in shared._repr_html_()
