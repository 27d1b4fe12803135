"""Dropout whose mask belongs to a token, not to its place in a batch.

Ordinary dropout draws one mask for a whole array, so the noise of a sample changes with the micro-batch, the row and
the replica that it happens to run in. Here the key of each token is made from the step's key, the number of its item
and its position in it, and from the layer and the place in the model; nothing else enters. Cutting or ordering a global
batch in another way moves no mask, and two images of one sample, which have equal positions, have masks of their own.

Dimensions: R rows, L length, D features.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_dropout(
    x_RLD: jax.Array,
    rate: float,
    key: jax.Array | None,
    sample_ids_RL: jax.Array,
    positions_RL: jax.Array,
    *,
    layer: jax.Array | int,
    place: int,
) -> jax.Array:
    """Sets features to zero with probability `rate` and scales the others by `1 / (1 - rate)`.

    Args:
        x_RLD: activations of packed rows.
        rate: probability in [0, 1) that a feature is dropped, kept to 1/65536; 0 returns `x_RLD` as it is.
        key: uint32[2], raw data of a threefry key that carries seed, step and section; None (evaluation) drops nothing.
        sample_ids_RL: uint32, number of the item that each token belongs to, made of its sample and its place in it.
        positions_RL: int32, position of each token in its item.
        layer: number of the layer; may be traced, as in a scan over layers.
        place: number of the place within a layer, so that two dropouts in one layer differ.

    Returns:
        An array like `x_RLD`.

    >>> x = jnp.ones((1, 2, 4))
    >>> ids, positions = jnp.full((1, 2), 7, jnp.uint32), jnp.array([[0, 1]])
    >>> token_dropout(x, 0.5, None, ids, positions, layer=0, place=0) is x
    True
    """
    if key is None or rate == 0.0:
        return x_RLD
    keep_RLD = _keep(rate, key, sample_ids_RL, positions_RL, layer, place, x_RLD.shape[-1])
    return jnp.where(keep_RLD, x_RLD / (1.0 - rate), jnp.zeros_like(x_RLD))


def _keep(
    rate: float, key: jax.Array, sample_ids_RL: jax.Array, positions_RL: jax.Array, layer: jax.Array | int, place: int, features: int
) -> jax.Array:
    base = jax.random.wrap_key_data(key, impl="threefry2x32")
    base = jax.random.fold_in(jax.random.fold_in(base, layer), place)

    # Each word of random bits serves two features, as making the words is nearly all of the work.
    words = -(-features // 2)

    def of_token(sample_id: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(base, sample_id), position), (words,), jnp.uint32)

    words_RLD = jax.vmap(jax.vmap(of_token))(sample_ids_RL, positions_RL)
    halves_RLD = jnp.concatenate([words_RLD & 0xFFFF, words_RLD >> 16], axis=-1)[..., :features]
    return halves_RLD >= min(round(rate * 2**16), 2**16 - 1)
