"""Gin files into objects: scopes, macros, overrides, strictness, provenance, and the resolved text."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_jax import errors
from maestro_jax.config import Config, config_folder, configurable, load
from maestro_jax.config import build as config_build
from maestro_jax.config import registry as config_registry
from maestro_jax.config.types import gin_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """A part.

    Args:
        width: features in
            each layer.
        rate: dropout.
    """

    width: int = 8
    rate: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    name: str = "unnamed"
    module: Any = None
    microbatch: tuple[int, ...] = (4,)
    dtype: Literal["float32", "bfloat16"] = "float32"
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    submesh: str | None = None
    encoder: Encoder = dataclasses.field(default_factory=Encoder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    sections: Sequence[Section] = ()
    steps: int = 10
    clip: float | None = None
    debug: bool = False
    workdir: str = "runs"
    policy: Any = None
    make: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")
        if self.workdir == "forbidden":
            raise errors.DataError("no", wanted="w", have="h", fix="f", anchor="a", set_by=errors.set_by(self, "workdir"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needy:
    source: str
    count: int


class Policy:
    def __init__(self, window: int = 2, inner: Any = None) -> None:
        self.window, self.inner = window, inner


def greedy(limit: int = 3, **options: Any) -> dict[str, Any]:
    return {"limit": limit, **options}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only this file's configurables, in an empty current folder."""
    monkeypatch.setattr(config_registry, "_registry", {})
    monkeypatch.chdir(tmp_path)
    for name, target in {
        "train": Train,
        "Section": Section,
        "Encoder": Encoder,
        "Needy": Needy,
        "Policy": Policy,
        "greedy": greedy,
    }.items():
        configurable(name)(target)


def from_text(text: str, *overrides: str, name: str = "run.gin") -> Config:
    Path(name).write_text(text, encoding="utf-8")
    return load(name, overrides, root="train")


def error_of(text: str, *overrides: str) -> errors.ConfigError:
    with pytest.raises(errors.ConfigError) as caught:
        from_text(text, *overrides).build()
    return caught.value


PAIR = """
train.sections = [@teacher/Section(), @student/Section()]
Section.dtype = 'bfloat16'
student/Section.dtype = 'float32'
student/Section.inputs = {'hidden': @teacher/Section()}
"""


def test_a_scoped_binding_wins_over_an_unscoped_one() -> None:
    teacher, student = from_text(PAIR).build().sections
    assert (teacher.dtype, student.dtype) == ("bfloat16", "float32")


def test_the_scope_becomes_the_unbound_name() -> None:
    assert [section.name for section in from_text(PAIR).build().sections] == ["teacher", "student"]
    assert from_text("train.sections = [@a/b/Section()]").build().sections[0].name == "b"
    assert from_text("train.sections = [@a/Section()]\na/Section.name = 'z'").build().sections[0].name == "z"


def test_equal_references_share_one_object_also_inside_a_dict() -> None:
    teacher, student = from_text(PAIR).build().sections
    assert student.inputs["hidden"] is teacher


def test_the_longer_scope_wins_and_the_shorter_applies() -> None:
    text = "train.sections = [@a/b/Section(), @a/Section()]\na/Section.submesh = 'x'\na/b/Section.microbatch = [1]"
    inner, outer = from_text(text).build().sections
    assert (inner.submesh, inner.microbatch, outer.microbatch) == ("x", (1,), (4,))


def test_a_scope_does_not_reach_nested_references() -> None:
    text = "train.sections = [@student/Section()]\nstudent/Section.encoder = @Encoder()\nstudent/Encoder.width = 3"
    error = error_of(text)
    assert error.what == "binding student/Encoder.width has no effect: no Encoder is built in scope 'student'."
    assert error.wanted == "one of Encoder"


def test_macros_are_values_and_references_and_may_nest() -> None:
    text = "width = 5\npart = @Encoder()\nparts = [%part, %part]\ntrain.policy = %parts\nEncoder.width = %width"
    assert from_text(text).build().policy == [Encoder(width=5), Encoder(width=5)]


def test_a_reference_without_brackets_is_the_thing_itself() -> None:
    run = from_text("train.make = @greedy\ntrain.policy = @Section").build()
    assert run.make is greedy
    assert run.policy is Section


def test_functions_plain_classes_and_modules_names_can_be_referred_to() -> None:
    run = from_text(
        "train.policy = {'p': @Policy(), 'g': @greedy(), 'd': @datetime.timedelta()}\ndatetime.timedelta.hours = 2\ngreedy.other = 1"
    )
    built = run.build().policy
    assert (built["p"].window, built["g"], built["d"].seconds) == (2, {"limit": 3, "other": 1}, 7200)


