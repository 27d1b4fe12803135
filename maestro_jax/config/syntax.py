"""Reads gin text: follows includes and imports, and returns plain bindings with file and line.

gin-config's parser is used for syntax alone. It keeps no types, lets mistyped names and duplicates pass and holds
bindings in global state, so what a binding means is decided in `config.bindings`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gin import config_parser

from ..errors import ConfigError
from .files import find_config, import_module, shown_path

COMMAND_LINE = "command line"
_KEY = re.compile(r"([A-Za-z_]\w*/)*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SCALAR = re.compile(r"[+-]?[0-9.][0-9A-Za-z._+-]*|True|False|None")
_UNREADABLE = (SyntaxError, tokenize.TokenError, StopIteration)  # The last when gin's parser reads past the end.
_OPENERS = tuple("[({'\"@%")
_gin: Any = config_parser  # Its annotations are wrong in places, so it counts as untyped here.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """`@scope/name()` (called) or `@name` (the class or function itself)."""

    scope: str
    name: str
    called: bool

    def __str__(self) -> str:
        return f"@{label(self.scope, self.name)}{'()' if self.called else ''}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%name`: the value of the line `name = value`."""

    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Binding:
    """One `scope/selector.parameter = value`, compared by identity; a macro has no parameter.

    Args:
        scope: parts joined by "/", or "".
        selector: name of a configurable as written, or of a macro.
        parameter: field that is set; "" for a macro.
        value: plain value, possibly with `Reference` and `Macro` inside.
        file: file as shown to the user, or `COMMAND_LINE`.
        line: from 1.
        order: place among all bindings; later ones may replace earlier ones.
        includers: the files through whose `include` this file was reached.
        raw: the value's text when it came from the command line.
    """

    scope: str
    selector: str
    parameter: str
    value: Any
    file: str
    line: int
    order: int
    includers: tuple[str, ...] = ()
    raw: str | None = None

    @property
    def key(self) -> str:
        """The left side as written, such as `student/Section.dtype`."""
        return label(self.scope, self.selector) + (f".{self.parameter}" if self.parameter else "")

    @property
    def place(self) -> str:
        """`file:line`, or `command line`."""
        return COMMAND_LINE if self.file == COMMAND_LINE else f"{self.file}:{self.line}"

    @property
    def source(self) -> str:
        """Place and key, the form that error texts show after "set by"."""
        return f"{COMMAND_LINE}  --gin.{self.key}" if self.file == COMMAND_LINE else f"{self.place}  {self.key}"


@dataclasses.dataclass(kw_only=True)
class Source:
    """What the files and the command line say, in order; `imports` maps each module to where it is imported."""

    path: Path | None = None
    bindings: list[Binding] = dataclasses.field(default_factory=list)
    imports: dict[str, str] = dataclasses.field(default_factory=dict)
    files: set[Path] = dataclasses.field(default_factory=set)


def label(scope: str, name: str) -> str:
    """Joins scope and name as gin writes them.

    >>> label("student", "Section"), label("", "train")
    ('student/Section', 'train')
    """
    return f"{scope}/{name}" if scope else name


def leaves(value: Any) -> Iterator[Reference | Macro]:
    """Yields the references and macros inside a parsed value."""
    if isinstance(value, Reference | Macro):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(key)
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)


def read(gin_file: str | None, overrides: Sequence[str]) -> Source:
    """Reads a config file, what it includes, and then the command line's bindings.

    Args:
        gin_file: a path, or the name of a shipped config; None reads the overrides alone.
        overrides: texts such as `train.steps=50`, without `--gin.`.

    Raises:
        ConfigError: a file is missing or is not gin text, an import fails, or an override has no `key=value` form.
    """
    source = Source()
    if gin_file is not None:
        source.path = find_config(gin_file)
        _read_file(source.path, source, includers=())
    for text in overrides:
        _read_override(text, source)
    return source


