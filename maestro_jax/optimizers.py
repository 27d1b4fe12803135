"""Optimizers and learning-rate schedules as configuration; the work is optax's.

In Python, `Section.optimizer` and `Trainer.optimizer` also take any `optax.GradientTransformation`. A transformation must
treat each parameter for itself: a section sees only its own parameters, and clipping by a norm is the trainer's (one
norm over all sections).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from .config import config_name, configurable
from .errors import ConfigError, set_by

Schedule = Callable[[Any], Any]
"""A learning rate as a function of the number of updates that were applied."""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear warm-up from 0, then half a cosine down to `end`.

    Args:
        peak: highest learning rate.
        steps: updates until the end of the decay, warm-up included.
        warmup: updates of warm-up.
        end: learning rate after the decay.
    """

    peak: float
    steps: int
    warmup: int = 0
    end: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.steps:
            raise ConfigError(
                "a learning-rate schedule has no room for its decay.",
                wanted="0 <= warmup < steps",
                have=f"warmup={self.warmup}, steps={self.steps}",
                fix="lower warmup, or raise steps",
                anchor="schedule-steps",
                set_by=set_by(self, "warmup"),
            )

    def __call__(self, count: Any) -> Any:
        """Returns the learning rate after `count` updates."""
        return optax.warmup_cosine_decay_schedule(0.0, self.peak, self.warmup, self.steps, self.end)(count)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).

    Args:
        learning_rate: a number, or a schedule.
        b1: decay of the first moment.
        b2: decay of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: per update, times the learning rate; not on parameters whose name ends in "scale" or "bias".
    """

    learning_rate: float | Schedule = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def build(self) -> optax.GradientTransformation:
        """Returns the optax transformation."""
        return optax.adamw(self.learning_rate, self.b1, self.b2, self.epsilon, weight_decay=self.weight_decay, mask=_decayed)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent.

    Args:
        learning_rate: a number, or a schedule.
        momentum: decay of the moving sum of gradients; None is plain descent.
    """

    learning_rate: float | Schedule = 1e-2
    momentum: float | None = None

    def build(self) -> optax.GradientTransformation:
        """Returns the optax transformation."""
        return optax.sgd(self.learning_rate, self.momentum)


def build_optimizer(optimizer: Any, origin: str) -> optax.GradientTransformation:
    """Returns an optax transformation from one of these classes, or from optax itself.

    Raises:
        ConfigError: when `optimizer` is neither, or a class or function that makes one and was not called.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    have, fix = type(optimizer).__name__, "pass one of these"
    if isinstance(optimizer, type) or inspect.isroutine(optimizer):
        name, kind = config_name(optimizer), "class" if isinstance(optimizer, type) else "function"
        have, fix = f"the {kind} {name} itself", f"write @{name}() in the config: the parentheses call it"
    elif hasattr(optimizer, "build"):
        return optimizer.build()
    raise ConfigError(
        "an optimizer cannot be used.",
        wanted="AdamW, Sgd, or an optax.GradientTransformation",
        have=have,
        fix=fix,
        anchor="optimizer-kind",
        set_by=origin,
    )


def _decayed(params: Any) -> Any:
    """Which parameters decay: all but norm scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: str(path[-1].key).rsplit("/", 1)[-1] not in ("scale", "bias"), params)