def test_a_registered_name_may_carry_its_module() -> None:
    run = from_text(f"train.policy = @{__name__}.Encoder()\nEncoder.width = 9").build()
    assert run.policy == Encoder(width=9)


def test_build_returns_the_same_object_again() -> None:
    config = from_text(PAIR)
    assert config.build() is config.build()


def test_binding_blocks_are_understood() -> None:
    assert from_text("train:\n  steps = 3\n  debug = True\n").build() == Train(steps=3, debug=True)


# Command line


def test_overrides_win_over_the_file_and_the_last_of_them_wins() -> None:
    assert from_text("train.steps = 1", "train.steps=2", "train.steps=3").build().steps == 3


def test_a_macro_can_be_set_on_the_command_line() -> None:
    assert from_text("count = 1\ntrain.steps = %count", "count=7").build().steps == 7


def test_a_macro_of_a_replaced_binding_counts_as_used() -> None:
    assert from_text("count = 1\ntrain.steps = %count", "train.steps=7").build().steps == 7


def test_choosing_another_part_excuses_the_file_s_bindings_of_the_old_one() -> None:
    text = "train.policy = @Policy()\nPolicy.window = 4\nPolicy.inner = @Encoder()\nEncoder.width = 2"
    assert from_text(text, "train.policy=@greedy()").build().policy == {"limit": 3}


def test_a_useless_override_is_not_excused() -> None:
    error = error_of("train.policy = @Policy()\nPolicy.window = 4", "train.policy=@greedy()", "Policy.window=5")
    assert error.what.startswith("binding Policy.window has no effect: it is not built")
    assert error.set_by == "command line  --gin.Policy.window"


def test_an_override_of_one_scope_may_leave_the_file_s_general_binding_without_effect() -> None:
    text = "train.sections = [@student/Section()]\nSection.submesh = 'a'"
    assert from_text(text, "student/Section.submesh=b").build().sections[0].submesh == "b"


def test_an_override_that_a_scoped_binding_hides_is_an_error() -> None:
    error = error_of("train.sections = [@student/Section()]\nstudent/Section.submesh = 'a'", "Section.submesh=b")
    assert error.what == "binding Section.submesh has no effect: more specific bindings win everywhere."
    assert "run.gin:2  student/Section.submesh" in error.wanted


# Strictness


@pytest.mark.parametrize(
    ("text", "what", "set_by", "anchor"),
    [
        (
            PAIR + "studnet/Section.submesh = 'a'",
            "binding studnet/Section.submesh has no effect: no Section is built in scope 'studnet' (did you mean 'student'?).",
            "run.gin:6  studnet/Section.submesh",
            "unused-binding",
        ),
        ("Encoder.width = 3", "binding Encoder.width has no effect: it is not built.", "run.gin:1  Encoder.width", "unused-binding"),
        (
            "\nSectoin.name = 'a'",
            "'Sectoin' is not a configurable (did you mean 'Section'?).",
            "run.gin:2  Sectoin.name",
            "unknown-configurable",
        ),
        (
            "train.policy = [\n @Encodr()]",
            "'Encodr' is not a configurable (did you mean 'Encoder'?).",
            "run.gin:1  train.policy",
            "unknown-configurable",
        ),
        ("train.step = 3", "train has no parameter 'step' (did you mean 'steps'?).", "run.gin:1  train.step", "unknown-parameter"),
        ("train.steps = 3\n\ntrain.steps = 4", "train.steps is bound twice.", "run.gin:3  train.steps", "duplicate-binding"),
        ("train.steps = '3'", "train.steps has a value of the wrong type.", "run.gin:1  train.steps", "wrong-type"),
        (
            "width = 1\ntrain.steps = %widht\ntrain.policy = %width",
            "macro %widht is not defined (did you mean 'width'?).",
            "run.gin:2  train.steps",
            "undefined-macro",
        ),
        ("steps = 3", "macro 'steps' is never used.", "run.gin:1  steps", "unused-macro"),
        ("a = %b\nb = [%a]\ntrain.steps = %a", "macro 'a' refers to itself.", "run.gin:1  a", "circular-reference"),
        ("train.policy = @Needy()", "Needy needs a value for 'source', 'count'.", "run.gin:1  train.policy", "missing-parameter"),
        ("train.policy = @Policy()\nPolicy.inner = @Policy()", "Policy refers to itself.", "run.gin:2  Policy.inner", "circular-reference"),
        ("train.policy = @a/Policy", "reference @a/Policy has a scope that does nothing.", "run.gin:1  train.policy", "gin-syntax"),
        ("train.steps = 0", "train cannot be made: steps must be at least 1", "run.gin:1  train.steps", "refused-values"),
        (
            "import no_such_module_here",
            "module 'no_such_module_here' cannot be imported.",
            "run.gin:1  import no_such_module_here",
            "import-failed",
        ),
        ("import json as j", "import of 'json' gives it another name.", "run.gin:1", "gin-syntax"),
        ("\ninclude 'no.gin'", "config file 'no.gin' cannot be found.", "run.gin:2  include 'no.gin'", "missing-file"),
        ("include 'run.gin'", "config file run.gin includes itself.", "run.gin:1  include 'run.gin'", "circular-include"),
        (
            "Section.inputs.hidden = 3",
            "'Section.inputs' is not a configurable.",
            "run.gin:1  Section.inputs.hidden",
            "unknown-configurable",
        ),
    ],
)
def test_a_mistake_is_one_error_with_file_and_line(text: str, what: str, set_by: str, anchor: str) -> None:
    error = error_of(text)
    assert (error.what, error.set_by, error.anchor) == (what, set_by, anchor)


