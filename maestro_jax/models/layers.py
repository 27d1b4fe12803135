"""The parts of decoders and encoders: annotated parameters, RMSNorm, rotary positions, grouped-query attention, gated MLP.

Equal layers are one module whose parameters have a leading axis `layers`; a scan cuts one layer out of it and calls
it. Parts therefore make their parameters with any leading shape (`stack`) and compute with those of one layer.

Parameters are float32 when made. What is computed follows the parameters that are passed in: with bfloat16 ones the
matrix products are bfloat16, while norms, softmax and sums of products stay float32.

Dimensions: R rows, L length, D embed, H query heads, G key heads, K features of a head, F width of the MLP.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import attention
from .rope import RopeScaling

Names = tuple[str | None, ...]

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
"""What a gated MLP applies to its gate."""


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], names: Names, scale: float) -> nnx.Param[jax.Array]:
    """Makes a float32 parameter, normally distributed with standard deviation `scale`.

    Args:
        rngs: source of the key ("params").
        shape: shape of the array.
        names: logical name of each axis, or None for an axis that is never sharded.
        scale: standard deviation.

    Returns:
        A parameter whose metadata `out_sharding` holds the names. It is not placed: sections place parameters by their
        own rules, and eager sharding would refuse logical names outside of a mesh.

    >>> parameter(nnx.Rngs(0), (4, 2), ("vocab", "embed"), 0.02).get_metadata("out_sharding")
    ('vocab', 'embed')
    """
    value = scale * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


class VocabularyTable(nnx.Module):
    """A table [vocab, embed]: the embedding, or an output head, which has the same layout.

    Args:
        vocab_size: V.
        embed: D.
        rngs: source of the key.
    """

    def __init__(self, vocab_size: int, embed: int, *, rngs: nnx.Rngs) -> None:
        # 0.02 is GPT-2's: small logits at the start, so that the first loss is close to log V.
        self.weight = parameter(rngs, (vocab_size, embed), ("vocab", "embed"), 0.02)


def project(x: jax.Array, weight: jax.Array, contracted: int = 1, bias: jax.Array | None = None) -> jax.Array:
    """Contracts the last axes of activations with the first axes of a weight, and adds a bias.

    The axes of tokens are flattened to one, so that the gradient of the weight contracts a single axis: a product with
    a transposed matrix, which libraries do in place. With [rows, length] kept apart, XLA on CPU copies activations
    through a strided transpose for each gradient, and the backward of a layer took four times as long. The weight is
    not reshaped: its reshaped form would be saved for the backward pass, a copy of all parameters.

    Args:
        x: [..., *inputs].
        weight: [*inputs, *outputs].
        contracted: number of axes in `inputs`.
        bias: [*outputs], or None.

    Returns:
        [..., *outputs].

    >>> project(jnp.ones((2, 3, 4, 5)), jnp.ones((4, 5, 6)), contracted=2).shape
    (2, 3, 6)
    """
    kept = x.ndim - contracted
    y = jnp.tensordot(x.reshape(-1, *x.shape[kept:]), weight, axes=contracted)
    if bias is not None:
        y += bias[None]
    return y.reshape(*x.shape[:kept], *weight.shape[contracted:])


def value_of(module: nnx.Module, name: str) -> jax.Array | None:
    """Returns the value of a parameter that a module may be without, such as a bias; None where it is."""
    found = getattr(module, name, None)
    return None if found is None else found[...]


class RMSNorm(nnx.Module):
    """Root mean square normalisation over the last axis (Zhang and Sennrich, arXiv 1910.07467), in float32.

    Args:
        embed: D.
        epsilon: added to the mean square.
        stack: leading shape of the parameter, `(layers,)` in a stack.
        name: logical name of the last axis.
    """

    def __init__(self, embed: int, epsilon: float, *, stack: tuple[int, ...] = (), name: str = "embed") -> None:
        names = ("layers",) * len(stack) + (name,)
        self.scale = nnx.Param(jnp.ones((*stack, embed), jnp.float32), out_sharding=names, eager_sharding=False)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape and dtype of `x`, [R, L, D] or [R, L, heads, D]."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        return (wide * inverse * scale).astype(x.dtype)


def rotary_angles(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None, sections: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary position embedding (Su et al., arXiv 2104.09864).

    Args:
        positions: int32 [R, L], or [R, L, dimensions], where `sections` says which pairs of features turn by which (Qwen2-VL, P. Wang
            et al., arXiv 2409.12191).
        head_dim: K, even.
        theta: base of the wave lengths; pair i turns by position * theta^(-2 i / K).
        scaling: changes these rates, for longer texts than the model was first trained on.
        sections: for each dimension, how many pairs turn by it, in order.

    Returns:
        Two float32 arrays [R, L, K / 2].
    """
    rates_K = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        rates_K = scaling.scaled(rates_K, theta)
    if positions.ndim == 3:
        positions = jnp.repeat(positions, jnp.array(sections), axis=-1, total_repeat_length=head_dim // 2)
    else:
        positions = positions[:, :, None]
    angles_RLK = positions.astype(jnp.float32) * rates_K[None, None, :]
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return amplitude * jnp.cos(angles_RLK), amplitude * jnp.sin(angles_RLK)


def rotate(x_RLHK: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns pairs of features (i, i + K / 2) by their angles; the pairing is that of Llama weights on Hugging Face.

    Args:
        x_RLHK: queries or keys.
        angles: cosines and sines from `rotary_angles`.

    Returns:
        An array of the shape and dtype of `x_RLHK`; computed in float32.
    """
    cos_RL1K, sin_RL1K = angles[0][:, :, None, :], angles[1][:, :, None, :]
    first_RLHK, second_RLHK = jnp.split(x_RLHK.astype(jnp.float32), 2, axis=-1)
    turned = [first_RLHK * cos_RL1K - second_RLHK * sin_RL1K, second_RLHK * cos_RL1K + first_RLHK * sin_RL1K]
    return jnp.concatenate(turned, axis=-1).astype(x_RLHK.dtype)


class GroupedQueryAttention(nnx.Module):
    """Attention with fewer key heads than query heads (Ainslie et al., arXiv 2305.13245).

    Args:
        embed: D.
        heads: H.
        kv_heads: G, a divisor of H.
        head_dim: K.
        kind: name of a registered kind of attention.
        output_scale: factor on the initial scale of the output projection.
        stack: leading shape of the parameters.
        bias: whether queries, keys and values have biases, zero at first.
        output_bias: whether what comes out has one, zero at first.
        qk_epsilon: queries and keys are normalised over a head's features, with this epsilon; None: they are not.
        rngs: source of keys.
    """

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        kind: str,
        output_scale: float,
        stack: tuple[int, ...] = (),
        bias: bool = False,
        output_bias: bool = False,
        qk_epsilon: float | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        names, scale = ("layers",) * len(stack), 1 / math.sqrt(embed)
        self.query = parameter(rngs, (*stack, embed, heads, head_dim), (*names, "embed", "heads", "head_dim"), scale)
        self.key = parameter(rngs, (*stack, embed, kv_heads, head_dim), (*names, "embed", "kv_heads", "head_dim"), scale)
        self.value = parameter(rngs, (*stack, embed, kv_heads, head_dim), (*names, "embed", "kv_heads", "head_dim"), scale)
        output_scale /= math.sqrt(heads * head_dim)
        self.output = parameter(rngs, (*stack, heads, head_dim, embed), (*names, "heads", "head_dim", "embed"), output_scale)
        self.kind, self.normed = kind, qk_epsilon is not None
        if output_bias:
            self.output_bias = parameter(rngs, (*stack, embed), (*names, "embed"), 0.0)
        if bias:
            sizes = {"query": ("heads", heads), "key": ("kv_heads", kv_heads), "value": ("kv_heads", kv_heads)}
            for part, (name, size) in sizes.items():
                setattr(self, f"{part}_bias", parameter(rngs, (*stack, size, head_dim), (*names, name, "head_dim"), 0.0))
        if qk_epsilon is not None:
            self.query_norm = RMSNorm(head_dim, qk_epsilon, stack=stack, name="head_dim")
            self.key_norm = RMSNorm(head_dim, qk_epsilon, stack=stack, name="head_dim")

    def __call__(
        self,
        x_RLD: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        segment_ids_RL: jax.Array,
        positions_RL: jax.Array | None,
        *,
        windows: bool = False,
    ) -> jax.Array:
        """Returns [R, L, D]; see `attention` for what a token sees, and for `windows`."""
        q_RLHK, k_RLGK, v_RLGK = self.heads(x_RLD, angles)
        mixed_RLHK = attention(q_RLHK, k_RLGK, v_RLGK, segment_ids_RL, positions_RL, self.kind, windows=windows)
        return self.mixed(mixed_RLHK)

    def heads(self, x_RLD: jax.Array, angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [R, L, H, K], keys and values [R, L, G, K], queries and keys turned by their positions."""
        q_RLHK, k_RLGK, v_RLGK = (self._projected(x_RLD, part) for part in ("query", "key", "value"))
        if self.normed:
            q_RLHK, k_RLGK = self.query_norm(q_RLHK), self.key_norm(k_RLGK)
        return rotate(q_RLHK, angles), rotate(k_RLGK, angles), v_RLGK

    def mixed(self, mixed_RLHK: jax.Array) -> jax.Array:
        """Returns [R, L, D] of what attention made of the values."""
        return project(mixed_RLHK, self.output[...], contracted=2, bias=value_of(self, "output_bias"))

    def _projected(self, x_RLD: jax.Array, part: str) -> jax.Array:
        return project(x_RLD, getattr(self, part)[...], bias=value_of(self, f"{part}_bias"))


class GatedMLP(nnx.Module):
    """Gated MLP, down(activation(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202); with silu it is SwiGLU.

    Args:
        embed: D.
        width: F.
        output_scale: factor on the initial scale of the down projection.
        activation: a name of `ACTIVATIONS`.
        stack: leading shape of the parameters.
        bias: whether all three maps have biases, zero at first.
        rngs: source of keys.
    """

    def __init__(
        self,
        embed: int,
        width: int,
        *,
        output_scale: float,
        activation: str = "silu",
        stack: tuple[int, ...] = (),
        bias: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        names = ("layers",) * len(stack)
        self.gate = parameter(rngs, (*stack, embed, width), (*names, "embed", "mlp"), 1 / math.sqrt(embed))
        self.up = parameter(rngs, (*stack, embed, width), (*names, "embed", "mlp"), 1 / math.sqrt(embed))
        self.down = parameter(rngs, (*stack, width, embed), (*names, "mlp", "embed"), output_scale / math.sqrt(width))
        self.activation = activation
        if bias:
            for part, (name, size) in {"gate": ("mlp", width), "up": ("mlp", width), "down": ("embed", embed)}.items():
                setattr(self, f"{part}_bias", parameter(rngs, (*stack, size), (*names, name), 0.0))

    def __call__(self, x_RLD: jax.Array) -> jax.Array:
        """Returns [R, L, D]."""
        gate_RLF = ACTIVATIONS[self.activation](self._projected(x_RLD, "gate"))
        return self._projected(gate_RLF * self._projected(x_RLD, "up"), "down")

    def _projected(self, x: jax.Array, part: str) -> jax.Array:
        return project(x, getattr(self, part)[...], bias=value_of(self, f"{part}_bias"))
