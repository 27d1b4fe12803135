"""Optimizers from configuration, from optax, and the mistakes between them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

from maestro_jax.config import load
from maestro_jax.errors import ConfigError
from maestro_jax.optimizers import AdamW, Sgd, WarmupCosine, build_optimizer


def step(transformation: optax.GradientTransformation, params: dict[str, Any]) -> Any:
    """The first update for gradients of one."""
    gradients = {name: jnp.ones_like(value) for name, value in params.items()}
    return transformation.update(gradients, transformation.init(params), params)[0]


def test_an_optax_transformation_is_taken_as_it_is() -> None:
    transformation = optax.adam(1e-3)
    assert build_optimizer(transformation, "here") is transformation


def test_sgd_steps_against_the_gradient() -> None:
    update = step(build_optimizer(Sgd(learning_rate=0.5), "here"), {"w": jnp.zeros((2,))})
    assert update["w"].tolist() == [-0.5, -0.5]


def test_weight_decay_spares_scales_and_biases() -> None:
    params = {name: jnp.full((1,), 3.0) for name in ("layers/kernel", "norm/scale", "layers/bias")}
    plain = step(AdamW(weight_decay=0.0).build(), params)
    decayed = step(AdamW(weight_decay=0.1).build(), params)
    assert {name for name in params if float(plain[name][0]) != float(decayed[name][0])} == {"layers/kernel"}


@pytest.mark.parametrize(
    ("optimizer", "kind", "name"),
    [(optax.adam, "function", "optax.adam"), (optax.MultiSteps, "class", "optax.MultiSteps"), (AdamW, "class", "AdamW")],
)
def test_what_was_not_called_is_told_to_be(optimizer: Any, kind: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(optimizer, "run.gin:3  train.optimizer")
    assert str(caught.value) == (
        "an optimizer cannot be used.\n"
        "  wanted   AdamW, Sgd, or an optax.GradientTransformation\n"
        f"  have     the {kind} {name} itself\n"
        "  set by   run.gin:3  train.optimizer\n"
        f"  fix      write @{name}() in the config: the parentheses call it\n"
        "  help     docs/errors.md#optimizer-kind"
    )


def test_something_else_is_refused_by_its_type() -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer("adam", "here")
    assert (caught.value.have, caught.value.fix) == ("str", "pass one of these")


def test_types_of_optax_are_shown_in_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ["optax.adam.learning_rate='fast'"], root="optax.adam").build()
    assert caught.value.wanted == "Union[float, Array, Callable[[Union[...]], Union[...]]]"


def test_a_schedule_without_room_for_its_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for its decay") as caught:
        WarmupCosine(peak=1.0, steps=3, warmup=3)
    assert caught.value.anchor == "schedule-steps"


def test_warm_up_reaches_the_peak_and_decay_the_end() -> None:
    schedule = WarmupCosine(peak=2.0, steps=10, warmup=4, end=0.5)
    assert [float(schedule(count)) for count in (0, 2, 4, 10)] == pytest.approx([0.0, 1.0, 2.0, 0.5])
