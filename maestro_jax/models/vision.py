"""A vision transformer for packed images of any resolution (as in NaViT, arXiv 2307.06304, and Qwen2-VL, arXiv 2409.12191).

Patches of several images lie in one row; each has its row and column in its image, which turn the queries and keys
(rotary positions in two dimensions) or choose learned vectors. Attention runs in both directions inside an image. At the
end merge x merge neighbouring patches become one row for the LLM: they lie behind one another in the data.

Dimensions: R rows, L length, P numbers of a patch, D embed, K features of a head, T = L / merge^2, W width.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import configurable
from .encoder import Embedding, EncoderModule, EncoderSizes, check_rows, check_width
from .layers import parameter, rotary_angles
from .stack import EMBEDDING, Angles, Batch, Windows, batch_dropout, check_positive, refuse_size

MOST_WINDOWS = 512
"""Along a side of an image; windows of 8 patches of 14 pixels reach 57,000 pixels."""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionTransformer(EncoderSizes):
    """Sizes and choices of a vision transformer; each item that it reads is an image, as patches.

    Args:
        layers: number of layers.
        embed: width of the hidden state.
        heads: attention heads.
        mlp: width inside the gated MLP.
        patch_size: height and width of a patch in pixels.
        channels: numbers of a pixel; a patch is patch_size^2 * channels * frames numbers.
        frames: pictures in a patch, one behind the other in time; an image stands in all of them.
        patch_bias: whether the embedding of patches has a bias.
        merge: merge x merge neighbouring patches become one row that comes out.
        window: patches along a side of the square windows in which most layers attend, a multiple of merge; None: all see whole images.
        whole_layers: numbers of the layers that see whole images all the same, from 0.
        width: width of the rows that come out, usually the LLM's embed; None leaves out the projector: rows are merge^2 * embed wide.
        projector_mlp: width inside the projector; merge^2 * embed when not given.
        projector_activation: of the projector: "gelu", or "gelu_tanh", which approximates it.
        positions: "rotary" turns queries and keys by row and column, at any resolution; "learned" adds a vector for each row and column.
        grid: most rows, and most columns, of patches in an image, for learned positions; a patch beyond them makes the loss NaN.
        head_dim: features of a head, a multiple of 4; embed // heads when not given.
        rope_theta: base of the rotary wave lengths; a small one, such as 100, tells the patches of small images apart.
        norm_epsilon: added to the mean square in the norms.
        dropout: rate after the embedding, attention and MLP; noise belongs to a patch, wherever it is computed.
        biases: add biases to all maps of the layers and of the projector.
        attention: registered kind of attention.

    Raises:
        ConfigError: sizes that do not fit together, or an unknown choice.

    >>> config = VisionTransformer(layers=2, embed=16, heads=4, mlp=32, patch_size=2, channels=1, width=24)
    >>> ids = jnp.ones((1, 8), jnp.int32)
    >>> batch = {"patches": jnp.ones((1, 8, 4)), "coords": jnp.zeros((1, 8, 2), jnp.int32)}
    >>> batch |= {"segment_ids": ids, "positions": jnp.arange(8)[None], "sample_ids": ids.astype(jnp.uint32)}
    >>> config(nnx.Rngs(0))(batch)["hidden"].shape
    (1, 2, 24)
    """

    patch_size: int
    channels: int = 3
    frames: int = 1
    patch_bias: bool = True
    merge: int = 2
    window: int | None = None
    whole_layers: tuple[int, ...] = ()
    positions: Literal["rotary", "learned"] = "rotary"
    grid: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("patch_size", "channels", "frames", "merge", "window", "grid"), "encoder-shape")
        if self.window is not None and self.window % self.merge:
            refuse_size(self, "window", f"a multiple of merge={self.merge}", "let windows hold whole blocks of patches", "encoder-shape")
        if not all(0 <= layer < self.layers for layer in self.whole_layers):
            wanted = f"numbers from 0 to {self.layers - 1}"
            refuse_size(self, "whole_layers", wanted, "name layers that there are", "encoder-shape")

    @property
    def turned(self) -> int:
        """Rows turn one half of a head's features and columns the other, each in pairs."""
        return 4

    @property
    def patch(self) -> int:
        """Numbers of a patch."""
        return self.patch_size**2 * self.channels * self.frames

    def __call__(self, rngs: nnx.Rngs) -> VisionTransformerModule:
        """Builds the module with new parameters."""
        return VisionTransformerModule(self, rngs=rngs)


