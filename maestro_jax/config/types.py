"""Checks configuration values against type annotations, and writes values as gin text."""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .syntax import Reference

_SEQUENCES = (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_SETS = (set, frozenset, collections.abc.Set)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


class WrongType(Exception):
    """A value does not fit its annotation; the text is a phrase such as `item 1 is 'large' (str)`."""


class NotGinText(ValueError):
    """gin text has no way to write a value."""


def check(value: Any, hint: Any) -> Any:
    """Returns `value` as the annotation wants it.

    Whole numbers become floats, lists become tuples and text becomes a `Path` where the annotation asks for these;
    a bool is not an int. Protocols and annotations that cannot be checked accept every value.

    Args:
        value: a built value, without references.
        hint: a resolved annotation.

    Raises:
        WrongType: the value does not fit.

    >>> check([1, 2], tuple[float, ...])
    (1.0, 2.0)
    >>> check(True, int)
    Traceback (most recent call last):
    maestro_jax.config.types.WrongType: True (bool)
    """
    hint = _bare(hint)
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return _check_union(value, arguments)
    if kind is typing.Literal:
        return _require(value, any(type(value) is type(choice) and value == choice for choice in arguments))
    if kind is None or kind is type(None):
        return _require(value, value is None)
    if kind is collections.abc.Callable:
        return _require(value, callable(value))
    if not isinstance(kind, type) or kind is object or getattr(kind, "_is_protocol", False):
        return value
    return _check_class(value, kind, arguments)


def shown(value: Any) -> str:
    """A short text of a value and its type for error texts."""
    return f"{short(value)} ({type(value).__name__})"


def short(value: Any, limit: int = 120) -> str:
    """`repr` in one line of at most `limit` characters; functions and classes by name."""
    name = getattr(value, "__qualname__", None)
    text = name if isinstance(name, str) else " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short_type(text: str, limit: int = 80) -> str:
    """An annotation without module paths; one of more than `limit` characters also without what its inner types are made of.

    >>> short_type("collections.abc.Mapping[str, numpy.ndarray]")
    'Mapping[str, ndarray]'
    >>> short_type("Union[float, Callable[[Union[Array, bool]], Array], None]", limit=40)
    'Union[float, Callable[...], None]'
    """
    text = re.sub(r"""('[^']*'|"[^"]*")|(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])""", lambda match: match[1] or "", text)
    while len(text) > limit:
        shorter = re.sub(r"\[(?!\.\.\.\])(?:[^\[\]]|\[\.\.\.\])+\]", "[...]", text)
        if shorter == text or re.fullmatch(r"\w+\[\.\.\.\]", shorter):  # Only the outermost name would be left.
            return text[: limit - 3] + "..."
        text = shorter
    return text


def advice(value: Any, hint: Any) -> str:
    """What to write instead, for the mistakes that are easy to make."""
    kinds = {_bare(hint), *typing.get_args(_bare(hint))}
    if isinstance(value, float) and value.is_integer() and int in kinds:
        return f"write {int(value)}, without point or exponent"
    if isinstance(value, str) and value.lower() in ("true", "false") and bool in kinds:
        return f"write {value.capitalize()}"
    if isinstance(value, type | types.FunctionType):
        return f"write @{value.__name__}(), with brackets, to use what it makes"
    return "change the value, or see --help for the type of every setting"


def gin_text(value: Any) -> str:
    """Writes a value so that gin reads the same value back.

    Raises:
        NotGinText: the value is not made of plain literals and references.

    >>> gin_text({"kl": (1.0, float("inf"))})
    "{'kl': (1.0, 1e999)}"
    """
    if isinstance(value, Reference):
        return str(value)
    if isinstance(value, Path):
        return repr(os.fspath(value))
    if type(value) is float:
        if math.isnan(value):
            raise NotGinText("nan")
        return repr(value).replace("inf", "1e999")  # The literal overflows to infinity; gin has no word for it.
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is list:
        return f"[{', '.join(map(gin_text, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(gin_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict | types.MappingProxyType):
        return "{" + ", ".join(f"{gin_text(key)}: {gin_text(item)}" for key, item in value.items()) + "}"
    raise NotGinText(type(value).__name__)


def _bare(hint: Any) -> Any:
    """Takes off wrappers that say nothing about the value: Annotated, Final, InitVar, NewType, aliases, type variables."""
    while True:
        if isinstance(hint, dataclasses.InitVar):
            hint = hint.type
        elif typing.get_origin(hint) in (typing.Annotated, typing.Final, typing.ClassVar):
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        elif isinstance(hint, typing.TypeVar):
            hint = hint.__bound__ or object
        else:
            return hint


def _check_union(value: Any, choices: Iterable[Any]) -> Any:
    fitting = []
    for choice in choices:
        try:
            fitting.append(check(value, choice))
        except WrongType:
            continue
    if not fitting:
        raise WrongType(shown(value))
    unchanged = [item for item in fitting if type(item) is type(value)]
    return (unchanged or fitting)[0]  # In `float | int` a whole number stays whole, whatever the order.


def _check_class(value: Any, kind: type, arguments: tuple[Any, ...]) -> Any:
    if kind is float:
        return float(_require(value, isinstance(value, int | float) and not isinstance(value, bool)))
    if kind is int:
        return _require(value, isinstance(value, int) and not isinstance(value, bool))
    if issubclass(kind, Path) and isinstance(value, str):
        return kind(value)
    if kind is type:
        wanted = arguments[0] if arguments and isinstance(arguments[0], type) else object
        return _require(value, isinstance(value, type) and issubclass(value, wanted))
    if kind is tuple:
        return _check_tuple(value, arguments)
    if kind in _SEQUENCES and isinstance(value, list | tuple):
        return tuple(_each(value, arguments[0] if arguments else Any))
    if kind in _SEQUENCES:
        return _require(value, isinstance(value, kind) and not isinstance(value, str | bytes))
    if kind is list or kind in _SETS:
        items = _each(_require(value, isinstance(value, list | tuple | set | frozenset)), arguments[0] if arguments else Any)
        return list(items) if kind is list else set(items) if kind is set else frozenset(items)
    if kind in _MAPPINGS and isinstance(value, Mapping):
        return _check_mapping(value, arguments)
    try:
        fits = isinstance(value, kind)
    except TypeError:  # Classes may forbid isinstance.
        return value
    # A notebook cell that runs again makes its class anew, while annotations elsewhere still mean the old one.
    name = (kind.__module__, kind.__qualname__)
    return _require(value, fits or any((base.__module__, base.__qualname__) == name for base in type(value).__mro__))


def _check_tuple(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    _require(value, isinstance(value, list | tuple))
    if not arguments:
        return tuple(value)
    if len(arguments) == 2 and arguments[1] is ...:
        return tuple(_each(value, arguments[0]))
    wanted = () if arguments == ((),) else arguments
    if len(value) != len(wanted):
        raise WrongType(f"{len(value)} items: {shown(value)}")
    return tuple(_within(f"item {index}", check, item, hint) for index, (item, hint) in enumerate(zip(value, wanted, strict=True)))


def _check_mapping(value: Mapping[Any, Any], arguments: tuple[Any, ...]) -> Any:
    if not arguments:
        return value
    return {
        _within(f"key {short(key)}", check, key, arguments[0]): _within(f"key {short(key)} with", check, item, arguments[1])
        for key, item in value.items()
    }


def _each(values: Iterable[Any], hint: Any) -> list[Any]:
    return [_within(f"item {index}", check, item, hint) for index, item in enumerate(values)]


def _within(where: str, function: Callable[[Any, Any], Any], value: Any, hint: Any) -> Any:
    try:
        return function(value, hint)
    except WrongType as error:
        raise WrongType(f"{where}: {error}") from None


def _require(value: Any, holds: bool) -> Any:
    if not holds:
        raise WrongType(shown(value))
    return value
