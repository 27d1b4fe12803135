"""Why a user's module failed on the shapes of its section: what the exception and the names in its batch say of the cause."""

from __future__ import annotations

import dataclasses
import re
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax
import jax
from flax.errors import InvalidRngError

from ..data.samples import ArraySpec
from ..errors import EdgeError, GraphError, MaestroError, did_you_mean, set_by
from .section import Section

_FRAMEWORK = (*flax.__path__, *jax.__path__, str(Path(__file__).parent))
"""Folders of code that calls a user's module."""

_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
"""Folders of code that a user's module calls, unless it is installed there itself."""

_STANDARD = sysconfig.get_path("stdlib")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a module was called with.

    Args:
        section: its section.
        specs: stream -> array name -> spec, from the data set.
        batch: arrays of the batch.
        inputs: arrays that arrive over edges.
    """

    section: Section
    specs: Mapping[str, Mapping[str, ArraySpec]]
    batch: Mapping[str, Any]
    inputs: Mapping[str, Any]


def described(value: Any) -> str:
    """Dtype and shape of an array, or the type of anything else."""
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else type(value).__name__


def module_failed(call: Call, error: Exception) -> MaestroError:
    """Returns the error that explains an exception of a module."""
    place, line = _place(error)
    raised = f"{type(error).__name__}: {str(error).strip()[:600]}" + (f"\nat {place}: {line}" if place else "")
    if isinstance(error, InvalidRngError) or "`rngs` argument" in str(error):
        return _draws_noise(call.section, raised)
    return _absent(call, error, raised) or _other_inputs(call, error, raised, place) or _anything(call, raised, place)


def not_a_dict(section: Section, returned: Any) -> MaestroError:
    """Returns the error about a module that returned something else."""
    return GraphError(
        f"the module of section {section.name!r} returns no dict.",
        wanted='names and arrays: {"hidden": ...} for other sections\' "SECTION.hidden", and the sum of each objective by its name',
        have=described(returned),
        fix="return a dict, also of a single array",
        anchor="module-fails",
        set_by=set_by(section, "module"),
    )


def _place(error: Exception) -> tuple[str, str]:
    """Where in the user's code an exception was raised, and the line there; empty where none of it was running."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_FRAMEWORK)]
    outside = [each for each in frames if not each.filename.startswith((_STANDARD, *_PACKAGES))]
    own = outside or [each for each in frames if each.filename.startswith(_PACKAGES)]
    return (f"{own[-1].filename}:{own[-1].lineno}", own[-1].line or "") if own else ("", "")


def _draws_noise(section: Section, raised: str) -> MaestroError:
    return GraphError(
        f"the module of section {section.name!r} draws random numbers from Flax.",
        wanted="noise by sample and position: Flax's Dropout draws one mask for a whole array, "
        "which would depend on how the batch is cut into micro-batches",
        have=raised,
        fix="use maestro_jax.models.token_dropout with batch.get('key'), which is None except in training",
        anchor="module-state",
        set_by=set_by(section, "module"),
    )


def _failed(call: Call, raised: str, *, wanted: str, fix: str, set_by: str, kind: type[MaestroError] = GraphError) -> MaestroError:
    received = [f"{name}: {{{_arrays(arrays)}}}" for name, arrays in (("batch", call.batch), ("inputs", call.inputs)) if arrays]
    return kind(
        f"the module of section {call.section.name!r} fails on the shapes that it would receive.",
        wanted=wanted,
        have="\n".join([raised, *received]),
        fix=fix,
        anchor="module-fails",
        set_by=set_by,
    )


def _arrays(arrays: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {described(array)}" for name, array in arrays.items())


def _absent(call: Call, error: Exception, raised: str) -> MaestroError | None:
    """A name that its batch does not have."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(name, str) or name in call.batch:
        return None
    section, stream = call.section, call.section.reads
    wanted = f"one of {list(call.batch)}{did_you_mean(name, list(call.batch))}: section {section.name!r} reads {stream!r}"
    if name == "key":
        fix = "use batch.get('key'): the key is there only while the section is trained"
        return _failed(call, raised, wanted=wanted, fix=fix, set_by=set_by(section, "module"))
    others = [other for other, arrays in call.specs.items() if name in arrays]
    if others:
        fix = f"correct the name, or set Section.reads to {others[0]!r}, whose items have {name!r}"
        return _failed(call, raised, wanted=wanted, fix=fix, set_by=set_by(section, "reads"))
    fix = f"correct the name, or add the array to the items of stream {stream!r}; if it is no array of the batch, correct the module"
    return _failed(call, raised, wanted=wanted, fix=fix, set_by=set_by(section, "module"))


def _other_inputs(call: Call, error: Exception, raised: str, place: str) -> MaestroError | None:
    """A module whose arguments are not the inputs of its section. It has not begun, so none of the user's lines was running."""
    named = re.search(r"(unexpected keyword argument|missing \d+ required .* arguments?:) .*", str(error))
    if not isinstance(error, TypeError) or place or named is None or "__init__" in str(error):
        return None
    given = ", ".join(["batch", *call.inputs])
    return _failed(
        call,
        raised,
        wanted=f"a module that takes ({given}): the batch, and what Section.inputs names, by these names",
        fix="give the argument of the module and the key in Section.inputs one name",
        set_by=set_by(call.section, "inputs"),
        kind=EdgeError,
    )


def _anything(call: Call, raised: str, place: str) -> MaestroError:
    section = call.section
    origins = [set_by(section, "module"), *([set_by(section, "inputs")] if call.inputs else [])]
    return _failed(
        call,
        raised,
        wanted="a module that takes (batch, **inputs) and returns a dict",
        fix=f"correct the module{f' at {place}' if place else ''}"
        + (", or make the widths and dtypes of its inputs those that it takes" if call.inputs else ""),
        set_by="\n".join(origins),
        kind=EdgeError if call.inputs else GraphError,
    )
