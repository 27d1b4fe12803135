"""What was scheduled for some steps and what was measured of it: the data behind timelines and explanations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .schedules import Schedule, Task, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A window of steps: scheduled and measured tasks are one kind of object.

    Args:
        first_step: number of the window's first step, from 1.
        workload: what was to be done; its costs are those of the schedule.
        scheduled: the tasks in the order in which they were issued.
        measured: the same tasks in the same order, with start and end in nanoseconds since the window's first task was issued. Devices do
            not tell when they begin: a start is the latest of when the task was issued, when the task before it on its devices ended, and
            when what it needs had been computed.
        issued: nanoseconds at which each measured task was given to its devices.
        nominal: whether the schedule's costs are counted, in nanoseconds of a nominal device: only their ratios mean something.
    """

    first_step: int
    workload: Workload
    scheduled: Schedule
    measured: Schedule
    issued: tuple[int, ...]
    nominal: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the record in its file format."""
        return {
            "first_step": self.first_step,
            "workload": self.workload.to_json(),
            "scheduled": self.scheduled.to_json(),
            "measured": self.measured.to_json(),
            "issued": list(self.issued),
            "nominal": self.nominal,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Record:
        """Makes a record from its file format.

        Raises:
            ScheduleError: the workload in it is malformed.
            KeyError: something is missing.
        """
        return cls(
            first_step=raw["first_step"],
            workload=Workload.from_json(raw["workload"]),
            scheduled=_schedule(raw["scheduled"]),
            measured=_schedule(raw["measured"]),
            issued=tuple(raw["issued"]),
            nominal=raw["nominal"],
        )


def _schedule(raw: Mapping[str, Any]) -> Schedule:
    tasks = ({**task, "items": tuple((sample, item) for sample, item in task["items"])} for task in raw["tasks"])
    return Schedule(tasks=tuple(Task(**task) for task in tasks))
