"""The notebook on scheduling runs from beginning to end, shows what its text says, and what is stored with it is what it shows."""

from __future__ import annotations

import re

import nbformat
import notebook_support
import pytest
from notebook_support import output

NOTEBOOK = notebook_support.ROOT / "notebooks" / "schedules.ipynb"
WORKLOADS = notebook_support.ROOT / "tests" / "schedules" / "workloads"

DEPENDENT = {"real", "real-in-order", "real-wavefront", "real-compare"}
"""Cells on steps of a real run: the built-in corpus differs between versions of Python, and counted costs between those of JAX."""

pytestmark = pytest.mark.xdist_group("notebook_schedules")  # one process executes it, where groups are kept together


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    return notebook_support.execute(NOTEBOOK, tmp_path_factory.mktemp("notebook"), {"workloads": str(WORKLOADS)})


def rows(notebook: nbformat.NotebookNode, cell_id: str) -> dict[str, list[float]]:
    """First cell of a row of a table -> the numbers of the others."""
    lines = [line.strip("| ").split(" | ") for line in output(notebook, cell_id, "text/markdown").splitlines()[2:]]
    return {line[0]: [float(cell.rstrip("%")) for cell in line[1:]] for line in lines}


def headline(notebook: nbformat.NotebookNode, cell_id: str) -> str:
    """The first line of a drawing."""
    [words] = re.findall(r'font-weight="bold">([^<]+)<', output(notebook, cell_id, "text/html"))
    return words


def ratio(notebook: nbformat.NotebookNode, cell_id: str) -> float:
    return float(headline(notebook, cell_id).rpartition("ratio ")[2])


def test_every_cell_runs_without_a_word_on_stderr(executed: nbformat.NotebookNode) -> None:
    assert notebook_support.troubles(executed) == []


def test_a_schedule_draws_itself(executed: nbformat.NotebookNode) -> None:
    assert headline(executed, "in-order") == "makespan 36.02 ms"


def test_the_frames_follow_the_sample_as_the_text_says(executed: nbformat.NotebookNode) -> None:
    boxes = re.findall(r"<title>([^<]+)</title>(?:(?!</g>).)*stroke=", output(executed, "bubbles", "text/html"))
    assert [box.partition(",")[0] for box in boxes] == [
        "vision 0: forward",
        "vision 0: forward",
        "llm 1: forward and backward",
        "vision 0: backward",
        "vision 0: backward",
    ]


def test_the_parts_of_the_gap_add_up(executed: nbformat.NotebookNode) -> None:
    printed = output(executed, "gap", "stream")
    [total] = re.findall(r"gap ([\d.]+) ms$", printed, flags=re.MULTILINE)
    parts = re.findall(r"^  \w+ +([\d.]+) ms ", printed, flags=re.MULTILINE)
    assert len(parts) == 6
    assert sum(map(float, parts)) == pytest.approx(float(total), abs=0.3)


def test_order_and_sizes_help_together_and_neither_alone(executed: nbformat.NotebookNode) -> None:
    found = rows(executed, "order")
    assert found["8192"][0] == found["8192"][1]
    assert found["4096"][1] + 5.4 < found["8192"][0] < found["4096"][0]


def test_wavefront_is_better_than_by_hand(executed: nbformat.NotebookNode) -> None:
    assert ratio(executed, "wavefront") < ratio(executed, "by-hand") < ratio(executed, "bubbles")


@pytest.mark.parametrize("cell", ["compare", "real-compare", "large-compare"])
def test_wavefront_is_the_best_policy(executed: nbformat.NotebookNode, cell: str) -> None:
    found = rows(executed, cell)
    assert list(found) == ["wavefront", "in_order", "lockstep", "sequential"]
    assert all(found["wavefront"][1] < numbers[1] for name, numbers in found.items() if name != "wavefront")


def test_real_steps_are_drawn_with_their_numbers(executed: nbformat.NotebookNode) -> None:
    assert "steps 0 to 3, samples [8, 8, 8, 8]" in output(executed, "real", "stream")
    numbers = re.findall(r'fill="#ffffff" font-size="11">(\d+)<', output(executed, "real-wavefront", "text/html"))
    assert set(numbers) == set("0123")


def test_more_effort_finds_better_schedules(executed: nbformat.NotebookNode) -> None:
    for ratios in rows(executed, "effort").values():
        assert sorted(ratios, reverse=True) == ratios
        assert ratios[-1] < ratios[0]


def test_one_sample_leaves_nothing_to_choose(executed: nbformat.NotebookNode) -> None:
    assert rows(executed, "samples")["1"] == [1, 1]


def test_what_is_stored_is_up_to_date(executed: nbformat.NotebookNode) -> None:
    """Where it is not, `python tests/notebook_support.py notebooks/schedules.ipynb` makes it anew."""
    stored = nbformat.read(NOTEBOOK, as_version=4)
    cells = {cell.id: cell for cell in executed.cells}
    assert {cell.id for cell in stored.cells} == cells.keys() - {"injected"}
    compared = [cell for cell in stored.cells if cell.get("outputs") and cell.id not in DEPENDENT]
    assert len(compared) > 10
    for cell in compared:
        for kind in set(cell.outputs[0].get("data", ["stream"])) - {"text/plain"}:
            assert output(stored, cell.id, kind) == output(executed, cell.id, kind), cell.id
