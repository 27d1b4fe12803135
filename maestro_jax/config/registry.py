"""The classes and functions that gin files may name, with their parameters, types, defaults and documentation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, overload

from ..errors import ConfigError, did_you_mean
from .files import import_module
from .types import short, short_type

Target = TypeVar("Target", bound=Callable[..., Any])

MISSING = inspect.Parameter.empty
_ANYTHING = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a configurable; `default` is `MISSING` when it must be bound."""

    name: str
    hint: Any
    type_text: str
    default: Any = MISSING
    default_text: str = "required"
    doc: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A row of `--help`: one parameter of one configurable, as text."""

    configurable: str
    field: str
    type: str
    default: str
    doc: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """A configurable: the name that gin files use, and the class or function behind it."""

    name: str
    target: Callable[..., Any]

    @property
    def qualified(self) -> str:
        """Module and name of the class or function; the same for both runs of a notebook cell."""
        return f"{self.target.__module__}.{self.target.__qualname__}"

    @property
    def takes_any(self) -> bool:
        """Whether the signature ends in `**keywords`, so that any parameter may be bound."""
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _signature(self.target))

    @functools.cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters that can be given by name, in order."""
        annotations, docs = hints(self.target), _docs(self.target)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found = [parameter for parameter in _signature(self.target) if parameter.kind in by_name]
        return {
            parameter.name: Parameter(
                name=parameter.name,
                hint=annotations.get(parameter.name, Any),
                type_text=type_text(parameter.annotation),
                default=parameter.default,
                default_text=_default_text(self.target, parameter),
                doc=docs.get(parameter.name, ""),
            )
            for parameter in found
        }


_registry: dict[str, Entry] = {}


@overload
def configurable(target: Target) -> Target: ...
@overload
def configurable(target: str) -> Callable[[Target], Target]: ...
def configurable(target: Any) -> Any:
    """Registers a class or function, so that gin files can bind its parameters and refer to it.

    Written above `@dataclasses.dataclass`. Running the definition again (a notebook cell) replaces it.

    Args:
        target: the class or function, or the name to register it under.

    Returns:
        The class or function, unchanged.

    Raises:
        ConfigError: something else has the name.

    >>> @configurable("documented_trainer")
    ... @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Trainer:
    ...     steps: int = 10
    >>> Trainer().steps
    10
    """
    if isinstance(target, str):
        return functools.partial(_register, target)
    return _register(target.__name__, target)


def find(name: str, set_by: str) -> Entry:
    """Finds what a gin file calls `name`: a registered name, also with its module, or any importable `module.name`.

    Raises:
        ConfigError: there is no such configurable, or its module cannot be imported.
    """
    module, _, last = name.rpartition(".")
    entry = _registry.get(last)
    if entry is not None and f".{entry.target.__module__}".endswith(f".{module}" if module else ""):
        return entry
    if not module:
        raise _unknown(name, list(_registry), "a registered configurable", set_by)
    if module in _registry:
        raise _unknown(name, [], f"{module}.{last} = ..., with one name after {module}", set_by)
    home = import_module(module, set_by)
    target = getattr(home, last, None)
    if not callable(target):
        raise _unknown(name, [f"{module}.{key}" for key in vars(home)], f"a class or function of module {module}", set_by)
    return entry_of(target) or Entry(name, target)


def entry_of(target: Any) -> Entry | None:
    """The entry that a class or function is registered under, or None."""
    return next((entry for entry in _registry.values() if entry.target is target), None)


def config_name(target: Any) -> str:
    """The name by which a config can refer to a class or function, as short as it can be.

    It is the registered name, else the shortest dotted name that leads to it.

    >>> import collections.abc
    >>> config_name(collections.abc.Mapping), config_name(dataclasses.dataclass)
    ('collections.abc.Mapping', 'dataclasses.dataclass')
    """
    entry = entry_of(target)
    if entry is not None:
        return entry.name
    name, home = target.__name__, getattr(target, "__module__", None)
    if not home:  # A method of a built-in class.
        return target.__qualname__
    parts = home.split(".")
    modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return f"{next((module for module in modules if getattr(sys.modules.get(module), name, None) is target), home)}.{name}"


def describe(names: Iterable[str] | None = None, set_by: str = "the calling program: describe()") -> list[Field]:
    """Lists the parameters of configurables, for `--help`.

    Args:
        names: which configurables, in this order; None takes all that are registered, by name.
        set_by: who names them, for the error text.

    Returns:
        One row a parameter; `doc` comes from the `Args:` section of the docstring.

    Raises:
        ConfigError: a name is unknown.
    """
    entries = [find(name, set_by) for name in (sorted(_registry) if names is None else names)]
    return [
        Field(configurable=entry.name, field=item.name, type=item.type_text, default=item.default_text, doc=item.doc)
        for entry in entries
        for item in entry.parameters.values()
    ]


def summaries(names: Iterable[str] | None = None, set_by: str = "the calling program: summaries()") -> dict[str, str]:
    """Returns name of a configurable -> first line of its docstring.

    Args:
        names: which configurables, in this order; None takes all that are registered, by name.
        set_by: who names them, for the error text.

    Raises:
        ConfigError: a name is unknown.
    """
    entries = [find(name, set_by) for name in (sorted(_registry) if names is None else names)]
    return {entry.name: (inspect.getdoc(entry.target) or "").partition("\n")[0] for entry in entries}


