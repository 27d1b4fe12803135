"""Several processes compute what one computes, each on its own devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_support import run_processes

LAYOUTS = [
    ("chain", 2, 2),  # one section and another, and two
    ("omni", 3, 2),  # a section over two processes
    pytest.param("chain", 4, 1, marks=pytest.mark.slow),
    pytest.param("omni", 2, 3, marks=pytest.mark.slow),
    ("tensor", 4, 1),  # a replica over two processes
    pytest.param("omni", 8, 1, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process computes."""
    known: dict[str, Any] = {}

    class Known(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            [known[name]] = run_processes(tmp_path_factory.mktemp(name), 1, 6, "steps", name)
            self[name] = known[name]
            return known[name]

    return Known()


def put_together(parts: list[Any]) -> dict[str, np.ndarray]:
    """Gradients from the pieces of all processes."""
    pieces: dict[str, list[Any]] = {}
    for part in parts:
        for name, found in part["gradients"].items():
            pieces.setdefault(name, []).extend(found)
    whole = {}
    for name, found in pieces.items():
        bounds = [[[low or 0, high] for low, high in index] for index, _ in found]
        sizes = [np.shape(values) for _, values in found]
        ends = [[low + size for (low, _), size in zip(b, s, strict=True)] for b, s in zip(bounds, sizes, strict=True)]
        array = np.full(np.max(ends, axis=0), np.nan)
        for b, s, (_, values) in zip(bounds, sizes, found, strict=True):
            array[tuple(slice(low, low + size) for (low, _), size in zip(b, s, strict=True))] = values
        whole[name] = array
    return whole


@pytest.mark.parametrize(("graph", "processes", "devices"), LAYOUTS)
def test_gradients_losses_and_evaluations_are_those_of_one_process(
    graph: str, processes: int, devices: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    found, wanted = run_processes(tmp_path, processes, devices, "steps", graph), alone[graph]
    have, want = put_together(found), put_together([wanted])
    assert have.keys() == want.keys()
    for name, gradient in want.items():
        assert np.abs(have[name] - gradient).max() <= 1e-5 * np.abs(gradient).max()
    for process in found:
        for mine, theirs in zip(process["losses"], wanted["losses"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        assert process["evaluation"] == pytest.approx(wanted["evaluation"], rel=1e-5)
    # The layout is the one that the test is about.
    assert len({n for processes_of in found[0]["sections"].values() for n in processes_of}) > 1


def test_other_schedules_and_other_rows_are_found(tmp_path: Path) -> None:
    found = run_processes(tmp_path, 2, 2, "disagree")
    assert [process["schedule"] for process in found] == ["processes-disagree"] * 2
    assert found[1]["payload"] == "mispaired-payload"


def test_processes_that_could_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    found = run_processes(tmp_path, 2, 3, "refused")
    assert {process["layout"] for process in found} <= {"replica-spans-processes", "no error"}


def test_samples_are_read_where_they_are_needed(tmp_path: Path) -> None:
    found = run_processes(tmp_path, 2, 4, "reads")
    assert [process["share"] for process in found] == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert all(process["ids"] == [f"s{n}" for n in range(16) if n != 5] for process in found)
    assert all(process["bad"] == ["sample 5 is bad."] for process in found)
