"""Loops that run as often as the data say, with bounds that who counts the work of a program can read.

A `while` in a traced program does not tell how often it runs. The bounds go into its name, which is also what profilers show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

_NAME = re.compile(r"runs_(\d+)_to_(\d+)_times")


def bounded_loop(count: jax.Array, bounds: tuple[int, int], body: Callable[[jax.Array, Any], Any], state: Any) -> Any:
    """Runs `state = body(n, state)` for n = 0 ... count - 1.

    Args:
        count: int32, how often.
        bounds: how often at least and at most, for estimates of cost; they bound nothing.
        body: one turn.
        state: a tree of arrays that keep shape and dtype.

    Returns:
        The state after the last turn. It has no derivative of its own.

    >>> import jax.numpy as jnp
    >>> bounded_loop(jnp.int32(3), (1, 9), lambda n, total: total + n, jnp.int32(0))
    Array(3, dtype=int32)
    """
    with jax.named_scope(f"runs_{bounds[0]}_to_{bounds[1]}_times"):
        return jax.lax.fori_loop(0, count, body, state)


def bounds_in(names: str) -> tuple[int, int] | None:
    """Returns the bounds in the names of an operation; None where there are none.

    >>> bounds_in("transpose(jvp(layer))/runs_4_to_10_times"), bounds_in("layer")
    ((4, 10), None)
    """
    found = _NAME.findall(names)
    return (int(found[-1][0]), int(found[-1][1])) if found else None
