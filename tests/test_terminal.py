"""The screen: plain lines in a log, a bar that always closes in a terminal, an output that is updated in a notebook."""

from __future__ import annotations

import builtins
import io
import math
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from maestro_jax.plan_table import WIDTH
from maestro_jax.runtime import Program
from maestro_jax.terminal import COMPILE_LINES, NOT_FINITE, NOTHING_COUNTED, Terminal

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
RECORD: Mapping[str, Any] = {
    "step": 40,
    "steps": 300,
    "loss": 2.31,
    "objectives": {"student/kl": 0.80123, "student/cross_entropy": 1.51},
    "gradient_norm": 1.2,
    "applied": True,
    "tokens_per_second": 12345.0,
    "seconds": 0.4,
    "eta_seconds": 93.0,
    "padding": {"teacher": 0.04},
    "skipped_steps": 0,
}


@pytest.fixture(autouse=True)
def ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the terminal in which the tests run must not matter."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def program(bucket: int = 1024, loaded: bool = False) -> Program:
    return Program(section="student", kind="backward", bucket=bucket, replica=1, seconds=2.0, loaded=loaded, memory=None)


def step_line(stream: io.StringIO, **changes: Any) -> str:
    with Terminal(stream) as terminal:
        terminal.step({**RECORD, **changes})
    return stream.getvalue()


def test_step_line_has_every_value_with_its_name() -> None:
    assert step_line(io.StringIO()) == (
        "step  40/300  loss 2.3100  student: kl 0.8012  cross_entropy 1.5100  norm 1.2000  12.3k tokens/s  ETA 1:33\n"
    )


@pytest.mark.parametrize("record", [{}, {"tokens_per_second": None, "eta_seconds": None}])
def test_step_line_leaves_out_what_is_unknown(record: dict[str, None]) -> None:
    stream, screen = io.StringIO(), Screen()
    for file in (stream, screen):
        with Terminal(file) as terminal:
            terminal.step({"step": 1, "steps": 9, "loss": 1.0, **record})
    assert stream.getvalue() == "step 1/9  loss 1.0000\n"
    assert "ETA" not in screen.getvalue()
    assert "tokens" not in screen.getvalue()


def test_objectives_are_grouped_by_section() -> None:
    line = step_line(io.StringIO(), objectives={"a/x": 1.0, "b/x": 2.0, "a/y": 3.0, "plain": 4.0})
    assert "  a: x 1.0000  y 3.0000  b: x 2.0000  plain 4.0000  norm" in line


def test_objective_for_which_nothing_counted_is_a_dash() -> None:
    assert "  student: kl -  " in step_line(io.StringIO(), objectives={"student/kl": math.nan})


def test_skipped_step_is_marked_and_shows_what_was_not_finite() -> None:
    line = step_line(io.StringIO(), applied=False, loss=math.nan, gradient_norm=math.inf, skipped_steps=3)
    assert "loss nan  " in line
    assert f"norm inf  {NOT_FINITE}, 3 so far  " in line


def test_step_in_which_nothing_counted_is_skipped_without_alarm() -> None:
    line = step_line(io.StringIO(), applied=False, loss=math.nan, gradient_norm=0.0, skipped_steps=1)
    assert "loss -  " in line
    assert f"norm 0.0000  {NOTHING_COUNTED}  12.3k" in line


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.0000"), (12345.678, "12345.6780"), (-5.432e-4, "-0.0005"), (4.9e-5, "4.900e-05"), (-3e7, "-3.000e+07")]
)
def test_values_keep_their_digits(value: float, text: str) -> None:
    assert f"loss {text}  " in step_line(io.StringIO(), loss=value)


def test_log_has_one_line_for_a_step_with_many_objectives() -> None:
    line = step_line(io.StringIO(), objectives={f"section_{number}/objective": float(number) for number in range(30)})
    assert line.count("\n") == 1


