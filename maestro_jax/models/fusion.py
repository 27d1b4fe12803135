"""A decoder that reads rows of other models in the places of some of its tokens: text with images and sound.

Where the data names a row, the row stands for the token: the embedding of the placeholder token is not used. What arrives
has the decoder's width, or goes through a projector that is trained here, as when an encoder is frozen.

Dimensions: R rows, L length, D embed of the decoder, N = R * L tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import check_fields, configurable
from ..errors import ConfigError, did_you_mean, set_by
from .decoder import ROPE_POSITIONS, Decoder
from .heads import masked_sums
from .projector import Projector
from .stack import Batch, check_positive
from .weights import Source, weights_below


class LanguageModel(Protocol):
    """What a decoder must offer; `DecoderModule` does."""

    def embed(self, batch: Batch) -> jax.Array:
        """Returns the embeddings of the tokens [R, L, D]."""
        ...

    def hidden_states(self, x_RLD: jax.Array, batch: Batch) -> jax.Array:
        """Returns the last hidden states [R, L, D] of embeddings."""
        ...

    def head_weight(self) -> jax.Array:
        """Returns the vocabulary head [V, D] that belongs to the hidden states."""
        ...


Kind = Literal["accuracy", "cross_entropy"]

_NEXT_TOKEN: Mapping[str, tuple[Kind, str]] = {
    "cross_entropy": ("cross_entropy", "loss_mask"),
    "accuracy": ("accuracy", "loss_mask"),
}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Multimodal:
    """A decoder with inputs from encoders, and any number of objectives, each over tokens of its own.

    Args:
        decoder: a Decoder with a head, or any callable that takes rngs and gives a module like it (see LanguageModel).
        inputs: names of the inputs; a row of input NAME replaces the embedding of each token whose item array NAME_rows is at least 0.
        projectors: input name -> Projector that its rows go through first; inputs without one must have the decoder's width.
        objectives: objective name -> ("cross_entropy" or "accuracy", name of the item array that says which tokens count, and how much).
        chunk: most tokens whose logits exist at once in the loss.

    Raises:
        ConfigError: a name that cannot be used, a chunk that is not positive, or a decoder without a head for the objectives.

    >>> decoder = Decoder(vocab_size=64, layers=2, embed=16, heads=4, kv_heads=2, mlp=32)
    >>> config = Multimodal(decoder=decoder, inputs=("image",), objectives={"digits": ("accuracy", "image_mask")})
    >>> ids = jnp.ones((1, 8), jnp.int32)
    >>> batch = {"tokens": ids, "targets": ids, "image_rows": jnp.array([[0, 1, -1, -1, -1, -1, -1, -1]]), "image_mask": jnp.ones((1, 8))}
    >>> batch |= {"segment_ids": ids, "positions": jnp.arange(8)[None], "sample_ids": ids.astype(jnp.uint32)}
    >>> {name: value.shape for name, value in config(nnx.Rngs(0))(batch, image=jnp.ones((1, 8, 16))).items()}
    {'hidden': (1, 8, 16), 'digits': ()}
    """

    decoder: Callable[[nnx.Rngs], Any]
    inputs: tuple[str, ...] = ("image", "audio")
    projectors: Mapping[str, Projector] = dataclasses.field(default_factory=dict)
    objectives: Mapping[str, tuple[Kind, str]] = dataclasses.field(default_factory=lambda: dict(_NEXT_TOKEN))
    chunk: int = 256

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, ("chunk",), "multimodal-names")
        if not all(name.isidentifier() for name in self.inputs) or len(set(self.inputs)) < len(self.inputs):
            self._refuse("inputs", "different names made of letters, digits and underscores", "name each input once")
        unknown = sorted(set(self.projectors) - set(self.inputs))
        if unknown:
            self._refuse("projectors", f"names of inputs: some of {list(self.inputs)}", f"correct or remove {unknown}")
        if "hidden" in self.objectives:
            self._refuse("objectives", "other names than 'hidden', which is an output", "rename the objective")
        decoder = getattr(self.decoder, "config", self.decoder)
        if self.objectives and isinstance(decoder, Decoder) and not decoder.has_head:
            raise ConfigError(
                "Multimodal.decoder has no output head, so its objectives cannot be computed.",
                wanted="a Decoder with objective='next_token' or tied=True",
                have=f"objective={decoder.objective!r}, tied={decoder.tied}",
                set_by=set_by(self, "decoder"),
                fix="set Decoder.objective = 'next_token', or Multimodal.objectives = {} for a decoder that only feeds others",
                anchor="decoder-without-head",
            )

    def __hash__(self) -> int:
        """Of what the mappings hold, as modules are compared by their configurations."""
        return hash((self.decoder, self.inputs, tuple(self.projectors.items()), tuple(self.objectives.items()), self.chunk))

    @property
    def vocab_size(self) -> int | None:
        """Of the decoder: tokens and targets are its own."""
        return getattr(self.decoder, "vocab_size", None)

    @property
    def initial_weights(self) -> Mapping[str, Source]:
        """Those that the decoder names."""
        return weights_below("decoder", self.decoder)

    def __call__(self, rngs: nnx.Rngs) -> MultimodalModule:
        """Builds the module with new parameters."""
        return MultimodalModule(self, rngs=rngs)

    def _refuse(self, field: str, wanted: str, fix: str) -> None:
        raise ConfigError(
            f"Multimodal.{field} has a name that cannot be used.",
            wanted=wanted,
            have=f"{field}={getattr(self, field)!r}",
            set_by=set_by(self, field),
            fix=fix,
            anchor="multimodal-names",
        )


class MultimodalModule(nnx.Module):
    """Parameters at `decoder/...`, and at `NAME_projector/...` for each input that has one.

    Args:
        config: the decoder, the inputs and the objectives.
        rngs: source of the initial parameters ("params").
    """

    def __init__(self, config: Multimodal, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.decoder = config.decoder(rngs)
        for name, projector in config.projectors.items():
            setattr(self, f"{name}_projector", projector(rngs))

    def __call__(self, batch: Batch, **inputs: jax.Array) -> dict[str, jax.Array]:
        """Computes hidden states of text with what arrived, and the sums of all objectives.

        Args:
            batch: what the decoder reads; "NAME_rows" int32 [R, L] for each input; with objectives, "targets" int32 and
                the masks that they name, float32 [R, L].
            inputs: name -> rows [R, L, W] at the units that take them; what lies elsewhere is not looked at.

        Returns:
            "hidden" [R, L, D] after the final norm, and the objectives, float32 sums over tokens weighted by their masks.

        Raises:
            ConfigError: the section passes other inputs, an array is missing in the batch, or a width differs.
        """
        self._check(batch, inputs)
        x_RLD = self.decoder.embed(batch)
        for name in self.config.inputs:
            x_RLD = self._placed(x_RLD, name, inputs[name], batch)
        hidden_RLD = self.decoder.hidden_states(x_RLD, batch)
        outputs = {"hidden": hidden_RLD}
        if self.config.objectives:
            objectives = tuple((name, kind, mask) for name, (kind, mask) in self.config.objectives.items())
            masks = {mask: batch[mask].reshape(-1) for _, _, mask in objectives}
            hidden_ND, targets_N = hidden_RLD.reshape(-1, hidden_RLD.shape[-1]), batch["targets"].reshape(-1)
            outputs |= masked_sums(hidden_ND, self.decoder.head_weight(), targets_N, masks, objectives, self.config.chunk)
        return outputs

    def _placed(self, x_RLD: jax.Array, name: str, arrived: jax.Array, batch: Batch) -> jax.Array:
        """Puts the rows of one input in the places of tokens; padding, whose row numbers mean nothing, keeps its tokens."""
        if name in self.config.projectors:
            arrived = getattr(self, f"{name}_projector")(arrived)
        takes_RL = (batch[f"{name}_rows"] >= 0) & (batch["segment_ids"] > 0)
        if arrived.shape != x_RLD.shape:
            raise ConfigError(
                f"input {name!r} of Multimodal does not have the decoder's width.",
                wanted=f"rows of {x_RLD.shape[-1]} numbers",
                have=f"rows of {arrived.shape[-1]} numbers",
                set_by=set_by(self.config, "inputs"),
                fix=f"set the encoder's width to {x_RLD.shape[-1]}, or give the input a Projector in Multimodal.projectors",
                anchor="multimodal-width",
            )
        return jnp.where(takes_RL[..., None], arrived.astype(x_RLD.dtype), x_RLD)

    def _check(self, batch: Batch, inputs: Mapping[str, jax.Array]) -> None:
        config = self.config
        if set(inputs) != set(config.inputs):
            raise ConfigError(
                "Multimodal gets other inputs than it is made for.",
                wanted=f"inputs {sorted(config.inputs)}",
                have=f"inputs {sorted(inputs)}",
                set_by=set_by(config, "inputs"),
                fix="let Section.inputs and Multimodal.inputs name the same inputs",
                anchor="multimodal-names",
            )
        wanted = {f"{name}_rows": "inputs" for name in config.inputs}
        if config.inputs and getattr(getattr(self.decoder, "config", None), "rope_sections", ()):
            # Text alone may do without; rows of an image without their places would be read as a line of words.
            wanted[ROPE_POSITIONS] = "decoder"
        wanted |= {mask: "objectives" for _, mask in config.objectives.values()}
        for array, field in wanted.items():
            if array not in batch:
                raise ConfigError(
                    f"Multimodal.{field} needs an item array that the data does not have.",
                    wanted=f"one of {sorted(batch)}{did_you_mean(array, sorted(batch))}",
                    have=repr(array),
                    set_by=set_by(config, field),
                    fix="correct the name, or add the array to the items of the stream that the section reads",
                    anchor="multimodal-names",
                )
