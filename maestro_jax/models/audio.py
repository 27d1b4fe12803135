"""An encoder of sound for packed clips of any length: log-mel frames, convolutions over time, a transformer.

As in Whisper (arXiv 2212.04356) two convolutions come first: one over neighbouring frames, one that makes a single row of
`stride` frames. In packed rows a clip's neighbour may be another clip: at its borders a convolution sees zeros, as it
would at the ends of a clip on its own.

Dimensions: R rows, L length, M mel bands, C channels, K frames of a kernel, S stride, T = L / S, D embed, W width.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import configurable
from .encoder import Embedding, EncoderModule, EncoderSizes, check_rows, check_width
from .layers import rotary_angles
from .stack import EMBEDDING, Batch, batch_dropout, check_positive, refuse_size


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioEncoder(EncoderSizes):
    """Sizes and choices of an encoder of sound; each item that it reads is a clip, as log-mel frames.

    Args:
        layers: number of layers.
        embed: width of the hidden state.
        heads: attention heads.
        mlp: width inside the gated MLP.
        mels: mel bands of a frame.
        stride: frames that become one row that comes out; the layers see one row in their place.
        kernel: frames that the first convolution looks at, odd.
        width: width of the rows that come out, usually the LLM's embed; None leaves out the projector: rows are `embed` wide.
        projector_mlp: width inside the projector; `embed` when not given.
        projector_activation: of the projector: "gelu", or "gelu_tanh", which approximates it.
        head_dim: features of a head, even; embed // heads when not given.
        rope_theta: base of the rotary wave lengths.
        norm_epsilon: added to the mean square in the norms.
        dropout: rate after the convolutions, attention and MLP; noise belongs to a row, wherever it is computed.
        biases: add biases to all maps of the layers and of the projector.
        attention: registered kind of attention.

    Raises:
        ConfigError: sizes that do not fit together, or an unknown choice.

    >>> config = AudioEncoder(layers=2, embed=16, heads=4, mlp=32, mels=5, stride=4, width=24)
    >>> ids = jnp.ones((1, 8), jnp.int32)
    >>> batch = {"frames": jnp.ones((1, 8, 5)), "segment_ids": ids}
    >>> batch |= {"positions": jnp.arange(8)[None], "sample_ids": ids.astype(jnp.uint32)}
    >>> config(nnx.Rngs(0))(batch)["hidden"].shape
    (1, 2, 24)
    """

    mels: int
    stride: int = 2
    kernel: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("mels", "stride", "kernel"), "encoder-shape")
        if self.kernel % 2 == 0:
            refuse_size(self, "kernel", "an odd number: as many frames before as after", "3 is usual", "encoder-shape")

    def __call__(self, rngs: nnx.Rngs) -> AudioEncoderModule:
        """Builds the module with new parameters."""
        return AudioEncoderModule(self, rngs=rngs)


class AudioEncoderModule(EncoderModule):
    """The parameters of an encoder of sound and its computation; made by calling an `AudioEncoder`.

    Args:
        config: sizes and choices.
        rngs: source of the initial parameters ("params").
    """

    def __init__(self, config: AudioEncoder, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, merge=1, rngs=rngs)
        self.config = config
        self.frames = Embedding((config.kernel, config.mels), (None, None), config.embed, rngs=rngs)
        self.strides = Embedding((config.stride, config.embed), (None, "embed"), config.embed, rngs=rngs)

    def __call__(self, batch: Batch) -> dict[str, jax.Array]:
        """Computes one row for each `stride` frames.

        Args:
            batch: "frames" float [R, L, M]; "segment_ids", "positions" int32 and "sample_ids" uint32 [R, L]; "key" uint32[2] while
                training with dropout.

        Returns:
            "hidden" [R, T, W].

        Raises:
            ConfigError: the frames have another number of bands, or rows cannot be cut into `stride` units.
        """
        config, stride = self.config, self.config.stride
        check_width(config, "mels", batch["frames"], config.mels)
        check_rows(config, "stride", batch["frames"].shape[1], stride)
        x_RLD = jax.nn.gelu(self.frames(neighbours(batch["frames"], batch["segment_ids"], config.kernel)))
        rows, length, embed = x_RLD.shape
        x_RTD = jax.nn.gelu(self.strides(x_RLD.reshape(rows, length // stride, stride, embed)))
        strided = {name: batch[name][:, ::stride] for name in ("segment_ids", "sample_ids")}
        strided["positions"] = batch["positions"][:, ::stride] // stride
        strided |= {name: batch[name] for name in ("key",) if name in batch}
        x_RTD = batch_dropout(x_RTD, config.dropout, strided, 0, EMBEDDING)
        return {"hidden": self.encode(x_RTD, strided, rotary_angles(strided["positions"], config.head_size, config.rope_theta))}


def neighbours(x_RLC: jax.Array, segment_ids_RL: jax.Array, kernel: int) -> jax.Array:
    """Each unit with those around it, which is all that a convolution needs.

    Args:
        x_RLC: packed rows.
        segment_ids_RL: int32, 0 for padding, items of a row numbered from 1.
        kernel: K, odd.

    Returns:
        [R, L, K, C], zero where the neighbour belongs to another segment or lies beyond the row.

    >>> neighbours(jnp.arange(1.0, 5.0).reshape(1, 4, 1), jnp.array([[1, 1, 1, 2]]), 3)[0, :, :, 0]
    Array([[0., 1., 2.],
           [1., 2., 3.],
           [2., 3., 0.],
           [0., 4., 0.]], dtype=float32)
    """
    reach, length = kernel // 2, x_RLC.shape[1]
    wide_x = jnp.pad(x_RLC, ((0, 0), (reach, reach), (0, 0)))
    # No segment has the number -1.
    wide_ids = jnp.pad(segment_ids_RL, ((0, 0), (reach, reach)), constant_values=-1)
    shifted = []
    for shift in range(kernel):
        window = slice(shift, shift + length)
        own_RL1 = (wide_ids[:, window] == segment_ids_RL)[..., None]
        shifted.append(jnp.where(own_RL1, wide_x[:, window], jnp.zeros((), x_RLC.dtype)))
    return jnp.stack(shifted, axis=2)
