"""How much memory a traced program needs beside its arguments, before anything is compiled: what lives at the same time, at most.

Every result is taken for an array, from where it is made to where it is last used. Compilers compute some results where they are needed and
make no array of them, so this is more than a program takes: on CPU by up to a sixth for our models, on GPUs by more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend import core

Size = Callable[[tuple[int, ...], int], int]
"""Shape and bytes of an array -> bytes that a device has of it."""


def whole(shape: tuple[int, ...], size: int) -> int:
    """The size of an array that no axis splits."""
    return size


def peak_bytes(jaxpr: Any, size: Size = whole) -> int:
    """Returns the most bytes that the intermediate and final results of a program take at the same time.

    Args:
        jaxpr: the program, such as `jax.make_jaxpr(function)(*shapes).jaxpr`.
        size: what a device has of each array.

    >>> import jax
    >>> shape = jax.ShapeDtypeStruct((4, 4), "float32")
    >>> peak_bytes(jax.make_jaxpr(lambda a: (a @ a) @ a)(shape).jaxpr)
    128
    """

    def bytes_of(var: Any) -> int:
        shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
        return size(shape, math.prod(shape) * getattr(dtype, "itemsize", 4))

    return _peak(jaxpr, bytes_of)


def _peak(jaxpr: Any, bytes_of: Callable[[Any], int]) -> int:
    equations = _needed(jaxpr)
    made = {var for equation in equations for var in equation.outvars}
    last = {var: n for n, equation in enumerate(equations) for var in equation.invars if isinstance(var, core.Var)}
    held = {var for var in jaxpr.outvars if isinstance(var, core.Var)}
    live, peak = 0, 0
    for n, equation in enumerate(equations):
        live += sum(bytes_of(var) for var in equation.outvars)
        peak = max(peak, live + _inside(equation, bytes_of))
        used = {var for var in (*equation.invars, *equation.outvars) if isinstance(var, core.Var)}
        live -= sum(bytes_of(var) for var in used if var in made and var not in held and last.get(var, n) == n)
    return peak


def _needed(jaxpr: Any) -> list[Any]:
    """The equations whose results are used."""
    wanted = {var for var in jaxpr.outvars if isinstance(var, core.Var)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if any(var in wanted for var in equation.outvars):
            kept.append(equation)
            wanted |= {var for var in equation.invars if isinstance(var, core.Var)}
    return kept[::-1]


def _inside(equation: Any, bytes_of: Callable[[Any], int]) -> int:
    """Bytes that a call, or a round of a loop, needs besides its results."""
    inner = [0]
    for jaxpr in _jaxprs(equation.params):
        results = sum(bytes_of(var) for var in jaxpr.outvars if isinstance(var, core.Var))
        inner.append(_peak(jaxpr, bytes_of) - results)
    return max(inner)


def _jaxprs(parameters: dict[str, Any]) -> Iterator[Any]:
    for value in parameters.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each
