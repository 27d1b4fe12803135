"""The parts of a decoder against their formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maestro_jax.models.layers import GatedMLP, GroupedQueryAttention, RMSNorm, VocabularyTable, project, rotary_angles, rotate


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_rms_norm_divides_by_the_root_mean_square_and_scales() -> None:
    norm = RMSNorm(8, 1e-6)
    norm.scale.set_value(jnp.arange(8.0))
    x = normal(0, 2, 3, 8)
    wanted = np.asarray(x) / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * np.arange(8.0)
    np.testing.assert_allclose(norm(x), wanted, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bfloat16_is_computed_in_float32() -> None:
    x = (300.0 * normal(1, 1, 2, 64)).astype(jnp.bfloat16)
    got = RMSNorm(64, 1e-6)(x)
    wide = np.asarray(x, np.float32)
    wanted = wide / np.sqrt(np.mean(np.square(wide), axis=-1, keepdims=True))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jnp.asarray(wanted).astype(jnp.bfloat16))


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = normal(0, 1, 1, 1, 8), normal(1, 1, 1, 1, 8)

    def product(q_position: int, k_position: int) -> float:
        turned = [rotate(x, rotary_angles(jnp.array([[p]]), 8, 100.0)) for x, p in ((q, q_position), (k, k_position))]
        return float(jnp.sum(turned[0] * turned[1]))

    np.testing.assert_allclose(product(7, 4), product(3, 0), rtol=1e-5)
    assert abs(product(7, 4) - product(7, 5)) > 1e-3


def test_rotation_pairs_feature_i_with_i_plus_half() -> None:
    x = jnp.zeros((1, 1, 1, 8)).at[..., 1].set(1.0)
    angle = 3 * 100.0 ** (-2 / 8)
    wanted = np.zeros(8)
    wanted[1], wanted[5] = np.cos(angle), np.sin(angle)
    np.testing.assert_allclose(rotate(x, rotary_angles(jnp.array([[3]]), 8, 100.0))[0, 0, 0], wanted, atol=1e-6)


def test_project_contracts_several_axes() -> None:
    x, weight = normal(0, 2, 3, 4, 5), normal(1, 4, 5, 6)
    np.testing.assert_allclose(project(x, weight, contracted=2), jnp.einsum("rlhk,hkd->rld", x, weight), atol=1e-5)


def test_swiglu_is_the_gated_product() -> None:
    mlp = GatedMLP(6, 10, output_scale=1.0, rngs=nnx.Rngs(0))
    x = normal(0, 2, 3, 6)
    gate = x @ mlp.gate[...]
    np.testing.assert_allclose(mlp(x), (gate / (1 + jnp.exp(-gate)) * (x @ mlp.up[...])) @ mlp.down[...], atol=1e-5)


def test_stacked_layers_are_independent_draws_of_the_scale_of_one_layer() -> None:
    stacked = GroupedQueryAttention(64, 4, 2, 16, kind="dense", output_scale=0.5, stack=(3,), rngs=nnx.Rngs(0))
    query, output = np.asarray(stacked.query[...]), np.asarray(stacked.output[...])
    np.testing.assert_allclose(query.std(axis=(1, 2, 3)), 1 / 8, rtol=0.05)
    np.testing.assert_allclose(output.std(axis=(1, 2, 3)), 0.5 / 8, rtol=0.05)
    assert abs(np.corrcoef(query[0].ravel(), query[1].ravel())[0, 1]) < 0.1


def test_parameters_carry_names_and_need_no_mesh() -> None:
    table = VocabularyTable(16, 8, rngs=nnx.Rngs(0))
    assert table.weight.get_metadata("out_sharding") == ("vocab", "embed")
    assert table.weight[...].dtype == jnp.float32
