"""Scalings of rotary positions: what stays, what is slowed down, and which numbers are refused."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.errors import ConfigError
from maestro_jax.models import Decoder, LinearScaling, Llama3Scaling, YarnScaling
from maestro_jax.models.layers import rotary_angles

THETA, HEAD = 10000.0, 64
RATES = THETA ** (-np.arange(0, HEAD, 2, dtype=np.float64) / HEAD)
SIZES: dict[str, Any] = {"vocab_size": 32, "layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "mlp": 24}


def slowed(scaling: Any) -> np.ndarray:
    """How many times more slowly each pair turns."""
    return RATES / np.asarray(scaling.scaled(jnp.asarray(RATES, jnp.float32), THETA))


def test_linear_scaling_at_twice_the_position_is_none_at_the_position() -> None:
    scaled = rotary_angles(jnp.array([[6, 20]]), HEAD, THETA, LinearScaling(factor=2.0))
    plain = rotary_angles(jnp.array([[3, 10]]), HEAD, THETA)
    np.testing.assert_allclose(scaled, plain, atol=1e-6)


def test_llama3_scaling_keeps_fast_pairs_and_slows_down_slow_ones_in_full() -> None:
    found = slowed(Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=256))
    turns = 256 * RATES / (2 * math.pi)
    np.testing.assert_allclose(found[turns > 4], 1.0, rtol=1e-5)
    np.testing.assert_allclose(found[turns < 1], 8.0, rtol=1e-5)
    between = found[(turns >= 1) & (turns <= 4)]
    assert len(between) > 2
    assert np.all(np.diff(between) > 0)


def test_yarn_slows_down_the_slowest_pairs_in_full_and_makes_scores_larger() -> None:
    scaling = YarnScaling(factor=4.0, original_length=256)
    found = slowed(scaling)
    assert (found[0], found[-1]) == pytest.approx((1.0, 4.0), rel=1e-5)
    assert np.all(np.diff(found) > -1e-4)
    assert scaling.amplitude == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert YarnScaling(factor=4.0, original_length=256, attention_factor=1.5).amplitude == 1.5
    cosines, sines = rotary_angles(jnp.array([[5]]), HEAD, THETA, scaling)
    np.testing.assert_allclose(cosines**2 + sines**2, scaling.amplitude**2, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LinearScaling(factor=0.5), "factor"),
        (lambda: Llama3Scaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0), "high_freq_factor"),
        (lambda: Llama3Scaling(factor=8.0, original_length=0), "original_length"),
        (lambda: YarnScaling(factor=2.0, original_length=64, beta_slow=0.0), "beta_fast"),
    ],
)
def test_numbers_that_cannot_be_right_are_refused_by_field(make: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"\.{field} does not fit") as caught:
        make()
    assert caught.value.anchor == "rope-scaling"


@pytest.mark.parametrize("changes", [{"rope_scaling": "yarn"}, {"activation": "relu"}])
def test_a_decoder_refuses_what_is_no_scaling_or_no_activation(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"Decoder\.{next(iter(changes))} does not fit"):
        Decoder(**SIZES, **changes)
