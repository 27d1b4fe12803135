"""Builds configuration objects from gin files and command line settings, strictly.

gin's syntax, without its global state: classes and functions register with `@configurable`; `load` reads files and
overrides; `Config.build` makes the objects. Whatever has no effect, is unknown or has the wrong type is an error that
names file and line. Objects know where each of their fields was set (`errors.set_by`), already in `__post_init__`.

What differs from gin-config: a scope reaches only the reference that it is written on, not the references inside it;
equal references give one shared object; `@Name` without brackets is the class or function itself; a file cannot bind
one key twice; `pkg.module.name` may be named without registration, so `@optax.adamw()` works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MaestroError
from .bindings import Bindings, Owner
from .registry import MISSING, Entry, Parameter, default_factory
from .syntax import Binding, Reference, Source, label, read
from .types import WrongType, advice, check, gin_text, short


def load(gin_file: str | None, overrides: Sequence[str] = (), *, root: str) -> Config:
    """Reads a config file and command line settings.

    Args:
        gin_file: a path, the name of a shipped config, or None for the overrides alone.
        overrides: texts such as `train.steps=50` or `student/Section.dtype=bfloat16`; they win over the file, and
            words need no quotes.
        root: name of the configurable that `Config.build` makes.

    Returns:
        The configuration, with names, parameters and macros checked.

    Raises:
        ConfigError: a mistake in the file or in an override.

    >>> from maestro_jax.config import configurable
    >>> @configurable("documented_run")
    ... @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     steps: int
    ...     widths: tuple[float, ...] = ()
    >>> load(None, ["documented_run.steps=50", "documented_run.widths=[1, 2]"], root="documented_run").build()
    Run(steps=50, widths=(1.0, 2.0))
    """
    source = read(gin_file, overrides)
    return Config(source, root)


def config_folder(owner: object, field: str) -> Path | None:
    """The folder of the config file that set `owner.field`, so that paths can count from it (see `find_file`).

    Returns:
        None when the field was set by the command line, by a default or from Python.
    """
    known: dict[str, str] = getattr(owner, "_provenance", {})
    place = re.match(r"(.+?):\d+  ", known.get(field, ""))
    return Path(place[1]).parent if place else None


class Config:
    """One configuration, read and checked; `build` makes its objects.

    Args:
        source: what was read, from `load`.
        root: name of the configurable to build; may have a scope.
    """

    def __init__(self, source: Source, root: str) -> None:
        self.path = source.path
        self.root = root
        self._imports = source.imports
        self._place = f"the calling program: load(root={root!r})"
        self._bindings = Bindings(source)
        scope, _, name = root.rpartition("/")
        self._reference = Reference(scope=scope, name=self._bindings.entry(name, self._place).name, called=True)
        self._object: Any = MISSING
        self._settings: dict[Owner, list[_Setting]] = {}

    def build(self) -> Any:
        """Makes the root object and all that it refers to; later calls return the same object.

        Raises:
            ConfigError: a required parameter is missing, a value has the wrong type, references run in a circle, a
                binding has no effect, or a class refuses its values with ValueError or TypeError. Errors of this
                package that a class raises itself pass unchanged.
        """
        if self._object is MISSING:
            builder = _Builder(self._bindings)
            built = builder.build(self._reference, self._place)
            self._bindings.check_unused(self.root, list(builder.settings))
            self._object, self._settings = built, builder.settings
        return self._object

    def resolved(self) -> str:
        """Every parameter of every object that was built, as gin text that builds equal objects when it is loaded again.

        Each line says where its value was set. Values that gin cannot write (objects as defaults) stand in comments;
        macros are written out.
        """
        self.build()
        lines = ["# Every setting that was in effect, defaults included, and where it was set."]
        lines += [f"import {module}  # {place}" for module, place in self._imports.items()]
        for (scope, name), settings in self._settings.items():
            lines += ["", f"# {label(scope, name)}"]
            lines += [setting.line(label(scope, name)) for setting in settings]
        return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A parameter's value in gin's terms (references unbuilt, macros expanded) and where it was set."""

    parameter: str
    value: Any
    source: str

    def line(self, owner: str) -> str:
        try:
            return f"{owner}.{self.parameter} = {gin_text(self.value)}  # {self.source}"
        except ValueError:  # NotGinText, or a whole number with more digits than Python prints.
            return f"# {owner}.{self.parameter} = {short(self.value)}  # {self.source}; gin text cannot say it"


