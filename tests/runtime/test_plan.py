"""The plan gives sections their devices and layouts, and refuses what cannot be laid out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from support import TEXT_SPECS, chain, teacher_functions

from maestro_jax.errors import ConfigError, MaestroError, MeshError
from maestro_jax.graph import Edge, Objective, Section, SectionGraph
from maestro_jax.runtime import Plan, make_plan, requests_of

TO_MIDDLE, TO_STUDENT = "teacher.hidden->middle.hidden", "middle.hidden->student.hidden"


def planned(graph: SectionGraph | None = None, devices: int = 8, share: bool = False, **sections: Any) -> Plan:
    return make_plan(graph or chain(**sections), TEXT_SPECS, jax.devices()[:devices], share=share)


def refused(kind: type[MaestroError], **sections: Any) -> MaestroError:
    with pytest.raises(kind) as caught:
        planned(**sections)
    return caught.value


class Named(nnx.Module):
    """Parameters with logical names: one that tensor=2 splits, one that it cannot, and one whole number."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.even = nnx.Param(jnp.ones((8, 6)), out_sharding=("vocab", "embed"))
        self.odd = nnx.Param(jnp.ones((3, 5)), out_sharding=("heads", "embed"))
        self.counts = nnx.Param(jnp.zeros((4,), jnp.int32))

    def __call__(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"loss": batch["loss_mask"].sum() * self.even[...].sum() * self.odd[...].sum()}


def alone(**fields: Any) -> SectionGraph:
    return SectionGraph(sections=(Section(name="a", module=Named, objectives={"loss": Objective()}, microbatch=32, **fields),))


@pytest.mark.quick
def test_sections_stand_on_devices_of_their_own_producers_first() -> None:
    plan = planned(teacher={"axes": {"tensor": 2}}, student={"replicas": 4})
    assert list(plan.sections) == ["teacher", "middle", "student"]
    assert {n: [d.id for d in s.submesh.mesh.devices.flat] for n, s in plan.sections.items()} == {
        "teacher": [0, 1],
        "middle": [2],
        "student": [3, 4, 5, 6],
    }


def test_requests_say_where_they_were_set() -> None:
    requests = requests_of(chain(teacher={"axes": {"tensor": 2}, "submesh": "both"}, student={"replicas": 4}))
    assert [(r.section, r.submesh, r.replicas, dict(r.axes), r.origin) for r in requests] == [
        ("teacher", "both", 1, {"tensor": 2}, "the calling program: Section('teacher').axes"),
        ("middle", "middle", 1, {}, "the calling program: Section('middle').replicas"),
        ("student", "student", 4, {}, "the calling program: Section('student').replicas"),
    ]


def test_edges_of_a_section() -> None:
    plan = planned()
    assert [e.edge.label for e in plan.into("middle")] == [TO_MIDDLE]
    assert [e.edge.label for e in plan.out_of("middle")] == [TO_STUDENT]
    assert plan.into("teacher") == plan.out_of("student") == ()


@pytest.mark.quick
def test_every_pair_of_replicas_has_a_wire() -> None:
    plan = planned(teacher={"replicas": 2, "axes": {"tensor": 2}}, student={"replicas": 3})
    assert sorted(plan.edges[TO_MIDDLE].wires) == [(0, 0), (1, 0)]
    assert sorted(plan.edges[TO_STUDENT].wires) == [(0, 0), (0, 1), (0, 2)]
    wire = plan.edges[TO_MIDDLE].wires[1, 0]
    assert [d.id for d in wire.source.devices.flat] == [2, 3]
    assert [d.id for d in wire.target.devices.flat] == [4]


@pytest.mark.parametrize(
    ("producer", "consumer", "rows"),
    [({"microbatch": (32, 64)}, {"microbatch": 48}, 48), ({"microbatch": 16}, {"microbatch": 48}, 16)],
    ids=["consumer smaller", "producer smaller"],
)
def test_a_slot_holds_the_smaller_of_the_two_microbatches(producer: dict[str, Any], consumer: dict[str, Any], rows: int) -> None:
    assert planned(teacher=producer, middle=consumer).edges[TO_MIDDLE].slot_rows == rows