def _read_file(path: Path, source: Source, includers: tuple[str, ...], set_by: str = "--gin_file") -> None:
    shown, identity = shown_path(path), path.resolve()
    if shown in includers:
        raise ConfigError(
            f"config file {shown} includes itself.",
            wanted="includes without a circle",
            have=" -> ".join([*includers, shown]),
            set_by=set_by,
            fix="move what the files share into a third file that includes neither",
            anchor="circular-include",
        )
    if identity in source.files:
        return  # Two included files may share a base; reading it again would undo what the first one changed.
    source.files.add(identity)
    parser = _Parser(_file_text(path, shown, set_by))
    while (statement := _statement(parser, shown)) is not None:
        place = f"{shown}:{statement.location.line_num}"
        if isinstance(statement, config_parser.IncludeStatement):
            where = f"{place}  include {statement.filename!r}"
            found = find_config(statement.filename, includer=path, set_by=where)
            _read_file(found, source, (*includers, shown), set_by=where)
        elif isinstance(statement, config_parser.ImportStatement):
            _import(statement, source, place)
        elif isinstance(statement, config_parser.BindingStatement):
            source.bindings.append(
                Binding(
                    scope=statement.scope,
                    selector=statement.selector,
                    parameter=statement.arg_name,
                    value=statement.value,
                    file=shown,
                    line=statement.location.line_num,
                    order=len(source.bindings),
                    includers=includers,
                )
            )


def _import(statement: config_parser.ImportStatement, source: Source, place: str) -> None:
    if statement.alias:
        raise ConfigError(
            f"import of {statement.module!r} gives it another name.",
            wanted=f"import {statement.module}",
            have=statement.format(),
            set_by=place,
            fix=f"leave out 'as {statement.alias}': names are registered without their module",
            anchor="gin-syntax",
        )
    import_module(statement.module, f"{place}  {statement.format()}")
    source.imports.setdefault(statement.module, place)


def _file_text(path: Path, shown: str, set_by: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"config file {shown} cannot be read.",
            wanted="a readable text file in UTF-8",
            have=str(error),
            set_by=set_by,
            fix="check that the path names a gin file, and save it as UTF-8",
            anchor="missing-file",
        ) from error


def _statement(parser: _Parser, shown: str) -> Any:
    try:
        parser.start()
        return parser.parse_statement()
    except _UNREADABLE as error:
        message, line, column, text = parser.explain(error)
        _raise_syntax_error(message, set_by=f"{shown}:{line}, column {column}", text=text, column=column, cause=error)


def _raise_syntax_error(message: str, *, set_by: str, cause: BaseException, text: str = "", column: int = 0) -> NoReturn:
    word = re.search(r"Failed to parse token '(.*)'", message)
    message = message.splitlines()[0].rstrip(".")
    message, fix = message[0].lower() + message[1:], "compare the line with the examples on the help page"
    if word:
        message, fix = f"{word[1]} is not a value", f"put text in quotes: {word[1]!r}; a name needs @ (or % for a macro)"
        if word[1] in ("true", "false", "none"):
            fix = f"write {word[1].capitalize()}"
    raise ConfigError(
        f"gin text cannot be understood: {message}.",
        wanted="scope/Name.parameter = value, where value is a Python literal, @Name() or %macro",
        have=f"{text}\n{' ' * (column - 1)}^" if text else message,
        set_by=set_by,
        fix=fix,
        anchor="gin-syntax",
    ) from cause


def _read_override(text: str, source: Source) -> None:
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not raw or not _KEY.fullmatch(key):
        raise ConfigError(
            f"command line setting {text!r} cannot be understood.",
            wanted="--gin.scope/Name.parameter=value",
            have=f"--gin.{text}",
            set_by=f"{COMMAND_LINE}  --gin.{key}",
            fix="write the setting as in a gin file, with = and a value ('' for empty text)",
            anchor="gin-syntax",
        )
    scope, selector, parameter = config_parser.parse_binding_key(key)
    value = _override_value(raw, f"{COMMAND_LINE}  --gin.{key}")
    source.bindings.append(
        Binding(
            scope=scope, selector=selector, parameter=parameter, value=value, file=COMMAND_LINE, line=0, order=len(source.bindings), raw=raw
        )
    )


