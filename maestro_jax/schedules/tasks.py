"""Tasks and schedules: plain data, with a digest that processes can compare."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, Literal

Kind = Literal["forward", "backward", "forward_backward", "update"]
Piece = tuple[int, int]
"""(sample id in the workload, number of the item within the sample's items of the section)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One program call (or a section's update) on one replica.

    Args:
        section: name of the section.
        replica: number of the replica, from 0.
        kind: what is done; `forward_backward` is both in one program, for micro-batches without consumers.
        step: number of the step within the workload.
        bucket: static size of the micro-batch in units; 0 for an update.
        items: pieces in row order; empty for an update.
        start: scheduled start in nanoseconds.
        end: scheduled end in nanoseconds.
    """

    section: str
    replica: int
    kind: Kind
    step: int
    bucket: int = 0
    items: tuple[Piece, ...] = ()
    start: int = 0
    end: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the task in the schedule file format."""
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, "items": [list(p) for p in self.items]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Tasks in their global issue order; the order per replica is the same order filtered.

    Args:
        tasks: every task of the workload's steps.
    """

    tasks: tuple[Task, ...]

    def _repr_html_(self) -> str:
        from ..drawing.timeline import Timeline  # here, because only notebooks draw

        return Timeline(schedule=self)._repr_html_()

    @property
    def makespan(self) -> int:
        """Scheduled end of the last task in nanoseconds, 0 without tasks."""
        return max((t.end for t in self.tasks), default=0)

    def to_json(self) -> dict[str, Any]:
        """Returns the schedule in its file format."""
        return {"tasks": [t.to_json() for t in self.tasks]}

    def digest(self) -> str:
        """A SHA-256 of the tasks in order: equal on every process that made the same schedule."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