def test_rows_of_a_slot_are_a_multiple_of_the_stripes() -> None:
    plan = planned(teacher={"axes": {"tensor": 2}, "microbatch": 20}, middle={"axes": {"tensor": 3}})
    assert plan.edges[TO_MIDDLE].slot_rows == 24
    assert plan.edges[TO_MIDDLE].wires[0, 0].stripes == 6


@pytest.mark.quick
@pytest.mark.parametrize(
    ("teacher", "middle", "fans"),
    [
        ({"microbatch": 64}, {"microbatch": 16}, (2, 5)),
        ({"microbatch": 16}, {"microbatch": 64}, (5, 2)),
        ({"microbatch": 64}, {"microbatch": 48}, (2, 3)),
        ({"microbatch": 64, "fan_out": 7}, {"microbatch": 48, "fan_in": 1}, (1, 7)),
    ],
    ids=str,
)
def test_fans_are_one_more_than_sizes_need_unless_given(teacher: dict[str, Any], middle: dict[str, Any], fans: tuple[int, int]) -> None:
    edge = planned(teacher=teacher, middle=middle).edges[TO_MIDDLE]
    assert (edge.fan_in, edge.fan_out) == fans


@pytest.mark.parametrize("trainable", [True, False])
def test_gradients_flow_back_where_the_producer_runs_backward(trainable: bool) -> None:
    plan = planned(teacher={"trainable": trainable})
    assert [plan.edges[label].backward for label in (TO_MIDDLE, TO_STUDENT)] == [trainable, trainable]


def test_edge_has_the_dtype_of_its_producer() -> None:
    plan = planned(teacher={"dtype": "bfloat16"})
    assert plan.edges[TO_MIDDLE].row == jax.ShapeDtypeStruct((8,), jnp.bfloat16)


def test_several_edges_between_two_sections_are_laid_out_apart() -> None:
    base = chain()
    init, apply = teacher_functions(8)
    two = (init, lambda params, batch: {**apply(params, batch), "other": jnp.zeros((*batch["tokens"].shape, 3))})
    middle = base["middle"].module
    takes_two = (middle[0], lambda params, batch, hidden, other: middle[1](params, batch, hidden))
    sections = (
        dataclasses.replace(base["teacher"], module=two),
        dataclasses.replace(base["middle"], module=takes_two),
        base["student"],
    )
    more = Edge(producer="teacher", output="other", consumer="middle", input="other")
    plan = planned(SectionGraph(sections=sections, more_edges=(more,)))
    assert {label: edge.row.shape for label, edge in plan.edges.items()} == {TO_MIDDLE: (8,), TO_STUDENT: (8,), more.label: (3,)}


@pytest.mark.quick
def test_parameters_are_split_inside_a_replica_and_master_copies_over_replicas() -> None:
    section = planned(alone(axes={"tensor": 2}, replicas=2)).sections["a"]
    assert section.specs["even"] == PartitionSpec("tensor", None)
    assert section.master_specs["even"] == PartitionSpec("tensor", "replica")
    assert section.specs["odd"] == section.master_specs["odd"] == PartitionSpec(None, None)


@pytest.mark.quick
def test_a_parameter_that_stays_whole_is_noted() -> None:
    plan = planned(alone(axes={"tensor": 2}))
    assert plan.notes == ("section 'a': odd stays whole: dimension 0 (heads, 3) by tensor=2 is not divisible",)


def test_rules_of_a_section_are_added_to_the_default_ones() -> None:
    section = planned(alone(axes={"tensor": 2}, rules={"embed": "tensor", "vocab": None})).sections["a"]
    assert section.specs["even"] == PartitionSpec(None, "tensor")


@pytest.mark.quick
def test_master_copies_are_float32_and_the_rest_has_compute_precision() -> None:
    section = planned(alone(dtype="bfloat16", frozen=("odd",))).sections["a"]
    assert {p: str(s.dtype) for p, s in section.trained.items()} == {"even": "float32"}
    assert {p: str(s.dtype) for p, s in section.compute.items()} == {"even": "bfloat16"}
    assert {p: str(s.dtype) for p, s in section.frozen.items()} == {"odd": "bfloat16", "counts": "int32"}