def _override_value(raw: str, set_by: str) -> Any:
    """A gin value where the text is one, else the text itself: shells strip quotes, so words need none here."""
    if _SCALAR.fullmatch(raw):
        try:
            return ast.literal_eval(raw)
        except (SyntaxError, ValueError):
            return raw
    if not raw.startswith(_OPENERS):
        return raw
    parser = _Parser(raw, bare_words=True)
    try:
        parser.start()
        value = parser.parse_value()
        while parser.current_token.type in (tokenize.NEWLINE, tokenize.NL):
            parser._advance_one_token()
        if parser.current_token.type != tokenize.ENDMARKER:
            parser._raise_syntax_error(f"{parser.current_token.string!r} follows the value")
        return value
    except _UNREADABLE as error:
        message, _, column, text = parser.explain(error)
        _raise_syntax_error(message, set_by=set_by, text=text, column=column, cause=error)


class _Delegate(_gin.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(scope=scope, name=name, called=evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


class _Parser(_gin.ConfigParser):
    """gin's parser that refuses repeated dict keys and, for the command line, takes bare words as text."""

    def __init__(self, text: str, bare_words: bool = False) -> None:
        self._lines = text.splitlines()
        self._bare_words = bare_words
        self._open: list[tuple[tuple[int, int], list[Any]]] = []  # Start and keys of each container that is being read.
        self._first_error: BaseException | None = None
        try:
            super().__init__(text, _Delegate())  # Reads the first token.
        except _UNREADABLE as error:
            self._first_error = error

    def start(self) -> None:
        """Raises what reading the first token raised, so that callers handle it like every other mistake."""
        if self._first_error is not None:
            raise self._first_error

    def explain(self, error: BaseException) -> tuple[str, int, int, str]:
        """What is wrong, at which line and column (from 1), and that line's text."""
        if isinstance(error, SyntaxError):
            message, line, column = error.msg, error.lineno or 1, error.offset or 0
        else:  # The text ends too early. Where Python notices that differs between its versions; where it began does not.
            message = "a bracket or quote is not closed"
            line, column = self._open[-1][0] if self._open else self._current_token.end if self._current_token else (1, 0)
        return message, line, column + 1, self._lines[line - 1] if line <= len(self._lines) else ""

    def _raise_syntax_error(self, msg: str, location: Any = None) -> None:
        if type(location) is tuple:  # gin counts columns from 1 in these and from 0 in its own kind of location.
            file, line, column, text = location
            location = config_parser.Location(file, line, column - 1, text)
        super()._raise_syntax_error(msg, location)

    def _maybe_parse_container(self) -> tuple[bool, Any]:
        self._open.append((self.current_token.start, []))
        found = super()._maybe_parse_container()
        self._open.pop()
        return found

    def _parse_dict_item(self) -> tuple[Any, Any]:
        before = self._current_location()
        key, value = super()._parse_dict_item()
        try:
            plain = hash(key) is not None and not list(leaves(key))
        except TypeError:
            plain = False
        if not plain:
            self._raise_syntax_error("A list, dict, reference or macro cannot be a key.", before)
        _, keys = self._open[-1]
        if key in keys:
            self._raise_syntax_error(f"Key {key!r} is there twice.", before)
        keys.append(key)
        return key, value

    def _maybe_parse_basic_type(self) -> tuple[bool, Any]:
        token = self.current_token
        if self._bare_words and token.type == tokenize.NAME and token.string not in ("True", "False", "None"):
            self._advance()
            return True, token.string
        return super()._maybe_parse_basic_type()
