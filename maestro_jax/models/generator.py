"""A small head that draws an image from a state of another model, so that a loss lies downstream of the LLM.

Dimensions: R rows, L length, D width of a state, Q pixels.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import check_fields, configurable
from .projector import Projector
from .stack import Batch, check_positive


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Redraw:
    """An MLP from states to images; its objective "redraw" is a sum over images of the mean squared error of a pixel.

    Args:
        embed: width of the states that arrive.
        pixels: numbers of an image, for example 64 for 8 x 8 in grey.
        mlp: width inside; `embed` when not given.

    Raises:
        ConfigError: a size is not positive.

    >>> ids = jnp.ones((1, 2), jnp.int32)
    >>> outputs = Redraw(embed=6, pixels=64)(nnx.Rngs(0))({"target": jnp.ones((1, 2, 64)), "segment_ids": ids}, state=jnp.zeros((1, 2, 6)))
    >>> float(outputs["redraw"]), outputs["image"].shape
    (2.0, (1, 2, 64))
    """

    embed: int
    pixels: int
    mlp: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, ("embed", "pixels", "mlp"), "projector-shape")

    def __call__(self, rngs: nnx.Rngs) -> RedrawModule:
        """Builds the module with new parameters."""
        return RedrawModule(self, rngs=rngs)


class RedrawModule(nnx.Module):
    """Parameters at `head/up` and `head/down`; made by calling a `Redraw`.

    Args:
        config: sizes.
        rngs: source of the initial parameters ("params").
    """

    def __init__(self, config: Redraw, *, rngs: nnx.Rngs) -> None:
        self.head = Projector(embed=config.embed, width=config.pixels, mlp=config.mlp)(rngs)

    def __call__(self, batch: Batch, state: jax.Array) -> dict[str, jax.Array]:
        """Draws an image for each unit and compares it with its target.

        Args:
            batch: "target" float32 [R, L, Q], values 0 to 1, and "segment_ids" int32 [R, L].
            state: [R, L, D], the states that arrive.

        Returns:
            "image" [R, L, Q], and "redraw", a float32 scalar: the sum over units of the mean over pixels of the squared error.
        """
        image_RLQ = self.head(state)
        error_RLQ = image_RLQ.astype(jnp.float32) - batch["target"]
        error_RL = jnp.mean(jnp.square(error_RLQ), axis=-1)
        return {"image": image_RLQ, "redraw": jnp.sum(jnp.where(batch["segment_ids"] > 0, error_RL, 0.0))}