def test_an_unknown_parameter_lists_the_known_ones() -> None:
    assert error_of("Encoder.depth = 3").wanted == "one of width, rate"


def test_the_whole_text_of_an_error() -> None:
    assert str(error_of("train.sections = [@student/Section()]\nstudent/Section.microbatch = [1, 'large']")) == (
        "student/Section.microbatch has a value of the wrong type.\n"
        "  wanted   tuple[int, ...]\n"
        "  have     item 1: 'large' (str)\n"
        "  set by   run.gin:2  student/Section.microbatch\n"
        "  fix      change the value, or see --help for the type of every setting\n"
        "  help     docs/errors.md#wrong-type"
    )


def test_the_error_of_a_macro_s_value_names_both_lines() -> None:
    assert error_of("count = 'x'\ntrain.steps = %count").set_by == "run.gin:2  train.steps (macro count: run.gin:1)"


def test_all_bindings_without_effect_are_listed() -> None:
    assert error_of("Encoder.width = 3\nPolicy.window = 1").have == "Encoder.width, Policy.window"


def test_an_error_of_our_own_passes_unchanged_and_knows_where_the_value_was_set() -> None:
    with pytest.raises(errors.DataError) as caught:
        from_text("\ntrain.workdir = 'forbidden'").build()
    assert caught.value.set_by == "run.gin:2  train.workdir"


def test_other_exceptions_pass_with_a_note() -> None:
    def broken() -> None:
        raise KeyError("lost")

    configurable(broken)
    with pytest.raises(KeyError) as caught:
        from_text("train.policy = @broken()").build()
    assert caught.value.__notes__ == ["while building broken, referred to by run.gin:1  train.policy"]


def test_a_mistyped_root_is_an_error() -> None:
    with pytest.raises(errors.ConfigError, match=r"'trian' is not a configurable \(did you mean 'train'\?\)"):
        load(None, root="trian")


def test_a_binding_of_what_is_named_but_not_called_says_so() -> None:
    error = error_of("make = @greedy\ntrain.make = %make\ngreedy.limit = 2")
    assert error.what == "binding greedy.limit has no effect: nothing calls @greedy, so no value reaches it."
    assert error.wanted == "@greedy(): the parentheses call it"
    assert error.fix == "write @greedy(), with parentheses (run.gin:2  train.make), or delete the binding"


def test_an_uncalled_reference_that_was_replaced_is_not_blamed() -> None:
    error = error_of("train.policy = @greedy", "train.policy=@Policy()", "greedy.limit=2")
    assert error.what == "binding greedy.limit has no effect: it is not built."


def test_without_a_config_file_the_shipped_ones_are_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        with pytest.raises(errors.ConfigError) as caught:
            load(None, root="Needy").build()
        return caught.value.fix

    names = [path.name for path in sorted((Path(__file__).parents[2] / "configs").glob("*.gin"))]
    shipped = f"(shipped: {', '.join(names)})"
    assert missing() == f"name a config file, such as --gin_file={names[0]} {shipped}, or add --gin.Needy.source=..."
    monkeypatch.setattr(config_build, "shipped_configs", dict)
    assert missing() == "name a config file that has the line, or add --gin.Needy.source=... to the command line"
    assert error_of("train.policy = @Needy()").fix == "add the line to the config file, or --gin.Needy.source=... to the command line"


def test_a_missing_value_of_any_type_is_described_by_its_documentation() -> None:
    def place(data: Any, size: int) -> None:
        """Does.

        Args:
            data: a source, or rows.
            size: in rows.
        """

    configurable(place)
    assert error_of("train.policy = @place()").wanted == "place.data = (a source, or rows)\nplace.size = (int)"


# Where values come from


def test_objects_know_where_their_fields_were_set() -> None:
    run = from_text(PAIR, "train.steps=3").build()
    student = run.sections[1]
    assert errors.set_by(run, "steps") == "command line  --gin.train.steps"
    assert errors.set_by(student, "dtype") == "run.gin:4  student/Section.dtype"
    assert errors.set_by(student, "name") == "run.gin:2  train.sections (scope of @student/Section())"
    assert errors.set_by(student, "submesh") == "default  student/Section.submesh"


