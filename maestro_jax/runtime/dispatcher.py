"""Issues the tasks of a schedule, in its order, from one thread, without waiting for any result.

An executor for `schedules.loop.run`: whatever has been issued counts as available, because device queues do the
waiting. The only wait is the bound on tasks in flight per replica. Adaptively, a task has ended when its results are there, and the
thread waits for that where nothing may be issued (`schedules.policies.adaptive`).

Of several processes each walks through the whole order, calls the programs of replicas whose devices it has, and takes part in
transfers from and to them.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ..errors import EdgeError, ScheduleError
from ..meshes import Parcel, move
from ..schedules import DEVICES, Task, adaptive, issue
from .checks import explain_mismatch, refuse_deleted
from .compile import Compiled
from .completions import Completions
from .feeds import Micro, Slot, Window
from .state import SectionState
from .watchdog import Replica, Standing

Slots = dict[str, list[tuple[jax.Array, ...]]]

POLL_SECONDS = 1e-4
"""Between two looks at what has ended; JAX can wait for one array, or for all, but not for the first one."""


@dataclasses.dataclass
class Payload:
    """Rows on their way from one micro-batch to another, with the hash of what the sender takes them to be."""

    arrays: tuple[jax.Array, ...]
    pairing: str


@dataclasses.dataclass
class Saved:
    """What a forward leaves for its backward."""

    slots: Any
    kept: Any


class InFlight:
    """Bounds the tasks that a replica has been given and has not finished, over steps."""

    def __init__(self, limit: int, standing: Standing) -> None:
        self.limit, self._standing = limit, standing
        standing.unfinished = self.unfinished
        self._given: dict[Replica, collections.deque[tuple[Task, jax.Array]]] = collections.defaultdict(collections.deque)

    def add(self, task: Task, marker: jax.Array) -> None:
        """Counts a task; waits for the oldest one of its replica when there are too many."""
        queue = self._given[task.section, task.replica]
        queue.append((task, marker))
        if len(queue) > self.limit:
            self._standing.waiting = f"the oldest task of {task.section} replica {task.replica}"
            # It leaves the queue when it has ended: until then the watchdog sees it.
            queue[0][1].block_until_ready()
            queue.popleft()
            self._standing.waiting = ""

    def wait(self) -> None:
        """Waits for all of them."""
        for queue in self._given.values():
            jax.block_until_ready([marker for _, marker in queue])

    def unfinished(self) -> dict[Replica, list[Task]]:
        """The tasks that each replica was given and that have not ended, oldest first."""
        return {key: [task for task, marker in list(queue) if not _is_ready(marker)] for key, queue in list(self._given.items())}


class Dispatcher:
    """Runs one window of steps on the devices of a plan."""

    now = DEVICES

    def __init__(
        self,
        compiled: Compiled,
        states: Mapping[str, SectionState],
        zeros: Mapping[Any, tuple[jax.Array, ...]],
        in_flight: InFlight,
        debug: bool,
        number: int,
        standing: Standing,
        completions: Completions | None = None,
        adaptive: bool = False,
    ) -> None:
        """Takes what lasts for a run, and its own number in it.

        `debug` checks every argument before a call; `completions` are told of every task, where it is to be known when they end;
        `adaptive` lets replicas overtake (one process only).
        """
        self.completions, self.adaptive = completions, adaptive
        self.debug, self.number, self.standing = debug, number, standing
        self.compiled, self.plan, self.states, self.zeros, self.in_flight = compiled, compiled.plan, states, zeros, in_flight

    def issue(self, window: Window, sums: Mapping[tuple[str, int], dict[str, jax.Array]] | None = None) -> Iterator[int]:
        """Issues every task of a window, except updates, which it leaves to the caller.

        Args:
            window: schedule and feeds.
            sums: for an evaluation, the objective sums of each (section, replica) to add to; `self.sums` has them at the end.

        Yields:
            The number of a step in the window when all its backwards have been issued: its update is due before the iterator goes on.

        Raises:
            ScheduleError: when the schedule asks for a task before what it needs was issued.
            EdgeError: when a payload's rows are not what its consumer expects.
        """
        self.window = window
        self.standing.window(window.schedule, len(window.steps))
        self.payloads: dict[tuple[str, Micro, Micro], Payload] = {}
        self.returned: dict[tuple[str, Micro, Micro], tuple[jax.Array, ...]] = {}
        self.saved: dict[Micro, Saved] = {}
        self.replica_of: dict[Micro, int] = {(t.section, t.items): t.replica for t in window.schedule.tasks if t.items}
        self.sums = dict(sums or {})
        self.issued: list[Task] = []
        self._started: list[tuple[Task, list[jax.Array]]] = []
        self.latest: jax.Array | None = None
        for state in self.states.values() if window.training else ():
            state.begin_window()
        updated = -1
        choose = adaptive(window.progress, window.schedule, self.in_flight.limit) if self.adaptive else window.choose
        for task in issue(window.progress, choose, self):
            # The first update of a step stands for all of them: one norm over all sections is all of them at once.
            if task.kind == "update" and task.step > updated:
                updated = task.step
                yield updated
        if self.payloads or self.returned or self.saved:
            raise ScheduleError(
                "steps ended with payloads that nobody took.",
                wanted="every payload consumed",
                have=str(sorted(label for label, _, _ in [*self.payloads, *self.returned])),
                fix="report this: the schedule is not valid",
                anchor="schedule-invalid",
                set_by="the policy",
            )

    # -- Executor

    def start(self, task: Task) -> int:
        """Issues a task; returns its scheduled end."""
        if task.kind != "update" and self.plan.is_local(task.section, task.replica):
            self.standing.start(task)
            needs = self._needed(task) if self.completions is not None else ()
            issued = time.monotonic_ns()
            marker: jax.Array = getattr(self, "_" + task.kind)(task)
            if self.completions is not None:
                self.completions.watch(task, issued, needs, marker)
            self.in_flight.add(task, marker)
            self.latest = marker
        elif task.kind == "forward":
            self._send(task, None)
        elif task.kind != "update":
            self._send_back(task, None)
        self.issued.append(task)
        self._started.append((task, self._results(task) if self.adaptive else []))
        return task.end

    def wait(self, until: int | None) -> list[Task]:
        """Everything that was issued counts as ended, because its results are futures; adaptively, waits until some of them are there."""
        while True:
            ready = [all(map(_is_ready, results)) for _, results in self._started]
            if any(ready) or not ready:
                break
            self.standing.waiting = "whichever task ends next"
            time.sleep(POLL_SECONDS)
        self.standing.waiting = ""
        ended = [task for (task, _), is_ready in zip(self._started, ready, strict=True) if is_ready]
        self._started = [each for each, is_ready in zip(self._started, ready, strict=True) if not is_ready]
        return ended

    # -- kinds of task

    def _forward(self, task: Task) -> jax.Array:
        micro = (task.section, task.items)
        slots = self._arrived(task)
        runs_backward = self.plan.graph.runs_backward[task.section] and self.window.training
        kind = "evaluate" if self.plan.graph.runs_backward[task.section] and not self.window.training else "forward"
        gradients, sums = self._take(task)
        out = self._call(task, kind, *self._inputs(task, slots), sums)
        payload, new_sums, marker = out[0], out[1], out[-1]
        if runs_backward:
            self.saved[micro] = Saved(slots, out[2] if self.plan.sections[task.section].keeps_residuals else ())
        self._put(task, gradients, new_sums)
        self._send(task, payload)
        return marker

    def _backward(self, task: Task) -> jax.Array:
        micro = (task.section, task.items)
        saved = self.saved.pop(micro)
        gradients, sums = self._take(task)
        cotangents = self._cotangents(task)
        back, gradients, marker = self._call(task, "backward", *self._inputs(task, saved.slots), saved.kept, cotangents, gradients)
        self._put(task, gradients, sums)
        self._send_back(task, back)
        return marker

    def _forward_backward(self, task: Task) -> jax.Array:
        slots = self._arrived(task)
        gradients, sums = self._take(task)
        back, sums, gradients, marker = self._call(task, "forward_backward", *self._inputs(task, slots), sums, gradients)
        self._put(task, gradients, sums)
        self._send_back(task, back)
        return marker

    def _inputs(self, task: Task, slots: Any) -> tuple[Any, ...]:
        params, frozen = self.states[task.section].params(task.replica)
        return params, frozen, self.window.feeds[task.section, task.items].arrays, slots

    def _call(self, task: Task, kind: str, *args: Any) -> Any:
        program = self.compiled[task.section, kind, task.bucket, task.replica]
        if self.debug:
            refuse_deleted(kind, task.section, args)
        try:
            return program(*args)
        except (ValueError, TypeError) as error:
            devices = self.plan.sections[task.section].submesh.replica_devices(task.replica)
            raise explain_mismatch(devices, task, kind, args, error) from error

    # -- accumulators: taken because programs donate them, put back at once

    def _take(self, task: Task) -> tuple[Any, Any]:
        if not self.window.training:
            return None, self.sums[task.section, task.replica]
        return self.states[task.section].holder(task.replica, task.step).take()

    def _put(self, task: Task, gradients: Any, sums: Any) -> None:
        if self.window.training:
            self.states[task.section].holder(task.replica, task.step).put(gradients, sums)
        else:
            self.sums[task.section, task.replica] = sums

    # -- payloads

    def _needed(self, task: Task) -> list[tuple[jax.Array, ...]]:
        """The payloads that a task is about to take."""
        micro = (task.section, task.items)
        if task.kind == "backward":
            return [self.returned[slot.label, micro, slot.partner] for slot in self.window.feeds[micro].leaving]
        return [self.payloads[slot.label, slot.partner, micro].arrays for slot in self.window.feeds[micro].arriving]

    def _arrived(self, task: Task) -> dict[str, tuple[tuple[jax.Array, ...], ...]]:
        """The payloads of a micro-batch by slot, zeros where none is sent; each is checked against its route."""
        micro = (task.section, task.items)
        slots: Slots = {e.edge.label: [self.zeros[e.edge.label, "in", task.replica]] * e.fan_in for e in self.plan.into(task.section)}
        for slot in self.window.feeds[micro].arriving:
            payload = self.payloads.pop((slot.label, slot.partner, micro))
            if payload.pairing != slot.pairing:
                raise _mispaired(slot, payload, self.window.steps[task.step].step)
            slots[slot.label][slot.number] = payload.arrays
        return {label: tuple(found) for label, found in slots.items()}

    def _send(self, task: Task, payload: Mapping[str, Any] | None) -> None:
        """Sends the payloads of a micro-batch, or takes those that come here of one that another process runs."""
        micro = (task.section, task.items)
        leaving = self.window.feeds[micro].leaving
        parcels = [Parcel(self._wire(slot, micro, slot.partner), _of_slot(payload, slot)) for slot in leaving]
        for slot, arrays in zip(leaving, self._move(parcels, task), strict=True):
            if arrays is not None:
                self.payloads[slot.label, micro, slot.partner] = Payload(arrays, slot.pairing)

    def _send_back(self, task: Task, back: Mapping[str, Any] | None) -> None:
        """Sends the gradients of the payloads of a micro-batch to where they came from, or takes those that come back here."""
        micro = (task.section, task.items)
        slots = [s for s in self.window.feeds[micro].arriving if self.plan.edges[s.label].backward]
        parcels = [Parcel(self._wire(slot, slot.partner, micro), _of_slot(back, slot), back=True) for slot in slots]
        for slot, arrays in zip(slots, self._move(parcels, task), strict=True):
            if arrays is not None:
                self.returned[slot.label, slot.partner, micro] = arrays

    def _move(self, parcels: list[Parcel], task: Task) -> list[tuple[jax.Array, ...] | None]:
        name = f"{self.number} {task.kind} {task.section} {task.items}"
        return move(parcels, self.plan.group.transport, name)

    def _cotangents(self, task: Task) -> dict[str, tuple[tuple[jax.Array, ...], ...]]:
        micro = (task.section, task.items)
        slots: Slots = {e.edge.label: [self.zeros[e.edge.label, "out", task.replica]] * e.fan_out for e in self.plan.out_of(task.section)}
        for slot in self.window.feeds[micro].leaving:
            slots[slot.label][slot.number] = self.returned.pop((slot.label, micro, slot.partner))
        return {label: tuple(found) for label, found in slots.items()}

    def _results(self, task: Task) -> list[jax.Array]:
        """What is there when a task has ended: its marker, and what it sent, where it arrives. An update ends when it is issued."""
        if task.kind == "update":
            return []
        micro, feed = (task.section, task.items), self.window.feeds[task.section, task.items]
        if task.kind == "forward":
            sent = [self.payloads[slot.label, micro, slot.partner].arrays for slot in feed.leaving]
        else:
            sent = [self.returned[s.label, s.partner, micro] for s in feed.arriving if self.plan.edges[s.label].backward]
        return jax.tree.leaves((self.latest, sent))

    def _wire(self, slot: Slot, producer: Micro, consumer: Micro) -> Any:
        return self.plan.edges[slot.label].wires[self.replica_of[producer], self.replica_of[consumer]]


def _is_ready(array: Any) -> bool:
    return array.is_ready()


def _of_slot(sent: Mapping[str, Any] | None, slot: Slot) -> tuple[jax.Array, ...] | None:
    """The arrays of a slot among what a program returned; None where another process called it."""
    return sent[slot.label][slot.number] if sent is not None else None


def _mispaired(slot: Slot, payload: Payload, step: int) -> EdgeError:
    return EdgeError(
        f"a payload of edge {slot.label} met the wrong consumer in step {step}.",
        wanted=f"rows with the pairing {slot.pairing}, of samples {sorted({s for s, _ in slot.partner[1]})} of the batch",
        have=f"rows with the pairing {payload.pairing}",
        fix="report this: routes at both ends of the edge disagree",
        anchor="mispaired-payload",
        set_by="the routes of this step",
    )
