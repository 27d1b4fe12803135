"""Workloads: costs, modes, the shared file format, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import workload_support as support
from workload_support import section, work

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import Cost, EdgeWork, SampleWork, Workload


def refusal(**fields: Any) -> str:
    with pytest.raises(ScheduleError) as caught:
        Workload(**{"sections": {"a": section(), "b": section()}, "edges": (), "steps": (), **fields})
    assert caught.value.anchor == "workload-malformed"
    return f"{caught.value.what} {caught.value.wanted} | {caught.value.have}"


@pytest.mark.quick
@pytest.mark.parametrize("name", support.FILES)
def test_shared_file_is_read_and_written_without_loss(name: str) -> None:
    raw = support.raw_file(name)
    written = json.loads(json.dumps(Workload.from_json(raw).to_json()))
    assert {key: written[key] for key in ("sections", "edges", "steps", "name")} == {**raw, "name": raw.get("name", "workload")}


def test_all_seven_shared_files_are_here() -> None:
    assert len(support.FILES) == 7


def test_devices_rows_and_fans_survive_a_round_trip() -> None:
    sections = {"a": section(devices=((0, 1),), row_length=8), "b": section(replicas=2)}
    edge = EdgeWork(producer="a", consumer="b", delay=4, fan_in=2, fan_out=3)
    workload = work(sections, [edge], [{"a": (3, 4), "b": (5,)}], [])
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload


def test_cost_of_squares_is_rounded_down_once_per_microbatch() -> None:
    cost = Cost(fixed=7, per_unit=2, per_unit_squared=100)
    assert cost.of(16, [3, 4]) == 7 + 32 + 2
    assert cost.of(16, []) == 39


def test_order_puts_producers_first_and_keeps_the_given_order_otherwise() -> None:
    sections = {name: section() for name in "dcba"}
    assert work(sections, ["a c", "b d"]).order == ("b", "d", "a", "c")


def test_backward_runs_below_everything_trainable() -> None:
    trainable = {"teacher": False, "encoder": True, "frozen": False, "student": True, "probe": False}
    sections = {name: section(trainable=value) for name, value in trainable.items()}
    workload = work(sections, ["teacher student", "encoder frozen", "frozen student", "teacher probe"])
    assert dict(workload.runs_backward) == {"teacher": False, "encoder": True, "frozen": True, "student": True, "probe": False}


def test_unknown_section_of_an_edge_is_refused() -> None:
    assert refusal(edges=(EdgeWork(producer="a", consumer="c"),)) == "an edge names the section 'c'. one of ['a', 'b'] | 'c'"


def test_cycle_is_refused() -> None:
    edges = (EdgeWork(producer="a", consumer="b"), EdgeWork(producer="b", consumer="a"))
    assert refusal(edges=edges) == "the sections form a cycle. edges without a cycle | [('a', 'b'), ('b', 'a')]"
    assert "form a cycle" in refusal(edges=(EdgeWork(producer="a", consumer="a"),))


def test_second_edge_between_two_sections_is_refused() -> None:
    edges = (EdgeWork(producer="a", consumer="b"), EdgeWork(producer="a", consumer="b", delay=1))
    assert "'a'" in refusal(edges=edges)


def test_sample_twice_is_refused() -> None:
    steps = ((SampleWork(id=4, items={"a": (1,)}),), (SampleWork(id=4, items={"b": (1,)}),))
    assert refusal(steps=steps) == "sample 4 stands in it twice. ids that are unique in the workload | 4 again"


def test_items_of_an_unknown_section_are_refused() -> None:
    assert refusal(steps=((SampleWork(id=0, items={"c": (1,)}),),)) == "sample 0 has items in 'c'. one of ['a', 'b'] | 'c'"


@pytest.mark.parametrize("units", [(17,), (0,), (), (3, -1)])
def test_items_that_do_not_fit_are_refused(units: tuple[int, ...]) -> None:
    found = refusal(steps=((SampleWork(id=0, items={"a": units}),),))
    assert found == f"an item of sample 0 does not fit section 'a'. 1 to 16 units | {units}"


def test_an_item_longer_than_a_row_is_refused() -> None:
    steps = ((SampleWork(id=0, items={"a": (9,)}),),)
    assert "1 to 8 units | (9,)" in refusal(sections={"a": section(row_length=8)}, steps=steps)


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": 0},
        {"buckets": ()},
        {"buckets": (16, 8)},
        {"devices": ((0,), (1,))},
        {"devices": ((),)},
        {"row_length": 12},
    ],
    ids=str,
)
def test_section_that_cannot_run_is_refused(fields: dict[str, Any]) -> None:
    assert "section 'a'" in refusal(sections={"a": section(**fields)})


@pytest.mark.parametrize("broken", [{}, {"sections": {}, "edges": []}, {"sections": [], "edges": [], "steps": []}], ids=str)
def test_malformed_file_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="a workload file is malformed"):
        Workload.from_json(broken)


def test_file_with_an_unknown_cost_is_refused() -> None:
    raw = work({"a": section()}, []).to_json()
    raw["sections"]["a"]["forward"]["per_cube"] = 1
    with pytest.raises(ScheduleError, match="per_cube"):
        Workload.from_json(raw)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("sections", "vision", "max_inflight"), "x"),
        (("sections", "vision", "replicas"), 1.0),
        (("sections", "vision", "buckets"), [4.5, 8]),
        (("sections", "vision", "trainable"), "no"),
        (("sections", "vision", "forward", "fixed"), -1),
        (("edges", 0, "delay"), None),
        (("edges", 0, "delay"), float("inf")),
        (("steps", 0, 0, "id"), []),
        (("steps", 0, 0, "items"), {"vision": [0.5]}),
    ],
    ids=str,
)
def test_numbers_that_are_not_whole_are_refused(place: tuple[Any, ...], value: Any) -> None:
    raw = support.raw_file("mllm_tiny_batch")
    inside: Any = raw
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    with pytest.raises(ScheduleError, match="a workload file is malformed"):
        Workload.from_json(raw)


def test_rows_of_one_item_survive_the_file_format_and_packed_ones_are_not_told() -> None:
    found = work({"a": section(packed=False), "b": section()}, [], [{"a": (3,), "b": (3,)}])
    raw = found.to_json()
    assert (raw["sections"]["a"]["packed"], "packed" in raw["sections"]["b"]) == (False, False)
    assert Workload.from_json(raw) == found
