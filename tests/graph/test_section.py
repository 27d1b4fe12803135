"""A section checks its own fields, and knows its buckets, frozen parts and denominators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from maestro_jax.data import Item
from maestro_jax.errors import ConfigError, DataError
from maestro_jax.graph import Edge, Objective, Section


def section(**fields: Any) -> Section:
    return Section(**{"name": "student", "module": None, **fields})


def item(**arrays: list[float]) -> Item:
    return Item(units=3, arrays={name: np.array(values, np.float32) for name, values in arrays.items()})


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "what", "wanted", "have"),
    [
        ({"name": "my student"}, "name", "a name made of letters, digits and underscores", "'my student'"),
        ({"name": "a.b"}, "name", "a name made of letters, digits and underscores", "'a.b'"),
        ({"replicas": 0}, "replicas", "a whole number, at least 1", "0"),
        ({"fan_in": 0}, "fan_in", "a whole number, at least 1", "0"),
        ({"fan_out": -2}, "fan_out", "a whole number, at least 1", "-2"),
        ({"axes": {"tensor": 0}}, "axes", "axis names other than 'replica' with sizes of at least 1", "{'tensor': 0}"),
        ({"axes": {"replica": 2}}, "axes", "axis names other than 'replica' with sizes of at least 1", "{'replica': 2}"),
        ({"dtype": "float16"}, "dtype", "float32 or bfloat16", "'float16'"),
        ({"microbatch": ()}, "microbatch", "one or more ascending sizes in units", "()"),
        ({"microbatch": 0}, "microbatch", "one or more ascending sizes in units", "0"),
        ({"microbatch": (64, 32)}, "microbatch", "one or more ascending sizes in units", "(64, 32)"),
        ({"microbatch": (32, 32)}, "microbatch", "one or more ascending sizes in units", "(32, 32)"),
        ({"microbatch": (32, 80), "row_length": 32}, "row_length", "a length that divides every bucket of (32, 80)", "32"),
        ({"microbatch": 32, "row_length": 0}, "row_length", "a length that divides every bucket of (32,)", "0"),
        ({"inputs": {"x": "teacher"}}, "inputs", "x: 'section.output', or 'section.output[array]'", "'teacher'"),
        ({"inputs": {"x": "a.b.c"}}, "inputs", "x: 'section.output', or 'section.output[array]'", "'a.b.c'"),
    ],
    ids=str,
)
def test_wrong_field_is_refused(fields: dict[str, Any], what: str, wanted: str, have: str) -> None:
    with pytest.raises(ConfigError) as caught:
        section(**fields)
    name = fields.get("name", "student")
    assert caught.value.what == f"section {name!r} has a wrong {what}."
    assert (caught.value.wanted, caught.value.have, caught.value.anchor) == (wanted, have, "section-value")
    assert caught.value.set_by == f"the calling program: Section({name!r}).{what}"


def test_one_size_is_a_ladder_of_one_bucket() -> None:
    assert section(microbatch=64).buckets == (64,)
    assert section(microbatch=(32, 64)).buckets == (32, 64)


@pytest.mark.parametrize(("row_length", "longest"), [(None, 64), (16, 16)])
def test_the_longest_item_is_a_row(row_length: int | None, longest: int) -> None:
    assert section(microbatch=(32, 64), row_length=row_length).largest_item == longest


@pytest.mark.quick
@pytest.mark.parametrize(
    ("pattern", "frozen"),
    [
        ("teacher_head", ["teacher_head/weight"]),
        ("teacher_head/", ["teacher_head/weight"]),
        ("teacher_head/*", ["teacher_head/weight"]),
        ("teacher", []),
        ("*/weight", ["teacher_head/weight", "student/layers/weight"]),
        ("student/layers", ["student/layers/weight", "student/layers/bias"]),
        ("scale", ["scale"]),
        ("SCALE", []),
        ("*", ["teacher_head/weight", "student/layers/weight", "student/layers/bias", "scale"]),
    ],
)
def test_frozen_patterns(pattern: str, frozen: list[str]) -> None:
    paths = ["teacher_head/weight", "student/layers/weight", "student/layers/bias", "scale"]
    assert [p for p in paths if section(frozen=(pattern,)).is_frozen(p)] == frozen


def test_everything_in_a_section_that_does_not_train_is_frozen() -> None:
    assert section(trainable=False).is_frozen("anything/at/all")
    assert not section().is_frozen("anything/at/all")


def test_label_of_an_edge_names_both_ends() -> None:
    assert Edge(producer="teacher", output="hidden", consumer="student", input="guide").label == "teacher.hidden->student.guide"


def test_denominator_is_the_sum_of_an_array() -> None:
    assert Objective().count_of(item(loss_mask=[1, 0, 1])) == 2.0
    assert Objective(count="weights").count_of(item(weights=[0.5, 0.25, 1])) == 1.75


def test_denominator_is_summed_in_double_precision() -> None:
    big = Item(units=3, arrays={"loss_mask": np.array([2**24, 1, 1], np.float32)})
    assert Objective().count_of(big) == 2**24 + 2


def test_denominator_may_be_a_function_of_the_item() -> None:
    assert Objective(count=lambda item: item.units).count_of(item(loss_mask=[0, 0, 0])) == 3.0


def test_an_objective_that_cannot_be_counted_is_named_after_its_section() -> None:
    shared = Objective(count=lambda item: float("nan"))
    sections = [section(name=name, objectives={"square": shared}) for name in ("student", "critic")]
    with pytest.raises(DataError) as caught:
        sections[0].objectives["square"].count_of(item())
    assert caught.value.set_by == "the calling program: Objective('student/square').count"
    assert [each.objectives["square"].name for each in sections] == ["student/square", "critic/square"]
    assert shared.name is None
