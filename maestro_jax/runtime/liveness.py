"""How much memory a traced program needs beside its arguments, before anything is compiled: what lives at the same time, at most.

A result is an array from where it is made to where it is last used. Functions on elements that only such functions and reductions need
are *fused* into these by compilers: no array is made of them, and what they read lives on until then. What such a function makes is written
over an operand that nobody needs any more. This is close to what XLA does on CPU; on GPUs it fuses more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax.extend import core

from .counts import jaxprs_in

Size = Callable[[tuple[int, ...], int], int]
"""Shape and bytes of an array -> bytes that a device has of it."""


ELEMENTWISE = (
    "abs add add_any and broadcast_in_dim ceil clamp convert_element_type copy cos div eq exp expand_dims floor ge gt integer_pow iota"
    " is_finite le log logistic lt max min mul ne neg not or pow reshape round rsqrt select_n sign sin sqrt square squeeze sub tanh xor"
)
FUSED = frozenset(ELEMENTWISE.split())
"""Functions on elements."""
REDUCED = frozenset(("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"))
"""Reductions, which compute what they read themselves."""


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
    held = {var for var in jaxpr.outvars if isinstance(var, core.Var)}
    fused = _fused(equations, held)
    last = _last_uses(equations, fused)
    ends: dict[int, list[Any]] = {}
    for var, n in last.items():
        ends.setdefault(n, []).append(var)
    made: set[Any] = set()
    live, peak = 0, 0
    for n, equation in enumerate(equations):
        arrays = [var for var in equation.outvars if var not in fused]
        over = [var for var in ends.get(n, ()) if var in made and var not in held]
        # A function on elements writes its result over an operand that nobody needs any more.
        in_place = equation.primitive.name in FUSED and any(bytes_of(var) == bytes_of(arrays[0]) for var in over if arrays)
        live += sum(bytes_of(var) for var in arrays)
        peak = max(peak, live - (bytes_of(arrays[0]) if in_place else 0) + _inside(equation, bytes_of))
        made.update(arrays)
        live -= sum(bytes_of(var) for var in (*over, *(var for var in arrays if var not in last and var not in held)))
    return peak


def _fused(equations: list[Any], held: set[Any]) -> set[Any]:
    """Results of which no array is made."""
    users: dict[Any, list[str]] = {}
    for equation in equations:
        for var in equation.invars:
            if isinstance(var, core.Var):
                users.setdefault(var, []).append(equation.primitive.name)
    takes = FUSED | REDUCED
    return {
        var
        for equation in equations
        if equation.primitive.name in FUSED
        for var in equation.outvars
        if var not in held and all(user in takes for user in users.get(var, ()))
    }


def _last_uses(equations: list[Any], fused: set[Any]) -> dict[Any, int]:
    """Array -> the last equation that reads it, itself or through what is fused into it."""
    last: dict[Any, int] = {}
    for n in range(len(equations) - 1, -1, -1):
        equation = equations[n]
        until = max([n, *(last.get(var, n) for var in equation.outvars if var in fused)])
        for var in equation.invars:
            if isinstance(var, core.Var):
                last[var] = max(last.get(var, -1), until)
    return last


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
    """Bytes that a call, or a round of a loop, needs besides its results: of a scan, also its parts of what is scanned, for products."""
    inner = [0]
    for jaxpr in jaxprs_in(equation.params):
        results = sum(bytes_of(var) for var in jaxpr.outvars if isinstance(var, core.Var))
        parts = jaxpr.invars[equation.params["num_consts"] + equation.params["num_carry"] :] if equation.primitive.name == "scan" else ()
        inner.append(_peak(jaxpr, bytes_of) - results + sum(bytes_of(var) for var in parts if _multiplied(jaxpr, var)))
    return max(inner)


def _multiplied(jaxpr: Any, var: Any) -> bool:
    """Whether a product of matrices reads an argument, here or in a call."""
    for equation in jaxpr.eqns:
        places = [n for n, each in enumerate(equation.invars) if each is var]
        if places and equation.primitive.name == "dot_general":
            return True
        for inner in jaxprs_in(equation.params) if places and equation.primitive.name != "scan" else ():
            if any(n < len(inner.invars) and _multiplied(inner, inner.invars[n]) for n in places):
                return True
    return False
