"""Tasks and schedules as files and digests."""

from __future__ import annotations

import dataclasses

import pytest

from maestro_jax.schedules import Schedule, Task

FORWARD = Task(section="a", replica=1, kind="forward", step=2, bucket=8, items=((3, 0), (4, 1)), start=5, end=9)
UPDATE = Task(section="a", replica=0, kind="update", step=2, start=9, end=12)


@pytest.mark.quick
def test_task_in_the_file_format() -> None:
    assert FORWARD.to_json() == {
        "section": "a",
        "replica": 1,
        "kind": "forward",
        "step": 2,
        "bucket": 8,
        "items": [[3, 0], [4, 1]],
        "start": 5,
        "end": 9,
    }
    assert (UPDATE.to_json()["bucket"], UPDATE.to_json()["items"]) == (0, [])


def test_schedule_in_the_file_format_keeps_the_order() -> None:
    assert Schedule(tasks=(UPDATE, FORWARD)).to_json() == {"tasks": [UPDATE.to_json(), FORWARD.to_json()]}


def test_makespan_is_the_last_end() -> None:
    assert Schedule(tasks=(UPDATE, FORWARD)).makespan == 12
    assert Schedule(tasks=()).makespan == 0


@pytest.mark.quick
def test_digest_does_not_change_between_versions() -> None:
    assert Schedule(tasks=(FORWARD, UPDATE)).digest() == "60f298ada4d4473b5636fc92884abb4f2a63e0b291d3e5c63fd90265a9b78fa6"


def test_digest_depends_on_order_and_on_every_field() -> None:
    changed = [
        dataclasses.replace(FORWARD, **change)
        for change in (
            {"section": "b"},
            {"replica": 0},
            {"kind": "forward_backward"},
            {"step": 1},
            {"bucket": 16},
            {"items": ((3, 0),)},
            {"start": 4},
            {"end": 10},
        )
    ]
    schedules = [Schedule(tasks=(FORWARD, UPDATE)), Schedule(tasks=(UPDATE, FORWARD)), *(Schedule(tasks=(t, UPDATE)) for t in changed)]
    assert len({s.digest() for s in schedules}) == len(schedules)