def check_parameter(entry: Entry, name: str, set_by: str) -> None:
    """Raises a ConfigError when `entry` has no parameter called `name`."""
    if name in entry.parameters or (entry.takes_any and name):
        return
    known = list(entry.parameters)
    what = f"{entry.name} has no parameter {name!r}" if name else f"the binding of {entry.name} names no parameter"
    raise ConfigError(
        f"{what}{did_you_mean(name, known)}.",
        wanted="one of " + ", ".join(known) if known else "no parameter: it takes none",
        have=name or "none",
        set_by=set_by,
        fix="correct the name; --help lists every parameter with a line of documentation",
        anchor="unknown-parameter",
    )


def _register(name: str, target: Any) -> Any:
    entry, known = Entry(name, target), _registry.get(name)
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(
            f"{name!r} cannot be the name of a configurable.",
            wanted="letters, digits and underscores",
            have=name,
            set_by=entry.qualified,
            fix="choose another name in @configurable(...)",
            anchor="two-configurables",
        )
    if known is not None and known.qualified != entry.qualified:
        raise ConfigError(
            f"two configurables are called {name!r}.",
            wanted="one class or function a name",
            have=f"{known.qualified} and {entry.qualified}",
            set_by=entry.qualified,
            fix='give one of them another name: @configurable("other_name")',
            anchor="two-configurables",
        )
    _registry[name] = entry
    return target


def _unknown(name: str, known: list[str], wanted: str, set_by: str) -> ConfigError:
    return ConfigError(
        f"{name!r} is not a configurable{did_you_mean(name, known)}.",
        wanted=wanted,
        have=name,
        set_by=set_by,
        fix="correct the name; for your own class, add 'import your_module' at the top of the file and @configurable above the class",
        anchor="unknown-configurable",
    )


def _signature(target: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        found = list(inspect.signature(target).parameters.values())
        if isinstance(target, type) and {parameter.kind for parameter in found} == _ANYTHING:
            # A metaclass that makes objects its own way (Flax NNX) hides what the class itself takes.
            found = list(inspect.signature(target.__init__).parameters.values())[1:]
        return found
    except (TypeError, ValueError):  # Some built-in classes have no signature to read; they refuse wrong names themselves.
        return [inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD)]


def hints(target: Any) -> dict[str, Any]:
    """Resolved annotations; one that cannot be resolved (imported for type checkers only) accepts everything."""
    owner = target.__init__ if isinstance(target, type) and not dataclasses.is_dataclass(target) else target
    try:
        return typing.get_type_hints(owner)
    except Exception:
        names = vars(sys.modules.get(target.__module__, types.ModuleType("missing")))
        return {item.name: _resolved(item.annotation, names) for item in _signature(target)}


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return Any if annotation is MISSING else typing.get_type_hints(holder, globalns=names)["it"]
    except Exception:
        return Any


def type_text(annotation: Any) -> str:
    """An annotation as people write it."""
    if annotation is MISSING:
        return "any"
    return short_type(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _default_text(target: Any, parameter: inspect.Parameter) -> str:
    if parameter.default is MISSING:
        return "required"
    factory = default_factory(target, parameter.name)
    return short(parameter.default if factory is None else factory())


def default_factory(target: Any, name: str) -> Callable[[], Any] | None:
    """The `default_factory` of a dataclass field, if that is where its default comes from."""
    fields = {field.name: field for field in dataclasses.fields(target)} if dataclasses.is_dataclass(target) else {}
    field = fields.get(name)
    if field is None or field.default_factory is dataclasses.MISSING:
        return None
    return field.default_factory


def _docs(target: Any) -> dict[str, str]:
    """The `Args:` sections of a function, or of a class, its bases and its `__init__`; a subclass's own text wins."""
    owners = list(reversed(target.__mro__)) if isinstance(target, type) else [target]
    texts = [getattr(owner, "__doc__", None) for owner in owners]
    if isinstance(target, type) and not dataclasses.is_dataclass(target):
        texts.append(target.__init__.__doc__)
    docs: dict[str, str] = {}
    for text in texts:
        docs.update(arguments_section(text or ""))
    return docs


def arguments_section(docstring: str) -> dict[str, str]:
    """Reads the `Args:` section of a docstring, one entry a name, each text in one line.

    >>> arguments_section('''Summary.
    ...
    ...     Args:
    ...         steps: optimizer steps,
    ...             at least 1.
    ...         seed: any whole number.
    ... ''')
    {'steps': 'optimizer steps, at least 1.', 'seed': 'any whole number.'}
    """
    section = re.search(r"^( *)Args:\n((?:\1 +.*\n?|\s*\n)*)", inspect.cleandoc(docstring), re.MULTILINE)
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(section[2]).splitlines() if section else []:
        start = re.match(r"\*{0,2}(\w+)(?: \([^)]*\))?: ?(.*)", line)
        if start:
            name, found[start[1]] = start[1], start[2].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