def test_screen_breaks_a_step_between_values_only() -> None:
    log, screen = step_line(io.StringIO()), step_line(Screen())
    printed = [line for line in plain(screen).splitlines() if line.startswith(("step", "    "))]
    assert len(printed) > 1
    assert "  ".join([*(line.strip() for line in printed), "ETA 1:33"]) == log.strip()
    assert max(map(len, printed)) <= 80


def plain(text: str) -> str:
    """Text as printed, without control codes, and what was drawn again in the place of something else on lines of its own."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\r", "\n"))


def test_compilation_makes_few_lines_in_a_log() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    for done in range(1, 201):
        terminal.compiling(program(), done, 200)
    lines = stream.getvalue().splitlines()
    assert len(lines) <= COMPILE_LINES + 1
    assert lines[0] == "compiled 25 of 200: student backward 1024 replica 1"
    assert lines[-1] == "compiled 200 programs in 400.0 s"


def test_programs_that_were_loaded_for_other_replicas_are_told_apart() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    for done in range(1, 4):
        terminal.compiling(program(loaded=done > 1), done, 3)
    assert stream.getvalue().splitlines()[-1] == "compiled 1 program and loaded 2 for other replicas in 6.0 s"


def test_compile_time_starts_anew_with_the_next_compilation() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    for _ in range(2):
        terminal.compiling(program(bucket=0), 1, 1)
    assert stream.getvalue().splitlines() == ["compiled 1 program in 2.0 s"] * 2


@pytest.mark.parametrize(("columns", "label"), [("80", "student  backward  1024"), ("60", "student"), ("120", "replica 1")])
def test_compile_bar_keeps_what_fits_of_its_label(columns: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = Screen()
    with Terminal(stream) as terminal:
        terminal.compiling(program(), 1, 200)
    bars = [line.rstrip() for line in plain(stream.getvalue()).splitlines() if line.startswith("compiling")]
    assert bars
    assert all(bar.endswith(label) and len(bar) <= int(columns) for bar in bars)


def test_tick_moves_the_bar_and_leaves_its_values() -> None:
    stream = Screen()
    with Terminal(stream) as terminal:
        terminal.tick(39, 300)
        terminal.step(RECORD)
        terminal.tick(41, 300)
    bars = [line.rstrip() for line in plain(stream.getvalue()).splitlines() if line.startswith("training")]
    assert "41/300" in bars[-1]
    assert bars[-1].endswith("ETA 1:33  loss 2.3100")
    assert plain(stream.getvalue()).count("step ") == 1


def test_tick_writes_nothing_in_a_log() -> None:
    stream = io.StringIO()
    with Terminal(stream) as terminal:
        terminal.tick(1, 300)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("0", WIDTH), ("many", WIDTH)])
def test_log_is_as_wide_as_the_user_says(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert Terminal(io.StringIO())._console.width == width


def test_evaluation_names_step_and_objectives() -> None:
    stream = io.StringIO()
    Terminal(stream).evaluation(160, {"student/kl": 0.7, "student/extra": math.nan})
    assert stream.getvalue() == "held-out at step 160  student: kl 0.7000  extra -\n"


def test_words_of_the_caller_are_printed_as_they_are() -> None:
    stream = io.StringIO()
    with Terminal(stream) as terminal:
        terminal.note("[bold]not markup[/bold] :smile:")
        terminal.start("x" * 300)
        terminal.finish(["one", "", "two"])
    assert stream.getvalue() == f"note: [bold]not markup[/bold] :smile:\n{'x' * 300}\none\n\ntwo\n"


def test_log_has_no_control_codes_though_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with Terminal(stream) as terminal:
        terminal.compiling(program(), 1, 2)
        terminal.note("a note")
        terminal.step({**RECORD, "applied": False})
    assert "\x1b" not in stream.getvalue()


def test_screen_shows_a_bar_and_ends_it() -> None:
    stream = Screen()
    with Terminal(stream) as terminal:
        terminal.compiling(program(), 1, 2)
        assert SHOW_CURSOR not in stream.getvalue()
        terminal.compiling(program(), 2, 2)
        assert stream.getvalue().count(SHOW_CURSOR) == 1
        terminal.step(RECORD)
        terminal.finish(["done"])
    assert stream.getvalue().count(HIDE_CURSOR) == stream.getvalue().count(SHOW_CURSOR) == 2
    assert "training" in stream.getvalue()
    assert plain(stream.getvalue()).splitlines()[-1] == "done"


def test_bar_closes_when_training_fails() -> None:
    stream = Screen()

    def train() -> None:
        with Terminal(stream) as terminal:
            terminal.step(RECORD)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        train()
    assert stream.getvalue().count(HIDE_CURSOR) == stream.getvalue().count(SHOW_CURSOR) == 1


@pytest.mark.parametrize("columns", ["40", "60", "80", "200"])
def test_bar_shows_whole_values(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = Screen()
    with Terminal(stream) as terminal:
        terminal.step(RECORD)
    bars = [line for line in plain(stream.getvalue()).splitlines() if line.startswith("training")]
    assert bars
    assert all("40/300" in bar and "…" not in bar for bar in bars)
    assert any("ETA 1:33" in bar for bar in bars) is (int(columns) >= 60)
    assert any("loss 2.3100" in bar for bar in bars) is (int(columns) >= 80)


def test_screen_can_be_told_to_be_plain() -> None:
    stream = Screen()
    with Terminal(stream, interactive=False) as terminal:
        terminal.step(RECORD)
    assert "\x1b" not in stream.getvalue()


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured, bare = Screen(), Screen()
    Terminal(coloured).note("a note")
    monkeypatch.setenv("NO_COLOR", "1")
    Terminal(bare).note("a note")
    assert "\x1b[33m" in coloured.getvalue()
    assert bare.getvalue() == "note: a note\n"


def test_long_notes_break_between_words_and_paths_stay_whole() -> None:
    stream = Screen()
    Terminal(stream).note("words " * 20 + "/a/path" * 20)
    lines = plain(stream.getvalue()).splitlines()
    assert lines[-1] == "/a/path" * 20
    assert all(len(line) <= 80 for line in lines[:-1])
    assert " ".join(lines).split() == ["note:", *["words"] * 20, "/a/path" * 20]


class Handle:
    """Records what IPython would show in one place of a notebook's output."""

    def __init__(self, content: dict[str, str]) -> None:
        self.contents = [content]

    def update(self, content: dict[str, str], raw: bool) -> None:
        assert raw
        self.contents.append(content)


