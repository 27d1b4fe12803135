"""Equal transformer layers in one module, scanned: what decoders and encoders share.

Nine parameter leaves (more with biases, or norms of queries and keys) hold any number of layers, because the host
pays for each leaf of each task.

Dimensions: R rows, L length, D embed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import ConfigError, set_by
from .attention import check_attention
from .blockwise import SAVED
from .layers import GatedMLP, GroupedQueryAttention, RMSNorm
from .noise import token_dropout

Batch = Mapping[str, jax.Array]
Angles = tuple[jax.Array, jax.Array]

EMBEDDING, ATTENTION, MLP = 0, 1, 2
"""Places of dropout within a layer; the embedding's is in layer 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """Attention in windows: in most layers a unit sees its window, and in some of them its whole item.

    Args:
        numbers: int32 [R, L], the window of each unit, different for all windows of a row; 0 for padding.
        whole: of each layer, whether it sees whole items.
    """

    numbers: jax.Array
    whole: tuple[bool, ...]


_policies = jax.checkpoint_policies
_KEPT = _policies.save_from_both_policies(_policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names(SAVED))


class LayerSizes(Protocol):
    """The sizes and choices of layers, as the configurations of models have them."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def embed(self) -> int:
        """Width of the hidden state."""
        ...

    @property
    def heads(self) -> int:
        """Query heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        ...

    @property
    def head_dim(self) -> int | None:
        """Features of a head; None: embed // heads."""
        ...

    @property
    def head_size(self) -> int:
        """Features of a head."""
        ...

    @property
    def mlp(self) -> int:
        """Width inside the gated MLP."""
        ...

    @property
    def rope_theta(self) -> float:
        """Base of the rotary wave lengths."""
        ...

    @property
    def norm_epsilon(self) -> float:
        """Added to the mean square in the norms."""
        ...

    @property
    def dropout(self) -> float:
        """Rate of dropout."""
        ...

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        ...

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        ...

    @property
    def biases(self) -> bool:
        """Whether the output of attention and the maps of the MLP have biases."""
        ...

    @property
    def activation(self) -> str:
        """What the gated MLP applies to its gate."""
        ...

    @property
    def attention(self) -> str:
        """Registered kind of attention, or "auto"."""
        ...


