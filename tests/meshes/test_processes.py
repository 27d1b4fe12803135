"""What processes tell one another on the host, and arrays that go from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from process_support import run_processes


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_processes(tmp_path_factory.mktemp("group"), 3, 1, "group_calls")


def test_everybody_hears_everybody_in_order(told: list[Any]) -> None:
    for found in told:
        assert found["order"] == [[[p, n] for p in range(3)] for n in range(50)]
        assert found["threads"] == {c: [[f"{c}{n}"] * 3 for n in range(30)] for c in "ab"}


def test_a_disagreement_and_an_error_of_the_first_process_are_raised_in_all(told: list[Any]) -> None:
    assert [found["disagree"] for found in told] == ["processes-disagree"] * 3
    assert [found["lead"] for found in told] == [["done", "d"], [None, "d"], [None, "d"]]


def test_a_process_that_says_nothing_is_an_error(told: list[Any]) -> None:
    assert told[0]["silent"] == "process-silent"


@pytest.mark.parametrize(("source", "target"), [(3, 2), (1, 4)])
def test_a_thousand_transfers_both_ways_arrive_where_they_belong(source: int, target: int, tmp_path: Path) -> None:
    found = run_processes(tmp_path, 2, 4, "transfers", str(source), str(target), "500")
    assert [(process["arrived"], process["wrong"]) for process in found] == [(500, 0), (500, 0)]
    assert found[1]["scalar"] == [2.5] * target
    assert found[0]["scalar"] is None
