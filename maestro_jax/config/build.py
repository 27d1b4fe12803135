"""Builds configuration objects from gin files and command line settings, strictly.

gin's syntax, without its global state: classes and functions register with `@configurable`; `load` reads files and
overrides; `Config.build` makes the objects. Whatever has no effect, is unknown or has the wrong type is an error that
names file and line. Objects know where each of their fields was set (`errors.set_by`), already in `__post_init__`.

What differs from gin-config: a scope reaches only the reference that it is written on, not the references inside it;
equal references give one shared object; `@Name` without brackets is the class or function itself; a file cannot bind
one key twice; `pkg.module.name` may be named without registration, so `@optax.adamw()` works; and a class or function
with a required parameter `rngs`, such as a Flax NNX module, is not called yet: `@Student()` is a callable that takes
`rngs` from the trainer and passes the bound settings along (see `Later`), so `Student.width = 48` works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MaestroError
from .bindings import Bindings, Owner
from .files import shipped_configs
from .registry import MISSING, Entry, Parameter, default_factory, entry_of
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Later:
    """What a called reference means when its target needs `rngs`, which only the trainer has: `rngs -> module`.

    Args:
        target: class or function that is called then.
        settings: its other arguments.

    >>> Later(target=dict, settings={"width": 48})("the keys")
    {'rngs': 'the keys', 'width': 48}
    """

    target: Callable[..., Any]
    settings: Mapping[str, Any]

    def __call__(self, rngs: Any) -> Any:
        """Makes the module."""
        return self.target(rngs=rngs, **self.settings)  # By name, because it may be any parameter, also a keyword-only one.


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
            builder = _Builder(self._bindings, has_file=self.path is not None)
            built = builder.build(self._reference, self._place)
            self._bindings.check_unused(self.root, builder.built)
            self._object, self._settings = built, builder.settings
        return self._object

    def resolved(self) -> str:
        """Every parameter of every object that was built, as gin text that builds equal objects when it is loaded again.

        Each line says where its value was set. Values that gin cannot write stand in comments, among them objects as
        defaults, except for those of a registered dataclass with no setting of their own; macros are written out.
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

    def __init__(self, bindings: Bindings, *, has_file: bool) -> None:
        self.bindings = bindings
        self.settings: dict[Owner, list[_Setting]] = {}  # Of what is built, and of the defaults that gin text can name.
        self._has_file = has_file
        self._objects: dict[Owner, Any] = {}
        self._unfinished: list[Owner] = []

    @property
    def built(self) -> list[Owner]:
        """Everything that was built, an object before its parts."""
        return [owner for owner in self.settings if owner in self._objects]

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
                self.settings[owner].append(self._default(entry, parameter))
        needed = [parameter for parameter in missing if parameter.name != "rngs"]
        if needed:
            raise _missing(owner, needed, source, self._has_file)
        if missing:
            return _later(entry, arguments, provenance)
        return _call(entry, owner, arguments, provenance, source)

    def _default(self, entry: Entry, parameter: Parameter) -> _Setting:
        factory = default_factory(entry.target, parameter.name)
        value = parameter.default if factory is None else factory()
        named = entry_of(type(value))
        if named is not None and self._is_what_a_reference_makes(value, named):
            owner = ("", named.name)
            if owner not in self.settings:
                self.settings[owner] = []  # Here, so that the text has the order that it has when it is loaded again.
                self.settings[owner] += [self._default(named, part) for part in named.parameters.values()]
            value = Reference(scope="", name=named.name, called=True)
        return _Setting(parameter.name, value, "default")

    def _is_what_a_reference_makes(self, value: Any, entry: Entry) -> bool:
        """Whether `@Name()` would build an equal object: a dataclass with all its defaults, which no binding changes."""
        required = any(parameter.default is MISSING for parameter in entry.parameters.values())
        if required or not dataclasses.is_dataclass(value) or self.bindings.extra_parameters(("", entry.name), ()):
            return False
        try:
            return bool(value == entry.target())
        except Exception:  # A user's class may have fields, such as arrays, that cannot be compared.
            return False

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


def _later(entry: Entry, settings: dict[str, Any], provenance: dict[str, str]) -> Later:
    later = Later(target=entry.target, settings=settings)
    _remember(later, provenance)
    return later


def _remember(made: Any, provenance: dict[str, str]) -> None:
    # An object with slots has no place for it; errors then name the class instead.
    with contextlib.suppress(AttributeError, TypeError):
        object.__setattr__(made, "_provenance", provenance)


def _missing(owner: Owner, parameters: list[Parameter], source: str, has_file: bool) -> ConfigError:
    name = label(*owner)
    setting = f"--gin.{name}.{parameters[0].name}=..."
    fix, shipped = f"add the line to the config file, or {setting} to the command line", list(shipped_configs())
    if not has_file:
        fix = f"name a config file that has the line, or add {setting} to the command line"
    if not has_file and shipped:
        fix = f"name a config file, such as --gin_file={shipped[0]} (shipped: {', '.join(shipped)}), or add {setting}"
    return ConfigError(
        f"{name} needs a value for {', '.join(repr(parameter.name) for parameter in parameters)}.",
        wanted="\n".join(f"{name}.{parameter.name} = ({_wanted(parameter)})" for parameter in parameters),
        have="no binding and no default",
        set_by=source,
        fix=fix,
        anchor="missing-parameter",
    )


def _wanted(parameter: Parameter) -> str:
    """The type, or the documentation where that says nothing."""
    return parameter.doc.rstrip(".") if parameter.doc and parameter.hint is Any else parameter.type_text