class _Builder:
    """Makes objects from bindings, one for each scope and name."""

    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings
        self.settings: dict[Owner, list[_Setting]] = {}
        self._objects: dict[Owner, Any] = {}
        self._unfinished: list[Owner] = []

    def build(self, reference: Reference, source: str) -> Any:
        """Makes what `reference` means; `source` says where it stands."""
        entry = self.bindings.entry(reference.name, source)
        if not reference.called:
            return entry.target
        owner = (reference.scope, entry.name)
        if owner in self._unfinished:
            raise ConfigError(
                f"{label(*owner)} refers to itself.",
                wanted="references without a circle",
                have=" -> ".join(label(*part) for part in (*self._unfinished[self._unfinished.index(owner) :], owner)),
                set_by=source,
                fix="give one of them a reference to something else, or another scope",
                anchor="circular-reference",
            )
        if owner not in self._objects:
            self._unfinished.append(owner)
            self.settings[owner] = []  # Here, so that the order is that of reading: an object before its parts.
            self._objects[owner] = self._make(entry, owner, source)
            self._unfinished.pop()
        return self._objects[owner]

    def _make(self, entry: Entry, owner: Owner, source: str) -> Any:
        arguments: dict[str, Any] = {}
        provenance: dict[str, str] = {}
        missing: list[Parameter] = []
        extra = [Parameter(name=name, hint=Any, type_text="any") for name in self.bindings.extra_parameters(owner, entry.parameters)]
        for parameter in (*entry.parameters.values(), *extra):
            name = parameter.name
            binding = self.bindings.lookup(owner, name)
            if binding is not None:
                provenance[name] = self.bindings.sources(binding)
                arguments[name] = self._argument(binding, parameter, owner)
            elif name == "name" and owner[0] and dataclasses.is_dataclass(entry.target):
                arguments[name] = owner[0].rpartition("/")[2]
                provenance[name] = f"{source} (scope of @{label(*owner)}())"
                self.settings[owner].append(_Setting(name, arguments[name], provenance[name]))
            elif parameter.default is MISSING:
                missing.append(parameter)
            else:
                provenance[name] = f"default  {label(*owner)}.{name}"
                factory = default_factory(entry.target, name)
                default = parameter.default if factory is None else factory()
                self.settings[owner].append(_Setting(name, default, "default"))
        if missing:
            raise _missing(owner, missing, source)
        return _call(entry, owner, arguments, provenance, source)

    def _argument(self, binding: Binding, parameter: Parameter, owner: Owner) -> Any:
        value = self.bindings.expand(binding.value)
        self.settings[owner].append(_Setting(parameter.name, value, self.bindings.sources(binding)))
        built = self._built(value, self.bindings.sources(binding))
        try:
            return check(built, parameter.hint)
        except WrongType as error:
            if binding.raw is not None and isinstance(value, int | float | None):
                # A shell passes no quotes, so `workdir=2024` is the text when text is what the field takes.
                try:
                    text = check(binding.raw, parameter.hint)
                    self.settings[owner][-1] = _Setting(parameter.name, binding.raw, binding.source)
                    return text
                except WrongType:
                    pass
            raise ConfigError(
                f"{label(*owner)}.{parameter.name} has a value of the wrong type.",
                wanted=parameter.type_text,
                have=str(error),
                set_by=self.bindings.sources(binding),
                fix=advice(built, parameter.hint),
                anchor="wrong-type",
            ) from None

    def _built(self, value: Any, source: str) -> Any:
        if isinstance(value, Reference):
            return self.build(value, source)
        if isinstance(value, dict):
            return {self._built(key, source): self._built(item, source) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._built(item, source) for item in value)
        return value


def _call(entry: Entry, owner: Owner, arguments: dict[str, Any], provenance: dict[str, str], source: str) -> Any:
    target: Any = entry.target
    # A metaclass that makes objects its own way (Flax NNX) may also take every attribute for a part of the model.
    ordinary = isinstance(target, type) and type(target).__call__ is type.__call__
    try:
        if ordinary and dataclasses.is_dataclass(entry.target) and target.__new__ is object.__new__:
            # As calling the class does, except that __post_init__ can already say where a wrong value was set.
            made = object.__new__(target)
            _remember(made, provenance)
            target.__init__(made, **arguments)
            return made
        made: Any = target(**arguments)
    except MaestroError:
        raise
    except (ValueError, TypeError) as error:
        bound = {name: text for name, text in provenance.items() if not text.startswith("default  ")}
        named = [text for name, text in bound.items() if re.search(rf"\b{re.escape(name)}\b", str(error))]
        raise ConfigError(
            f"{label(*owner)} cannot be made: {str(error).partition(chr(10))[0] or type(error).__name__}",
            wanted=f"values that {entry.name} accepts",
            have=", ".join(f"{name}={short(value, 60)}" for name, value in arguments.items()) or "defaults only",
            set_by="\n".join(named or bound.values()) or source,
            fix="change the value that the first line names",
            anchor="refused-values",
        ) from error
    except Exception as error:
        error.add_note(f"while building {label(*owner)}, referred to by {source}")
        raise
    if ordinary:
        _remember(made, provenance)
    return made


def _remember(made: Any, provenance: dict[str, str]) -> None:
    # An object with slots has no place for it; errors then name the class instead.
    with contextlib.suppress(AttributeError, TypeError):
        object.__setattr__(made, "_provenance", provenance)


def _missing(owner: Owner, parameters: list[Parameter], source: str) -> ConfigError:
    name = label(*owner)
    return ConfigError(
        f"{name} needs a value for {', '.join(repr(parameter.name) for parameter in parameters)}.",
        wanted="\n".join(f"{name}.{parameter.name} = ({parameter.type_text})" for parameter in parameters),
        have="no binding and no default",
        set_by=source,
        fix=f"add the line to the config file, or --gin.{name}.{parameters[0].name}=... to the command line",
        anchor="missing-parameter",
    )
