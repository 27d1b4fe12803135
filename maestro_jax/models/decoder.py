"""A decoder-only language model for packed rows: the shape of Llama, with layers stacked and scanned.

`Decoder` is the configuration; calling it with `rngs` builds the module. Twelve parameter leaves hold any number of
layers, because the host pays for each leaf of each task.

Dimensions: R rows, L length, D embed, V vocabulary, N = R * L tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import configurable
from ..errors import ConfigError, set_by
from .attention import check_attention
from .heads import next_token_sums
from .layers import GroupedQueryAttention, RMSNorm, SwiGLU, VocabularyTable, rotary_angles
from .noise import token_dropout

Batch = Mapping[str, jax.Array]

# Places of dropout within a layer; the embedding's is in layer 0.
_EMBEDDING, _ATTENTION, _MLP = 0, 1, 2


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes and choices of a decoder-only language model.

    Args:
        vocab_size: tokens in the vocabulary.
        layers: number of layers.
        embed: width of the hidden state.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: features of a head, even; embed // heads when not given.
        mlp: width inside the gated MLP.
        rope_theta: base of the rotary wave lengths.
        norm_epsilon: added to the mean square in the norms.
        tied: the embedding table is the output head as well.
        dropout: rate after the embedding, attention and MLP; noise belongs to a token, wherever it is computed.
        objective: "next_token" makes the loss; "none" gives only hidden states, and there is no head unless tied.
        loss_chunk: most tokens whose logits exist at once in the loss.
        attention: registered kind of attention.

    Raises:
        ConfigError: sizes that do not fit together, or an unknown choice.

    >>> config = Decoder(vocab_size=64, layers=2, embed=16, heads=4, kv_heads=2, mlp=32)
    >>> config.head_dim
    4
    >>> ids = jnp.ones((1, 8), jnp.int32)
    >>> batch = {"tokens": ids, "targets": ids, "loss_mask": jnp.ones((1, 8)), "segment_ids": ids}
    >>> batch |= {"positions": jnp.arange(8)[None], "sample_ids": ids.astype(jnp.uint32)}
    >>> {name: value.shape for name, value in config(nnx.Rngs(0))(batch).items()}
    {'hidden': (1, 8, 16), 'accuracy': (), 'cross_entropy': ()}
    """

    vocab_size: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    tied: bool = False
    dropout: float = 0.0
    objective: Literal["next_token", "none"] = "next_token"
    loss_chunk: int = 256
    attention: str = "dense"

    def __post_init__(self) -> None:
        for field in ("vocab_size", "layers", "embed", "heads", "kv_heads", "mlp", "loss_chunk"):
            if getattr(self, field) < 1:
                raise self._refusal(field, "at least 1", "choose a positive size")
        if self.head_dim is None:
            if self.embed % self.heads:
                raise self._refusal("heads", f"a divisor of embed={self.embed}", "choose such a number of heads, or set head_dim")
            object.__setattr__(self, "head_dim", self.embed // self.heads)
        if self.head_size < 2 or self.head_size % 2:
            raise self._refusal("head_dim", "an even number, as rotary positions turn pairs of features", "make head_dim even")
        if self.heads % self.kv_heads:
            raise self._refusal("kv_heads", f"a divisor of heads={self.heads}", "let every key head serve equally many query heads")
        if not 0.0 <= self.dropout < 1.0:
            raise self._refusal("dropout", "a rate of at least 0 and below 1", "0 turns dropout off")
        if self.rope_theta <= 0 or self.norm_epsilon <= 0:
            field = "rope_theta" if self.rope_theta <= 0 else "norm_epsilon"
            raise self._refusal(field, "a positive number", "leave it out to get the default")
        if self.objective not in ("next_token", "none"):
            raise self._refusal("objective", "'next_token' or 'none'", "'none' suits a model that only feeds others, such as a teacher")
        check_attention(self.attention, owner="Decoder", set_by=set_by(self, "attention"))

    @property
    def head_size(self) -> int:
        """`head_dim` as a number, also where it was left out."""
        return self.embed // self.heads if self.head_dim is None else self.head_dim

    @property
    def has_head(self) -> bool:
        """Whether there are weights that turn hidden states into logits."""
        return self.tied or self.objective == "next_token"

    def __call__(self, rngs: nnx.Rngs) -> DecoderModule:
        """Builds the module with new parameters."""
        return DecoderModule(self, rngs=rngs)

    def _refusal(self, field: str, wanted: str, fix: str) -> ConfigError:
        return ConfigError(
            f"Decoder.{field} does not fit.",
            wanted=wanted,
            have=f"{field}={getattr(self, field)!r}",
            set_by=set_by(self, field),
            fix=fix,
            anchor="decoder-shape",
        )


class DecoderLayers(nnx.Module):
    """All layers in one: parameters have a leading axis, and a call computes one layer with its slice of them."""

    def __init__(self, config: Decoder, *, rngs: nnx.Rngs) -> None:
        stack = (config.layers,)
        # Each layer adds twice to the residual stream; this keeps the variance of the sum at 1 (as in GPT-2).
        output_scale = 1 / math.sqrt(2 * config.layers)
        self.attention_norm = RMSNorm(config.embed, config.norm_epsilon, stack=stack)
        self.attention = GroupedQueryAttention(
            config.embed,
            config.heads,
            config.kv_heads,
            config.head_size,
            kind=config.attention,
            output_scale=output_scale,
            stack=stack,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(config.embed, config.norm_epsilon, stack=stack)
        self.mlp = SwiGLU(config.embed, config.mlp, output_scale=output_scale, stack=stack, rngs=rngs)
        self.dropout = config.dropout

    def __call__(self, x_RLD: jax.Array, layer: jax.Array, batch: Batch, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns [R, L, D] after layer number `layer`, whose parameters this module holds during the scan."""
        mixed_RLD = self.attention(self.attention_norm(x_RLD), angles, batch["segment_ids"], batch["positions"])
        x_RLD += _dropout(mixed_RLD, self.dropout, batch, layer, _ATTENTION)
        return x_RLD + _dropout(self.mlp(self.mlp_norm(x_RLD)), self.dropout, batch, layer, _MLP)


class DecoderModule(nnx.Module):
    """A decoder's parameters and its computation; made by calling a `Decoder`.

    Args:
        config: sizes and choices.
        rngs: source of the initial parameters ("params").
    """

    def __init__(self, config: Decoder, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = VocabularyTable(config.vocab_size, config.embed, rngs=rngs)
        self.layers = DecoderLayers(config, rngs=rngs)
        self.final_norm = RMSNorm(config.embed, config.norm_epsilon)
        if config.has_head and not config.tied:
            self.head = VocabularyTable(config.vocab_size, config.embed, rngs=rngs)

    def __call__(self, batch: Batch) -> dict[str, jax.Array]:
        """Computes hidden states, and the sums of the next-token loss when that is the objective.

        Args:
            batch: "tokens", "segment_ids", "positions" int32 and "sample_ids" uint32, all [R, L]; for the loss also
                "targets" int32 and "loss_mask" float32; "key" uint32[2] while training with dropout.

        Returns:
            "hidden" [R, L, D] after the final norm; for the loss also "cross_entropy" (nats) and "accuracy", float32
            sums over tokens weighted by the mask.
        """
        hidden_RLD = self._hidden(batch)
        outputs = {"hidden": hidden_RLD}
        if self.config.objective == "next_token":
            hidden_ND = hidden_RLD.reshape(-1, hidden_RLD.shape[-1])
            targets_N, mask_N = batch["targets"].reshape(-1), batch["loss_mask"].reshape(-1)
            outputs |= next_token_sums(hidden_ND, self.head_weight(), targets_N, mask_N, self.config.loss_chunk)
        return outputs

    def head_weight(self) -> jax.Array:
        """Returns the weights [V, D] that make logits of hidden states: the head's, or the embedding's when tied.

        Raises:
            ConfigError: the configuration has no head.
        """
        if not self.config.has_head:
            raise ConfigError(
                "this Decoder has no output head.",
                wanted="objective='next_token' or tied=True",
                have=f"objective={self.config.objective!r}, tied={self.config.tied}",
                set_by=set_by(self.config, "objective"),
                fix="set Decoder.objective = 'next_token'; a loss that nobody uses costs nothing",
                anchor="decoder-without-head",
            )
        return (self.embedding if self.config.tied else self.head).weight[...]

    def _hidden(self, batch: Batch) -> jax.Array:
        config = self.config
        x_RLD = self.embedding.weight[...][batch["tokens"]]
        x_RLD = _dropout(x_RLD, config.dropout, batch, 0, _EMBEDDING)
        angles = rotary_angles(batch["positions"], config.head_size, config.rope_theta)
        graph, weights = nnx.split(self.layers)

        # The products with weights are kept for the backward pass; norms, rotations, scores and gates are made again.
        # That is little work, and saves more time on memory than it costs, besides the memory itself.
        @functools.partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def one_layer(x_RLD: jax.Array, piece: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
            layer_weights, layer = piece
            return nnx.merge(graph, layer_weights)(x_RLD, layer, batch, angles), None

        x_RLD, _ = jax.lax.scan(one_layer, x_RLD, (weights, jnp.arange(config.layers)))
        return self.final_norm(x_RLD)


def _dropout(x_RLD: jax.Array, rate: float, batch: Batch, layer: jax.Array | int, place: int) -> jax.Array:
    return token_dropout(x_RLD, rate, batch.get("key"), batch["sample_ids"], batch["positions"], layer=layer, place=place)
