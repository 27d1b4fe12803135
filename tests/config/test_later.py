"""Called references to what needs `rngs`, which only the trainer has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from maestro_jax import errors
from maestro_jax.config import Config, configurable, load
from maestro_jax.config import registry as config_registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    policy: Any = None


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only this file's configurables, in an empty current folder."""
    monkeypatch.setattr(config_registry, "_registry", {})
    monkeypatch.chdir(tmp_path)
    configurable("train")(Train)


def from_text(text: str, name: str = "run.gin") -> Config:
    Path(name).write_text(text, encoding="utf-8")
    return load(name, root="train")


def error_of(text: str) -> errors.ConfigError:
    with pytest.raises(errors.ConfigError) as caught:
        from_text(text).build()
    return caught.value


class Keyed:
    """A module as Flax NNX has them: `rngs` is required, and may come by name only."""

    def __init__(self, width: int = 4, *, rngs: Any) -> None:
        self.width, self.rngs = width, rngs


@pytest.mark.parametrize("make", [Keyed, lambda rngs, width=4: Keyed(width, rngs=rngs)], ids=["class", "function"])
def test_a_called_reference_to_what_needs_rngs_waits_for_them(make: Any) -> None:
    configurable("Keyed")(make)
    run = from_text("train.policy = @Keyed()\nKeyed.width = 48").build()
    made = run.policy("keys")
    assert (made.width, made.rngs) == (48, "keys")
    assert errors.set_by(run.policy, "width") == "run.gin:2  Keyed.width"


def test_what_needs_rngs_still_needs_its_other_settings() -> None:
    configurable("keyed")(lambda rngs, width: (rngs, width))
    error = error_of("train.policy = @keyed()")
    assert (error.what, error.anchor) == ("keyed needs a value for 'width'.", "missing-parameter")


def test_what_needs_rngs_and_is_given_them_is_made_at_once() -> None:
    configurable(Keyed)
    assert from_text("train.policy = @Keyed()\nKeyed.rngs = 3").build().policy.rngs == 3


def test_the_resolved_text_builds_what_needs_rngs_again() -> None:
    configurable(Keyed)
    first = from_text("train.policy = @Keyed()\nKeyed.width = 48")
    assert from_text(first.resolved(), name="resolved.gin").build() == first.build()
