"""What the commands share: `--gin.NAME=VALUE` flags and the text of `--help`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Sequence

from .config import describe, load, shipped_configs, summaries

PREFIX = "--gin."

_FIRST = ("train", "Section", "SectionGraph", "Objective")  # what every config has; the others follow by name
_NOTHING_SAID = ("Any", "any")  # types that tell a reader nothing


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates gin overrides from other flags.

    Args:
        argv: arguments of the command, without its name.

    Returns:
        (other arguments, "name=value" of each override). `--gin.NAME VALUE` counts as `--gin.NAME=VALUE`.

    >>> split_arguments(["--gin_file=a.gin", "--gin.train.steps=5", "--gin.train.seed", "3"])
    (['--gin_file=a.gin'], ['train.steps=5', 'train.seed=3'])
    """
    rest: list[str] = []
    overrides: list[str] = []
    remaining = iter(argv)
    for argument in remaining:
        if not argument.startswith(PREFIX):
            rest.append(argument)
        elif "=" in argument:
            overrides.append(argument[len(PREFIX) :])
        else:
            overrides.append(f"{argument[len(PREFIX) :]}={next(remaining, '')}")
    return rest, overrides


def help_text(parser: argparse.ArgumentParser, gin_file: str | None, overrides: Sequence[str], name: str | None = None) -> str:
    """Returns the flags, the shipped configs, the sections of the config file if one is named, and everything configurable.

    Args:
        parser: of the command's own flags.
        gin_file: config file that was named; what it imports can be asked for.
        overrides: "name=value" of each override.
        name: a configurable, with or without a scope: returns its fields only.

    Raises:
        ConfigError: when the named config file is wrong, or `name` is no configurable.
    """
    config = load(gin_file, overrides, root="train") if gin_file else None
    if name:
        return "\n".join(_listing([name.strip("@()").rpartition("/")[2]])).strip("\n")
    parts = [_flags(parser), "", "Shipped configs (--gin_file=NAME):"]
    parts += [f"  {file:<20} {comment}" for file, comment in shipped_configs().items()]
    if config is not None:
        graph = config.build().graph
        sections = [f"  {s.name:<16} {graph.mode(s.name)}; scope {s.name}/" for s in graph.sections]
        parts += ["", f"Sections of {gin_file}:", *sections]
    known = summaries()
    first = [each for each in _FIRST if each in known]
    parts += ["", "Configurables (NAME, then FIELD: type = default), one alone with --help NAME."]
    parts += ["Sizes are in units, the elements of items: tokens for text."]
    parts += _listing([*first, *(each for each in known if each not in first)])
    return "\n".join(parts)


def _flags(parser: argparse.ArgumentParser) -> str:
    # The overrides are taken out before the parser sees them, so their flag is added to a copy that only prints.
    shown = argparse.ArgumentParser(prog=parser.prog, description=parser.description, parents=[parser], add_help=False)
    text = "sets a value, for example --gin.train.steps=50 or --gin.teacher/Section.microbatch=512"
    shown.add_argument(f"{PREFIX}NAME=VALUE", action="store_true", help=text)
    return shown.format_help().rstrip()


def _listing(names: Iterable[str]) -> list[str]:
    lines = []
    for name, summary in summaries(names, set_by="--help").items():
        lines += ["", *textwrap.wrap(f"{name}: {summary}", 110, initial_indent="  ", subsequent_indent="    ")]
        for field in describe([name]):
            kind = "" if field.type in _NOTHING_SAID else f": {field.type}"
            default = " (required)" if field.default == "required" else f" = {field.default}"
            lines.append(f"    {field.field}{kind}{default}")
            lines += textwrap.wrap(field.doc, 96, initial_indent="        ", subsequent_indent="        ")
    return lines
