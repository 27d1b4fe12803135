"""The text of --help, whole and for one name."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from maestro_jax import configurables as _registers_everything  # noqa: F401
from maestro_jax.command_line import help_text
from maestro_jax.config import summaries
from maestro_jax.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


def shown(gin_file: str | None = None, name: str | None = None) -> str:
    parser = argparse.ArgumentParser(prog="own", description="Does it.", add_help=False)
    parser.add_argument("--gin_file", help="config file")
    text = help_text(parser, gin_file, [], name)
    assert "--gin.NAME=VALUE" not in parser.format_help()
    return text


def names(text: str) -> list[str]:
    return re.findall(r"^  (\w+): ", text, re.MULTILINE)


def test_every_configurable_is_listed_once_what_every_config_has_comes_first() -> None:
    found = names(shown())
    assert found[:4] == ["train", "Section", "SectionGraph", "Objective"]
    assert found[4:] == sorted(found[4:])
    assert sorted(found) == sorted(summaries())


def test_the_flag_of_settings_is_aligned_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown().splitlines()
    (setting,) = [line for line in lines if line.startswith("  --gin.NAME=VALUE ")]
    (file,) = [line for line in lines if line.startswith("  --gin_file ")]
    assert setting.index("sets a value") == file.index("config file")
    assert max(map(len, lines[: lines.index("Shipped configs (--gin_file=NAME):")])) <= 80


def test_shipped_configs_are_listed_with_what_they_do() -> None:
    text = shown()
    for path in CONFIGS.glob("*.gin"):
        assert re.search(rf"^  {path.name} +{re.escape(path.read_text().splitlines()[0].lstrip('# '))}$", text, re.MULTILINE)


def test_fields_have_type_default_and_documentation_and_any_is_no_type() -> None:
    lines = shown().splitlines()
    steps = lines.index("    steps: int = 100")
    assert lines[steps + 1] == "        optimizer steps; 0 only evaluates. In a folder with a run, that is its newest"
    assert "    graph: SectionGraph (required)" in lines
    assert "    module (required)" in lines
    assert "    optimizer = None" in lines


def test_units_are_explained_once() -> None:
    assert shown().count("tokens for text") == 1


@pytest.mark.parametrize("name", ["Section", "teacher/Section", "@Section()"])
def test_one_name_shows_its_fields_alone(name: str) -> None:
    text = shown(name=name)
    assert names(text) == ["Section"]
    assert text.startswith("  Section: ")
    assert "    microbatch: int | tuple[int, ...] = " in text


def test_an_importable_name_is_described_too() -> None:
    assert "    learning_rate: " in shown(name="optax.adam")


def test_a_mistyped_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'Sectoin' is not a configurable \(did you mean 'Section'\?\)") as caught:
        shown(name="Sectoin")
    assert caught.value.set_by == "--help"


def test_what_a_config_imports_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    program = "from maestro_jax.config import configurable\n@configurable\ndef part_of_help_test(size: int = 1):\n    return size\n"
    Path("own_parts_of_help_test.py").write_text(program)
    Path("own.gin").write_text("import own_parts_of_help_test\n")
    assert "    size: int = 1" in shown("own.gin", "part_of_help_test")


def test_sections_of_a_config_are_listed_with_their_scopes() -> None:
    assert "  teacher          forward only; scope teacher/" in shown("kd_tiny.gin").splitlines()
