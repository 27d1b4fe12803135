"""A decoder-only language model for packed rows: the shape of Llama and Qwen, with layers stacked and scanned.

`Decoder` is the configuration; calling it with `rngs` builds the module. Twelve parameter leaves (a few more with biases,
or norms of queries and keys) hold any number of layers, because the host pays for each leaf of each task.

Dimensions: R rows, L length, D embed, V vocabulary, N = R * L tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
from flax import nnx

from ..config import configurable
from ..errors import ConfigError, set_by
from .heads import next_token_sums
from .layers import ACTIVATIONS, RMSNorm, VocabularyTable, rotary_angles
from .rope import RopeScaling
from .stack import EMBEDDING, Batch, LayerStack, batch_dropout, check_layers, check_positive, refuse_size

ROPE_POSITIONS = "rope_positions"
"""Item array int32 [units, 3]: time, row and column, for rotary positions in three dimensions."""


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
        rope_sections: pairs of features that turn by time, row and column, as in Qwen2.5-VL; positions are then those of the item array
            "rope_positions", where the data has it. (): all turn by the place in the text.
        rope_scaling: LinearScaling(), Llama3Scaling() or YarnScaling(), for longer texts than the model was first trained on; None: none.
        norm_epsilon: added to the mean square in the norms.
        qk_norm: normalise the queries and keys of each head, as Qwen3 does.
        qkv_bias: add biases to queries, keys and values, as Qwen2 does.
        activation: of the gated MLP: "silu" (SwiGLU), "gelu" or "gelu_tanh", which approximates it.
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
    >>> import jax.numpy as jnp
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
    rope_sections: tuple[int, ...] = ()
    rope_scaling: Any = None
    norm_epsilon: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    tied: bool = False
    dropout: float = 0.0
    objective: Literal["next_token", "none"] = "next_token"
    loss_chunk: int = 256
    attention: str = "dense"

    def __post_init__(self) -> None:
        check_positive(self, ("vocab_size", "loss_chunk"), "decoder-shape")
        check_layers(self, "decoder-shape")
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.embed // self.heads)
        if self.objective not in ("next_token", "none"):
            fix = "'none' suits a model that only feeds others, such as a teacher"
            refuse_size(self, "objective", "'next_token' or 'none'", fix, "decoder-shape")
        if self.activation not in ACTIVATIONS:
            refuse_size(self, "activation", f"one of {', '.join(ACTIVATIONS)}", "silu is what Llama and Qwen use", "decoder-shape")
        if self.rope_sections and sum(self.rope_sections) != self.head_size // 2:
            wanted = f"numbers that add up to half of a head's features, {self.head_size // 2}"
            refuse_size(self, "rope_sections", wanted, "take them from the config.json of the model", "decoder-shape")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            wanted, fix = (
                "LinearScaling(), Llama3Scaling(), YarnScaling(), or None",
                "in a config file write @YarnScaling(), with parentheses",
            )
            refuse_size(self, "rope_scaling", wanted, fix, "decoder-shape")

    @property
    def biases(self) -> bool:
        """Outputs of attention and maps of the MLP have none."""
        return False

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


class DecoderModule(nnx.Module):
    """A decoder's parameters and its computation; made by calling a `Decoder`.

    Args:
        config: sizes and choices.
        rngs: source of the initial parameters ("params").
    """

    def __init__(self, config: Decoder, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = VocabularyTable(config.vocab_size, config.embed, rngs=rngs)
        self.layers = LayerStack(config, rngs=rngs)
        self.final_norm = RMSNorm(config.embed, config.norm_epsilon)
        if config.has_head and not config.tied:
            self.head = VocabularyTable(config.vocab_size, config.embed, rngs=rngs)

    def __call__(self, batch: Batch) -> dict[str, jax.Array]:
        """Computes hidden states, and the sums of the next-token loss when that is the objective.

        Args:
            batch: "tokens", "segment_ids", "positions" int32 and "sample_ids" uint32, all [R, L]; for the loss also
                "targets" int32 and "loss_mask" float32; "key" uint32[2] while training with dropout; with rope_sections,
                "rope_positions" int32 [R, L, 3], which text alone may leave out.

        Returns:
            "hidden" [R, L, D] after the final norm; for the loss also "cross_entropy" (nats) and "accuracy", float32
            sums over tokens weighted by the mask.
        """
        hidden_RLD = self.hidden_states(self.embed(batch), batch)
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

    def embed(self, batch: Batch) -> jax.Array:
        """Returns the embeddings [R, L, D] of "tokens"."""
        return self.embedding.weight[...][batch["tokens"]]

    def hidden_states(self, x_RLD: jax.Array, batch: Batch) -> jax.Array:
        """Runs the layers and the final norm.

        Args:
            x_RLD: what stands for the tokens: their embeddings, or rows of another model in their places.
            batch: as in `__call__`; tokens and targets are not looked at.

        Returns:
            [R, L, D], the last hidden states.
        """
        config = self.config
        x_RLD = batch_dropout(x_RLD, config.dropout, batch, 0, EMBEDDING)
        angles = rotary_angles(self._rope_positions(batch), config.head_size, config.rope_theta, config.rope_scaling, config.rope_sections)
        return self.final_norm(self.layers(x_RLD, batch, angles, batch["positions"]))

    def _rope_positions(self, batch: Batch) -> jax.Array:
        """[R, L] for text that turns by its place alone, [R, L, dimensions] where the data says more."""
        if self.config.rope_sections and ROPE_POSITIONS in batch:
            return batch[ROPE_POSITIONS]
        return batch["positions"]
