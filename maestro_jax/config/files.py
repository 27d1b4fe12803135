"""Finds config files, data files and modules that a config names."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MaestroError, did_you_mean

_PACKAGE = Path(__file__).resolve().parent.parent


def find_config(name: str | os.PathLike[str], *, includer: Path | None = None, set_by: str = "--gin_file") -> Path:
    """Finds a config file: a path as given, else, when it names no folder, among the shipped configs.

    Args:
        name: such as `runs/mine.gin` or `kd_tiny.gin`.
        includer: the file that includes it, from whose folder the path counts; None counts from the current folder.
        set_by: who names the file, for the error text.

    Returns:
        A path that exists.

    Raises:
        ConfigError: there is no such file; the text says where it was looked for and lists the shipped configs.
    """
    name = Path(name)
    places = [name if includer is None else includer.parent / name]
    if name.parent == Path():
        places += [folder / name for folder in shipped_folders()]
    found = next((place for place in places if place.is_file()), None)
    if found is not None:
        return found
    shipped = list(shipped_configs())
    raise ConfigError(
        f"config file {str(name)!r} cannot be found{did_you_mean(name.name, shipped)}.",
        wanted="a file that exists, or the name of a shipped config: " + (", ".join(shipped) or "there is none"),
        have="none of\n" + "\n".join(str(place.absolute()) for place in places),
        set_by=set_by,
        fix="give a path from the current folder, or one of the shipped names",
        anchor="missing-file",
    )


def find_file(name: str | os.PathLike[str], near: Path | None = None, *, set_by: str = "the calling program") -> Path:
    """Finds a data file that a config names, such as weights.

    Args:
        name: a path. As given (from the current folder) it comes first.
        near: the config file, or its folder; looked into second. See `config.config_folder`.
        set_by: what names the file, for the error text. See `errors.set_by`.

    Returns:
        A path that exists, in the current folder, beside the config, or among the shipped configs.

    Raises:
        ConfigError: the file is in none of these places.
    """
    places = [Path(name)]
    if near is not None:
        places.append((near if near.is_dir() else near.parent) / name)
    places += [folder / name for folder in shipped_folders()]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise ConfigError(
            f"file {os.fspath(name)!r} cannot be found.",
            wanted="a file that exists",
            have="none of\n" + "\n".join(str(place.absolute()) for place in places),
            set_by=set_by,
            fix="give a path from the current folder, or put the file beside the config file",
            anchor="missing-file",
        )
    return found


def shipped_folders() -> list[Path]:
    """The folder of configs inside the installed package, or of the source checkout that the package is part of."""
    inside, beside = _PACKAGE / "configs", _PACKAGE.parent / "configs"
    if inside.is_dir():
        return [inside]
    # Beside an installed package lies everybody's site-packages, whose "configs" would be someone else's.
    return [beside] if beside.is_dir() and (_PACKAGE.parent / "pyproject.toml").is_file() else []


def shipped_configs() -> dict[str, str]:
    """Returns file name of every shipped config -> its first comment line, sorted by name."""
    paths = sorted((path for folder in shipped_folders() for path in folder.glob("*.gin")), key=lambda path: path.name)
    return {path.name: _first_comment(path.read_text(encoding="utf-8")) for path in paths}


def _first_comment(text: str) -> str:
    lines = (line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#"))
    return next((line for line in lines if line), "")


def import_module(name: str, place: str) -> Any:
    """Imports a module that a config names; the current folder counts as importable, as with `python -m`.

    Raises:
        ConfigError: there is no such module, or it imports something that is missing.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except MaestroError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"module {name!r} cannot be imported.",
            wanted="a module in the current folder or in an installed package",
            have=str(error),
            set_by=place,
            fix=f"check the spelling, or run from the folder that holds {name.split('.')[0]!r}",
            anchor="import-failed",
        ) from error
    except Exception as error:
        error.add_note(f"while importing {name!r} for {place}")
        raise


def shown_path(path: Path) -> str:
    """The path from the current folder when it lies below it, else in full."""
    full, here = path.resolve(), Path.cwd().resolve()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(full)
