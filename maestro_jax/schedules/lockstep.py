"""Ordinary data parallelism as a policy, to compare with: the replicas of a section start their k-th micro-batch together."""

from __future__ import annotations

import dataclasses

from ..errors import ScheduleError
from .cutting import cut
from .loop import Clock, Key, Progress, run
from .policies import InOrder
from .tasks import Schedule, Task
from .workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lockstep:
    """Arrival order; the k-th micro-batches of a section's replicas start together, forward and backward; backward first."""

    def schedule(self, workload: Workload) -> Schedule:
        """Cuts in arrival order and runs the clock.

        Where rounds of micro-batches need more memory than there is, the schedule is that of `InOrder`. Replicas that share a
        device cannot start together: they start as soon as it is free.
        """
        try:
            progress = Progress(workload, cut(workload))
            return Schedule(tasks=tuple(run(progress, _Rounds(progress), Clock())))
        except ScheduleError as stuck:
            if stuck.anchor != "schedule-stuck":
                raise
        return InOrder().schedule(workload)


class _Rounds:
    """Chooses whole rounds: one task for each replica of a section."""

    def __init__(self, progress: Progress) -> None:
        self.pending: list[tuple[Key, int]] = []
        # Rounds of forwards that have not begun, per section, and those whose backwards have not.
        self.forwards: dict[str, list[list[Key]]] = {}
        self.backwards: dict[str, list[list[Key]]] = {}
        for name, keys in progress.queues.items():
            replicas = progress.workload.sections[name].replicas
            self.forwards[name], self.backwards[name] = [], []
            for step in range(len(progress.workload.steps)):
                mine = [k for k in keys if progress.nodes[k].step == step]
                self.forwards[name] += [mine[n : n + replicas] for n in range(0, len(mine), replicas)]

    def __call__(self, progress: Progress, now: int) -> Task | None:
        if not self.pending:
            self.pending = self._round(progress, now)
        for key, replica in self.pending:
            if progress.idle(progress.nodes[key].section, replica):
                self.pending.remove((key, replica))
                return progress.task(key, replica, now)
        return None if self.pending else self._update(progress, now)

    def _round(self, progress: Progress, now: int) -> list[tuple[Key, int]]:
        """A round that can start as a whole: backward before forward, and the section deepest in the graph first."""
        for name in reversed(progress.workload.order):
            for found in self.backwards[name]:
                if self._may_start(progress, name, found, now):
                    self.backwards[name].remove(found)
                    return [(key, replica) for replica, key in enumerate(found) if key in progress.nodes]
        for name in reversed(progress.workload.order):
            found = next(iter(self.forwards[name]), [])
            if found and self._may_start(progress, name, found, now):
                self.forwards[name].pop(0)
                backwards: list[Key] = [("backward", *key[1:]) for key in found]
                # A round may hold micro-batches without consumers, which ran backward already.
                if any(key in progress.nodes for key in backwards):
                    self.backwards[name].append(backwards)
                return [(key, replica) for replica, key in enumerate(found)]
        return []

    @staticmethod
    def _may_start(progress: Progress, name: str, keys: list[Key], now: int) -> bool:
        for replica, key in enumerate(keys):
            if key not in progress.nodes:
                continue
            if not (progress.idle(name, replica) and progress.available(key, now) and progress.fits(key, replica)):
                return False
        return True

    @staticmethod
    def _update(progress: Progress, now: int) -> Task | None:
        for (name, replica), keys in progress.backlog.items():
            for key in keys:
                if key[0] == "update" and progress.idle(name, replica) and progress.available(key, now):
                    return progress.task(key, replica, now)
        return None