class VisionTransformerModule(EncoderModule):
    """A vision transformer's parameters and its computation; made by calling a `VisionTransformer`.

    Args:
        config: sizes and choices.
        rngs: source of the initial parameters ("params").
    """

    def __init__(self, config: VisionTransformer, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, merge=config.merge**2, rngs=rngs)
        self.config = config
        self.patches = Embedding((config.patch,), (None,), config.embed, bias=config.patch_bias, rngs=rngs)
        if config.positions == "learned":
            self.row_positions = parameter(rngs, (config.grid, config.embed), (None, "embed"), 0.1)
            self.column_positions = parameter(rngs, (config.grid, config.embed), (None, "embed"), 0.1)

    def __call__(self, batch: Batch) -> dict[str, jax.Array]:
        """Computes one row for each merge x merge patches.

        Args:
            batch: "patches" float [R, L, P]; "coords" int32 [R, L, 2], row and column of each patch in its image; "segment_ids",
                "positions" int32 and "sample_ids" uint32 [R, L]; "key" uint32[2] while training with dropout.

        Returns:
            "hidden" [R, T, W].

        Raises:
            ConfigError: the patches have another size, or rows cannot be cut into merge^2 units.
        """
        config = self.config
        check_width(config, "patch_size", batch["patches"], config.patch)
        check_rows(config, "merge", batch["patches"].shape[1], self.merge)
        x_RLD = self.patches(batch["patches"])
        coords_RL2 = batch["coords"]
        if config.positions == "learned":
            x_RLD += _rows_of(self.row_positions[...], coords_RL2[..., 0]) + _rows_of(self.column_positions[...], coords_RL2[..., 1])
            coords_RL2 = jnp.zeros_like(coords_RL2)
        x_RLD = batch_dropout(x_RLD, config.dropout, batch, 0, EMBEDDING)
        angles = rotary_angles_2d(coords_RL2, config.head_size, config.rope_theta)
        return {"hidden": self.encode(x_RLD, batch, angles, self._windows(batch))}

    def _windows(self, batch: Batch) -> Windows | None:
        config = self.config
        if config.window is None:
            return None
        whole = tuple(layer in config.whole_layers for layer in range(config.layers))
        return Windows(numbers=window_numbers(batch["segment_ids"], batch["coords"], config.window), whole=whole)


def window_numbers(segment_ids_RL: jax.Array, coords_RL2: jax.Array, window: int) -> jax.Array:
    """Numbers the windows of packed images; what lies in one need not lie side by side in the row.

    Args:
        segment_ids_RL: int32, 0 for padding.
        coords_RL2: int32, row and column of each patch in its image.
        window: patches along a side of a window, counted from the first row and column.

    Returns:
        int32 [R, L], 0 for padding.

    >>> coords = jnp.array([[[0, 0], [0, 1], [0, 2], [1, 0], [0, 0], [0, 0]]])
    >>> numbers = window_numbers(jnp.array([[1, 1, 1, 1, 2, 0]]), coords, 2)[0]
    >>> [int(numbers[n] == numbers[0]) for n in range(6)], int(numbers[5])
    ([1, 1, 0, 1, 0, 0], 0)
    """
    rows_RL, columns_RL = coords_RL2[..., 0] // window, coords_RL2[..., 1] // window
    numbers_RL = (segment_ids_RL * MOST_WINDOWS + rows_RL) * MOST_WINDOWS + columns_RL
    return jnp.where(segment_ids_RL > 0, numbers_RL, 0)


def rotary_angles_2d(coords_RL2: jax.Array, head_dim: int, theta: float) -> Angles:
    """Cosines and sines of rotary positions in two dimensions: rows turn half of the pairs of features, columns the others.

    Args:
        coords_RL2: int32, row and column.
        head_dim: K, a multiple of 4.
        theta: base of the wave lengths, as in `rotary_angles` with K / 2 features.

    Returns:
        Two float32 arrays [R, L, K / 2].
    """
    rows, columns = (rotary_angles(coords_RL2[..., n], head_dim // 2, theta) for n in range(2))
    cosines, sines = (jnp.concatenate(pair, axis=-1) for pair in zip(rows, columns, strict=True))
    return cosines, sines


def _rows_of(table_GD: jax.Array, index_RL: jax.Array) -> jax.Array:
    # Clamped, as indexing does by itself, a patch beyond the grid would pass for one at its edge.
    return table_GD.at[index_RL].get(mode="fill", fill_value=jnp.nan)