def test_plain_objects_know_it_too_and_objects_with_slots_do_without() -> None:
    class Slotted:
        __slots__ = ("size",)

        def __init__(self, size: int) -> None:
            self.size = size

    configurable(Slotted)
    run = from_text("train.policy = [@Policy(), @Slotted()]\nPolicy.window = 1\nSlotted.size = 2").build()
    assert errors.set_by(run.policy[0], "window") == "run.gin:2  Policy.window"
    assert run.policy[1].size == 2


def test_objects_of_a_metaclass_that_makes_them_are_left_alone() -> None:
    class Meta(type):
        def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
            return super().__call__(*arguments, **keywords)

    class Module(metaclass=Meta):
        def __init__(self, size: int) -> None:
            self.size = size

    configurable(Module)
    assert error_of("train.policy = @Module()\nModule.sise = 2").what == "Module has no parameter 'sise' (did you mean 'size'?)."
    assert vars(from_text("train.policy = @Module()\nModule.size = 2").build().policy) == {"size": 2}


def test_config_folder_is_where_the_setting_file_lies() -> None:
    Path("parts").mkdir()
    Path("parts/base.gin").write_text("train.workdir = 'deep'")
    run = from_text("include 'parts/base.gin'\ntrain.steps = 2", "train.debug=True").build()
    assert config_folder(run, "workdir") == Path("parts")
    assert config_folder(run, "steps") == Path()
    assert config_folder(run, "debug") is config_folder(run, "clip") is config_folder(Train(), "steps") is None


# The resolved text


EVERYTHING = """
width = 5
train.sections = [@teacher/Section(), @student/Section(), @Section()]
train.policy = {'a': (@Policy(), 1.5), 'b': @datetime.timedelta, 'c': "it's"}
train.make = @greedy
Section.encoder = @Encoder()
Encoder.width = %width
Section.dtype = 'bfloat16'
student/Section.inputs = {'hidden': @teacher/Section()}
"""


def comparable(run: Any) -> Any:
    """Plain classes compare by identity, so `Policy` is taken apart."""
    policy, number = run.policy["a"]
    return dataclasses.replace(run, policy={**run.policy, "a": (policy.window, policy.inner, number)})


def test_the_resolved_text_builds_equal_objects_and_itself() -> None:
    first = from_text(EVERYTHING, "train.workdir=my runs", "train.clip=1e999")
    again = from_text(first.resolved(), name="resolved.gin")
    assert comparable(again.build()) == comparable(first.build())
    assert again.build().sections[1].inputs["hidden"] is again.build().sections[0]

    def settings(config: Config) -> list[str]:
        return [line.partition("  # ")[0] for line in config.resolved().splitlines()]

    assert settings(again) == settings(first)


def test_the_resolved_text_says_where_each_value_was_set() -> None:
    text = "train.sections = [@a/Section()]\ncount = 3\na/Section.microbatch = [%count]"
    assert from_text(text, "train.workdir=my runs").resolved() == (
        "# Every setting that was in effect, defaults included, and where it was set.\n"
        "\n"
        "# train\n"
        "train.sections = [@a/Section()]  # run.gin:1  train.sections\n"
        "train.steps = 10  # default\n"
        "train.clip = None  # default\n"
        "train.debug = False  # default\n"
        "train.workdir = 'my runs'  # command line  --gin.train.workdir\n"
        "train.policy = None  # default\n"
        "train.make = None  # default\n"
        "\n"
        "# a/Section\n"
        "a/Section.name = 'a'  # run.gin:1  train.sections (scope of @a/Section())\n"
        "a/Section.module = None  # default\n"
        "a/Section.microbatch = [3]  # run.gin:3  a/Section.microbatch (macro count: run.gin:2)\n"
        "a/Section.dtype = 'float32'  # default\n"
        "a/Section.inputs = {}  # default\n"
        "a/Section.submesh = None  # default\n"
        "a/Section.encoder = @Encoder()  # default\n"
        "\n"
        "# Encoder\n"
        "Encoder.width = 8  # default\n"
        "Encoder.rate = 0.0  # default\n"
    )


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(value=plain)
def test_simple_values_survive_the_resolved_text_exactly(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_registry, "_registry", {})
        configurable("train")(Train)
        first = from_text(f"train.policy = {gin_text(value)}")
        again = from_text(first.resolved(), name="resolved.gin").build().policy
    assert repr(again) == repr(first.build().policy) == repr(value)


def test_reading_configurations_loads_no_jax() -> None:
    program = "import sys; import maestro_jax.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2]).returncode == 0
