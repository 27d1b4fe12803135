"""What may start when: the one loop behind the simulator and the dispatcher.

`Progress` knows the dependencies between the tasks of a workload and what has been started and finished. `run` asks a
policy what to start and hands it to an *executor*: a `Clock` makes time pass in the simulator; in the runtime, devices
do, and everything that has been issued counts as available because device queues do the waiting.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from ..errors import ScheduleError
from .cutting import Microbatch
from .tasks import Kind, Task
from .workload import Workload

DEVICES = 2**62
"""The time that an executor with real devices reports: later than every scheduled availability."""

Key = tuple[Kind, str, int]
"""(kind, section, number of the micro-batch); for an update, (kind, section, step * replicas + replica)."""


class Executor(Protocol):
    """Runs tasks, in simulated or in real time."""

    now: int
    """Nanoseconds; tasks whose inputs are available by now may start."""

    def start(self, task: Task) -> int:
        """Starts a task and returns its end in nanoseconds."""
        ...

    def wait(self, until: int | None) -> list[Task]:
        """Lets time pass, at most to `until` where given, and returns the tasks that ended; none if nothing is left to wait for."""
        ...


class Clock:
    """Simulated time: a task ends when its cost has passed."""

    def __init__(self) -> None:
        self.now = 0
        self._running: list[tuple[int, int, Task]] = []
        self._count = 0

    def start(self, task: Task) -> int:
        """Starts a task; its end is already known from its cost."""
        self._count += 1
        heapq.heappush(self._running, (task.end, self._count, task))
        return task.end

    def wait(self, until: int | None) -> list[Task]:
        """Moves to the next end of a task, or to `until` if that is earlier."""
        if until is not None and (not self._running or until < self._running[0][0]):
            self.now = until
            return []
        ended = []
        if self._running:
            self.now = self._running[0][0]
        while self._running and self._running[0][0] == self.now:
            ended.append(heapq.heappop(self._running)[2])
        return ended


@dataclasses.dataclass
class _Node:
    """A task of the workload that has not been finished, and what it waits for."""

    kind: Kind
    microbatch: Microbatch | None
    section: str
    step: int
    replica: int | None
    duration: int
    waits: int = 0
    available: int = 0
    unblocks: list[tuple[Key, int]] = dataclasses.field(default_factory=list)


class Progress:
    """The state of a run: which tasks may start now, who holds how many units, which devices are busy."""

    def __init__(self, workload: Workload, microbatches: Iterable[Microbatch]) -> None:
        self.workload = workload
        self.nodes: dict[Key, _Node] = {}
        self.held: dict[tuple[str, int], int] = defaultdict(int)
        self.held_bytes: dict[tuple[str, int], int] = defaultdict(int)
        self.unfinished: dict[tuple[str, int], int] = defaultdict(int)
        self.free_since: dict[tuple[str, int], int] = defaultdict(int)
        self.queues: dict[str, list[Key]] = {name: [] for name in workload.order}
        self.backlog: dict[tuple[str, int], list[Key]] = defaultdict(list)
        self._busy: set[tuple[str, int] | int] = set()
        self._devices_of: dict[tuple[str, int], frozenset[tuple[str, int] | int]] = {
            (name, replica): frozenset(section.devices[replica] if section.devices else [(name, replica)])
            for name, section in workload.sections.items()
            for replica in range(section.replicas)
        }
        self._replica_of: dict[tuple[str, int], int] = {}
        self._times: list[int] = []
        # Forward-only micro-batches hold their units until the forward of their last consumer has ended.
        self._unserved: dict[tuple[str, int], int] = {}
        self._producers: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
        self._build(list(microbatches))
        self.left = len(self.nodes)

    # -- construction

    def _build(self, microbatches: list[Microbatch]) -> None:
        self._by_items = {(m.section, m.step, m.items): m.number for m in microbatches}
        self._units = {(m.section, m.number): sum(m.units) for m in microbatches}
        self._bytes = {(m.section, m.number): self.workload.sections[m.section].bytes_of(m.bucket) for m in microbatches}
        # Per section: which micro-batches hold an item, and which hold any item of a sample (item None).
        found: dict[tuple[str, int, int | None], set[int]] = defaultdict(set)
        for m in microbatches:
            for sample, item in m.items:
                found[m.section, sample, item].add(m.number)
                found[m.section, sample, None].add(m.number)
        pairs: dict[tuple[str, int], set[tuple[str, int, int]]] = defaultdict(set)
        for edge in self.workload.edges:
            for m in microbatches:
                if m.section == edge.producer:
                    for sample, item in m.items:
                        consumers = found[edge.consumer, sample, item if edge.paired else None]
                        pairs[m.section, m.number] |= {(edge.consumer, c, edge.delay) for c in consumers}
        for m in microbatches:
            self._add_nodes(m, bool(pairs[m.section, m.number]))
        for (section, number), consumers in pairs.items():
            self._link(section, number, consumers)
        self._add_updates(microbatches)

    def _add_nodes(self, m: Microbatch, has_consumers: bool) -> None:
        work = self.workload.sections[m.section]
        forward, backward = work.forward.of(m.bucket, m.units), work.backward.of(m.bucket, m.units)
        kinds: list[tuple[Kind, int]] = [("forward", forward)]
        if self.workload.runs_backward[m.section]:
            kinds = [("forward", forward), ("backward", backward)] if has_consumers else [("forward_backward", forward + backward)]
        for kind, duration in kinds:
            self.nodes[kind, m.section, m.number] = _Node(kind, m, m.section, m.step, None, duration)
        if len(kinds) == 2:
            self._block("backward", m.section, m.number, self._first(m.section, m.number), 0)
        self.queues[m.section].append(self._first(m.section, m.number))

    def _first(self, section: str, number: int) -> Key:
        key: Key = ("forward", section, number)
        return key if key in self.nodes else ("forward_backward", section, number)

    def _last(self, section: str, number: int) -> Key:
        key: Key = ("backward", section, number)
        return key if key in self.nodes else ("forward_backward", section, number)

    def _block(self, kind: Kind, section: str, number: int, by: Key, delay: int) -> None:
        """The named task waits until `by` has ended, plus a delay."""
        self.nodes[kind, section, number].waits += 1
        self.nodes[by].unblocks.append(((kind, section, number), delay))

    def _link(self, section: str, number: int, consumers: set[tuple[str, int, int]]) -> None:
        for consumer, n, delay in sorted(consumers):
            first = self._first(consumer, n)
            self._block(first[0], consumer, n, self._first(section, number), delay)
            self._producers[consumer, n].add((section, number))
            if self.workload.runs_backward[section]:
                self._block("backward", section, number, self._last(consumer, n), delay)
        if not self.workload.runs_backward[section]:
            self._unserved[section, number] = len(consumers)

    def _add_updates(self, microbatches: list[Microbatch]) -> None:
        for name, section in self.workload.sections.items():
            if not section.trainable:
                continue
            for step in range(len(self.workload.steps)):
                for replica in range(section.replicas):
                    number = step * section.replicas + replica
                    self.nodes["update", name, number] = _Node("update", None, name, step, replica, section.update)
                    self.backlog[name, replica].append(("update", name, number))
                    if step:
                        # A step without a backward must not be updated before the one before it.
                        self._block("update", name, number, ("update", name, number - section.replicas), 0)
        for m in microbatches:
            if self.workload.runs_backward[m.section]:
                for name, section in self.workload.sections.items():
                    for replica in range(section.replicas) if section.trainable else ():
                        self._block("update", name, m.step * section.replicas + replica, self._last(m.section, m.number), 0)

    # -- what may start

    def idle(self, section: str, replica: int) -> bool:
        """Whether a replica and all its devices have no task."""
        return self._busy.isdisjoint(self._devices_of[section, replica])

    def available(self, key: Key, now: int) -> bool:
        """Whether everything that a task waits for has ended and arrived."""
        node = self.nodes[key]
        return node.waits == 0 and node.available <= now

    def fits(self, key: Key, replica: int, beside: Iterable[Key] = ()) -> bool:
        """Whether a replica may start this task: parameters are up to date, and what it would hold is within its limits.

        Args:
            key: the task.
            replica: where.
            beside: forwards of the same section that will need room on this replica before anything is given back.
        """
        node = self.nodes[key]
        if node.microbatch is None or node.kind == "backward":
            return True
        section = self.workload.sections[node.section]
        before = ("update", node.section, (node.step - 1) * section.replicas + replica)
        if section.trainable and node.step and before in self.nodes:
            return False
        held, held_bytes = self.held[node.section, replica], self.held_bytes[node.section, replica]
        for _, name, number in (key, *beside):
            held, held_bytes = held + self._units[name, number], held_bytes + self._bytes[name, number]
        return held <= section.max_inflight and (section.max_bytes is None or held_bytes <= section.max_bytes)

    def next_availability(self, now: int) -> int | None:
        """The earliest time after `now` at which a task whose dependencies have ended becomes available."""
        while self._times and self._times[0] <= now:
            heapq.heappop(self._times)
        return self._times[0] if self._times else None

    def task(self, key: Key, replica: int, now: int) -> Task:
        """Describes the task `key` if it started now on this replica."""
        node = self.nodes[key]
        m = node.microbatch
        bucket, items = (m.bucket, m.items) if m else (0, ())
        end = now + node.duration
        return Task(section=node.section, replica=replica, kind=node.kind, step=node.step, bucket=bucket, items=items, start=now, end=end)

    def key_of(self, task: Task) -> Key:
        """The key of a task that came from a schedule."""
        if task.kind == "update":
            return "update", task.section, task.step * self.workload.sections[task.section].replicas + task.replica
        return task.kind, task.section, self._by_items[task.section, task.step, task.items]

    def find(self, task: Task) -> Key | None:
        """The key of a task that is still to be done, or None when the workload has no such task."""
        if task.kind != "update" and (task.section, task.step, task.items) not in self._by_items:
            return None
        key = self.key_of(task)
        return key if key in self.nodes else None

    # -- changes

    def start(self, task: Task) -> None:
        """Marks a task as running: its replica's devices are busy and hold its units."""
        key = self.key_of(task)
        self._busy |= self._devices_of[task.section, task.replica]
        self.unfinished[task.section, task.replica] += 1
        node = self.nodes[key]
        if node.microbatch is not None and node.kind != "backward":
            self.queues[task.section].remove(key)
            self._replica_of[task.section, key[2]] = task.replica
            self._hold(task.section, key[2], 1)
            if node.kind == "forward" and self.workload.runs_backward[task.section]:
                backward: Key = ("backward", task.section, key[2])
                self.nodes[backward].replica = task.replica
                self.backlog[task.section, task.replica].append(backward)
        else:
            self.backlog[task.section, task.replica].remove(key)

    def finish(self, task: Task) -> None:
        """Marks a task as ended, frees its devices and what it held, and unblocks what waited for it."""
        key = self.key_of(task)
        self._busy -= self._devices_of[task.section, task.replica]
        self.unfinished[task.section, task.replica] -= 1
        self.free_since[task.section, task.replica] = task.end
        node = self.nodes.pop(key)
        for other, delay in node.unblocks:
            waiting = self.nodes[other]
            waiting.waits -= 1
            waiting.available = max(waiting.available, task.end + delay)
            if not waiting.waits:
                heapq.heappush(self._times, waiting.available)
        self.left -= 1
        if node.microbatch is not None:
            self._release(node.kind, task.section, key[2])

    def _release(self, kind: Kind, section: str, number: int) -> None:
        """Frees the units that the end of a task makes unnecessary: its own after a backward, else those of producers that are served."""
        if kind != "forward":
            self._hold(section, number, -1)
        if kind == "backward":
            return
        for producer in self._producers[section, number]:
            if producer in self._unserved:
                self._unserved[producer] -= 1
                if not self._unserved[producer]:
                    self._hold(*producer, -1)
        if self._unserved.get((section, number)) == 0:
            self._hold(section, number, -1)

    def _hold(self, section: str, number: int, sign: int) -> None:
        """Adds what a micro-batch holds to its replica, or takes it away with a sign of -1."""
        place = section, self._replica_of[section, number]
        self.held[place] += sign * self._units[section, number]
        self.held_bytes[place] += sign * self._bytes[section, number]


