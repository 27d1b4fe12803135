"""Logical names become mesh axes where sizes allow."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from jax.sharding import PartitionSpec

from maestro_jax.meshes import partition_spec, spread

RULES: Mapping[str, str | None] = {"vocab": "tensor", "heads": "tensor", "embed": "fsdp", "rows": "absent", "off": None}


def sizes(tensor: int = 2, fsdp: int = 2) -> dict[str, int]:
    return {"replica": 1, "fsdp": fsdp, "tensor": tensor}


@pytest.mark.quick
def test_named_dimensions_follow_the_rules() -> None:
    assert partition_spec((8, 6), ("vocab", "embed"), RULES, sizes()) == (PartitionSpec("tensor", "fsdp"), [])


@pytest.mark.parametrize("names", [None, (None, None), ("unknown", "off"), ("rows", None)], ids=str)
def test_names_without_a_rule_or_axis_stay_whole_without_a_note(names: tuple[str | None, ...] | None) -> None:
    assert partition_spec((8, 6), names, RULES, sizes()) == (PartitionSpec(None, None), [])


def test_an_axis_is_used_for_the_first_dimension_that_asks_for_it() -> None:
    assert partition_spec((8, 6, 4), ("vocab", "heads", "embed"), RULES, sizes()) == (PartitionSpec("tensor", None, "fsdp"), [])


def test_axis_of_size_one_splits_nothing() -> None:
    assert partition_spec((8, 6), ("vocab", "embed"), RULES, sizes(tensor=1)) == (PartitionSpec(None, "fsdp"), [])


def test_indivisible_dimension_stays_whole_and_is_noted() -> None:
    spec, whole = partition_spec((3, 6), ("heads", "embed"), RULES, sizes())
    assert (spec, whole) == (PartitionSpec(None, "fsdp"), ["dimension 0 (heads, 3) by tensor=2"])


def test_an_axis_that_one_dimension_cannot_use_goes_to_the_next() -> None:
    spec, whole = partition_spec((3, 6), ("heads", "vocab"), RULES, sizes())
    assert (spec, whole) == (PartitionSpec(None, "tensor"), ["dimension 0 (heads, 3) by tensor=2"])


def test_scalar_parameter() -> None:
    assert partition_spec((), (), RULES, sizes()) == (PartitionSpec(), [])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shape", "spec", "replicas", "wanted"),
    [
        ((4, 6), PartitionSpec(None, "tensor"), 2, ("replica", "tensor")),
        ((4, 6), PartitionSpec("tensor"), 2, ("tensor", "replica")),
        ((3, 4), PartitionSpec(None, None), 2, (None, "replica")),
        ((4, 6), PartitionSpec(None, None), 1, (None, None)),
        ((3, 5), PartitionSpec(None, None), 2, (None, None)),
        ((4,), PartitionSpec("tensor"), 2, ("tensor",)),
        ((0, 4), PartitionSpec(None, None), 2, (None, "replica")),
        ((), PartitionSpec(), 2, ()),
    ],
)
def test_master_copies_are_spread_over_the_first_free_dimension(
    shape: tuple[int, ...], spec: PartitionSpec, replicas: int, wanted: tuple[str | None, ...]
) -> None:
    assert spread(shape, spec, {"replica": replicas}) == PartitionSpec(*wanted)


def test_several_axes_go_to_dimensions_of_their_own() -> None:
    assert spread((4, 6, 8), PartitionSpec(), {"fsdp": 2, "one": 1, "tensor": 3}) == PartitionSpec("fsdp", "tensor", None)
    assert spread((4, 6), PartitionSpec(None, "tensor"), {"fsdp": 2, "tensor": 3}) == PartitionSpec("fsdp", "tensor")
    assert spread((3,), PartitionSpec(), {"fsdp": 2}) == PartitionSpec(None)
