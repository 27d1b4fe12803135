"""The types of a configuration object's fields, checked also when it is made from Python."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from typing import Any

from ..errors import ConfigError, set_by
from .registry import hints, type_text
from .types import WrongType, advice, check, short_type


def check_fields(owner: Any) -> None:
    """Checks every field of a frozen dataclass against its annotation, as config files are checked; call it in `__post_init__`.

    Lists become tuples and whole numbers floats where the annotation asks for them; numpy's whole numbers become Python's.

    Raises:
        ConfigError: names the field, what it wants and what it has.
    """
    annotations = hints(type(owner))
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            value = operator.index(value)
        try:
            checked = check(value, annotations[field.name])
        except WrongType as error:
            raise ConfigError(
                f"{type(owner).__name__}.{field.name} has a wrong type.",
                wanted=short_type(type_text(annotations[field.name])),
                have=str(error),
                fix=advice(value, annotations[field.name]),
                anchor="wrong-type",
                set_by=set_by(owner, field.name),
            ) from error
        if checked is not getattr(owner, field.name):
            object.__setattr__(owner, field.name, checked)