def refuse_size(owner: object, field: str, wanted: str, fix: str, anchor: str) -> NoReturn:
    """Refuses one field of a model's configuration.

    Args:
        owner: the configuration.
        field: name of the field.
        wanted: what would have been right.
        fix: what the user can do.
        anchor: heading of the error page.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{type(owner).__name__}.{field} does not fit.",
        wanted=wanted,
        have=f"{field}={getattr(owner, field)!r}",
        set_by=set_by(owner, field),
        fix=fix,
        anchor=anchor,
    )


def check_positive(owner: object, fields: tuple[str, ...], anchor: str) -> None:
    """Refuses sizes below 1; None, a size that was left out, passes.

    Raises:
        ConfigError: names the first such field.
    """
    for field in fields:
        value = getattr(owner, field)
        if value is not None and value < 1:
            refuse_size(owner, field, "at least 1", "choose a positive size", anchor)


def check_layers(sizes: LayerSizes, anchor: str, turned: int = 2) -> None:
    """Refuses sizes of layers that do not fit together.

    Args:
        sizes: the configuration of a model.
        anchor: heading of the error page about this model.
        turned: what must divide the features of a head: rotary positions turn pairs, for each dimension of a position.

    Raises:
        ConfigError: names the first field that does not fit.
    """
    check_positive(sizes, ("layers", "embed", "heads", "kv_heads", "mlp"), anchor)
    if sizes.head_dim is None and sizes.embed % sizes.heads:
        refuse_size(sizes, "heads", f"a divisor of embed={sizes.embed}", "choose such a number of heads, or set head_dim", anchor)
    if sizes.head_size < 2 or sizes.head_size % turned:
        field = "heads" if sizes.head_dim is None else "head_dim"
        text = "an even number" if turned == 2 else f"a multiple of {turned}"
        wanted = f"{text} of features in a head (here {sizes.head_size}), as rotary positions turn pairs of features"
        refuse_size(sizes, field, wanted, f"make head_dim {text}", anchor)
    if sizes.heads % sizes.kv_heads:
        refuse_size(sizes, "kv_heads", f"a divisor of heads={sizes.heads}", "let every key head serve equally many query heads", anchor)
    if not 0.0 <= sizes.dropout < 1.0:
        refuse_size(sizes, "dropout", "a rate of at least 0 and below 1", "0 turns dropout off", anchor)
    for field in ("rope_theta", "norm_epsilon"):
        if getattr(sizes, field) <= 0:
            refuse_size(sizes, field, "a positive number", "leave it out to get the default", anchor)
    check_attention(sizes.attention, owner=type(sizes).__name__, set_by=set_by(sizes, "attention"))


class LayerStack(nnx.Module):
    """All layers in one: parameters have a leading axis, and the scan computes one layer with its slice of them.

    Each layer is x + attention(norm(x)), then x + mlp(norm(x)), with grouped-query attention, a gated MLP and RMSNorm.

    Args:
        sizes: sizes and choices.
        rngs: source of the initial parameters ("params").
    """

    def __init__(self, sizes: LayerSizes, *, rngs: nnx.Rngs) -> None:
        stack = (sizes.layers,)
        # Each layer adds twice to the residual stream; this keeps the variance of the sum at 1 (as in GPT-2).
        output_scale = 1 / math.sqrt(2 * sizes.layers)
        self.attention_norm = RMSNorm(sizes.embed, sizes.norm_epsilon, stack=stack)
        self.attention = GroupedQueryAttention(
            sizes.embed,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_size,
            kind=sizes.attention,
            output_scale=output_scale,
            stack=stack,
            bias=sizes.qkv_bias,
            output_bias=sizes.biases,
            qk_epsilon=sizes.norm_epsilon if sizes.qk_norm else None,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(sizes.embed, sizes.norm_epsilon, stack=stack)
        self.mlp = GatedMLP(
            sizes.embed, sizes.mlp, output_scale=output_scale, activation=sizes.activation, stack=stack, bias=sizes.biases, rngs=rngs
        )
        self.dropout = sizes.dropout
        self.count = sizes.layers

    def __call__(
        self, x_RLD: jax.Array, batch: Batch, angles: Angles, order_RL: jax.Array | None, windows: Windows | None = None
    ) -> jax.Array:
        """Runs all layers.

        Args:
            x_RLD: embeddings.
            batch: "segment_ids" and, for dropout, "positions", "sample_ids" and "key".
            angles: of the rotation of queries and keys.
            order_RL: int32; a token sees those of its segment that are not later than itself. Positions make attention
                causal, None makes it run in both directions.
            windows: of attention; None: every layer sees whole items.

        Returns:
            [R, L, D], before any final norm.
        """
        graph, weights = nnx.split(self)
        whole_N = None if windows is None else jnp.array(windows.whole)

        # The products with weights are kept for the backward pass; norms, rotations, scores and gates are made again.
        # That is little work, and saves more time on memory than it costs, besides the memory itself. Scores of long rows
        # are much work, for which blockwise attention names what it needs to make each of them once more only.
        @functools.partial(jax.checkpoint, prevent_cse=False, policy=_KEPT)
        def step(x_RLD: jax.Array, piece: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
            layer_weights, layer = piece
            x_RLD = rows_split(x_RLD)
            segment_ids_RL = batch["segment_ids"]
            if windows is not None and whole_N is not None:
                segment_ids_RL = jnp.where(whole_N[layer], segment_ids_RL, windows.numbers)
            one = nnx.merge(graph, layer_weights)
            mixed_RLD = one.attention(one.attention_norm(x_RLD), angles, segment_ids_RL, order_RL, windows=windows is not None)
            x_RLD += batch_dropout(mixed_RLD, one.dropout, batch, layer, ATTENTION)
            return x_RLD + batch_dropout(one.mlp(one.mlp_norm(x_RLD)), one.dropout, batch, layer, MLP), None

        return jax.lax.scan(step, x_RLD, (weights, jnp.arange(self.count)))[0]


def rows_split(x_RLD: jax.Array) -> jax.Array:
    """Says that rows lie split over `fsdp` where the program's mesh has such an axis.

    Weights are split over it as well, and without this word XLA would rather keep those where they are and split the width of what every
    layer reads: each device then holds all rows, and sums go around where weights should (measured: 2 to 5 times the memory).
    """
    mesh = jax.sharding.get_abstract_mesh()
    size = dict(mesh.shape).get("fsdp", 1)
    if size == 1 or x_RLD.shape[0] % size:
        return x_RLD
    return jax.lax.with_sharding_constraint(x_RLD, jax.sharding.PartitionSpec("fsdp"))


def batch_dropout(x_RLD: jax.Array, rate: float, batch: Batch, layer: jax.Array | int, place: int) -> jax.Array:
    """`token_dropout` with the key, samples and positions of a batch; without a key, in evaluation, nothing is dropped."""
    return token_dropout(x_RLD, rate, batch.get("key"), batch["sample_ids"], batch["positions"], layer=layer, place=place)
