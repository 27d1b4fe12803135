"""The encoder of sound: its convolutions against their formula, in packed rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_support import clip, packed, parts

from maestro_jax.models import AudioEncoder
from maestro_jax.models.audio import neighbours

TINY = AudioEncoder(layers=1, embed=16, heads=2, mlp=20, mels=5, stride=4, width=10, rope_theta=100.0)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_first_convolution_is_that_of_each_clip_on_its_own(kernel: int) -> None:
    module = dataclasses.replace(TINY, kernel=kernel)(nnx.Rngs(0))
    clips = [clip(4, 0), clip(8, 1)]
    batch = packed([list(enumerate(clips))], 20)
    got = module.frames(neighbours(batch["frames"], batch["segment_ids"], kernel))[0]
    start = 0
    for each in clips:
        wanted = jax.lax.conv_general_dilated(
            jnp.asarray(each.arrays["frames"])[None], module.frames.weight[...], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )[0]
        np.testing.assert_allclose(got[start : start + each.units], wanted + module.frames.bias[...][None], atol=1e-5)
        start += each.units


def test_the_second_convolution_makes_one_row_of_a_stride_of_frames() -> None:
    params, _, apply = parts(dataclasses.replace(TINY, kernel=1, layers=1))
    batch = packed([[(0, clip(8, 0))]], 8)
    # Without attention between rows, a row can only know the frames of its stride.
    alone = {**batch, "segment_ids": jnp.array([[1, 1, 1, 1, 2, 2, 2, 2]])}
    reached = jax.jit(jax.grad(lambda x: jnp.sum(apply(params, {**alone, "frames": x})["hidden"][0, 1])))(batch["frames"])
    np.testing.assert_array_equal(np.any(np.asarray(reached[0]) != 0, axis=-1), [False] * 4 + [True] * 4)


def test_when_a_frame_comes_matters() -> None:
    params, _, apply = parts(TINY)
    batch = packed([[(0, clip(16, 0))]], 16)
    later = {**batch, "positions": batch["positions"][:, ::-1] // 4 * 4}
    rows, others = (np.asarray(jax.jit(apply)(params, b)["hidden"]) for b in (batch, later))
    assert float(np.max(np.abs(rows - others))) > 1e-3


def test_rows_depend_on_distances_in_time_alone() -> None:
    params, _, apply = parts(TINY)
    batch = packed([[(0, clip(16, 0))]], 16)
    moved = {**batch, "positions": batch["positions"] + 20}
    rows, others = (np.asarray(jax.jit(apply)(params, b)["hidden"]) for b in (batch, moved))
    np.testing.assert_allclose(others, rows, atol=3e-6)
