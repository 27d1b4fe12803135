"""How much memory a traced program needs beside its arguments, before anything is compiled: what lives at the same time, at most.

A compiler makes no array of what it can compute inside another loop. Here, results of functions on elements are arrays only where something
needs them as such: a product of matrices, a loop, a scatter. Everything else is an array from where it is made to where it is last used.
A loop holds what one round needs besides its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

FUSED = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "rsqrt", "sqrt", "sin", "cos"),
        *("pow", "integer_pow", "max", "min", "sign", "abs", "floor", "ceil", "round", "select_n", "convert_element_type", "broadcast_in_dim"),
        *("iota", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "stop_gradient", "square", "copy", "is_finite", "add_any"),
        *("clamp", "rem", "shift_left", "shift_right_logical", "random_wrap", "random_unwrap", "sharding_constraint", "name", "squeeze"),
        *("reshape", "transpose", "expand_dims", "slice", "rev", "pad", "erf_inv", "population_count", "nextafter", "optimization_barrier"),
    }
)
"""Functions whose results are computed where they are needed."""

NEEDING = frozenset({"dot_general", "conv_general_dilated", "scan", "while", "cond", "scatter", "scatter-add", "gather", "sort", "concatenate"})
"""Functions whose arguments are arrays."""


def peak_bytes(function: Callable[..., Any], *shapes: Any) -> int:
    """Traces a function and returns the most bytes that its intermediate and final results take at the same time.

    Args:
        function: what is traced.
        shapes: its arguments, as trees of `jax.ShapeDtypeStruct`.

    >>> shape = jax.ShapeDtypeStruct((4, 4), "float32")
    >>> peak_bytes(lambda a: (a @ a) @ a, shape), peak_bytes(lambda a: a * 2 + 1, shape)
    (128, 64)
    """
    return _peak(jax.make_jaxpr(function)(*shapes).jaxpr)


def _peak(jaxpr: Any) -> int:
    equations = _needed(jaxpr)
    last = {var: n for n, equation in enumerate(equations) for var in equation.invars if isinstance(var, core.Var)}
    held = set(jaxpr.outvars)
    arrays = _arrays(equations) | {var for var in held if isinstance(var, core.Var)}
    live, peak = 0, 0
    for n, equation in enumerate(equations):
        made = [var for var in equation.outvars if var in arrays]
        live += sum(_bytes(var) for var in made)
        peak = max(peak, live + _inside(equation))
        ended = {var for var in (*equation.invars, *made) if isinstance(var, core.Var) and last.get(var, n) == n and var not in held}
        live -= sum(_bytes(var) for var in ended if var in arrays)
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


def _arrays(equations: list[Any]) -> set[Any]:
    """Results that are arrays of their own."""
    found = set()
    for equation in equations:
        if equation.primitive.name not in FUSED:
            found |= set(equation.outvars)
        if equation.primitive.name in NEEDING:
            found |= {var for var in equation.invars if isinstance(var, core.Var)}
    made = {var for equation in equations for var in equation.outvars}
    return found & made


def _inside(equation: Any) -> int:
    """Bytes that a call or a round of a loop needs besides its results."""
    inner = [_peak(jaxpr) - sum(_bytes(var) for var in jaxpr.outvars if isinstance(var, core.Var)) for jaxpr in _jaxprs(equation.params)]
    return max([0, *inner])


def _jaxprs(parameters: dict[str, Any]) -> Iterator[Any]:
    for value in parameters.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def _bytes(var: Any) -> int:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 4)
