"""Gin text and command line settings are read: values, syntax errors with line and column."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from maestro_jax import errors
from maestro_jax.config import configurable, load
from maestro_jax.config import registry as config_registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    width: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    steps: int = 10
    clip: float | None = None
    debug: bool = False
    workdir: str = "runs"
    policy: Any = None


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only this file's configurables, in an empty current folder."""
    monkeypatch.setattr(config_registry, "_registry", {})
    monkeypatch.chdir(tmp_path)
    configurable("train")(Train)
    configurable(Encoder)


def error_of(text: str) -> errors.ConfigError:
    Path("run.gin").write_text(text, encoding="utf-8")
    with pytest.raises(errors.ConfigError) as caught:
        load("run.gin", root="train")
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("steps=50", 50),
        ("clip=1", 1.0),
        ("clip=1e-3", 1e-3),
        ("clip=None", None),
        ("debug=True", True),
        ("workdir=data/my corpus", "data/my corpus"),
        ("workdir='quoted'", "quoted"),
        ("workdir=2024", "2024"),
        ("workdir=2024-01/a=b#c", "2024-01/a=b#c"),
        ("workdir=None", "None"),
        ("policy=-x", "-x"),
        ("policy=[128, 512]", [128, 512]),
        ("policy={kl: [a, 'b c']}", {"kl": ["a", "b c"]}),
        ("policy=@Encoder()", Encoder()),
    ],
)
def test_overrides_need_no_quotes(text: str, value: Any) -> None:
    run = load(None, ["train." + text], root="train").build()
    found = getattr(run, text.partition("=")[0])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["train.steps", "train.steps=", "=3", "train steps=3", "train..steps=3"])
def test_an_override_without_key_or_value_is_an_error(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="cannot be understood") as caught:
        load(None, [text], root="train")
    assert caught.value.have == f"--gin.{text}"


@pytest.mark.parametrize("value", ["[1, 2", "'text", "'''text", "[1] 2", "@a/", "{'a' 1}"])
def test_a_value_that_begins_like_gin_text_must_be_gin_text(value: str) -> None:
    with pytest.raises(errors.ConfigError, match="gin text cannot be understood") as caught:
        load(None, [f"train.policy={value}"], root="train")
    assert caught.value.set_by == "command line  --gin.train.policy"


@pytest.mark.parametrize(
    ("text", "set_by", "message"),
    [
        ("train.steps = 3\ntrain.workdir = runs", "run.gin:2, column 17", "runs is not a value"),
        ("train.debug = true", "run.gin:1, column 15", "true is not a value"),
        ("train.steps 3", "run.gin:1, column 13", "couldn't parse statement"),
        ("\ntrain.policy = [1,\n2", "run.gin:2, column 16", "a bracket or quote is not closed"),
        ("train.policy = {'a': 1, 'a': 2}", "run.gin:1, column 25", "key 'a' is there twice"),
        ("train.policy = {[1]: 1}", "run.gin:1, column 17", "a list, dict, reference or macro cannot be a key"),
        ("train.policy = {%a: 1}", "run.gin:1, column 17", "a list, dict, reference or macro cannot be a key"),
        ("train.policy = @a/", "run.gin:1, column 17", "malformatted scope or selector"),
        ("'''text", "run.gin:1, column 1", "a bracket or quote is not closed"),
        ("train.steps = 1\ntrain.workdir = '''text", "run.gin:2, column 16", "a bracket or quote is not closed"),
        ("train.steps = 3 4", "run.gin:1, column 17", "expected newline"),
    ],
)
def test_a_syntax_error_shows_line_and_column(text: str, set_by: str, message: str) -> None:
    error = error_of(text)
    assert (error.set_by, error.anchor) == (set_by, "gin-syntax")
    assert message in error.what


def test_a_syntax_error_points_at_the_place_and_says_how_to_mend_it() -> None:
    error = error_of("train.workdir = runs")
    assert error.have == "train.workdir = runs\n                ^"
    assert error.fix.startswith("put text in quotes: 'runs'")
    assert error_of("train.debug = true").fix == "write True"


def test_a_file_that_is_not_text_is_an_error() -> None:
    Path("bad.gin").write_bytes(b"train.workdir = '\xff'")
    with pytest.raises(errors.ConfigError, match=r"config file bad\.gin cannot be read"):
        load("bad.gin", root="train")
