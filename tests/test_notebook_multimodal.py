"""The notebook on multimodal training runs from beginning to end, and shows what its text says."""

from __future__ import annotations

import re

import nbformat
import notebook_support
import pytest
from notebook_support import output

NOTEBOOK = notebook_support.ROOT / "notebooks" / "multimodal.ipynb"
SECTIONS = ["vision", "audio", "llm", "generator"]
TRAINED, FORWARD_ONLY, PASSING = "train", "forward only", "pass gradient"

pytestmark = pytest.mark.xdist_group("notebook_multimodal")  # one process executes it, where groups are kept together


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    """The notebook after a short training."""
    with pytest.MonkeyPatch.context() as patch:
        # As in this process: compiling is most of the time.
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        return notebook_support.execute(NOTEBOOK, tmp_path_factory.mktemp("notebook"), {"steps": 40})


@pytest.fixture
def stored() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def words(notebook: nbformat.NotebookNode, cell_id: str) -> list[str]:
    """All text in the drawings of a cell."""
    return re.findall(r"<text[^>]*>([^<]+)<", output(notebook, cell_id, "text/html"))


def rows(notebook: nbformat.NotebookNode, cell_id: str) -> dict[str, list[str]]:
    """First cell of a row of the first table -> the others."""
    found = re.findall(r"<tr>(.*?)</tr>", output(notebook, cell_id, "text/html"))
    cells = [re.findall(r"<td[^>]*>([^<]*)<", row) for row in found]
    return {first: rest for first, *rest in filter(None, cells)}


def printed(notebook: nbformat.NotebookNode, cell_id: str) -> dict[str, str]:
    """First word of a printed line -> the rest."""
    return {line.split()[0]: line.partition(" ")[2].strip() for line in output(notebook, cell_id, "stream").splitlines()}


def test_every_cell_runs_without_a_word_on_stderr(executed: nbformat.NotebookNode) -> None:
    assert notebook_support.troubles(executed) == []


@pytest.mark.parametrize(("cell", "streams"), [("both", {"image", "audio"}), ("image", {"image"}), ("own-sample", {"image"})])
def test_each_row_of_a_picture_is_taken_by_a_unit(executed: nbformat.NotebookNode, cell: str, streams: set[str]) -> None:
    html = output(executed, cell, "text/html")
    numbers = r'<text[^>]*fill="#ffb000"[^>]*>(\d+)<'
    taken = [
        re.findall(rf'fill="{colour}" fill-opacity="0.4"/><text[^>]*>(\d+)<', html)
        for stream, colour in (("image", "#2f7ed8"), ("audio", "#c0700c"))
        if stream in streams
    ]
    assert re.findall(numbers, html) == [number for each in taken for number in each]
    assert all(taken)
    assert 'stroke="currentColor"' in html  # an answer


def test_plain_text_has_no_picture(executed: nbformat.NotebookNode) -> None:
    html = output(executed, "plain", "text/html")
    assert "<path" not in html
    assert 'fill="currentColor"' in html


@pytest.mark.parametrize(
    ("cell", "modes"),
    [("graph", [TRAINED, TRAINED, TRAINED, TRAINED]), ("freeze", [FORWARD_ONLY, TRAINED, PASSING, TRAINED])],
)
def test_the_graph_draws_sections_and_what_they_do(executed: nbformat.NotebookNode, cell: str, modes: list[str]) -> None:
    drawn = words(executed, cell)
    assert [drawn[drawn.index(section) + 1] for section in SECTIONS] == modes
    assert {"hidden → image", "hidden → audio", "hidden → state"} < set(drawn)


def test_the_grid_shows_what_runs_for_which_sample(executed: nbformat.NotebookNode) -> None:
    html = output(executed, "grid", "text/html")
    columns = re.findall(r'<rect x="(\d+)" y="(\d+)"', html)
    by_row = {y: {x for x, found in columns if found == y} for _, y in columns}
    vision, audio, llm, generator = (by_row[y] for y in sorted(by_row, key=int))
    assert [len(vision), len(audio), len(llm)] == [8, 8, 16]
    assert len(vision & audio) == 4
    assert len(llm - vision - audio) == 4
    assert generator < vision


def test_the_real_step_has_the_padding_of_the_schedule(executed: nbformat.NotebookNode) -> None:
    table = rows(executed, "padding")
    assert list(table) == SECTIONS
    assert output(executed, "same", "stream").splitlines() == [
        str({name: cells[-1] for name, cells in table.items()}),
        "the samples drawn above: True",
    ]


def test_a_batch_without_images_issues_no_task_of_vision(executed: nbformat.NotebookNode) -> None:
    found = printed(executed, "without")
    assert list(found) == SECTIONS
    assert found["vision"] == found["generator"] == "1 update"
    assert "forward" in found["audio"]


def test_the_schedules_draw_themselves(executed: nbformat.NotebookNode) -> None:
    for cell in ("schedule", "ahead"):
        assert any(word.startswith("makespan") for word in words(executed, cell))


def test_a_frozen_encoder_runs_ahead(executed: nbformat.NotebookNode) -> None:
    told = re.findall(r"<title>(\w+) \d: ([\w ]+), step (\d).*? from ([\d.e+-]+) ", output(executed, "ahead", "text/html"), flags=re.DOTALL)
    last_vision = max(float(start) for section, _, _, start in told if section == "vision")
    first_update = min(float(start) for section, kind, _, start in told if section == "audio" and kind == "update")
    assert {step for section, _, step, _ in told if section == "vision"} == set("0123")
    assert last_vision < first_update


def test_the_gradient_is_verified(executed: nbformat.NotebookNode) -> None:
    assert output(executed, "verify", "text/plain").startswith("Verification(ok=True")
    assert list(rows(executed, "verify")) == sorted(SECTIONS)


def test_every_loss_falls_and_the_curves_are_drawn(executed: nbformat.NotebookNode) -> None:
    table = rows(executed, "rest")
    for name in ("loss", "llm/text", "llm/digits", "llm/tones", "generator/redraw"):
        *_, before, after = map(float, table[name])
        assert after < 0.95 * before, name
        assert f'aria-label="{name} over steps' in output(executed, "rest", "text/html")


def test_digits_and_tones_are_recognised_more_often_than_by_chance(stored: nbformat.NotebookNode) -> None:
    table = rows(stored, "rest")
    assert float(table["llm/digit_accuracy"][-1]) > 0.5
    assert float(table["llm/tone_accuracy"][-1]) > 0.5


def test_frozen_sections_keep_every_bit(executed: nbformat.NotebookNode) -> None:
    found = {name: re.findall(r"\d+", rest) for name, rest in printed(executed, "bits").items()}
    for name in ("vision", "llm"):
        same, arrays = found[name]
        assert same == arrays != "0"
    for name in ("audio", "generator"):
        assert found[name][0] == "0"


def test_own_files_become_a_sample(executed: nbformat.NotebookNode) -> None:
    assert output(executed, "own", "text/plain") == "Dataset(2 training samples, 0 held out, streams text, image, audio)"
    assert "chats.jsonl:1: text 1, image 1" in output(executed, "own-sample", "text/html")


def test_stored_drawings_are_up_to_date(executed: nbformat.NotebookNode, stored: nbformat.NotebookNode) -> None:
    """Where they are not, `python tests/notebook_support.py notebooks/multimodal.ipynb` draws them anew."""
    for cell in ("graph", "plan", "freeze", "own-sample"):
        assert output(stored, cell, "text/html") == output(executed, cell, "text/html"), cell
