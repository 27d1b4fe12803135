"""Config files, data files and modules are found, included and imported."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from maestro_jax import errors
from maestro_jax.config import Config, configurable, find_config, find_file, load
from maestro_jax.config import files as config_files
from maestro_jax.config import registry as config_registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    steps: int = 10
    debug: bool = False
    workdir: str = "runs"
    policy: Any = None


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only this file's configurable, in an empty current folder."""
    monkeypatch.setattr(config_registry, "_registry", {})
    monkeypatch.chdir(tmp_path)
    configurable("train")(Train)


def from_text(text: str) -> Config:
    Path("run.gin").write_text(text, encoding="utf-8")
    return load("run.gin", root="train")


def error_of(text: str) -> errors.ConfigError:
    with pytest.raises(errors.ConfigError) as caught:
        from_text(text).build()
    return caught.value


def test_an_including_file_changes_what_it_includes() -> None:
    Path("parts").mkdir()
    Path("parts/base.gin").write_text("train.steps = 1\ntrain.debug = True\ninclude 'deep.gin'")
    Path("parts/deep.gin").write_text("train.workdir = 'deep'")
    assert from_text("include 'parts/base.gin'\ntrain.steps = 2").build() == Train(steps=2, debug=True, workdir="deep")


def test_a_binding_above_the_include_that_repeats_it_is_an_error() -> None:
    Path("base.gin").write_text("train.steps = 1")
    error = error_of("train.steps = 2\ninclude 'base.gin'")
    assert (error.what, error.have) == ("train.steps is bound twice.", "run.gin:1 and base.gin:1")


def test_a_base_shared_by_two_includes_is_read_once() -> None:
    Path("base.gin").write_text("train.steps = 1")
    Path("one.gin").write_text("include 'base.gin'\ntrain.steps = 2")
    Path("two.gin").write_text("include 'base.gin'\ntrain.debug = True")
    assert from_text("include 'one.gin'\ninclude 'two.gin'").build() == Train(steps=2, debug=True)


def test_import_registers_a_module_of_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [item for item in sys.path if item])
    program = "from maestro_jax.config import configurable\n@configurable\ndef own(size: int = 1):\n    return size\n"
    Path("user_parts_of_test.py").write_text(program)
    config = from_text("import user_parts_of_test\ntrain.policy = @own()\nown.size = 4")
    assert config.build().policy == 4
    assert "import user_parts_of_test  # run.gin:1" in config.resolved()


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    package = tmp_path / "site" / "package"
    (package / "configs").mkdir(parents=True)
    (package / "configs" / "tiny.gin").write_text("train.steps = 6")
    monkeypatch.setattr(config_files, "_PACKAGE", package)
    return package


def test_a_bare_name_is_found_among_the_shipped_configs(shipped: Path) -> None:
    assert find_config("tiny.gin") == shipped / "configs" / "tiny.gin"
    assert load("tiny.gin", root="train").build().steps == 6
    assert from_text("include 'tiny.gin'").build().steps == 6


def test_shipped_configs_are_listed_with_their_first_comment(shipped: Path) -> None:
    (shipped / "configs" / "a.gin").write_text("\n#\n## Does it.\n# More.\ntrain.steps = 1  # no\n")
    assert list(config_files.shipped_configs().items()) == [("a.gin", "Does it."), ("tiny.gin", "")]


def test_a_file_in_the_current_folder_comes_before_a_shipped_one(shipped: Path) -> None:
    Path("tiny.gin").write_text("train.steps = 7")
    assert find_config("tiny.gin") == Path("tiny.gin")


def test_a_missing_config_says_where_it_was_looked_for_and_what_is_shipped(shipped: Path) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        find_config("tinny.gin")
    assert caught.value.what == "config file 'tinny.gin' cannot be found (did you mean 'tiny.gin'?)."
    assert caught.value.wanted.endswith("the name of a shipped config: tiny.gin")
    assert caught.value.have == f"none of\n{Path.cwd() / 'tinny.gin'}\n{shipped / 'configs' / 'tinny.gin'}"


def test_a_name_with_a_folder_is_not_looked_for_among_the_shipped_configs(shipped: Path) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        find_config("other/tiny.gin")
    assert str(shipped) not in caught.value.have


def test_configs_of_a_source_checkout_lie_beside_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "checkout" / "configs").mkdir(parents=True)
    monkeypatch.setattr(config_files, "_PACKAGE", tmp_path / "checkout" / "package")
    assert config_files.shipped_folders() == []
    (tmp_path / "checkout" / "pyproject.toml").touch()
    assert config_files.shipped_folders() == [tmp_path / "checkout" / "configs"]


def test_a_data_file_is_found_here_then_beside_the_config_then_among_the_shipped(shipped: Path) -> None:
    (shipped / "configs" / "w.bin").touch()
    assert find_file("w.bin") == shipped / "configs" / "w.bin"
    Path("near").mkdir()
    Path("near/w.bin").touch()
    assert find_file("w.bin", Path("near/run.gin")) == find_file("w.bin", Path("near")) == Path("near/w.bin")
    Path("w.bin").touch()
    assert find_file("w.bin", Path("near")) == Path("w.bin")


def test_a_missing_data_file_lists_the_places(shipped: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"file 'w\.bin' cannot be found") as caught:
        find_file("w.bin", Path("near/run.gin"), set_by="run.gin:1  x")
    assert caught.value.set_by == "run.gin:1  x"
    assert str(Path("near/w.bin").absolute()) in caught.value.have
