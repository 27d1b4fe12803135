"""What processes tell one another on the host, and arrays that go from one to another.

There are three of them, of four devices each: a and b hold parts of the same replicas, c looks on at some.
"""

from __future__ import annotations

from typing import Any

import pytest
from process_support import run_processes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_processes(tmp_path_factory.mktemp("processes"), 3, 4, "process_transfers.everything")


@pytest.fixture
def told(found: list[Any]) -> list[Any]:
    return [process["told"] for process in found]


def test_everybody_hears_everybody_in_order(told: list[Any]) -> None:
    for each in told:
        assert each["order"] == [[[p, n] for p in range(3)] for n in range(50)]
        assert each["threads"] == {c: [[f"{c}{n}"] * 3 for n in range(30)] for c in "ab"}


def test_a_disagreement_and_an_error_of_the_first_process_are_raised_in_all(told: list[Any]) -> None:
    assert [each["disagree"] for each in told] == ["processes-disagree"] * 3
    assert [each["lead"] for each in told] == [["done", "d"], [None, "d"], [None, "d"]]


def test_a_process_that_says_nothing_is_an_error(told: list[Any]) -> None:
    assert told[0]["silent"] == "process-silent"


def test_a_thousand_transfers_over_several_wires_at_once_arrive_where_they_belong(found: list[Any]) -> None:
    many = [process["many"] for process in found]
    assert [each["misplaced"] for each in many] == [0, 0, 0]
    # Both ways over all wires; a slot's stripes, joined on its devices: arrays of one end times its devices that are there.
    there = {
        "three to two": [0, 3, 3],
        "one to four": [0, 2, 2],
        "two to two": [0, 1, 1],
        "onto itself": [1, 1, 0],
        "in one process": [0, 0, 2],
    }
    back = {
        "three to two": [4, 2, 0],
        "one to four": [4, 0, 0],
        "two to two": [1, 1, 0],
        "onto itself": [1, 1, 0],
        "in one process": [0, 0, 2],
    }
    shards = [sum(each[n] for each in (*there.values(), *back.values())) for n in range(3)]
    assert [each["shards"] for each in many] == [250 * n for n in shards]


def test_a_process_gets_arrays_only_where_it_has_devices_of_the_receiving_end(found: list[Any]) -> None:
    assert [(process["many"]["wrongly here"], process["many"]["wrongly not here"]) for process in found] == [(0, 0)] * 3


def test_a_transfer_to_another_process_does_not_wait_for_its_producer(found: list[Any]) -> None:
    assert [process["unfinished"] for process in found] == [
        {"sent early": True, "misplaced": None},
        {"sent early": None, "misplaced": 0},
        {"sent early": None, "misplaced": 0},
    ]


def test_what_was_fetched_is_kept_by_nobody(found: list[Any]) -> None:
    """75 times two ways of 8 MB each: a process that kept what it offered, or a part of what it fetched, would grow by 150 MB or more."""
    assert max(process["large"]["more"] for process in found) < 75


def test_a_number_comes_from_the_own_process_where_there_is_one_else_from_the_first(found: list[Any]) -> None:
    numbers = {name: [process["numbers"][name] for process in found] for name in found[0]["numbers"]}
    assert numbers == {
        "a b to c": [None, None, [10.0, 10.0]],
        "a b to b c": [None, [11.0, 11.0], [10.0]],
        "c to a b": [[12.0, 12.0], [12.0], None],
        "b to b": [None, [11.0, 11.0], None],
    }


def test_host_values_lie_on_the_devices_of_all_processes_and_are_wrapped_again(found: list[Any]) -> None:
    wrapped = [process["wrapped"] for process in found]
    assert [(each["shape"], each["whole here"]) for each in wrapped] == [([8, 3], False)] * 3
    assert [[right for _, right in each["shards"]] for each in wrapped] == [[True, True], [True], [True]]


def test_the_exercise_counts_the_pairs_of_devices_between_processes(found: list[Any]) -> None:
    # 5 of 6 pairs of "three to two", both ways; 4 of "one to four"; 2 of "two to two"; none inside a process.
    assert [process["tried"]["pairs"] for process in found] == [5 * 2 + 4 + 2] * 3


def test_the_exercise_names_the_pair_whose_rows_arrive_at_another_device(found: list[Any]) -> None:
    sender, *receivers = (process["tried"]["rotated"] for process in found)
    assert sender == "nothing"
    for index, (anchor, what, wanted) in enumerate(receivers, start=1):
        assert (anchor, what) == ("transfer-misplaced", "rows of edge edge0 arrive in the wrong place between processes.")
        assert f"of process {index}, the rows that " in wanted
        assert wanted.endswith("of process 0 sent")


def test_the_exercise_finds_rows_of_an_earlier_transfer(found: list[Any]) -> None:
    for process in found[1:]:
        anchor, what, _ = process["tried"]["late"]
        assert (anchor, what) == ("transfer-misplaced", "rows of edge edge0 arrive in the wrong place between processes.")
