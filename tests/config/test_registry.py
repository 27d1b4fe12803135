"""Registering configurables and describing them for --help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import TestCase

import pytest

from maestro_jax import errors
from maestro_jax.config import Field, config_name, configurable, describe, load, summaries
from maestro_jax.config import registry as config_registry

if TYPE_CHECKING:
    from somewhere import Unknown  # pyright: ignore[reportMissingImports]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_registry, "_registry", {})


def part_of_a_notebook(size: int) -> type:
    @configurable
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Part:
        width: int = size

    return Part


def test_running_a_definition_again_replaces_it() -> None:
    part_of_a_notebook(1)
    assert isinstance(load(None, root="Part").build(), part_of_a_notebook(2)) is False
    assert load(None, root="Part").build().width == 2


def test_two_things_under_one_name_are_an_error() -> None:
    part_of_a_notebook(1)
    with pytest.raises(errors.ConfigError, match="two configurables are called 'Part'") as caught:
        configurable("Part")(len)
    assert caught.value.have == f"{__name__}.part_of_a_notebook.<locals>.Part and builtins.len"


def test_a_name_with_a_dot_is_an_error() -> None:
    with pytest.raises(errors.ConfigError, match=r"'a\.b' cannot be the name of a configurable"):
        configurable("a.b")(len)


def test_a_configurable_is_returned_unchanged() -> None:
    def function() -> int:
        return 3

    assert configurable(function) is function
    assert configurable("other")(function) is function


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A base.

    Args:
        seed: any whole number.
    """

    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(Base):
    """A part.

    Args:
        width: features in
            each layer.
        names: (optional) as in `a: b`.

    Returns:
        nothing: at all.
    """

    width: int
    names: dict[str, float | None] = dataclasses.field(default_factory=lambda: {"a": 1.0})


def test_describe_gives_type_default_and_documentation_of_each_field() -> None:
    configurable(Derived)
    rows = {row.field: row for row in describe(["Derived"])}
    assert rows["seed"] == Field(configurable="Derived", field="seed", type="int", default="0", doc="any whole number.")
    assert rows["width"] == Field(configurable="Derived", field="width", type="int", default="required", doc="features in each layer.")
    assert rows["names"].type == "dict[str, float | None]"
    assert (rows["names"].default, rows["names"].doc) == ("{'a': 1.0}", "(optional) as in `a: b`.")


def test_describe_takes_all_that_is_registered_by_name() -> None:
    configurable("z")(Base)
    configurable("a")(Derived)
    assert [row.configurable for row in describe()] == ["a", "a", "a", "z"]


def test_describe_refuses_an_unknown_name() -> None:
    configurable(Base)
    with pytest.raises(errors.ConfigError, match=r"'Bsae' is not a configurable \(did you mean 'Base'\?\)"):
        describe(["Bsae"])


def test_summaries_are_first_lines_in_the_order_asked_for() -> None:
    configurable("z")(Base)
    configurable("a")(Derived)
    assert list(summaries().items()) == [("a", "A part."), ("z", "A base.")]
    assert list(summaries(["z", "a"])) == ["z", "a"]
    with pytest.raises(errors.ConfigError, match="'b' is not a configurable") as caught:
        summaries(["b"], set_by="--help")
    assert caught.value.set_by == "--help"


def test_the_name_in_a_config_is_the_registered_one_or_the_shortest_that_leads_there() -> None:
    assert config_name(TestCase) == "unittest.TestCase"
    assert config_name(dict.get) == "dict.get"
    assert config_name(Base) == f"{__name__}.Base"
    configurable("own")(Base)
    assert config_name(Base) == "own"


def test_functions_and_plain_classes_are_described() -> None:
    def function(first: int, /, apply: Callable[..., Any] = len, *rest: int, untyped=None) -> None:  # noqa: ANN001, D417
        """Does.

        Args:
            apply: what to do.
        """

    class Plain:
        def __init__(self, size: float = 1.0) -> None:
            """Makes one.

            Args:
                size: in metres.
            """

    configurable(function)
    configurable(Plain)
    assert [(row.field, row.type, row.default, row.doc) for row in describe(["function", "Plain"])] == [
        ("apply", "Callable[..., Any]", "len", "what to do."),
        ("untyped", "any", "None", ""),
        ("size", "float", "1.0", "in metres."),
    ]


def test_a_type_that_cannot_be_resolved_leaves_the_other_types_checked() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Half:
        odd: Unknown = None
        steps: int = 1

    configurable(Half)
    assert load(None, ["Half.odd=anything"], root="Half").build().odd == "anything"
    with pytest.raises(errors.ConfigError, match=r"Half\.steps has a value of the wrong type"):
        load(None, ["Half.steps=x"], root="Half").build()
