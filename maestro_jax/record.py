"""What was scheduled for some steps and what was measured of it: the data behind timelines and explanations."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .schedules import Schedule, Task, Workload, lower_bound
from .schedules.cutting import microbatches_of
from .schedules.loop import Progress

FOLDER = "timelines"
"""In a run's folder: holds a file for each recorded window, with the number of its first step in the name."""

NOMINAL = (
    "Costs are counted, in nanoseconds of a nominal device; scheduled times are multiplied by {:.3g}, so that both parts end together."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A window of steps: scheduled and measured tasks are one kind of object.

    Args:
        first_step: number of the window's first step, from 1.
        workload: what was to be done; its costs are those of the schedule.
        scheduled: the tasks in the order of the schedule, which is that of their issue.
        measured: the same tasks in the same order, with start and end in nanoseconds since the window's first task was issued. Devices do
            not tell when they begin: a start is the latest of when the task was issued, when the task before it on its devices ended, and
            when what it needs had arrived there.
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

    @property
    def title(self) -> str:
        """Names the steps."""
        last = self.first_step + len(self.workload.steps) - 1
        return f"steps {self.first_step} to {last}" if last > self.first_step else f"step {self.first_step}"

    @property
    def stretch(self) -> float:
        """What scheduled times are multiplied by where they are drawn beside measured ones.

        1, unless costs are nominal: then both end together.
        """
        return self.measured.makespan / self.scheduled.makespan if self.nominal and self.scheduled.makespan else 1.0

    @functools.cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """For each task, the numbers of the tasks in other sections whose payloads it takes, or the gradients of its own."""
        tasks = self.scheduled.tasks
        progress = Progress(self.workload, microbatches_of(self.workload, tasks))
        numbers = {progress.key_of(task): number for number, task in enumerate(tasks)}
        found: list[list[int]] = [[] for _ in tasks]
        for key, number in numbers.items():
            for other, _ in progress.nodes[key].unblocks:
                if other[0] != "update" and other[1] != key[1]:
                    found[numbers[other]].append(number)
        return tuple(tuple(sorted(of_task)) for of_task in found)

    @functools.cached_property
    def units(self) -> tuple[int, ...]:
        """For each task, the units in its items; what its bucket has more of is padding."""
        of_sample = {sample.id: sample.items for step in self.workload.steps for sample in step}
        return tuple(sum(of_sample[sample][task.section][item] for sample, item in task.items) for task in self.scheduled.tasks)

    def _repr_html_(self) -> str:
        from .drawing.timeline import Timeline  # here, because only notebooks draw

        parts = {
            f"{self.title}, {name}": _numbered(schedule, self.first_step, factor)
            for name, schedule, factor in (("scheduled", self.scheduled, self.stretch), ("measured", self.measured, 1.0))
        }
        shared: dict[str, Any] = {"workload": self.workload, "bound": round(lower_bound(self.workload) * self.stretch)}
        until = max(schedule.makespan for schedule in parts.values())
        drawn = [Timeline(schedule=schedule, title=title, until=until, **shared)._repr_html_() for title, schedule in parts.items()]
        return "".join(drawn) + (f"<p>{NOMINAL.format(self.stretch)}</p>" if self.nominal else "")


def read_records(folder: Path | str) -> list[Record]:
    """Reads the recorded windows of a run, in their order.

    Args:
        folder: of the run.
    """
    paths = sorted((Path(folder) / FOLDER).glob("step-*.json"))
    return [Record.from_json(json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _numbered(schedule: Schedule, first: int, factor: float) -> Schedule:
    """The tasks as they are drawn: with the run's numbers of steps, and longer."""
    tasks = (dataclasses.replace(t, step=first + t.step, start=round(t.start * factor), end=round(t.end * factor)) for t in schedule.tasks)
    return Schedule(tasks=tuple(tasks))


def _schedule(raw: Mapping[str, Any]) -> Schedule:
    tasks = ({**task, "items": tuple((sample, item) for sample, item in task["items"])} for task in raw["tasks"])
    return Schedule(tasks=tuple(Task(**task) for task in tasks))
