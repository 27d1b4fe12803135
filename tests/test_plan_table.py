"""The tables of a plan say where each section runs, what it holds and what crosses its edges."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from maestro_jax.data.samples import ArraySpec
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.plan_table import EDGE_LEGEND, LEGEND, memory_text, plan_text, print_plan
from maestro_jax.runtime import Plan, make_plan
from maestro_jax.runtime.memory import MemoryUse

SPECS = {
    "text": {name: ArraySpec(dtype=dtype) for name, dtype in (("tokens", "int32"), ("loss_mask", "float32"))},
    "image": {"tokens": ArraySpec(dtype="int32")},
}


def table(vocabulary: int, width: int) -> tuple[Any, Any]:
    """A module that looks its tokens up."""
    return (
        lambda key: {"table": jnp.zeros((vocabulary, width))},
        lambda params, batch: {"hidden": params["table"][batch["tokens"]]},
    )


def student(params: Any, batch: Any, teacher_hidden: jax.Array, picture: jax.Array) -> dict[str, jax.Array]:
    return {"kl": jnp.sum(teacher_hidden) * params["weight"].sum() + jnp.sum(picture) * params["frozen"].sum()}


def make(devices: int = 8, submesh: str | None = None, share: bool = False, teacher_name: str = "teacher") -> Plan:
    """A frozen teacher and a trained encoder feed a student."""
    module = (lambda key: {"weight": jnp.zeros((1000, 64)), "frozen": jnp.zeros((50,))}, student)
    sections = (
        Section(name=teacher_name, module=table(10_000, 192), trainable=False, axes={"tensor": 2}, microbatch=2048, row_length=256),
        Section(name="encoder", module=table(500, 16), reads="image", microbatch=64, submesh=submesh),
        Section(
            name="student",
            module=module,
            inputs={"teacher_hidden": f"{teacher_name}.hidden", "picture": "encoder.hidden"},
            objectives={"kl": Objective()},
            frozen=("frozen",),
            replicas=2,
            microbatch=(256, 1024),
            row_length=256,
        ),
    )
    return make_plan(SectionGraph(sections=sections), SPECS, jax.devices()[:devices], share=share)


GOLDEN = """
plan: 3 sections, 2 edges, 5 devices (cpu)

section  mode          devices  replicas x axes  micro-batch  row length
────────────────────────────────────────────────────────────────────────
teacher  forward only  0-1 cpu  1 x tensor=2     2048                256
encoder  train         2 cpu    1                64                    -
student  train         3-4 cpu  2                256, 1024           256

section  dtype    trained parameters  frozen parameters  bytes per device
─────────────────────────────────────────────────────────────────────────
teacher  float32                   -              1.92M           7.68 MB
encoder  float32                  8k                  -             96 kB
student  float32                 64k                 50            640 kB

edge                                    row           slots                    MB per step  gradient
────────────────────────────────────────────────────────────────────────────────────────────────────
teacher.hidden->student.teacher_hidden  float32[192]  3 out, 2 in x 1024 rows         12.6        no
encoder.hidden->student.picture         float32[16]   2 out, 17 in x 64 rows       0.00640       yes

micro-batch: units in one program call; the smallest size that fits is taken
bytes per device: parameters, their float32 masters and gradient accumulators,
    without optimizer state and activations