def test_a_section_that_does_not_train_has_no_master_copies() -> None:
    section = planned(teacher={"trainable": False}).sections["teacher"]
    assert (dict(section.trained), dict(section.master_specs), list(section.frozen)) == ({}, {}, ["embed", "inner"])


def test_shape_of_a_microbatch() -> None:
    plan = planned(teacher={"microbatch": (32, 64), "row_length": 16})
    assert [plan.sections["teacher"].micro_shape(bucket) for bucket in (32, 64)] == [(2, 16), (4, 16)]
    assert plan.sections["student"].micro_shape(32) == (1, 32)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 3 * 4 * (48 + 15)),
        ({"replicas": 2}, 2 * 4 * (48 + 15) + 4 * (24 + 15)),
        ({"axes": {"tensor": 2}}, 3 * 4 * (24 + 15)),
        ({"dtype": "bfloat16"}, (2 + 4 + 4) * (48 + 15)),
        ({"frozen": ("even",)}, 4 * 48 + 3 * 4 * 15),
    ],
    ids=str,
)
def test_bytes_on_the_busiest_device(fields: dict[str, Any], size: int) -> None:
    counts = 4 * 4
    assert planned(alone(**fields)).sections["a"].bytes_per_device() == size + counts


@pytest.mark.quick
def test_too_few_devices_are_refused_or_shared() -> None:
    graph = chain(teacher={"axes": {"tensor": 2}}, student={"replicas": 4})
    with pytest.raises(MeshError, match="section 'student' cannot be placed"):
        planned(graph, devices=4)
    plan = planned(graph, devices=2, share=True)
    assert {n: [d.id for d in s.submesh.mesh.devices.flat] for n, s in plan.sections.items()} == {
        "teacher": [0, 1],
        "middle": [0],
        "student": [0, 1],
    }
    assert plan.notes == (
        "the plan asks for 7 devices and there are 2: sections share them and take turns",
        "section 'student': replicas=4 lowered to 2",
    )


def test_sharing_changes_nothing_when_devices_suffice() -> None:
    assert planned(share=True).notes == ()


@pytest.mark.quick
def test_frozen_pattern_that_matches_nothing_is_refused() -> None:
    error = refused(ConfigError, student={"frozen": ("embed", "haed")})
    assert str(error) == (
        "a frozen pattern of section 'student' matches no parameter.\n"
        "  wanted   a pattern for one of ['embed', 'head', 'inner']\n"
        "  have     'haed'\n"
        "  set by   the calling program: Section('student').frozen\n"
        "  fix      correct the pattern: parts of a path are joined by '/', '*' matches anything\n"
        "  help     docs/errors.md#frozen-pattern"
    )


@pytest.mark.quick
@pytest.mark.parametrize("axis", ["tensr", "replica"])
def test_rule_for_an_unknown_axis_is_refused(axis: str) -> None:
    error = refused(ConfigError, student={"rules": {"vocab": axis}})
    assert str(error) == (
        "section 'student' has a rule for an axis that its mesh does not have.\n"
        "  wanted   one of the axes ['fsdp', 'sequence', 'expert', 'tensor'], or None\n"
        f"  have     {{'vocab': '{axis}'}}\n"
        "  set by   the calling program: Section('student').rules\n"
        "  fix      correct the axis name, or add it to Section.axes\n"
        "  help     docs/errors.md#unknown-axis"
    )


@pytest.mark.quick
def test_rows_that_fsdp_cannot_split_are_refused() -> None:
    error = refused(ConfigError, teacher={"axes": {"fsdp": 2}, "microbatch": (16, 64), "row_length": 16})
    assert str(error) == (
        "the micro-batches of section 'teacher' cannot be split over its axes.\n"
        "  wanted   numbers of rows that fsdp=2 divides\n"
        "  have     buckets (16, 64) with row_length=16: [1, 4] rows\n"
        "  set by   the calling program: Section('teacher').row_length\n"
        "  fix      set row_length so that every bucket has enough rows, or lower fsdp\n"
        "  help     docs/errors.md#microbatch-rows"
    )
    assert planned(teacher={"axes": {"fsdp": 2}, "microbatch": (32, 64), "row_length": 16}).sections["teacher"].micro_shape(32) == (2, 16)
