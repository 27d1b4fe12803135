"""Policies: pure functions from a workload to a schedule.

A policy cuts samples into micro-batches and chooses what runs where and when. It judges time by the workload's costs
only, so that the same workload gives the same schedule in every process.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from ..errors import ScheduleError
from .cutting import Microbatch, cut
from .loop import Chooser, Clock, Key, Progress, run
from .tasks import Schedule, Task
from .workload import Workload


class Policy(Protocol):
    """Anything that schedules a workload.

    A policy that takes long may have an attribute `in_worker = True`: training then lets another process make its schedules (`worker.py`).
    """

    def schedule(self, workload: Workload) -> Schedule:
        """Returns a valid schedule; the same one for the same workload, always."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class InOrder:
    """Arrival order: largest buckets filled greedily, the earliest free replica takes the next micro-batch, backward first."""

    def schedule(self, workload: Workload) -> Schedule:
        """Cuts in arrival order and runs the clock."""
        return _scheduled(workload, in_order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential:
    """One task in flight at a time: the reference that everything else is compared with."""

    def schedule(self, workload: Workload) -> Schedule:
        """Cuts in arrival order and starts a task only when nothing else runs."""

        def choose(progress: Progress, now: int) -> Task | None:
            everyone_idle = all(progress.idle(name, r) for name, s in workload.sections.items() for r in range(s.replicas))
            return in_order(progress, now) if everyone_idle else None

        return _scheduled(workload, choose)


def _scheduled(workload: Workload, choose: Chooser) -> Schedule:
    """Runs the clock; where a memory limit gets it stuck, again with the micro-batches of all sections cut alike."""
    try:
        return Schedule(tasks=tuple(run(Progress(workload, cut(workload)), choose, Clock())))
    except ScheduleError as stuck:
        if stuck.anchor != "schedule-stuck":
            raise
        return Schedule(tasks=tuple(run(Progress(workload, cut(workload, aligned=True)), choose, Clock())))


def replay(progress: Progress, schedule: Schedule) -> Chooser:
    """Returns a chooser that starts the tasks of a schedule in its order, each only when it may start.

    Raises:
        ScheduleError: when a task of the schedule is not one of the workload's.
    """
    _check_tasks(progress, schedule)
    keys = [progress.key_of(task) for task in schedule.tasks]
    position = 0

    def choose(progress: Progress, now: int) -> Task | None:
        nonlocal position
        if position == len(keys):
            return None
        task, key = schedule.tasks[position], keys[position]
        if not (progress.available(key, now) and progress.fits(key, task.replica) and progress.idle(task.section, task.replica)):
            return None
        position += 1
        return task

    return choose


def adaptive(progress: Progress, schedule: Schedule, depth: int) -> Chooser:
    """Returns a chooser that lets a replica that would be idle overtake: it starts its first task in schedule order that may start.

    For executors that let a task end when it really has: then what may start has its inputs, and no queue waits for data. A replica that
    has tasks is given more of them in its scheduled order only, because what it takes early it cannot take back when something urgent comes
    (docs/scheduling.md has figures).

    A forward that overtakes others of its replica leaves room for them. So the first task that is left in the schedule's order always
    fits once those before it have ended, and nothing gets stuck that would not in that order.

    Args:
        progress: the state of the run.
        schedule: what is run.
        depth: most tasks that a replica has been given and has not ended.

    Raises:
        ScheduleError: when a task of the schedule is not one of the workload's.
    """
    _check_tasks(progress, schedule)
    queues: dict[tuple[str, int], list[tuple[int, Key, Task]]] = defaultdict(list)
    for number, task in enumerate(schedule.tasks):
        queues[task.section, task.replica].append((number, progress.key_of(task), task))

    def choose(progress: Progress, now: int) -> Task | None:
        best: tuple[tuple[bool, int], list[tuple[int, Key, Task]], int] | None = None
        for place, queue in queues.items():
            busy = progress.unfinished[place]
            position = _first(progress, queue[:1] if busy else queue, now) if busy < depth else None
            # Replicas that are idle come first, then what is scheduled first.
            if position is not None and (best is None or (busy > 0, queue[position][0]) < best[0]):
                best = (busy > 0, queue[position][0]), queue, position
        return best[1].pop(best[2])[2] if best else None

    return choose


def _first(progress: Progress, queue: Sequence[tuple[int, Key, Task]], now: int) -> int | None:
    """The position of the first task that may start, with room left for those that it overtakes."""
    overtaken: list[Key] = []
    full = False
    for position, (_, key, task) in enumerate(queue):
        forward = key[0] in ("forward", "forward_backward")
        if progress.available(key, now) and not (forward and full):
            if progress.fits(key, task.replica, overtaken):
                return position
            # Whatever comes later would have to leave room for this one as well.
            full = True
        if forward:
            overtaken.append(key)
    return None


def _check_tasks(progress: Progress, schedule: Schedule) -> None:
    """Every task is one of the workload's, once, in the bucket of its micro-batch, and a backward is where its forward is."""
    replica_of: dict[Key, int] = {}
    for task in schedule.tasks:
        section = progress.workload.sections.get(task.section)
        if section is None or not 0 <= task.replica < section.replicas:
            raise _no_such_task(task, "no such replica")
        key = progress.find(task)
        if key is None:
            raise _no_such_task(task, "no such micro-batch or step")
        if key in replica_of:
            raise _no_such_task(task, "it stands in the schedule twice")
        replica_of[key] = task.replica
        microbatch = progress.nodes[key].microbatch
        if microbatch is not None and microbatch.bucket != task.bucket:
            raise _no_such_task(task, f"its micro-batch has a bucket of {microbatch.bucket}")
        if task.kind == "backward" and replica_of.get(("forward", *key[1:])) not in (None, task.replica):
            raise _no_such_task(task, "its forward is on another replica")


def check_covers(workload: Workload, microbatches: Iterable[Microbatch]) -> None:
    """Refuses micro-batches that leave an item out, or run one twice.

    Raises:
        ScheduleError: names a section and a sample.
    """
    wanted = {(n, s.id, i) for step in workload.steps for s in step for n, units in s.items.items() for i in range(len(units))}
    found: Counter[tuple[str, int, int]] = Counter((m.section, *piece) for m in microbatches for piece in m.items)
    wrong = sorted([*(wanted - found.keys()), *(piece for piece, count in found.items() if count > 1 or piece not in wanted)])
    if wrong:
        section, sample, item = wrong[0]
        raise ScheduleError(
            f"a schedule does not run every item once: item {item} of sample {sample} in section {section!r}.",
            wanted="each item of the workload in one forward of its section",
            have=f"it stands in {found[wrong[0]]} micro-batches; {len(wrong)} such items in all",
            fix="schedule every sample of the workload",
            anchor="schedule-task",
            set_by="the schedule",
        )


def _no_such_task(task: Task, reason: str) -> ScheduleError:
    return ScheduleError(
        f"a {task.kind} of section {task.section!r} is not a task of the workload.",
        wanted="each task of the workload once",
        have=f"step {task.step}, replica {task.replica}, bucket {task.bucket}, items {task.items[:4]}: {reason}",
        fix="schedule the workload that is run",
        anchor="schedule-task",
        set_by="the schedule",
    )


def in_order(progress: Progress, now: int) -> Task | None:
    """Backward and updates before forward; of several forwards the one deepest in the graph, which frees most memory."""
    best: tuple[tuple[int, int, int, int, int], Key, int] | None = None
    depth = {name: -n for n, name in enumerate(progress.workload.order)}
    for name, section in progress.workload.sections.items():
        for replica in range(section.replicas):
            if not progress.idle(name, replica):
                continue
            for key in _candidates(progress, name, replica, now):
                rank = (
                    0 if key[0] in ("backward", "update") else 1,
                    progress.nodes[key].step,
                    depth[name],
                    progress.free_since[name, replica],
                    replica,
                )
                if best is None or rank < best[0]:
                    best = rank, key, replica
    return progress.task(best[1], best[2], now) if best else None


def _candidates(progress: Progress, name: str, replica: int, now: int) -> Iterator[Key]:
    """The first available backward or update of a replica, and the head of the section's queue if this replica may take it."""
    yield from (k for k in progress.backlog[name, replica][:] if progress.available(k, now))
    head = next(iter(progress.queues[name]), None)
    if head is not None and progress.available(head, now) and progress.fits(head, replica):
        yield head