MB per step: rows sent forward in a mean step; returning gradients add as much
"""


def row(text: str, first: str) -> str:
    """The line that begins with a word."""
    return next(line for line in text.splitlines() if line.startswith(first))


def test_plan_text_is_golden() -> None:
    assert plan_text(make(), {"teacher": 16_384.0, "encoder": 100.0}) == GOLDEN.lstrip("\n")


def shown(plan: Plan, width: int) -> str:
    """What a screen without colours shows."""
    file = io.StringIO()
    print_plan(Console(file=file, width=width, force_terminal=True, color_system=None), plan, {"teacher": 16_384.0})
    return file.getvalue()


def test_screen_does_not_show_slots() -> None:
    text = shown(make(), 80)
    assert "slots" not in text
    assert row(text, "teacher.hidden").split() == ["teacher.hidden->student.teacher_hidden", "float32[192]", "12.6", "no"]


def test_edge_says_whether_gradients_return() -> None:
    text = plan_text(make())
    assert [row(text, f"{name}.hidden").split()[-1] for name in ("teacher", "encoder")] == ["no", "yes"]


def test_section_says_its_dtype() -> None:
    section = Section(name="only", module=table(10, 4), trainable=False, dtype="bfloat16", microbatch=8)
    plan = make_plan(SectionGraph(sections=(section,)), SPECS, jax.devices()[:1])
    assert "\nonly     bfloat16  " in plan_text(plan)


def test_legend_leaves_out_edges_where_there_are_none() -> None:
    section = Section(name="only", module=table(10, 4), trainable=False, microbatch=8)
    text = plan_text(make_plan(SectionGraph(sections=(section,)), SPECS, jax.devices()[:1]))
    assert LEGEND[0] in text
    assert EDGE_LEGEND not in text


def test_sections_that_share_devices_say_so() -> None:
    text = plan_text(make(submesh="teacher"))
    assert [name for name in ("teacher", "encoder", "student") if ", shared" in row(text, f"{name} ")] == ["teacher", "encoder"]
    assert "\nnote: sections 'teacher' and 'encoder' share device 0 and take turns\n" in text


def test_notes_of_the_plan_are_lines() -> None:
    plan = make(devices=2, share=True)
    assert plan.notes
    assert plan_text(plan, width=60).splitlines()[-len(plan.notes) :] == [f"note: {note}" for note in plan.notes]


def test_axes_are_those_that_the_section_got() -> None:
    assert "tensor" not in row(plan_text(make(devices=1, share=True)), "teacher ")


def test_traffic_of_a_section_without_mean_units_is_unknown() -> None:
    assert row(plan_text(make(), {"encoder": 100.0}), "teacher.hidden").split()[-2] == "-"


@pytest.mark.parametrize("width", [100, 80, 30])
def test_no_word_is_cut_whatever_the_width(width: int) -> None:
    plan = make(teacher_name="teacher_with_a_name_that_is_long")
    words = sorted(plan_text(plan, width=1000).replace("─", "").split())
    assert sorted(plan_text(plan, width=width).replace("─", "").split()) == words


@pytest.mark.parametrize("submesh", [None, "teacher"])
def test_screen_of_80_columns_is_enough_where_names_are_short(submesh: str | None) -> None:
    plan = make(submesh=submesh)
    for text in (shown(plan, 80), plan_text(plan, width=80)):
        assert max(len(line) for line in text.splitlines() if not line.startswith("note:")) <= 80


@pytest.mark.parametrize("width", [140, 80, 30])
def test_no_line_ends_in_spaces(width: int) -> None:
    for text in (shown(make(), width), plan_text(make(), width=width)):
        assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_same_plan_gives_same_text() -> None:
    assert plan_text(make(), {"teacher": np.float64(3.0)}) == plan_text(make(), {"teacher": 3.0})


def test_memory_is_told_beside_what_xla_reports() -> None:
    use = MemoryUse(state=3_000_000, optimizer=2_000_000, microbatch=500_000, in_flight=4_000_000, program=7_000_000)
    assert use.predicted == 9_000_000
    assert memory_text({"teacher": use, "student": dataclasses.replace(use, program=None)}) == (
        "\n"
        "section  state  optimizer  micro-batch  in flight  predicted  largest program\n"
        "─────────────────────────────────────────────────────────────────────────────\n"
        "teacher   3 MB       2 MB       500 kB       4 MB       9 MB             7 MB\n"
        "student   3 MB       2 MB       500 kB       4 MB       9 MB                -\n"
        "\n"
        "predicted: state, optimizer and micro-batches in flight, on one device\n"
        "largest program: arguments, results and scratch, as XLA reports them\n"
    )


def test_memory_before_compilation_has_no_programs() -> None:
    use = MemoryUse(state=3_000_000, optimizer=0, microbatch=500_000, in_flight=4_000_000, program=None)
    assert memory_text({"teacher": use}) == (
        "\n"
        "section  state  optimizer  micro-batch  in flight  predicted\n"
        "────────────────────────────────────────────────────────────\n"
        "teacher   3 MB        0 B       500 kB       4 MB       7 MB\n"
        "\n"
        "predicted: state, optimizer and micro-batches in flight, on one device\n"
        "    before compilation: residuals for the backward are counted whole on each device of a replica\n"
    )
