"""What is stored with the notebooks; and that on distillation runs from beginning to end, and shows what it promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import notebook_support
import pytest
from notebook_support import output

FOLDER = notebook_support.ROOT / "notebooks"
NOTEBOOK = FOLDER / "distil.ipynb"
STORED_BYTES = 300_000

every_notebook = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)

pytestmark = pytest.mark.xdist_group("notebook")  # one process executes it, where groups are kept together


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbformat.NotebookNode]:
    """The notebook after a short training."""
    with pytest.MonkeyPatch.context() as patch:
        # As in this process: compiling is most of the time.
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield notebook_support.execute(NOTEBOOK, tmp_path_factory.mktemp("notebook"), {"steps": 12})


@pytest.fixture
def stored() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_every_cell_runs_without_a_word_on_stderr(executed: nbformat.NotebookNode) -> None:
    assert notebook_support.troubles(executed) == []


def test_the_graph_draws_both_sections(executed: nbformat.NotebookNode) -> None:
    drawn = re.findall(r"<text[^>]*>([^<]+)<", output(executed, "graph", "text/html"))
    assert {"teacher", "forward only", "student", "train", "hidden → teacher_hidden"} < set(drawn)


def test_the_plan_draws_devices_and_parameters(executed: nbformat.NotebookNode) -> None:
    html = output(executed, "plan", "text/html")
    assert re.findall(r">devices ([^<]+)<", html) == ["0-1 cpu", "2-3 cpu"]
    assert "parameters 302k trained, 197k frozen" in html


def test_the_gradient_is_verified(executed: nbformat.NotebookNode) -> None:
    assert output(executed, "verify", "text/plain").startswith("Verification(ok=True")


def test_the_loss_falls(executed: nbformat.NotebookNode) -> None:
    plain = output(executed, "rest", "text/plain")
    found = re.fullmatch(r"History\(steps 1-12, loss ([\d.]+) to ([\d.]+), 2 evaluations\)", plain)
    assert found, plain
    assert float(found[2]) < float(found[1]) - 0.5
    assert 'aria-label="loss over steps' in output(executed, "rest", "text/html")


def test_a_step_draws_itself(executed: nbformat.NotebookNode) -> None:
    html = output(executed, "first", "text/html")
    assert re.findall(r"<th[^>]*>([^<]+)<", html)[:2] == ["step", "loss"]


def test_a_recorded_window_draws_itself(executed: nbformat.NotebookNode) -> None:
    html = output(executed, "timeline", "text/html")
    assert re.findall(r"steps 9 to 12, (\w+): makespan", html) == ["scheduled", "scheduled", "measured", "measured"]  # heading and label
    assert len(set(re.findall(r"<title>teacher 0: forward, step (\d+)", html))) == 4


def test_the_student_alone_is_as_good(executed: nbformat.NotebookNode) -> None:
    printed = output(executed, "save", "stream")
    [(beside, alone)] = re.findall(r"cross-entropy: ([\d.]+) beside the teacher, ([\d.]+) alone", printed)
    assert float(alone) == pytest.approx(float(beside), abs=2e-4)


def test_the_loss_is_stored(stored: nbformat.NotebookNode) -> None:
    assert "loss" in output(stored, "rest", "text/html")


@every_notebook
def test_stored_outputs_are_those_of_one_run_from_beginning_to_end(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook_support.troubles(notebook) == []
    assert {each.output_type for cell in notebook.cells for each in cell.get("outputs", ())} == {"execute_result", "stream"}


def test_stored_drawings_are_up_to_date(executed: nbformat.NotebookNode, stored: nbformat.NotebookNode) -> None:
    """Where they are not, `python tests/notebook_support.py notebooks/distil.ipynb` draws them anew."""
    for cell in ("graph", "plan"):
        assert output(stored, cell, "text/html") == output(executed, cell, "text/html")


@every_notebook
def test_the_stored_notebook_is_small_and_names_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < STORED_BYTES
    assert re.findall(r"/(?:home|root|tmp|Users)/", text) == []
    assert '"version"' not in text
    assert "iopub" not in text  # times of execution


@every_notebook
def test_links_lead_somewhere(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    links = [link for cell in cells if cell.cell_type == "markdown" for link in re.findall(r"\]\(([^)]+)\)", cell.source)]
    assert links
    assert [link for link in links if not (FOLDER / link).exists()] == []
