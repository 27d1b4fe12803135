"""How far schedules are from optimal ones, on workloads small enough to be solved exactly.

`python -m benchmarks.optimal` solves small random workloads with an exact model (OR-tools CP-SAT: `pip install '.[optimal]'`) and compares
what policies make of them. The model decides everything at once: which items go together, in which bucket, on which replica, and when each
task starts. It has no rules of thumb: it leaves out only what cannot be better than something that it keeps.

A micro-batch is named after the first of its items, so that a cut has one description only (asymmetric representatives: Campêlo, Campos and
Corrêa, "On the asymmetric representatives formulation for the vertex coloring problem", Discrete Applied Mathematics 156, 2008).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import runpy
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ortools.sat.python import cp_model

from maestro_jax.schedules import Cost, EdgeWork, InOrder, SampleWork, Schedule, SectionWork, Task, Wavefront, Workload, lower_bound
from maestro_jax.schedules.tasks import Kind, Piece

JUDGE = Path(__file__).parent.parent / "tests" / "schedules" / "check_schedule.py"

UNLIMITED = 10**9

UPSTREAM = {
    "distillation": ("teacher",),
    "distillation, two steps": ("teacher",),
    "vision": ("vision",),
    "three encoders": ("vision", "audio", "video"),
    "two stages": ("stage",),
}
"""Kinds of workloads: what feeds the LLM."""

Var = cp_model.IntVar


@dataclasses.dataclass(kw_only=True)
class Slot:
    """A micro-batch that there may be, with its first item or not at all: flags say what it holds, its size and its replica."""

    section: str
    step: int
    units: dict[Piece, int]
    joins: dict[Piece, Var]
    buckets: dict[int, Var]
    replicas: list[Var]
    starts: dict[Kind, Var] = dataclasses.field(default_factory=dict)
    lengths: dict[Kind, Var] = dataclasses.field(default_factory=dict)
    ends: dict[Kind, Var] = dataclasses.field(default_factory=dict)

    @property
    def first(self) -> Piece:
        return next(iter(self.units))

    @property
    def there(self) -> Var:
        return self.joins[self.first]


class Model:
    """What a valid schedule of a workload is that ends within a horizon, in variables and constraints.

    Raises:
        ValueError: for a workload with rows, bytes or paired edges, which the model does not know.
    """

    def __init__(self, workload: Workload, horizon: int) -> None:
        if any(s.row_length or s.max_bytes or not s.packed for s in workload.sections.values()) or any(e.paired for e in workload.edges):
            raise ValueError("the exact model knows neither row_length nor rows of one item nor max_bytes nor paired edges")
        self.workload, self.horizon = workload, horizon
        self.longest_update = max((s.update for s in workload.sections.values() if s.trainable), default=0)
        self.cp = cp_model.CpModel()
        # The bound may be too high by what it rounds up, which is less than a nanosecond for each section and step.
        bound = max(0, lower_bound(workload) - len(workload.sections) * len(workload.steps))
        self.makespan = self.cp.new_int_var(bound, horizon, "makespan")
        self.step_ends = [self._time() for _ in workload.steps]
        self.slots: dict[tuple[str, int], list[Slot]] = {}
        # When all items of a sample in a section have run forward or backward, or later.
        self.done: dict[tuple[int, str, Kind], Var] = {}
        self.updates: dict[tuple[str, int, int], Var] = {}
        self.intervals: dict[Any, list[cp_model.IntervalVar]] = defaultdict(list)
        for t in range(len(workload.steps)):
            for name in workload.order:
                self._add_slots(name, t)
        for slot in [slot for slots in self.slots.values() for slot in slots]:
            for kind in self.kinds(slot.section):
                self._add_waits(slot, kind)
        for edge in workload.edges:
            for t in range(len(workload.steps)):
                self._add_fans(edge, t)
        for name in workload.order:
            self._add_updates(name)
            self._add_memory(name)
            self._add_symmetry(name)
        for intervals in self.intervals.values():
            self.cp.add_no_overlap(intervals)
        self.cp.minimize(self.makespan)

    def kinds(self, name: str) -> tuple[Kind, ...]:
        """The tasks of a micro-batch. Forward and backward are always two: one task for both is never better."""
        return ("forward", "backward") if self.workload.runs_backward[name] else ("forward",)

    def slots_of(self, name: str) -> list[Slot]:
        """The micro-batches of a section in all steps."""
        return [slot for t in range(len(self.workload.steps)) for slot in self.slots[name, t]]

    def cost(self, name: str, kind: Kind) -> Cost:
        """What a task costs."""
        return self.workload.sections[name].forward if kind == "forward" else self.workload.sections[name].backward

    def _time(self) -> Var:
        return self.cp.new_int_var(0, self.horizon, "")

    def _flag(self) -> Var:
        return self.cp.new_bool_var("")

    def _devices(self, name: str, replica: int) -> Iterable[Any]:
        devices = self.workload.sections[name].devices
        return devices[replica] if devices else [(name, replica)]

    def _needs(self, sample: int, name: str, kind: Kind) -> Iterator[tuple[str, int]]:
        """Sections whose tasks of a kind a sample's task of the same kind waits for, and how long the way is."""
        for edge in self.workload.edges:
            mine, other = (edge.consumer, edge.producer) if kind == "forward" else (edge.producer, edge.consumer)
            if mine == name and (sample, other, kind) in self.done:
                yield other, edge.delay

    # -- what there is

    def _add_slots(self, name: str, t: int) -> None:
        units = {(s.id, n): u for s in self.workload.steps[t] for n, u in enumerate(s.items.get(name, ()))}
        pieces = sorted(units, key=lambda p: (-units[p], p))
        slots = self.slots[name, t] = [self._slot(name, t, {p: units[p] for p in pieces[k:]}) for k in range(len(pieces))]
        for piece in pieces:
            self.cp.add_exactly_one(slot.joins[piece] for slot in slots if piece in slot.joins)
        for kind in self.kinds(name):
            for sample in {s for s, _ in pieces}:
                self.done[sample, name, kind] = self._time()
            for slot in slots:
                self._add_task(slot, kind)

    def _slot(self, name: str, t: int, units: dict[Piece, int]) -> Slot:
        """A micro-batch of the first item and any of the others that fit beside it."""
        work, first = self.workload.sections[name], next(iter(units))
        units = {p: u for p, u in units.items() if p == first or u + units[first] <= work.buckets[-1]}
        slot = Slot(
            section=name,
            step=t,
            units=units,
            joins={p: self._flag() for p in units},
            buckets={b: self._flag() for b in work.buckets if b >= units[first]},
            replicas=[self._flag() for _ in range(work.replicas)],
        )
        for flags in (slot.buckets.values(), slot.replicas):
            self.cp.add(sum(flags) == slot.there)
        for join in slot.joins.values():
            self.cp.add_implication(join, slot.there)
        # A larger bucket than the smallest that holds the items is never better.
        least = {b: 1 + max((x for x in work.buckets if x < b), default=0) for b in slot.buckets}
        held = sum(u * slot.joins[p] for p, u in units.items())
        self.cp.add(held <= sum(b * flag for b, flag in slot.buckets.items()))
        self.cp.add(held >= sum(least[b] * flag for b, flag in slot.buckets.items()))
        return slot

    def _add_task(self, slot: Slot, kind: Kind) -> None:
        """The forward or the backward of a micro-batch, on one of the replicas."""
        cp, start, end, length = self.cp, self._time(), self._time(), self._length(slot, kind)
        cp.add(end == start + length)
        cp.add(start == 0).only_enforce_if(~slot.there)
        cp.add(self.makespan >= end)
        for replica, here in enumerate(slot.replicas):
            for device in self._devices(slot.section, replica):
                self.intervals[device].append(cp.new_optional_interval_var(start, length, end, here, ""))
        slot.starts[kind], slot.lengths[kind], slot.ends[kind] = start, length, end
        for (sample, _), join in slot.joins.items():
            cp.add(self.done[sample, slot.section, kind] >= end).only_enforce_if(join)
        if kind == "backward":
            cp.add(start >= slot.ends["forward"])
            cp.add(self.step_ends[slot.step] >= end)

    def _length(self, slot: Slot, kind: Kind) -> Var:
        cost = self.cost(slot.section, kind)
        length = self.cp.new_int_var(0, cost.of(max(slot.buckets), slot.units.values()), "")
        linear = sum((cost.fixed + cost.per_unit * b) * flag for b, flag in slot.buckets.items())
        squares = sum(cost.per_unit_squared * u * u * slot.joins[p] for p, u in slot.units.items())
        # Rounded down: what is beyond the linear part is the largest number of thousands within the squares.
        self.cp.add(1000 * length - 1000 * linear <= squares)
        self.cp.add(1000 * length - 1000 * linear >= squares - 999)
        return length

    # -- what waits for what

    def _add_waits(self, slot: Slot, kind: Kind) -> None:
        for (sample, _), join in slot.joins.items():
            for other, delay in self._needs(sample, slot.section, kind):
                self.cp.add(slot.starts[kind] >= self.done[sample, other, kind] + delay).only_enforce_if(join)

    def _add_fans(self, edge: EdgeWork, t: int) -> None:
        if edge.fan_in is None and edge.fan_out is None:
            return
        feeds: dict[tuple[Piece, Piece], Var] = defaultdict(self._flag)
        for producer in self.slots[edge.producer, t]:
            for consumer in self.slots[edge.consumer, t]:
                for a, c in ((a, c) for a in producer.joins for c in consumer.joins if a[0] == c[0]):
                    self.cp.add_bool_or(~producer.joins[a], ~consumer.joins[c], feeds[producer.first, consumer.first])
        for end, limit in ((0, edge.fan_out), (1, edge.fan_in)):
            for number in {pair[end] for pair in feeds}:
                self.cp.add(sum(flag for pair, flag in feeds.items() if pair[end] == number) <= (limit or len(feeds)))

    def _add_updates(self, name: str) -> None:
        """Updates after the last backward of their step in any section, and before the section's forwards of the next step."""
        work = self.workload.sections[name]
        for t in range(len(self.workload.steps) if work.trainable else 0):
            for replica in range(work.replicas):
                start = self.updates[name, replica, t] = self._time()
                self.cp.add(start >= self.step_ends[t])
                # In order, also where a step has no backward to wait for.
                self.cp.add(start >= (self.updates[name, replica, t - 1] + work.update if t else 0))
                self.cp.add(self.makespan >= start + work.update)
                for device in self._devices(name, replica):
                    self.intervals[device].append(self.cp.new_fixed_size_interval_var(start, work.update, ""))
                for slot in self.slots.get((name, t + 1), ()):
                    self.cp.add(slot.starts["forward"] >= start + work.update).only_enforce_if(slot.replicas[replica])

    def _add_memory(self, name: str) -> None:
        """What a replica holds at a time, where all that it could hold is more than its limit."""
        work, slots = self.workload.sections[name], self.slots_of(name)
        if sum(slot.units[slot.first] for slot in slots) <= work.max_inflight:
            return
        spans: list[list[cp_model.IntervalVar]] = [[] for _ in range(work.replicas)]
        for slot in slots:
            start, held, release = slot.starts["forward"], self._time(), self._release(slot)
            self.cp.add(start + held == release)
            for join in slot.joins.values():
                for replica, runs in enumerate(slot.replicas):
                    here = self._flag()
                    self.cp.add_bool_or(~join, ~runs, here)
                    self.cp.add_implication(here, join)
                    self.cp.add_implication(here, runs)
                    spans[replica].append(self.cp.new_optional_interval_var(start, held, release, here, ""))
        for each in spans:
            self.cp.add_cumulative(each, [u for slot in slots for u in slot.units.values()], work.max_inflight)

    def _release(self, slot: Slot) -> Var:
        """When a micro-batch no longer holds anything: after its backward, or after the forward of all that consume it."""
        if self.workload.runs_backward[slot.section]:
            return slot.ends["backward"]
        release = self._time()
        self.cp.add(release >= slot.ends["forward"])
        for edge in self.workload.edges:
            for (sample, _), join in slot.joins.items() if edge.producer == slot.section else ():
                if (sample, edge.consumer, "forward") in self.done:
                    self.cp.add(release >= self.done[sample, edge.consumer, "forward"]).only_enforce_if(join)
        return release

    def _add_symmetry(self, name: str) -> None:
        """Replicas with devices of their own are alike: each takes its first micro-batch after the one before it has taken one."""
        before: list[Slot] = []
        for slot in self.slots_of(name) if not self.workload.sections[name].devices else ():
            for previous, here in enumerate(slot.replicas[1:]):
                self.cp.add_bool_or(~here, *(other.replicas[previous] for other in before))
            before.append(slot)

    # -- what follows from the above, and helps the solver to see that nothing is shorter

    def add_implied(self) -> None:
        """Adds what each sample needs from task to task, and what each section needs for all of its items."""
        for t, samples in enumerate(self.workload.steps):
            for sample in samples:
                for name in sample.items:
                    self._add_chain(sample, name, t)
        for name in self.workload.order:
            self._add_load(name)

    def _add_chain(self, sample: SampleWork, name: str, t: int) -> None:
        work = self.workload.sections[name]
        for kind in self.kinds(name):
            done, alone = self.done[sample.id, name, kind], self._alone(sample, name, kind)
            self.cp.add(done >= alone)
            for other, delay in self._needs(sample.id, name, kind):
                self.cp.add(done >= self.done[sample.id, other, kind] + delay + alone)
            if kind == "backward":
                # Of several items without a consumer, the last one to run forward may be any.
                self.cp.add(done >= self.done[sample.id, name, "forward"] + self._alone(sample, name, kind, min))
                self.cp.add(done <= self.step_ends[t])
            elif t and work.trainable:
                self.cp.add(done >= self.step_ends[t - 1] + work.update + alone)

    def _add_load(self, name: str) -> None:
        """Between its first sample's arrival and the time that the last one still needs, a section runs the cheapest cut at least."""
        work, samples = self.workload.sections[name], [s for step in self.workload.steps for s in step if name in s.items]
        costs, least = [self.cost(name, kind) for kind in self.kinds(name)], 0
        for t in range(len(self.workload.steps)):
            units = [slot.units[slot.first] for slot in self.slots[name, t]]
            least += cheapest(work.buckets, costs, units)
        if samples:
            begin = min(self._before(s, name) for s in samples)
            rest = min(self._after(s, name, self.kinds(name)[-1]) for s in samples)
            self.cp.add(self.makespan >= begin + -(-least // work.replicas) + rest)

    def _alone(self, sample: SampleWork, name: str, kind: Kind, which: Callable[[Iterable[int]], int] = max) -> int:
        """Nanoseconds of the longest item of a sample, or the shortest, in the smallest micro-batch that holds it."""
        buckets, cost = self.workload.sections[name].buckets, self.cost(name, kind)
        return which(cost.of(next(b for b in buckets if b >= u), [u]) for u in sample.items[name])

    def _before(self, sample: SampleWork, name: str) -> int:
        """Nanoseconds that a sample needs before its forward in a section can start."""
        needs = self._needs(sample.id, name, "forward")
        return max((self._before(sample, other) + self._alone(sample, other, "forward") + delay for other, delay in needs), default=0)

    def _after(self, sample: SampleWork, name: str, kind: Kind) -> int:
        """Nanoseconds to the end of everything, at least, after a sample's forward or backward in a section; with updates."""
        tasks: list[tuple[str, Kind]] = [(other, kind) for other in sample.items if (sample.id, other, kind) in self.done]
        then = [(*task, delay) for task in tasks for need, delay in self._needs(sample.id, *task) if need == name]
        if kind == "forward" and self.workload.runs_backward[name]:
            then.append((name, "backward", 0))
        last = self.longest_update if kind == "backward" else 0
        return max((d + self._alone(sample, to, k) + self._after(sample, to, k) for to, k, d in then), default=last)

    # -- to and from schedules

    def hint(self, schedule: Schedule) -> None:
        """Tells the solver a schedule to begin with."""
        found = {(task.section, piece, task.kind): task for task in schedule.tasks for piece in task.items}
        for name, work in self.workload.sections.items():
            numbers = {r: r for r in range(work.replicas)} if work.devices else {}
            held: set[Piece] = set()
            for slot in self.slots_of(name):
                both = found.get((name, slot.first, "forward_backward"))
                forward = both or found[name, slot.first, "forward"]
                there = slot.first not in held
                held.update(forward.items)
                if there:
                    numbers.setdefault(forward.replica, len(numbers))
                values: list[tuple[Var, int]] = [(join, there and piece in forward.items) for piece, join in slot.joins.items()]
                values += [(flag, there and bucket == forward.bucket) for bucket, flag in slot.buckets.items()]
                values += [(flag, there and number == numbers[forward.replica]) for number, flag in enumerate(slot.replicas)]
                values.append((slot.starts["forward"], there * forward.start))
                if "backward" in slot.starts:
                    units = [slot.units[p] for p in forward.items] if there else []
                    backward = both.end - work.backward.of(both.bucket, units) if both else found[name, slot.first, "backward"].start
                    values.append((slot.starts["backward"], there * backward))
                for variable, value in values:
                    self.cp.add_hint(variable, value)

    def schedule(self, value: Callable[[Var], int]) -> Schedule:
        """The schedule that values of the variables say."""
        tasks = []
        for slot in (slot for slots in self.slots.values() for slot in slots if value(slot.there)):
            for kind, start in slot.starts.items():
                task = Task(
                    section=slot.section,
                    replica=next(r for r, flag in enumerate(slot.replicas) if value(flag)),
                    kind=kind,
                    step=slot.step,
                    bucket=next(b for b, flag in slot.buckets.items() if value(flag)),
                    items=tuple(p for p, join in slot.joins.items() if value(join)),
                    start=value(start),
                    end=value(slot.ends[kind]),
                )
                tasks.append(task)
        for (name, replica, t), start in self.updates.items():
            end = value(start) + self.workload.sections[name].update
            tasks.append(Task(section=name, replica=replica, kind="update", step=t, start=value(start), end=end))
        return Schedule(tasks=tuple(sorted(tasks, key=lambda task: (task.start, task.end))))


def cheapest(buckets: Sequence[int], costs: Sequence[Cost], units: Sequence[int]) -> int:
    """Least time of all tasks of a section together, over all ways to cut its items; 0 for so many items that it would take too long."""
    one, best = [0], [0]
    if len(units) > 13:
        return 0
    for subset in range(1, 1 << len(units)):
        inside = [u for n, u in enumerate(units) if subset >> n & 1]
        bucket = next((b for b in buckets if b >= sum(inside)), None)
        one.append(UNLIMITED if bucket is None else sum(cost.of(bucket, inside) for cost in costs))
    for subset in range(1, 1 << len(units)):
        # All micro-batches that the first item may be in, with any of the others.
        first = subset & -subset
        others = rest = subset ^ first
        found = best[rest] + one[first]
        while others:
            found = min(found, one[first | others] + best[rest ^ others])
            others = (others - 1) & rest
        best.append(found)
    return best[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution:
    """What the solver found: a schedule, nanoseconds before which none ends, whether it ends there, and the seconds it took."""

    schedule: Schedule
    bound: int
    optimal: bool
    seconds: float


def solve(workload: Workload, known: Schedule, seconds: float) -> Solution:
    """Finds a shortest schedule, or the shortest that can be found in some seconds, beginning with a known one.

    The solver has one thread, so that the result is the same each time, unless the time runs out.

    Raises:
        RuntimeError: when the model does not allow the known schedule.
    """
    model = Model(workload, known.makespan)
    model.add_implied()
    model.hint(known)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    # Linear relaxations see little of what runs before what: without them the solver is several times as fast.
    solver.parameters.linearization_level = 0
    status = solver.solve(model.cp)
    if status in (cp_model.INFEASIBLE, cp_model.MODEL_INVALID):
        raise RuntimeError(f"the exact model of {workload.name!r} does not allow a valid schedule: {solver.status_name(status)}")
    found = known if status == cp_model.UNKNOWN else model.schedule(solver.value)
    bound = round(solver.best_objective_bound)
    return Solution(schedule=found, bound=bound, optimal=status == cp_model.OPTIMAL, seconds=solver.wall_time)


def instance(kind: str, samples: int, seed: int) -> Workload:
    """A random workload of a kind: an LLM (or student) and what feeds it, with lengths that have a long tail."""
    draw, names, made = random.Random(f"{kind} {samples} {seed}"), UPSTREAM[kind], []

    def units(median: float, most: int) -> int:
        return max(4, min(most, round(median * math.exp(draw.gauss(0, 0.7)))))

    cost = Cost(fixed=25, per_unit=1, per_unit_squared=5 if kind == "vision" else 0)
    twice = dataclasses.replace(cost, per_unit=2, per_unit_squared=2 * cost.per_unit_squared)
    limit = draw.choice((256, UNLIMITED))
    llm = SectionWork(replicas=1, buckets=(64, 128), trainable=True, max_inflight=limit, forward=cost, backward=twice, update=50)
    per_unit = 2 if len(names) == 1 else 1
    costs = Cost(fixed=10, per_unit=per_unit), Cost(fixed=10, per_unit=2 * per_unit)
    encoder = dataclasses.replace(llm, buckets=(32, 64), max_inflight=UNLIMITED, forward=costs[0], backward=costs[1], update=20)
    teacher = dataclasses.replace(llm, trainable=False, forward=Cost(fixed=35, per_unit=2))
    sections = {name: {"teacher": teacher, "stage": llm}.get(name, encoder) for name in names}
    sections["llm"] = dataclasses.replace(llm, replicas=1 if kind == "two stages" else draw.choice((1, 2)))
    for number in range(samples):
        items: dict[str, tuple[int, ...]] = {"llm": (units(30, 128),)}
        for name in names:
            if name in ("teacher", "stage"):
                items[name] = items["llm"]
            elif draw.random() < (0.6 if len(names) == 1 else 0.4):
                items[name] = tuple(units(15, 64) for _ in range(draw.choice((1, 1, 2)) if len(names) == 1 else 1))
        made.append(SampleWork(id=number, items=items))
    half = samples // 2 if kind.endswith("two steps") else samples
    edges = tuple(EdgeWork(producer=name, consumer="llm", delay=12) for name in names)
    steps = (tuple(made),) if half == samples else (tuple(made[:half]), tuple(made[half:]))
    return Workload(sections=sections, edges=edges, steps=steps, name=f"{kind}, {samples} samples, seed {seed}")


def compared(workload: Workload, seconds: float) -> tuple[Solution, int, int]:
    """What the solver finds, and the makespans of `Wavefront` and `InOrder`. The judge of the tests must accept the solver's schedule."""
    ours, in_order = Wavefront().schedule(workload), InOrder().schedule(workload)
    found = solve(workload, min(ours, in_order, key=lambda s: s.makespan), seconds)
    files = (json.loads(json.dumps(x.to_json())) for x in (workload, found.schedule))
    runpy.run_path(str(JUDGE))["check"](*files)
    return found, ours.makespan, in_order.makespan


def main() -> None:
    """Prints a row for each workload, and what they come to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 6, 8, 10, 12])
    parser.add_argument("--instances", type=int, default=2, help="of each kind and number of samples")
    parser.add_argument("--seconds", type=float, default=60, help="most for one workload")
    args = parser.parse_args()
    print("| workload | optimal | wavefront / optimal | in_order / optimal | optimal / bound | seconds |\n| --- |" + " ---: |" * 5)
    gaps: list[tuple[float, bool, str]] = []
    for kind, samples, seed in itertools.product(UPSTREAM, args.samples, range(args.instances)):
        workload = instance(kind, samples, seed)
        found, ours, in_order = compared(workload, args.seconds)
        best = found.schedule.makespan
        cells = [f"{found.bound} to {best}", "not solved", "", ""]
        gaps.append((ours / found.bound, found.optimal, workload.name))
        if found.optimal:
            cells = [str(best), f"{ours / best:.3f}", f"{in_order / best:.3f}", f"{best / lower_bound(workload):.3f}"]
        print(f"| {workload.name} | {' | '.join(cells)} | {found.seconds:.1f} |", flush=True)
    for optimal, title in ((True, "solved: wavefront / optimal"), (False, "not solved: wavefront / bound")):
        ratios = {name: ratio for ratio, solved, name in gaps if solved == optimal}
        if ratios:
            worst, ones = max(ratios, key=lambda name: ratios[name]), sum(ratio == 1 for ratio in ratios.values())
            print(f"\n{len(ratios)} {title} is {statistics.mean(ratios.values()):.3f} on average and 1 on {ones} of them;", end=" ")
            print(f"the worst is {worst} with {ratios[worst]:.3f}")


if __name__ == "__main__":
    main()