def test_notebook_updates_one_output_for_each_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    handles: list[Handle] = []

    def display(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        handles.append(Handle(content))
        return handles[-1]

    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    module: Any = types.ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    now = [1000.0]
    monkeypatch.setattr("maestro_jax.terminal.time.monotonic", lambda: now[0])
    with Terminal() as terminal:
        terminal.compiling(program(), 1, 3)
        terminal.compiling(program(), 2, 3)
        terminal.compiling(program(), 3, 3)
        terminal.step({**RECORD, "objectives": {"a<b/kl": 1.0}})
        terminal.tick(41, 300)  # At once: too soon.
        now[0] += 1
        terminal.tick(42, 300)
    assert [[content["text/plain"].split("  ")[1] for content in handle.contents] for handle in handles] == [
        ["1/3", "2/3"],
        ["40/300", "42/300"],
    ]
    assert '<progress value="40" max="300"></progress>' in handles[1].contents[0]["text/html"]
    assert "a&lt;b: kl" in handles[1].contents[0]["text/html"]
    assert capsys.readouterr().out.splitlines()[0] == "compiled 3 programs in 6.0 s"


def test_weights_that_are_read_move_a_bar_on_a_screen_and_are_one_line_in_a_log() -> None:
    log, screen = io.StringIO(), io.StringIO()
    for stream, interactive in ((log, False), (screen, True)):
        with Terminal(stream, interactive=interactive) as terminal:
            for done in range(1, 4):
                terminal.reading("teacher", done, 3)
    assert log.getvalue() == "read the weights of teacher: 3 parameters\n"
    assert "reading" in screen.getvalue()
    assert screen.getvalue().count(SHOW_CURSOR) == screen.getvalue().count(HIDE_CURSOR) == 1
