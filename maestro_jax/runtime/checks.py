"""Checks of program arguments: which one lies elsewhere, which one was given away."""

from __future__ import annotations

from typing import Any

import jax

from ..errors import MeshError
from ..schedules import Task

_INPUTS = ("params", "frozen", "feed", "slots")
ARGUMENT_NAMES = {
    "forward": (*_INPUTS, "sums"),
    "evaluate": (*_INPUTS, "sums"),
    "backward": (*_INPUTS, "residuals", "cotangents", "gradients"),
    "forward_backward": (*_INPUTS, "sums", "gradients"),
    "reduce": ("gradients", "sums"),
    "zero": ("gradients", "sums"),
    "apply": ("master", "optimizer", "compute", "gradients", "squares", "active"),
}
"""What the programs take, for error texts."""


def explain_mismatch(devices: list[Any], task: Task, kind: str, args: tuple[Any, ...], error: Exception) -> Exception:
    """Finds the argument that does not lie on its replica, and says so; else returns the error itself."""
    for path, array in _named(kind, args):
        if isinstance(array, jax.Array) and array.sharding.device_set != set(devices):
            return MeshError(
                f"argument {jax.tree_util.keystr(path)} of the {kind} of section {task.section!r}, replica {task.replica}, lies elsewhere.",
                wanted=f"devices {sorted(d.id for d in devices)}",
                have=f"devices {sorted(d.id for d in array.sharding.device_set)}, {array.dtype}{list(array.shape)}",
                fix="keep arrays on the submesh of their section; payloads cross by their edge only",
                anchor="wrong-mesh",
            )
    return error


def refuse_deleted(kind: str, section: str, args: tuple[Any, ...]) -> None:
    """Refuses arguments that were donated before: in a warm program on several devices they would crash the process.

    Raises:
        MeshError: names the section and the argument.
    """
    for path, array in _named(kind, args):
        if isinstance(array, jax.Array) and array.is_deleted():
            raise MeshError(
                f"argument {jax.tree_util.keystr(path)} of the {kind} of section {section!r} was donated to an earlier program.",
                wanted="an array that still exists",
                have=f"a deleted array, {array.dtype}{list(array.shape)}",
                fix="keep no view of a section's arrays across steps: read them through Engine.parameters",
                anchor="donated-argument",
            )


def _named(kind: str, args: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(dict(zip(ARGUMENT_NAMES[kind], args, strict=True)))[0]
