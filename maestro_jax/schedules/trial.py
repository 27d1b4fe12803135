"""Trial runs: how long a cut would take, many times a second.

A trial keeps the rules of `loop.Progress` (what waits for what, who may hold how much, updates) on lists of integers, and
chooses by a few `Rules` what starts. Its result becomes a schedule only by being replayed through `loop.run`, so that one
place decides what may start when; a test holds the two to the nanosecond.
"""

from __future__ import annotations

import dataclasses
from bisect import insort
from collections.abc import Sequence
from heapq import heappop, heappush

from .compact import Compact
from .parts import Pairs, Part
from .tasks import Kind

STUCK = 2**62
"""What a trial is worth that cannot be run to its end: later than everything."""

FED = 99.0
"""A patience that always runs forward first."""

Start = tuple[int, Kind, int, int]
"""(time, kind, number of the micro-batch, or the step of an update, number of the replica)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """How a trial chooses among what may start.

    Args:
        hunger: per section, how many rounds of a backward and a forward its consumers should have in store before it runs a
            backward while a forward could start. 0: backward first, always.
        strict: start the forwards of a section in their order only, so that none ever holds memory that an earlier one needs.
    """

    hunger: tuple[float, ...]
    strict: bool = False


class Graph:
    """All micro-batches of a workload, numbered by section and then step, with what depends on what.

    Args:
        model: the workload.
        parts: per step and section.
        pairs: per step and link.
    """

    __slots__ = ("backward", "buckets", "consumers", "forward", "fused", "producers", "section", "starts", "step", "units")

    def __init__(self, model: Compact, parts: Sequence[Sequence[Part]], pairs: Sequence[Sequence[Pairs]]) -> None:
        self.section: list[int] = []
        self.step: list[int] = []
        self.units: list[int] = []
        self.buckets: list[int] = []
        self.backward: list[int] = []
        self.forward: list[int] = []
        self.starts: list[list[int]] = [[] for _ in parts]
        for n in range(len(model.sections)):
            for t, step in enumerate(parts):
                part = step[n]
                self.starts[t].append(len(self.section))
                self.section += [n] * len(part.units)
                self.step += [t] * len(part.units)
                self.units += part.units
                self.buckets += part.buckets
                self.forward += part.forward
                self.backward += part.backward
        self.consumers: list[list[tuple[int, int]]] = [[] for _ in self.section]
        self.producers: list[list[tuple[int, int]]] = [[] for _ in self.section]
        for starts, found in zip(self.starts, pairs, strict=True):
            for link, connected in zip(model.links, found, strict=True):
                a, b, delay = starts[link.producer], starts[link.consumer], link.delay
                for p, c in connected:
                    self.consumers[a + p].append((b + c, delay))
                    self.producers[b + c].append((a + p, delay))
        # A micro-batch that nobody consumes runs forward and backward as one task.
        runs = model.runs_backward
        self.fused = [runs[n] and not found for n, found in zip(self.section, self.consumers, strict=True)]
        self.forward = [f + b if one else f for f, b, one in zip(self.forward, self.backward, self.fused, strict=True)]


class Trial:
    """One run of a graph.

    Args:
        model: the workload.
        graph: its micro-batches.
        rules: what to start first.
        record: whether to keep what was started, as `started`.
    """

    # fmt: off
    __slots__ = (
        "awake", "back_at", "back_left", "busy", "ends", "events", "forward_at", "forward_left", "free", "graph", "held",
        "held_bytes", "load", "model", "next", "now", "ready", "ready_back", "replica", "rules", "size", "started", "store",
        "todo", "unserved", "updates",
    )
    # fmt: on

    def __init__(self, model: Compact, graph: Graph, rules: Rules, record: bool = False) -> None:
        self.model, self.graph, self.rules = model, graph, rules
        self.started: list[Start] | None = [] if record else None
        count, replicas = len(graph.section), len(model.section_of)
        self.now = 0
        self.forward_left = [len(p) for p in graph.producers]
        self.forward_at = [0] * count
        self.back_left = [1 + len(c) for c in graph.consumers]
        self.back_at = [0] * count
        self.unserved = [len(c) for c in graph.consumers]
        self.replica = [-1] * count
        self.ready: list[list[int]] = [[] for _ in model.sections]
        self.ready_back: list[list[int]] = [[] for _ in range(replicas)]
        # Nanoseconds of work that may start, per section: what a producer looks at to see who would starve.
        self.store = [0] * len(model.sections)
        self.next = [graph.starts[0][n] if graph.starts else 0 for n in range(len(model.sections))]
        self.load = [0] * replicas
        # Replicas without a task, per section, by (nanoseconds of work that they have taken on, number).
        self.free: list[list[tuple[int, int]]] = [[] for _ in model.sections]
        for replica, n in enumerate(model.section_of):
            self.free[n].append((0, replica))
        self.busy: set[int] = set()
        # Sections where something changed that may let a task start. All of them look again when devices are shared.
        self.awake = [True] * len(model.sections)
        self.held, self.held_bytes = [0] * replicas, [0] * replicas
        self.updates = [0] * replicas
        self.todo = [0] * len(model.steps)
        self.ends: dict[tuple[int, int], int] = {}
        # Events are single integers, time * size + code: ends of forwards, of backwards, arrivals of both, ends of updates.
        self.events: list[int] = []
        self.size = 4 * count + replicas
        for m, n in enumerate(graph.section):
            if model.runs_backward[n]:
                self.todo[graph.step[m]] += 1
            if not self.forward_left[m]:
                self.ready[n].append(m)
                self.store[n] += graph.forward[m]

    def run(self) -> int:
        """Runs to the end and returns the makespan in nanoseconds; `STUCK` when something is left that can never start."""
        count, size, events = len(self.graph.section), self.size, self.events
        order = range(len(self.model.sections) - 1, -1, -1)
        free, awake, shared = self.free, self.awake, self.model.shares_devices
        while True:
            for n in order:
                if awake[n] or shared:
                    awake[n] = False
                    if free[n]:
                        self._start(n)
            if not events:
                break
            self.now = now = events[0] // size
            first, last = now * size, (now + 1) * size
            while events and events[0] < last:
                code = heappop(events) - first
                if code < count:
                    self._end_forward(code)
                elif code < 2 * count:
                    self._free(self.replica[code - count])
                    self._end_step(code - count)
                elif code < 3 * count:
                    self._arrive_forward(code - 2 * count)
                elif code < 4 * count:
                    self._arrive_backward(code - 3 * count)
                else:
                    replica = code - 4 * count
                    self.updates[replica] += 1
                    self._free(replica)
        return STUCK if self._left() else self.now

    def _left(self) -> bool:
        model = self.model
        steps = len(model.steps)
        missing = any(self.updates[r] < steps for r, n in enumerate(model.section_of) if model.sections[n].trainable)
        return missing or any(self.todo) or min(self.replica, default=0) < 0

    def _free(self, replica: int) -> None:
        n = self.model.section_of[replica]
        self.awake[n] = True
        insort(self.free[n], (self.load[replica], replica))
        if self.model.shares_devices:
            self.busy.difference_update(self.model.devices[replica])

    def _start(self, n: int) -> None:
        """Starts what the free replicas of a section can start, least loaded replica first."""
        model, graph, now = self.model, self.graph, self.now
        shared, trainable = model.shares_devices, model.sections[n].trainable
        waiting, ready, kept = self.free[n], self.ready[n], []
        count, size, events = len(graph.section), self.size, self.events
        plain = not (model.binding[n] or self.rules.strict)
        for entry in waiting:
            r = entry[1]
            if shared and not self.busy.isdisjoint(model.devices[r]):
                kept.append(entry)
                continue
            if not ready:
                m = -1
            elif plain:
                m = ready[0] if not trainable or graph.step[ready[0]] <= self.updates[r] else -1
            else:
                m = self._forward(n, r)
            back = self.ready_back[r]
            if back and (m < 0 or not self._starves(n, m, back[0])):
                m = heappop(back)
                self.store[n] -= graph.backward[m]
                end, code, kind = now + graph.backward[m], count + m, "backward"
            elif trainable and self.updates[r] < len(self.todo) and not self.todo[self.updates[r]]:
                m = self.updates[r]
                end, code, kind = now + model.sections[n].update, 4 * count + r, "update"
            elif m >= 0:
                self._take(n, m, r)
                end, code, kind = now + graph.forward[m], m, "forward_backward" if graph.fused[m] else "forward"
            else:
                kept.append(entry)
                continue
            heappush(events, end * size + code)
            if shared:
                self.busy.update(model.devices[r])
            if self.started is not None:
                self.started.append((now, kind, m, r))
        self.free[n] = kept
        if self.rules.strict and 0 < len(kept) < len(waiting):
            # Another forward is the next one now, and may fit where the one before it did not.
            self._start(n)

    def _forward(self, n: int, r: int) -> int:
        """The first forward that may start on a replica, or -1."""
        graph, model = self.graph, self.model
        ready = self.ready[n]
        section = model.sections[n]
        updates = self.updates[r] if section.trainable else len(self.todo)
        for m in ready:
            if graph.step[m] > updates or (self.rules.strict and m != self.next[n]):
                return -1
            if not model.binding[n]:
                return m
            fits = self.held[r] + graph.units[m] <= section.max_inflight
            if fits and section.max_bytes is not None:
                fits = self.held_bytes[r] + section.bytes_of(graph.buckets[m]) <= section.max_bytes
            if fits:
                return m
        return -1

    def _starves(self, n: int, m: int, back: int) -> bool:
        """Whether a consumer of a forward would run dry if a backward went first."""
        graph, model = self.graph, self.model
        need = self.rules.hunger[n] * (graph.backward[back] + graph.forward[m])
        for c, _ in graph.consumers[m]:
            section = graph.section[c]
            if self.store[section] < need * model.sections[section].replicas:
                return True
        return False

    def _take(self, n: int, m: int, r: int) -> None:
        graph = self.graph
        self.ready[n].remove(m)
        self.next[n] = m + 1
        self.store[n] -= graph.forward[m]
        self.replica[m] = r
        if self.model.binding[n]:
            self.held[r] += graph.units[m]
            if self.model.sections[n].max_bytes is not None:
                self.held_bytes[r] += self.model.sections[n].bytes_of(graph.buckets[m])
        split = self.model.runs_backward[n] and not graph.fused[m]
        self.load[r] += graph.forward[m] + (graph.backward[m] if split else 0)

    def _release(self, m: int) -> None:
        """Frees what a micro-batch holds, where that can matter."""
        r, n = self.replica[m], self.graph.section[m]
        if not self.model.binding[n]:
            return
        self.awake[n] = True
        section = self.model.sections[n]
        self.held[r] -= self.graph.units[m]
        if section.max_bytes is not None:
            self.held_bytes[r] -= section.bytes_of(self.graph.buckets[m])

    def _end_forward(self, m: int) -> None:
        graph, now, left, at = self.graph, self.now, self.forward_left, self.forward_at
        n = graph.section[m]
        self._free(self.replica[m])
        for c, delay in graph.consumers[m]:
            left[c] -= 1
            if now + delay > at[c]:
                at[c] = now + delay
            if not left[c]:
                if at[c] <= now:
                    self._arrive_forward(c)
                else:
                    heappush(self.events, at[c] * self.size + 2 * len(at) + c)
        runs = self.model.runs_backward
        for p, _ in graph.producers[m]:
            if not runs[graph.section[p]]:
                self.unserved[p] -= 1
                if not self.unserved[p]:
                    self._release(p)
        if graph.fused[m]:
            self._end_step(m)
        elif runs[n]:
            self.back_left[m] -= 1
        elif not graph.consumers[m]:
            self._release(m)

    def _end_step(self, m: int) -> None:
        """The backward of a micro-batch has ended, alone or with its forward: tells producers."""
        graph, now, left, at = self.graph, self.now, self.back_left, self.back_at
        self._release(m)
        self.todo[graph.step[m]] -= 1
        if not self.todo[graph.step[m]]:
            self.awake[:] = [True] * len(self.awake)
        self.ends[self.replica[m], graph.step[m]] = now
        for p, delay in graph.producers[m]:
            if self.model.runs_backward[graph.section[p]]:
                left[p] -= 1
                if now + delay > at[p]:
                    at[p] = now + delay
                if not left[p]:
                    if at[p] <= now:
                        self._arrive_backward(p)
                    else:
                        heappush(self.events, at[p] * self.size + 3 * len(at) + p)

    def _arrive_forward(self, m: int) -> None:
        n = self.graph.section[m]
        self.awake[n] = True
        insort(self.ready[n], m)
        self.store[n] += self.graph.forward[m]

    def _arrive_backward(self, m: int) -> None:
        n = self.graph.section[m]
        self.awake[n] = True
        heappush(self.ready_back[self.replica[m]], m)
        self.store[n] += self.graph.backward[m]
