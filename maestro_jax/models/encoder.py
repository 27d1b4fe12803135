"""What encoders of images and of sound share: layers that look in both directions, several units into one row, a projector.

Items are packed: attention stays inside a segment, and as the units of each item are a multiple of those that become one
row, items begin and end at borders of rows, so no row mixes two of them.

Dimensions: R rows, L length, D embed, T = L / m rows that come out where m units become one, W their width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
from flax import nnx

from ..config import check_fields
from ..errors import ConfigError, set_by
from .layers import Names, RMSNorm, parameter, project, value_of
from .projector import Projector
from .stack import Angles, Batch, LayerStack, Windows, check_layers, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """The fields that configurations of encoders have in common.

    Args:
        layers: number of layers.
        embed: width of the hidden state.
        heads: attention heads.
        mlp: width inside the gated MLP.
        width: width of the rows that come out, usually the LLM's embed; None leaves out the projector.
        projector_mlp: width inside the projector; that of its input when not given.
        projector_activation: of the projector: "gelu", or "gelu_tanh", which approximates it.
        head_dim: features of a head; embed // heads when not given.
        rope_theta: base of the rotary wave lengths.
        norm_epsilon: added to the mean square in the norms.
        dropout: rate after attention and MLP.
        biases: add biases to all maps of the layers and of the projector.
        attention: registered kind of attention.

    Raises:
        ConfigError: sizes that do not fit together, or an unknown choice.
    """

    layers: int
    embed: int
    heads: int
    mlp: int
    width: int | None = None
    projector_mlp: int | None = None
    projector_activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"
    head_dim: int | None = None
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    dropout: float = 0.0
    biases: bool = False
    attention: str = "dense"

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, ("width", "projector_mlp"), "encoder-shape")
        check_layers(self, "encoder-shape", self.turned)

    @property
    def turned(self) -> int:
        """What must divide the features of a head: 2 for each dimension of a position."""
        return 2

    @property
    def kv_heads(self) -> int:
        """Every head has its own keys and values."""
        return self.heads

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are taken as they are."""
        return False

    @property
    def qkv_bias(self) -> bool:
        """Queries, keys and values have biases where all maps do."""
        return self.biases

    @property
    def activation(self) -> str:
        """That of SwiGLU."""
        return "silu"

    @property
    def head_size(self) -> int:
        """`head_dim` as a number, also where it was left out."""
        return self.embed // self.heads if self.head_dim is None else self.head_dim


class EncoderModule(nnx.Module):
    """Layers, final norm and projector of an encoder, whose embeddings are made by a subclass.

    Args:
        config: sizes and choices.
        merge: how many embeddings, side by side, become one row that comes out.
        rngs: source of the initial parameters ("params").
    """

    def __init__(self, config: EncoderSizes, *, merge: int, rngs: nnx.Rngs) -> None:
        self.layers = LayerStack(config, rngs=rngs)
        self.final_norm = RMSNorm(config.embed, config.norm_epsilon)
        self.merge = merge
        if config.width is not None:
            sizes = Projector(
                embed=merge * config.embed,
                width=config.width,
                mlp=config.projector_mlp,
                bias=config.biases,
                activation=config.projector_activation,
            )
            self.projector = sizes(rngs)

    def encode(self, x_RLD: jax.Array, batch: Batch, angles: Angles, windows: Windows | None = None) -> jax.Array:
        """Runs everything but the embedding.

        Args:
            x_RLD: embeddings.
            batch: "segment_ids", and what dropout needs.
            angles: of the rotation of queries and keys.
            windows: of attention, where not every layer sees whole items.

        Returns:
            [R, T, W]; without a projector, W = m * D, the last hidden states of m units side by side.
        """
        hidden_RLD = self.final_norm(self.layers(x_RLD, batch, angles, None, windows))
        rows, length, embed = hidden_RLD.shape
        rows_RTW = hidden_RLD.reshape(rows, length // self.merge, self.merge * embed)
        return self.projector(rows_RTW) if hasattr(self, "projector") else rows_RTW


class Embedding(nnx.Module):
    """A linear map of numbers to embeddings.

    Args:
        shape: of what comes in, for example (P,), or (K, C) for K neighbours with C channels each.
        names: logical names of these dimensions.
        embed: D.
        bias: whether it has a bias.
        rngs: source of the keys.
    """

    def __init__(self, shape: tuple[int, ...], names: Names, embed: int, *, bias: bool = True, rngs: nnx.Rngs) -> None:
        # A name stands once in a parameter, as a mesh axis can split one of its dimensions.
        self.weight = parameter(rngs, (*shape, embed), (*names, None if "embed" in names else "embed"), 1 / math.sqrt(math.prod(shape)))
        # Not zero: a blank patch would have no direction at all, and the first norm a gradient of 1 / sqrt(epsilon).
        if bias:
            self.bias = parameter(rngs, (embed,), ("embed",), 0.1)

    def __call__(self, x_RLP: jax.Array) -> jax.Array:
        """Returns [R, L, D] in the dtype of the parameters, from [R, L, *shape] of any float dtype."""
        weight = self.weight[...]
        return project(x_RLP.astype(weight.dtype), weight, contracted=weight.ndim - 1, bias=value_of(self, "bias"))


def check_width(config: object, field: str, array: jax.Array, width: int) -> None:
    """Refuses units that have another width than the encoder embeds.

    Args:
        config: the encoder's configuration.
        field: the field that sets the width.
        array: [R, L, P], what is embedded.
        width: what P should be.

    Raises:
        ConfigError: P is not `width`.
    """
    if array.shape[-1] != width:
        wanted, have = f"{width} numbers a unit ({field}={getattr(config, field)})", f"{array.shape[-1]} numbers a unit"
        raise _wrong_units(config, field, wanted, have, "let data and encoder agree on the size of a unit")


def check_rows(config: object, field: str, length: int, merge: int) -> None:
    """Refuses packed rows that cannot be cut into `merge` units each.

    Args:
        config: the encoder's configuration.
        field: the field that says how many units become one row.
        length: L.
        merge: how many units become one row.

    Raises:
        ConfigError: `merge` does not divide L.
    """
    if length % merge:
        wanted = f"rows of a length that {merge} divides, because that many units become one row"
        fix = "make Section.row_length (Section.microbatch, where it is not set) a multiple"
        raise _wrong_units(config, field, wanted, f"rows of {length} units", fix)


def _wrong_units(config: object, field: str, wanted: str, have: str, fix: str) -> ConfigError:
    what = f"{type(config).__name__} does not fit the items that it reads."
    return ConfigError(what, wanted=wanted, have=have, set_by=set_by(config, field), fix=fix, anchor="encoder-units")
