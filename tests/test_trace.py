"""The trace, held against what the format's description asks of each kind of event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from record_support import record

from maestro_jax.trace import trace

FIELDS = {
    "M": {"ph", "name", "pid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
}


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    return json.loads(json.dumps(trace([record(9), record(21, nominal=True)]), allow_nan=False))["traceEvents"]


def nanoseconds(microseconds: float) -> int:
    return round(1000 * microseconds)


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == kind]


def test_every_event_has_the_fields_of_its_kind(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert set(event) - {"tid"} == FIELDS[event["ph"]] - {"tid"}
        assert all(isinstance(event[name], int) for name in ("pid", "tid", "id") if name in event)
        assert all(isinstance(event[name], int | float) and event[name] >= 0 for name in ("ts", "dur") if name in event)


def test_processes_are_sections_and_threads_are_replicas(events: list[dict[str, Any]]) -> None:
    names = {e["pid"]: e["args"]["name"] for e in of_kind(events, "M") if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in of_kind(events, "M") if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(order, key=order.__getitem__)] == [
        f"{group} {section}" for group in ("scheduled", "measured") for section in ("eye", "ear", "mind")
    ]
    threads = {(names[e["pid"]], e["tid"]): e["args"]["name"] for e in of_kind(events, "M") if e["name"] == "thread_name"}
    assert threads["measured eye", 1] == "eye 1"
    assert {(e["pid"], e["tid"]) for e in of_kind(events, "X")} == {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}


def test_slices_are_the_tasks_in_microseconds() -> None:
    made = record()
    slices = of_kind(trace([made])["traceEvents"], "X")
    tasks = [*made.scheduled.tasks, *made.measured.tasks]
    assert [(s["cat"], s["tid"], s["ts"] * 1000, s["dur"] * 1000) for s in slices] == [
        (t.kind, t.replica, pytest.approx(t.start), pytest.approx(t.end - t.start)) for t in tasks
    ]


def test_slices_tell_samples_and_units() -> None:
    made = record()
    slices = of_kind(trace([made])["traceEvents"], "X")[: len(made.scheduled.tasks)]
    for task, units, found in zip(made.scheduled.tasks, made.units, slices, strict=True):
        assert found["args"]["step"] == 9 + task.step
        if task.items:
            assert found["args"]["samples"] == sorted({sample for sample, _ in task.items})
            assert (found["args"]["units"], found["args"]["bucket"], found["args"]["items"]) == (units, task.bucket, len(task.items))
            assert found["args"]["padding"] == pytest.approx(1 - units / task.bucket)


def test_arrows_lead_from_producers_to_consumers(events: list[dict[str, Any]]) -> None:
    """Each end lies in the slice that it belongs to, or a viewer drops it."""
    slices, starts, ends = (of_kind(events, kind) for kind in "Xsf")
    assert [event["id"] for event in starts] == [event["id"] for event in ends]
    assert len({event["id"] for event in starts}) == 4 * sum(map(len, record().producers))
    assert {event["bp"] for event in ends} == {"e"}
    spans = [(s["pid"], s["tid"], nanoseconds(s["ts"]), nanoseconds(s["ts"]) + nanoseconds(s["dur"])) for s in slices]
    for event in [*starts, *ends]:
        at = nanoseconds(event["ts"])
        assert len([1 for *place, start, end in spans if place == [event["pid"], event["tid"]] and start <= at < end]) == 1
    assert all(start["ts"] < end["ts"] for start, end in zip(starts, ends, strict=True))


def test_windows_come_one_after_the_other(events: list[dict[str, Any]]) -> None:
    slices = of_kind(events, "X")
    first, second = ([s for s in slices if (s["args"]["step"] < 21) is early] for early in (True, False))
    assert len(first) == len(second)
    assert max(s["ts"] + s["dur"] for s in first) < min(s["ts"] for s in second)
