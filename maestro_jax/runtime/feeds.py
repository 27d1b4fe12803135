"""Everything that a step needs on its devices besides activations, made ahead of it: schedule, data, routes, scales.

Runs in a background thread while the step before runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..data import Packed, Sample, pack, route
from ..data.routes import Wiring, expected, sent
from ..graph import Section
from ..meshes import processes_of, put_whole
from ..schedules import EdgeWork, Policy, Progress, SampleWork, Schedule, SectionWork, Task, Workload, place, utilization_of
from ..schedules.cutting import microbatches_of
from ..schedules.loop import Chooser
from ..schedules.policies import check_covers, replay
from ..schedules.worker import Worker
from .agreement import agreed_feeds
from .arguments import Arguments
from .compile import Compiled
from .costs import Costs, counted_costs
from .global_batch import GlobalBatch, whole_batch
from .plan import EdgePlan, Plan
from .state import whole

Micro = tuple[str, tuple[tuple[int, int], ...]]
"""A micro-batch within its step: (section, pieces)."""

UNLIMITED = 2**60


@dataclasses.dataclass(frozen=True)
class Slot:
    """One payload of a micro-batch.

    Args:
        label: of its edge.
        number: which slot of this micro-batch it is.
        partner: the micro-batch at the other end.
        pairing: hash of what this end takes the rows to be.
    """

    label: str
    number: int
    partner: Micro
    pairing: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskFeed:
    """What one micro-batch takes beside parameters and payloads, as far as this process takes part.

    Args:
        arrays: on the devices of its replica, as `Arguments.feed` describes; None where another process runs it.
        arriving: payloads that it takes; where another process runs it, those that are sent from here.
        leaving: payloads that it sends; where another process runs it, those that are taken here.
    """

    arrays: Any
    arriving: tuple[Slot, ...]
    leaving: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A global batch that is ready to be issued.

    Args:
        step: number of the step in the run.
        samples: the samples, in arrival order.
        counts: (section, objective) -> denominator over the global batch.
        units: section -> units in its items, for throughput.
        scheduled: section -> units of its micro-batches; what is more than `units` is padding.
        busy: section -> share of its replicas' time in which they have a task, as scheduled for the whole window.
        active: section -> device scalar: whether any weighted objective counts anything (a step without is not applied).
    """

    step: int
    samples: Sequence[Sample]
    counts: Mapping[tuple[str, str], float]
    units: Mapping[str, int]
    scheduled: Mapping[str, int]
    busy: Mapping[str, float]
    active: Mapping[str, jax.Array]

    @property
    def padding(self) -> dict[str, float]:
        """Section -> share of the scheduled units that hold no item; 0 where nothing is scheduled."""
        return {name: 1 - self.units[name] / scheduled if scheduled else 0.0 for name, scheduled in self.scheduled.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive steps that are scheduled together, so that what waits for no update may run ahead into later ones.

    Args:
        training: whether gradients are wanted.
        steps: in order.
        workload: what is to be done.
        schedule: in which order.
        progress: what may start when; used up when the window is issued, so it is issued once.
        choose: starts the tasks of the schedule in its order.
        feeds: per micro-batch that concerns this process.
    """

    training: bool
    steps: tuple[PreparedStep, ...]
    workload: Workload
    schedule: Schedule
    progress: Progress
    choose: Chooser
    feeds: Mapping[Micro, TaskFeed]


def make_workload(
    plan: Plan,
    batches: Sequence[Sequence[Sample]],
    training: bool,
    costs: Costs,
    bucket_bytes: Mapping[str, tuple[int, ...]] | None = None,
) -> Workload:
    """Describes global batches to the scheduler.

    Args:
        plan: where sections run.
        batches: the samples of each step, in arrival order; counted through all steps, they are the workload's sample ids.
        costs: of tasks and transfers.
        training: whether sections run backward and update.
        bucket_bytes: section -> bytes that a micro-batch of each bucket holds in flight; None: not known, and not limited.
    """
    devices = {d: n for n, d in enumerate(dict.fromkeys(d for s in plan.sections.values() for d in s.submesh.mesh.devices.flat))}
    sections = {}
    for name, section in plan.sections.items():
        mesh = section.submesh
        sections[name] = SectionWork(
            replicas=mesh.replicas,
            buckets=section.section.buckets,
            trainable=section.section.trainable and training,
            max_inflight=UNLIMITED,
            forward=costs.sections[name].forward,
            backward=costs.sections[name].backward,
            update=costs.sections[name].update if training else 0,
            devices=tuple(tuple(devices[d] for d in mesh.replica_devices(r)) for r in range(mesh.replicas)),
            row_length=section.section.row_length,
            packed=section.section.packed,
            bucket_bytes=bucket_bytes[name] if bucket_bytes else None,
            max_bytes=section.section.max_bytes if bucket_bytes else None,
        )
    # Several edges between two sections are one dependency, as wide as the widest of them; the plan gives them equal fans.
    between: dict[tuple[str, str], list[EdgePlan]] = {}
    for edge in plan.edges.values():
        between.setdefault((edge.edge.producer, edge.edge.consumer), []).append(edge)
    edges = tuple(
        EdgeWork(
            producer=producer,
            consumer=consumer,
            delay=max(costs.delays[e.edge.label] for e in found),
            fan_in=found[0].fan_in,
            fan_out=found[0].fan_out,
            paired=all(e.edge.rows is None for e in found),
        )
        for (producer, consumer), found in between.items()
    )
    numbers = itertools.count()
    steps = tuple(tuple(sample_work(plan, next(numbers), sample) for sample in samples) for samples in batches)
    return Workload(sections=sections, edges=edges, steps=steps)


def sample_work(plan: Plan, number: int, sample: Sample) -> SampleWork:
    """What a scheduler knows of a sample: the units of its items in every section that runs for it."""
    items = {name: tuple(item.units for item in sample.items.get(s.section.reads, ())) for name, s in plan.sections.items()}
    return SampleWork(id=number, items={name: units for name, units in items.items() if units})


class Preparer:
    """Prepares steps for a compiled plan.

    Args:
        compiled: programs of the plan.
        policy: decides what runs where and when.
        specs: stream -> array name -> spec.
        seed: of everything random in a step.
        costs: of tasks and transfers; None counts them.
    """

    def __init__(self, compiled: Compiled, policy: Policy, specs: Any, seed: int, costs: Costs | None = None) -> None:
        self.compiled, self.plan, self.policy, self.specs, self.seed = compiled, compiled.plan, policy, specs, seed
        self.costs = costs if costs is not None else counted_costs(self.plan)
        self._worker = Worker()

    def prepare(self, samples: Sequence[Sample] | GlobalBatch, step: int, training: bool = True) -> Window:
        """Prepares a window of one step (see `prepare_window`)."""
        return self.prepare_window([samples], step, training)

    def prepare_window(self, batches: Sequence[Sequence[Sample] | GlobalBatch], first: int, training: bool = True) -> Window:
        """Schedules batches, packs them, makes routes and puts all arrays on the devices of their replicas.

        In a run of several processes all of them prepare the same windows in the same order; each reads, packs and puts what runs on
        its own devices.

        Args:
            batches: the samples of consecutive steps.
            first: number of the first step in the run.
            training: whether gradients are wanted.

        Raises:
            DataError: when an item does not fit the largest micro-batch of a section, or lengths differ across an edge.
            ScheduleError: when the batches cannot be scheduled.
            ClusterError: when processes have made different schedules.
        """
        known = [b if isinstance(b, GlobalBatch) else whole_batch(self.plan, self.specs, b) for b in batches]
        workload = make_workload(self.plan, [batch.samples for batch in known], training, self.costs, self.compiled.bucket_bytes)
        in_worker = getattr(self.policy, "in_worker", False)
        schedule = self._worker.schedule(self.policy, workload) if in_worker else self.policy.schedule(workload)
        microbatches = microbatches_of(workload, schedule.tasks)
        check_covers(workload, microbatches)
        tasks = [t for t in schedule.tasks if t.kind in ("forward", "forward_backward")]
        samples = self._read(known, tasks)
        feeds: dict[Micro, TaskFeed] = {}
        for number, batch in enumerate(known):
            of_step = [t for t in tasks if t.step == number]
            packed = {(t.section, t.items): self._pack(t, samples) for t in of_step}
            arriving, leaving, indices = self._routes(of_step, packed, first + number, samples)
            for task in of_step:
                micro = task.section, task.items
                arrays = None
                if self._runs_here(task):
                    arrays = self._put(task, packed[micro], indices[micro], batch.counts, first + number, training)
                feeds[micro] = TaskFeed(arrays=arrays, arriving=tuple(arriving[micro]), leaving=tuple(leaving[micro]))
        if self.plan.group.count > 1:
            feeds = agreed_feeds(self.plan, schedule, feeds, "schedules" if training else "evaluation schedules")
        busy = utilization_of(workload, schedule)
        steps = tuple(
            PreparedStep(
                step=first + number,
                samples=batch.samples,
                counts=batch.counts,
                units={n: sum(sum(s.items[n]) for s in workload.steps[number] if n in s.items) for n in self.plan.sections},
                scheduled={n: sum(t.bucket for t in tasks if t.section == n and t.step == number) for n in self.plan.sections},
                busy=busy,
                active=self._active(batch.counts),
            )
            for number, batch in enumerate(known)
        )
        progress = Progress(workload, microbatches)
        return Window(
            training=training,
            steps=steps,
            workload=workload,
            schedule=schedule,
            progress=progress,
            choose=replay(progress, schedule),
            feeds=feeds,
        )

    def _runs_here(self, task: Task) -> bool:
        return self.plan.is_local(task.section, task.replica)

    def _read(self, batches: Sequence[GlobalBatch], tasks: Sequence[Task]) -> list[Sample]:
        """The samples of all steps, with the arrays of those that run here."""
        places = [(batch, n) for batch in batches for n in range(len(batch.samples))]
        here = {sample for task in tasks if self._runs_here(task) for sample, _ in task.items}
        return [batch.read(n) if number in here else batch.samples[n] for number, (batch, n) in enumerate(places)]

    def _pack(self, task: Task, samples: Sequence[Sample]) -> Packed:
        section = self.plan.sections[task.section]
        stream = section.section.reads
        # What runs in another process is packed without its arrays: where its items lie follows from lengths alone.
        specs = self.specs[stream] if self._runs_here(task) else {}
        items = [(samples[s].number, samples[s].items[stream][n]) for s, n in task.items]
        places = place([item.units for _, item in items], task.bucket, section.section.row_length, section.section.packed)
        if places is None:
            raise RuntimeError(f"the schedule put {task.items} of {task.section!r} into a bucket of {task.bucket}")
        return pack(task.items, items, places, specs, section.micro_shape(task.bucket))

    def _active(self, counts: Mapping[tuple[str, str], float]) -> dict[str, jax.Array]:
        weighted = [counts[n, k] for n, s in self.plan.sections.items() for k, o in s.section.objectives.items() if o.weight]
        return {name: whole(self.plan.sections[name], np.bool_(any(weighted))) for name in self.compiled.trained if name in self.plan.local}

    def _routes(self, tasks: Sequence[Task], packed: Mapping[Micro, Packed], step: int, samples: Sequence[Sample]) -> tuple[Any, Any, Any]:
        """Returns per micro-batch: payloads that arrive, payloads that leave, and index arrays per edge."""
        micros = {(t.section, t.items): t for t in tasks}
        arriving: dict[Micro, list[Slot]] = {m: [] for m in micros}
        leaving: dict[Micro, list[Slot]] = {m: [] for m in micros}
        indices: dict[Micro, dict[str, np.ndarray]] = {m: {} for m in micros}
        for label, edge in self.plan.edges.items():
            streams = [self.plan.graph[name].reads for name in (edge.edge.producer, edge.edge.consumer)]
            wiring = Wiring(label, samples, streams[0], edge.merge, edge.edge.rows, takes=streams[1])
            for micro, task in micros.items():
                if micro[0] == edge.edge.producer:
                    indices[micro][label + " out"] = np.full((edge.fan_out, edge.slot_rows), task.bucket, np.int32)
                if micro[0] == edge.edge.consumer:
                    indices[micro][label + " in"] = np.full((edge.fan_in, edge.slot_rows), task.bucket, np.int32)
            for a in (m for m in micros if m[0] == edge.edge.producer):
                for b in (m for m in micros if m[0] == edge.edge.consumer):
                    if not (self._runs_here(micros[a]) or self._runs_here(micros[b])):
                        continue
                    found = route(packed[a], packed[b], edge.slot_rows, wiring)
                    if found is None:
                        continue
                    # Of a micro-batch that runs in another process, only the payloads from here, or to here, are known and counted.
                    n_out = sum(s.label == label for s in leaving[a])
                    n_in = sum(s.label == label for s in arriving[b])
                    indices[a][label + " out"][n_out] = found.gather
                    indices[b][label + " in"][n_in] = found.place
                    leaving[a].append(Slot(label, n_out, b, sent(wiring, step, packed[a], found.gather)))
                    arriving[b].append(Slot(label, n_in, a, expected(wiring, step, packed[b], found.place)))
        return arriving, leaving, indices

    def _put(
        self,
        task: Task,
        packed: Packed,
        indices: Mapping[str, np.ndarray],
        counts: Mapping[tuple[str, str], float],
        step: int,
        training: bool,
    ) -> Any:
        """Puts a micro-batch's arrays on its replica: in one batch where no other process has devices of it."""
        section = self.plan.sections[task.section].section
        arguments: Arguments = self.compiled.arguments[task.section]
        shapes = arguments.feed(task.bucket, task.replica, training)
        batch: dict[str, Any] = dict(packed.arrays)
        if "key" in shapes["batch"]:
            batch["key"] = _key(self.seed, step, section.name)
        feed = {
            "batch": batch,
            "place": {label: indices[label + " in"] for label in shapes["place"]},
            "gather": {label: indices[label + " out"] for label in shapes["gather"]},
            "scale": _scale(section, counts),
        }
        places = jax.tree.map(lambda s: s.sharding, shapes)
        if len(processes_of(self.plan.sections[task.section].submesh.replica_meshes[task.replica])) > 1:
            # `device_put` would compare what the processes give it, by a collective in this thread, which meets those of running programs.
            return jax.tree.map(put_whole, feed, places)
        return jax.device_put(feed, places)


def _scale(section: Section, counts: Mapping[tuple[str, str], float]) -> np.ndarray:
    """Weight / count per objective; 0 where nothing counts, so that such an objective changes nothing."""
    found = [(o.weight, counts[section.name, key]) for key, o in section.objectives.items()]
    return np.array([weight / count if count else 0.0 for weight, count in found], np.float32)


def _key(seed: int, step: int, section: str) -> np.ndarray:
    """Two 32-bit words from (seed, step, section): the key of everything random in a section's step."""
    low = zlib.crc32(f"{seed} {step} {section}".encode())
    high = zlib.crc32(f"{section} {step} {seed}".encode(), low)
    return np.array([high, low], np.uint32)
