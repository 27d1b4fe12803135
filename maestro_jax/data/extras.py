"""Packages that only some data sources need, and that are installed with an extra."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import DataError


def import_extra(module: str, package: str, wanted_for: str, *, extra: str = "examples", set_by: str = "the calling program") -> Any:
    """Imports a module of a package that may not be installed.

    Args:
        module: its full name, such as "sklearn.datasets".
        package: what `pip install` calls it.
        wanted_for: what it is needed for, for the error text.
        extra: of `maestro_jax`, which brings it along.
        set_by: where that was chosen.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{wanted_for} need a package that is not installed.",
            wanted=f"the package {package}",
            have=f"{type(error).__name__}: {error}",
            set_by=set_by,
            fix=f"pip install 'maestro_jax[{extra}]', which brings {package} along",
            anchor="extra-missing",
        ) from error
