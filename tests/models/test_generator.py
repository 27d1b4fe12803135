"""The head that redraws images: its sum, what padding adds, and how it is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_support import parts

from maestro_jax.errors import ConfigError
from maestro_jax.models import Projector, Redraw

REDRAW = Redraw(embed=6, pixels=4, mlp=10)


def batch() -> dict[str, jax.Array]:
    target = jax.random.uniform(jax.random.key(0), (1, 5, 4))
    return {"target": target, "segment_ids": jnp.array([[1, 2, 3, 0, 0]])}


STATE = jnp.where((batch()["segment_ids"] == 0)[..., None], 1.0, jax.random.normal(jax.random.key(1), (1, 5, 6)))


def test_redraw_sums_the_mean_squared_error_of_each_image() -> None:
    params, _, apply = parts(REDRAW)
    outputs = jax.jit(apply)(params, batch(), state=STATE)
    image = jax.nn.gelu(STATE @ params["head/up"]) @ params["head/down"]
    np.testing.assert_allclose(outputs["image"], image, atol=1e-6)
    wanted = np.mean(np.square(np.asarray(image - batch()["target"])), axis=-1)[0, :3].sum()
    np.testing.assert_allclose(outputs["redraw"], wanted, rtol=1e-6)


def test_gradient_reaches_the_states_of_images_and_not_of_padding() -> None:
    params, _, apply = parts(REDRAW)
    gradient = jax.jit(jax.grad(lambda state: apply(params, batch(), state=state)["redraw"]))(STATE)
    np.testing.assert_array_equal(np.any(np.asarray(gradient[0]) != 0, axis=-1), [True, True, True, False, False])


def test_bfloat16_parameters_give_a_float32_sum() -> None:
    params, _, apply = parts(REDRAW)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    got, wanted = (jax.jit(apply)(p, batch(), state=STATE)["redraw"] for p in (narrow, params))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=0.03)


@pytest.mark.parametrize("kind", [Redraw, Projector])
@pytest.mark.parametrize("field", ["embed", "mlp"])
def test_sizes_that_are_not_positive_are_refused_by_field(kind: Any, field: str) -> None:
    sizes = {"embed": 6, "mlp": 10, "pixels" if kind is Redraw else "width": 4}
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{field} does not fit") as caught:
        kind(**sizes | {field: 0})
    assert caught.value.anchor == "projector-shape"
