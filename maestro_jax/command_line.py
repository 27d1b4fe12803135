"""What the commands share: `--gin.NAME=VALUE` flags and the text of `--help`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from .config import describe, load, summaries

PREFIX = "--gin."


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


def help_text(parser: argparse.ArgumentParser, gin_file: str | None, overrides: Sequence[str]) -> str:
    """Returns the flags, the sections of the config file if one is named, and every configurable with its fields.

    Raises:
        ConfigError: when the named config file is wrong.
    """
    parts = [
        parser.format_help().rstrip(),
        "  --gin.NAME=VALUE      sets a value, for example --gin.train.steps=50 or --gin.teacher/Section.microbatch=512",
    ]
    if gin_file:
        graph = load(gin_file, overrides, root="train").build().graph
        sections = [f"  {s.name:<16} {graph.mode(s.name)}; scope {s.name}/" for s in graph.sections]
        parts += ["", f"Sections of {gin_file}:", *sections]
    parts += ["", "Configurables (NAME.FIELD: type = default):"]
    for name, summary in summaries().items():
        parts += ["", f"  {name}: {summary}"]
        for field in describe([name]):
            default = f" = {field.default}" if field.default else ""
            parts.append(f"    {field.field}: {field.type}{default}")
            parts += textwrap.wrap(field.doc, 96, initial_indent="        ", subsequent_indent="        ") if field.doc else []
    return "\n".join(parts)
