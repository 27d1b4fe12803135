"""A projector: the small MLP that brings rows of one model to the width of another (as in LLaVA, arXiv 2310.03744).

Dimensions: R rows, L length, D width of what comes in, F width inside, E width of what goes out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
from flax import nnx

from ..config import check_fields, configurable
from .layers import ACTIVATIONS, parameter, project, value_of
from .stack import check_positive


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Projector:
    """Sizes of an MLP from one width to another: down(activation(up(x))).

    Args:
        embed: width of the rows that come in.
        width: width of the rows that go out.
        mlp: width inside; `embed` when not given.
        bias: whether both maps have biases.
        activation: "gelu", or "gelu_tanh", which approximates it.

    Raises:
        ConfigError: a size is not positive.

    >>> Projector(embed=6, width=4)(nnx.Rngs(0))(jax.numpy.ones((1, 3, 6))).shape
    (1, 3, 4)
    """

    embed: int
    width: int
    mlp: int | None = None
    bias: bool = False
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, ("embed", "width", "mlp"), "projector-shape")

    def __call__(self, rngs: nnx.Rngs) -> ProjectorModule:
        """Builds the module with new parameters."""
        return ProjectorModule(self, rngs=rngs)


class ProjectorModule(nnx.Module):
    """A projector's parameters and its computation; made by calling a `Projector`.

    Args:
        config: sizes.
        rngs: source of the initial parameters ("params").
    """

    def __init__(self, config: Projector, *, rngs: nnx.Rngs) -> None:
        inner = config.embed if config.mlp is None else config.mlp
        self.up = parameter(rngs, (config.embed, inner), ("embed", "mlp"), 1 / math.sqrt(config.embed))
        self.down = parameter(rngs, (inner, config.width), ("mlp", "embed"), 1 / math.sqrt(inner))
        self.activation = config.activation
        if config.bias:
            self.up_bias = parameter(rngs, (inner,), ("mlp",), 0.0)
            self.down_bias = parameter(rngs, (config.width,), ("embed",), 0.0)

    def __call__(self, x_RLD: jax.Array) -> jax.Array:
        """Returns [R, L, E] in the dtype of the parameters, whatever that of `x_RLD`."""
        up_DF = self.up[...]
        inner_RLF = ACTIVATIONS[self.activation](project(x_RLD.astype(up_DF.dtype), up_DF, bias=value_of(self, "up_bias")))
        return project(inner_RLF, self.down[...], bias=value_of(self, "down_bias"))
