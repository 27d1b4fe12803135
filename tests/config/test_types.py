"""Values against annotations."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Optional, Protocol, TypeVar, Union

import numpy as np
import pytest

from maestro_jax.config.types import NotGinText, WrongType, advice, check, gin_text, short, short_type


class Quacks(Protocol):
    def quack(self) -> None: ...


class Colour(enum.Enum):
    RED = 1


class Base: ...


class Derived(Base): ...


Bounded = TypeVar("Bounded", bound=int)
Count = NewType("Count", int)
made = Derived()


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (True, bool, True),
        ("a", str, "a"),
        (None, None, None),
        (None, Optional[int], None),  # noqa: UP045
        (3, Union[str, int], 3),  # noqa: UP007
        (3, float | int, 3),
        (3, float | None, 3.0),
        ([1, 2], str | tuple[int, ...], (1, 2)),
        ("a", Literal["a", "b"], "a"),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([], tuple[()], ()),
        ([1, "a"], tuple, (1, "a")),
        ([1, 2], Sequence[int], (1, 2)),
        ([1, 2], Iterable[int], (1, 2)),
        (range(3), Sequence[int], range(3)),
        ((1, 2), list[int], [1, 2]),
        ([1, 2], set[int], {1, 2}),
        ([1, 2], frozenset[int], frozenset({1, 2})),
        ({"a": 1}, Mapping[str, float], {"a": 1.0}),
        ({"a": [1]}, dict[str, tuple[int, ...]], {"a": (1,)}),
        ({"a": 1}, dict, {"a": 1}),
        ("a/b", Path, Path("a/b")),
        ("a", Any, "a"),
        ("a", Quacks, "a"),
        (len, Callable[[Any], int], len),
        (Derived, type[Base], Derived),
        (made, Base, made),
        (Colour.RED, Colour, Colour.RED),
        (3, Annotated[int, "units"], 3),
        (3, Count, 3),
        (3, Bounded, 3),
        (3, dataclasses.InitVar[int], 3),
        (3, typing.Final[int], 3),
    ],
)
def test_a_fitting_value_is_returned_as_the_annotation_wants_it(value: Any, hint: Any, wanted: Any) -> None:
    found = check(value, hint)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("value", "hint", "text"),
    [
        (True, int, "True (bool)"),
        (True, float, "True (bool)"),
        (1, bool, "1 (int)"),
        (1.0, int, "1.0 (float)"),
        (1, str, "1 (int)"),
        ("1", float, "'1' (str)"),
        (0, None, "0 (int)"),
        ("x", int | None, "'x' (str)"),
        (True, Literal[1, 2], "True (bool)"),
        ("c", Literal["a", "b"], "'c' (str)"),
        (3, tuple[int, ...], "3 (int)"),
        ([1, "a"], tuple[int, ...], "item 1: 'a' (str)"),
        ([1], tuple[int, str], "1 items: [1] (list)"),
        ("ab", Sequence[str], "'ab' (str)"),
        ("ab", list[str], "'ab' (str)"),
        ("ab", set[str], "'ab' (str)"),
        ([1], dict[str, int], "[1] (list)"),
        ({1: 1}, dict[str, int], "key 1: 1 (int)"),
        ({"a": [1, None]}, Mapping[str, tuple[int, ...]], "key 'a' with: item 1: None (NoneType)"),
        (3, Callable[..., Any], "3 (int)"),
        (Base, type[Derived], "Base (type)"),
        (3, Base, "3 (int)"),
        (Derived, Base, "Derived (type)"),
        (1, Path, "1 (int)"),
        ("x", Count, "'x' (str)"),
    ],
)
def test_a_value_that_does_not_fit_is_named(value: Any, hint: Any, text: str) -> None:
    with pytest.raises(WrongType) as caught:
        check(value, hint)
    assert str(caught.value) == text


def test_a_class_defined_again_in_a_notebook_still_fits_its_older_self() -> None:
    def cell() -> type:
        class Part: ...

        return Part

    old, new = cell(), cell()
    part = new()
    assert check(part, old) is part


@pytest.mark.parametrize(
    ("value", "hint", "text"),
    [
        (1e6, int, "write 1000000, without point or exponent"),
        ("true", bool, "write True"),
        ("False", bool | None, "write False"),
        (Base, Base, "write @Base(), with brackets, to use what it makes"),
        ("x", int, "change the value, or see --help for the type of every setting"),
    ],
)
def test_easy_mistakes_get_their_own_advice(value: Any, hint: Any, text: str) -> None:
    assert advice(value, hint) == text


@pytest.mark.parametrize("value", [float("nan"), [float("nan")], Colour.RED, {1}, made, np.float32(1), (len,), 1j])
def test_what_gin_cannot_write_is_refused(value: Any) -> None:
    with pytest.raises(NotGinText):
        gin_text(value)


ARRAYS = "typing.Union[jax.jaxlib._jax.Array, numpy.ndarray, numpy.bool, numpy.number, bool, int, float, complex]"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tuple[int, ...]", "tuple[int, ...]"),
        ("collections.abc.Callable[[flax.nnx.Rngs], typing.Any]", "Callable[[Rngs], Any]"),
        ("Literal['a.b', \"c.d\", e.f]", "Literal['a.b', \"c.d\", f]"),
        (ARRAYS, "Union[Array, ndarray, bool, number, bool, int, float, complex]"),
        (
            f"Union[float, jax.jaxlib._jax.Array, collections.abc.Callable[[{ARRAYS}], {ARRAYS}]]",
            "Union[float, Array, Callable[[Union[...]], Union[...]]]",
        ),
        (f"dict[str, {ARRAYS}] | list[{ARRAYS}]", "dict[str, Union[...]] | list[Union[...]]"),
        (
            f"Literal[{', '.join(map(str, range(100, 130)))}]",
            "Literal[100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113,...",
        ),
    ],
)
def test_a_type_is_shown_without_modules_and_not_too_long(text: str, wanted: str) -> None:
    assert short_type(text) == wanted
    assert len(wanted) <= 80


def test_paths_are_written_as_text() -> None:
    assert gin_text(Path("a") / "b") == "'a/b'"


def test_long_values_are_shortened_to_one_line() -> None:
    assert short("x" * 50, 10) == "'xxxxxx..."
    assert short(np.zeros((2, 1))) == "array([[0.], [0.]])"
