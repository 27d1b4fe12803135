"""Scalings of rotary positions: how a decoder reads more tokens than it was first trained on.

Each scaling changes the rates at which pairs of features turn, and may multiply cosines and sines by a factor. The formulas
are those that checkpoints on Hugging Face name in `rope_scaling`, where the type is "linear", "llama3" or "yarn".

Dimensions: K features of a head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from ..config import check_fields, configurable
from ..errors import ConfigError, set_by


@runtime_checkable
class RopeScaling(Protocol):
    """What a decoder's `rope_scaling` offers."""

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        ...

    def scaled(self, rates_K: jax.Array, theta: float) -> jax.Array:
        """Returns new rates [K / 2] float32, of rates theta^(-2 i / K)."""
        ...


def _check(scaling: object, *, longest: str | None = None, ordered: tuple[str, str] | None = None) -> None:
    """Refuses a factor below 1, a length below 1, and bounds out of order."""
    check_fields(scaling)
    least = {"factor": 1, **({longest: 1} if longest is not None else {})}
    wrong = [(field, f"at least {low}") for field, low in least.items() if not getattr(scaling, field) >= low]
    if ordered is not None and not 0 < getattr(scaling, ordered[0]) < getattr(scaling, ordered[1]):
        wrong.append((ordered[1], f"more than {ordered[0]}, which is above 0"))
    for field, wanted in wrong:
        raise ConfigError(
            f"{type(scaling).__name__}.{field} does not fit.",
            wanted=wanted,
            have=f"{field}={getattr(scaling, field)}",
            set_by=set_by(scaling, field),
            fix="take the numbers from the config.json of the model",
            anchor="rope-scaling",
        )


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every pair turns `factor` times more slowly (position interpolation, Chen et al., arXiv 2306.15595).

    Args:
        factor: how many times more tokens are read, at least 1.

    Raises:
        ConfigError: the factor is below 1.

    >>> LinearScaling(factor=2.0).scaled(jnp.array([1.0, 0.5]), 4.0)
    Array([0.5 , 0.25], dtype=float32)
    """

    factor: float

    def __post_init__(self) -> None:
        _check(self)

    @property
    def amplitude(self) -> float:
        """Nothing is multiplied."""
        return 1.0

    def scaled(self, rates_K: jax.Array, theta: float) -> jax.Array:
        """See `RopeScaling`."""
        return rates_K / self.factor


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slow pairs turn `factor` times more slowly, fast ones as before, those between by interpolation (Llama 3.1).

    Args:
        factor: how many times more tokens are read, at least 1.
        low_freq_factor: pairs that turn less often than this in `original_length` tokens are slowed down in full.
        high_freq_factor: pairs that turn more often than this in `original_length` tokens stay.
        original_length: tokens of the texts that the model was first trained on.

    Raises:
        ConfigError: a number is out of range.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _check(self, longest="original_length", ordered=("low_freq_factor", "high_freq_factor"))

    @property
    def amplitude(self) -> float:
        """Nothing is multiplied."""
        return 1.0

    def scaled(self, rates_K: jax.Array, theta: float) -> jax.Array:
        """See `RopeScaling`."""
        turns_K = self.original_length * rates_K / (2 * math.pi)
        kept_K = jnp.clip((turns_K - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return kept_K * rates_K + (1 - kept_K) * rates_K / self.factor


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """As `Llama3Scaling`, with a ramp over the pairs' numbers, and larger attention scores (Peng et al., arXiv 2309.00071).

    Args:
        factor: how many times more tokens are read, at least 1.
        original_length: tokens of the texts that the model was first trained on.
        beta_fast: pairs that turn more often than this in `original_length` tokens stay.
        beta_slow: pairs that turn less often than this are slowed down in full.
        attention_factor: factor on cosines and sines; None: 0.1 log(factor) + 1.
        truncate: round the ends of the ramp to whole pairs.

    Raises:
        ConfigError: a number is out of range.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check(self, longest="original_length", ordered=("beta_slow", "beta_fast"))

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor

    def scaled(self, rates_K: jax.Array, theta: float) -> jax.Array:
        """See `RopeScaling`."""
        pairs = rates_K.shape[0]
        # The (broken) number of the pair that turns `turns` times in the original length.
        low, high = (
            2 * pairs * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        width = high - low if high != low else 0.001
        slowed_K = jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - low) / width, 0.0, 1.0)
        return (1 - slowed_K) * rates_K + slowed_K * rates_K / self.factor
