"""Objects that are defaults, in the resolved text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maestro_jax import errors
from maestro_jax.config import Config, configurable, load
from maestro_jax.config import registry as config_registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    policy: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    width: int = 8
    rate: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    encoder: Any = dataclasses.field(default_factory=Encoder)
    wide: Any = dataclasses.field(default_factory=lambda: Encoder(width=9))
    policy: Any = None
    table: Any = dataclasses.field(default_factory=lambda: Table())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    values: Any = dataclasses.field(default_factory=lambda: np.zeros(3))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only this file's configurables, in an empty current folder."""
    monkeypatch.setattr(config_registry, "_registry", {})
    monkeypatch.chdir(tmp_path)
    configurable("train")(Train)
    for part in (Encoder, Holder, Table):
        configurable(part)


def from_text(text: str, name: str = "run.gin") -> Config:
    Path(name).write_text(text, encoding="utf-8")
    return load(name, root="train")


def error_of(text: str) -> errors.ConfigError:
    with pytest.raises(errors.ConfigError) as caught:
        from_text(text).build()
    return caught.value


def resolved_of_holder(text: str) -> list[str]:
    first = from_text("train.policy = @Holder()\n" + text)
    again = from_text(first.resolved(), name="resolved.gin")
    lines = [[line.partition("  # ")[0] for line in config.resolved().splitlines()] for config in (first, again)]
    assert lines[0] == lines[1]
    for part in ("encoder", "wide", "policy"):
        assert getattr(again.build().policy, part) == getattr(first.build().policy, part)
    return lines[0]


def test_a_default_that_a_reference_cannot_make_stays_a_comment() -> None:
    lines = resolved_of_holder("")
    assert "Holder.encoder = @Encoder()" in lines
    assert "# Holder.wide = Encoder(width=9, rate=0.0)" in lines
    assert "# Holder.table = Table(values=array([0., 0., 0.]))" in lines


def test_a_default_is_not_confused_with_an_object_of_other_settings() -> None:
    lines = resolved_of_holder("Holder.policy = @Encoder()\nEncoder.width = 3")
    assert "# Holder.encoder = Encoder(width=8, rate=0.0)" in lines
    assert "Encoder.width = 3" in lines


def test_a_default_and_an_equal_reference_are_written_once() -> None:
    assert resolved_of_holder("Holder.policy = @Encoder()").count("Encoder.width = 8") == 1


def test_a_default_does_not_count_as_built() -> None:
    error = error_of("train.policy = @Holder()\nEncoder.width = 3")
    assert error.what == "binding Encoder.width has no effect: it is not built."
    assert error.wanted == "a binding of what train builds: train, Holder"