Chooser = Callable[[Progress, int], Task | None]
"""Names the next task to start at this time, or None to let time pass."""


def issue(progress: Progress, choose: Chooser, executor: Executor) -> Iterator[Task]:
    """Runs a workload to its end, and yields each task when it has been started.

    Args:
        progress: the workload's state; used up.
        choose: the policy's choice among what may start.
        executor: a clock or devices.

    Yields:
        The tasks in the order in which they were started, which is the global issue order.

    Raises:
        ScheduleError: when tasks are left and none can ever start.
    """
    while progress.left:
        while (task := choose(progress, executor.now)) is not None:
            progress.start(task)
            executor.start(task)
            yield task
        until = progress.next_availability(executor.now)
        ended = executor.wait(until)
        for task in ended:
            progress.finish(task)
        if not ended and until is None:
            raise _stuck(progress)


def run(progress: Progress, choose: Chooser, executor: Executor) -> list[Task]:
    """Runs a workload to its end (see `issue`) and returns its tasks in the order in which they were started."""
    return list(issue(progress, choose, executor))


def _stuck(progress: Progress) -> ScheduleError:
    waiting = [f"{key[0]} {key[2]} of {key[1]!r}" for key, node in progress.nodes.items() if node.waits == 0]
    held = {f"{section}[{replica}]": units for (section, replica), units in progress.held.items() if units}
    return ScheduleError(
        f"the schedule is stuck with {progress.left} tasks left.",
        wanted="a task that may start",
        have=f"{', '.join(waiting[:5]) or 'nothing'} cannot start; units held: {held}",
        fix="raise max_inflight or max_bytes of the sections that hold the most, or use smaller micro-batches",
        anchor="schedule-stuck",
        set_by="the workload",
    )
