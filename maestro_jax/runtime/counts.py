"""Counts the multiplications of a traced program: what a task costs before anything has been measured.

Products of matrices and convolutions are counted exactly, loops as often as they run, or between the bounds that they tell. Of
everything else, one is counted for each element that an arithmetic function yields: cheap beside matrix products, and all there is in
modules without them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from ..models.loops import bounds_in

ELEMENTWISE = frozenset(
    {"mul", "div", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "rsqrt", "sqrt", "sin", "cos", "pow"}
)
"""Functions that cost about a multiplication for each element."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Multiplications of a program.

    Args:
        least: of those that are made whatever the data are.
        most: of all that there can be. The difference is in loops that run as often as the data say (`models/loops.py`).
    """

    least: int = 0
    most: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(least=self.least + other.least, most=self.most + other.most)

    def times(self, least: int, most: int) -> Work:
        """Returns the work of a loop over this."""
        return Work(least=self.least * least, most=self.most * most)


def multiplications(function: Callable[..., Any], *shapes: Any) -> int:
    """Traces a function and counts its multiplications, at most.

    Args:
        function: what is traced.
        shapes: its arguments, as trees of `jax.ShapeDtypeStruct`.

    >>> shape = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((3, 5), "float32")
    >>> multiplications(lambda a, b: a @ b, *shape)
    30
    """
    return work(function, *shapes).most


def work(function: Callable[..., Any], *shapes: Any) -> Work:
    """Traces a function and counts its multiplications, at least and at most.

    Args:
        function: what is traced.
        shapes: its arguments, as trees of `jax.ShapeDtypeStruct`.
    """
    return _count(jax.make_jaxpr(function)(*shapes).jaxpr)


def _count(jaxpr: Any) -> Work:
    return sum((_count_one(equation) for equation in jaxpr.eqns), Work())


def _count_one(equation: Any) -> Work:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        return _exactly(_dot(equation))
    if name == "conv_general_dilated":
        return _exactly(_convolution(equation))
    if name == "scan":
        return _count(parameters["jaxpr"].jaxpr).times(parameters["length"], parameters["length"])
    if name == "cond":
        return max((_count(branch.jaxpr) for branch in parameters["branches"]), key=lambda found: found.most)
    if name == "while":
        # Where nothing tells how often it runs, what it repeats is counted once.
        least, most = bounds_in(str(equation.source_info.name_stack)) or (1, 1)
        return _count(parameters["body_jaxpr"].jaxpr).times(least, most)
    inner = sum((_count(jaxpr) for jaxpr in jaxprs_in(parameters)), Work())
    return inner + _exactly(math.prod(equation.outvars[0].aval.shape) if name in ELEMENTWISE else 0)


def _exactly(number: int) -> Work:
    return Work(least=number, most=number)


def jaxprs_in(parameters: dict[str, Any]) -> Iterator[Any]:
    """Programs inside a call, such as those of `jit`, `remat` and custom derivatives."""
    for value in parameters.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def _dot(equation: Any) -> int:
    """Elements of the result times the length of what is summed over."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
    """Elements of the result times those of the kernel that each one sees."""
    kernel, numbers = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
    window = math.prod(kernel[axis] for axis in numbers.rhs_spec[2:]) * kernel[numbers.rhs_spec[1]]
    return math.prod(equation.outvars[0].aval.shape) * window
