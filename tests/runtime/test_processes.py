"""Several processes compute what one computes, each on its own devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_support import run_processes


def slow(*run: Any) -> Any:
    return pytest.param(run, marks=pytest.mark.slow)


WIDE = (
    "teacher/Section.axes={}",
    "teacher/Section.replicas=2",
    "student/Section.replicas=1",
    "student/Section.axes={'fsdp': 2}",
    "student/Section.microbatch=128",
)

RUNS = [
    ("chain", 2, 2),  # one section and another, and two
    slow("chain", 4, 1),
    slow("omni", 3, 2),  # a section over two processes
    slow("omni", 2, 3),
    ("tensor", 4, 1),  # a replica over two processes
    slow("omni", 8, 1),
    ("kd_tiny.gin", 2, 2),  # a process for each section
    ("kd_tiny.gin", 2, 1, *(f"{name}/Section.submesh='all'" for name in ("teacher", "student")), *WIDE),  # a replica over all processes
    ("omni_tiny.gin", 2, 3),  # the language model lies in both processes
    slow("kd_tiny.gin", 4, 1),  # two processes for each section; one replica of the teacher is over both of its own
    slow("kd_tiny.gin", 3, 2, "student/Section.replicas=4"),  # one process and two
    slow("kd_tiny.gin", 2, 3, "student/Section.replicas=3"),  # one section alone, and both in its process
    slow("kd_tiny.gin", 8, 1, "teacher/Section.replicas=2", "student/Section.replicas=4"),
    slow("omni_tiny.gin", 3, 2),  # both encoders in one process, and a process for each of the others
    slow("omni_tiny.gin", 5, 1),  # a process for each encoder and the generator, and two for the language model
    slow("omni_tiny.gin", 8, 1, *(f"{name}/Section.replicas=2" for name in ("vision", "audio", "generator"))),
]
"""A graph or shipped config, numbers of processes and of their devices, and bindings."""

IDLE = {("omni", 8): 2}
"""Graph and number of processes -> those that have no device of the plan, and take part all the same."""

COUNTING = "accuracy"
"""How names end of metrics that count tokens: one more may be right by the last bit."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What one process computes, of a graph or config."""

    @functools.cache
    def computed(name: str) -> Any:
        [found] = run_processes(tmp_path_factory.mktemp(name), 1, 6, "process_steps.steps", name)
        return found

    return computed


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


def smooth(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if not name.endswith(COUNTING)}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: " ".join(map(str, run)))
def test_gradients_losses_and_evaluations_are_those_of_one_process(
    run: tuple[Any, ...], alone: Callable[[str], Any], tmp_path: Path
) -> None:
    graph, processes, devices, *bindings = run
    found, wanted = run_processes(tmp_path, processes, devices, "process_steps.steps", graph, *bindings), alone(graph)
    have, want = put_together(found), put_together([wanted])
    assert have.keys() == want.keys()
    for name, gradient in want.items():
        assert np.abs(have[name] - gradient).max() <= 1e-5 * np.abs(gradient).max(), name
    assert len(wanted["steps"]) == 20
    for process in found:
        for mine, theirs in zip([*process["steps"], process["evaluation"]], [*wanted["steps"], wanted["evaluation"]], strict=True):
            assert smooth(mine) == pytest.approx(smooth(theirs), rel=1e-5, nan_ok=True)
    # The layout is the one that the test is about.
    busy = {n for processes_of in found[0]["sections"].values() for n in processes_of}
    assert len(busy) == processes - IDLE.get((graph, processes), 0)
    # All that was offered was fetched, once, and nothing is left of it.
    offered, fetched = (sorted(each for process in found for each in process[kind]) for kind in ("offer", "fetch"))
    assert offered == fetched
    assert len(set(offered)) == len(offered) > 0
    assert [process["left"] for process in found] == [0] * processes


def test_other_schedules_and_other_rows_are_found(tmp_path: Path) -> None:
    found = run_processes(tmp_path, 2, 2, "process_steps.disagree")
    assert [process["schedule"] for process in found] == ["processes-disagree"] * 2
    assert found[1]["payload"] == "mispaired-payload"


def test_processes_that_could_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    found = run_processes(tmp_path, 2, 3, "process_steps.refused")
    assert [process["layout"] for process in found] == ["replica-spans-processes"] * 2


def test_samples_are_read_where_they_are_needed(tmp_path: Path) -> None:
    found = run_processes(tmp_path, 2, 4, "process_steps.reads")
    assert [process["share"] for process in found] == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert all(process["ids"] == [f"s{n}" for n in range(16) if n != 5] for process in found)
    assert all(process["bad"] == ["sample 5 is bad."] for process in found)


def test_processes_with_other_settings_layouts_or_versions_are_told_what_differs(tmp_path: Path) -> None:
    for found in run_processes(tmp_path, 2, 3, "process_steps.settings"):
        assert found["alike"] == []
        assert found["settings"] == ["processes-disagree", "train.evaluate_every: 5 in process 0, 6 in process 1"]
        anchor, have = found["layout"]
        assert anchor == "processes-disagree"
        assert "plan, line" in have
        assert "student" in have
        assert "jax: jax 0 in process 0, jax 1 in process 1" in found["versions"][1]


def test_costs_are_those_of_the_tasks_of_all_processes(tmp_path: Path) -> None:
    # The third has nothing to do.
    one, other, idle = run_processes(tmp_path, 3, 1, "process_steps.measured")
    assert one["tasks"] == other["tasks"] == idle["tasks"]
    assert {section for section, kind, taken in one["tasks"] if kind == "update"} == {"teacher", "student"}
    assert {section for section, kind, taken in one["tasks"] if kind != "update"} == {"teacher", "middle", "student"}
    assert all(taken > 0 for _, _, taken in one["tasks"])
    # One edge leads from process to process, and its transfers took some time.
    assert one["delays"] == other["delays"]
    [(label, taken)] = one["delays"].items()
    assert label.startswith("teacher")
    assert taken > 0
    assert one["same"]
    assert other["same"]


def test_rows_that_arrive_in_the_wrong_place_end_all_processes_before_training(tmp_path: Path) -> None:
    found = run_processes(tmp_path, 2, 1, "process_steps.misplaced")
    assert [process["anchor"] for process in found] == ["transfer-misplaced"] * 2


def test_each_process_finds_its_programs_in_the_cache_of_an_earlier_run(tmp_path: Path) -> None:
    for number in range(2):
        found = run_processes(tmp_path / str(number), 2, 1, "process_steps.kept", str(tmp_path / "cache"))
        assert [process["index"] for process in found] == [0, 1]
        for process in found:
            assert process["programs"] > 0
            # Besides programs of tasks and updates, what makes the first parameters is asked for.
            assert process["found"] >= process["programs"] if number else process["found"] == 0, process
