"""The planner: which allocation of devices to sections makes a step shortest, by schedules in simulated time.

Bounds leave some allocations (`bounding.py`). They are scheduled in the order of their lower bounds, first with little effort; an
allocation whose bound is not below the best schedule so far cannot win. The best few are scheduled as a run would, and the shortest
wins. How many are tried follows from the sizes of the problem, never from a clock, so the same problem gives the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import ScheduleError
from .bounding import Bounds, Groups, groupings, promising
from .bounds import lower_bound
from .candidates import Allocation, Candidate, PlanningProblem, placed
from .gap import utilization_of
from .lockstep import Lockstep
from .policies import Policy
from .tasks import Schedule
from .wavefront import Wavefront
from .workload import Cost, EdgeWork, Workload

BOUNDED, TRIED, FINALISTS = (20, 2000, 200_000), (4, 400, 40_000), (2, 12, 10_000)
"""How many allocations have their lower bound computed, are scheduled with little effort, and of these as a run would: fewest, most, and
samples in all of them, so that fewer are tried where a batch has more samples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """An allocation and what a step takes under it.

    Args:
        allocation: the devices of every section.
        step: nanoseconds of a step, as a mean over the sampled ones.
        lower_bound: nanoseconds below which no schedule of a step ends.
        utilization: section -> share of the time in which its replicas have tasks.
        schedule: of all sampled steps.
        workload: what was scheduled.
    """

    allocation: Allocation
    step: float
    lower_bound: float
    utilization: Mapping[str, float]
    schedule: Schedule
    workload: Workload


Known = dict[tuple[object, bool], Planned]
"""What was scheduled: (allocation, whether with little effort) -> plan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plans:
    """What a planner found.

    Args:
        best: allocations, those with the shortest step first.
        one_layout: the best with the same axes, replicas and micro-batch for all sections on all devices, in lockstep; None: none fits.
        time_shared: the best with all sections on the same devices, each with candidates of its own; None where none fits.
        disjoint: the best with each section on devices of its own; None where none fits.
    """

    best: tuple[Planned, ...]
    one_layout: Planned | None
    time_shared: Planned | None
    disjoint: Planned | None


def plan(problem: PlanningProblem, *, wanted: int = 5) -> Plans:
    """Searches for the allocations with the shortest steps.

    Args:
        problem: what is planned.
        wanted: most allocations that are returned as the best.

    Raises:
        ScheduleError: no allocation fits; it says what binds.
    """
    backward = _backward(problem)
    bounds = Bounds(problem, backward)
    ways = groupings(list(problem.candidates))
    found = promising(problem, bounds, ways)
    if not found:
        raise _infeasible(problem)
    known: Known = {}
    best = _judged(problem, [allocation for _, allocation in found], wanted, known)
    together, alone = (tuple(problem.candidates),), tuple((name,) for name in problem.candidates)
    shared, apart = (_best_of(problem, bounds, groups, known) for groups in (together, alone))
    return Plans(best=tuple(best), one_layout=_one_layout(problem), time_shared=shared, disjoint=apart)


def _best_of(problem: PlanningProblem, bounds: Bounds, groups: Groups, known: Known) -> Planned | None:
    """The best plan with these groups of sections; None where none fits."""
    found = promising(problem, bounds, [groups])
    return next(iter(_judged(problem, [allocation for _, allocation in found], 1, known)), None)


def judge(problem: PlanningProblem, allocation: Allocation, policy: Policy | None = None) -> Planned:
    """Schedules the sampled steps under an allocation.

    Args:
        problem: what is planned; its costs are those that count.
        allocation: where sections run.
        policy: what schedules; None is `Wavefront` as in training.
    """
    workload = problem.workload(allocation)
    schedule = (policy or Wavefront()).schedule(workload)
    steps = len(problem.steps)
    return Planned(
        allocation=allocation,
        step=schedule.makespan / steps,
        lower_bound=lower_bound(workload) / steps,
        utilization=utilization_of(workload, schedule),
        schedule=schedule,
        workload=workload,
    )


def regret(problem: PlanningProblem, chosen: Allocation, best: Sequence[Allocation]) -> float:
    """Returns by how much a step of one allocation is longer than the shortest of some, as a share, all by the costs of `problem`."""
    shortest = min(judge(problem, allocation).step for allocation in best)
    return judge(problem, chosen).step / shortest - 1


def with_candidates(problem: PlanningProblem, allocation: Allocation) -> Allocation:
    """Returns the same allocation with the candidates of another problem: those of the same keys, whose costs may differ."""
    known = {(c.section, c.key): c for candidates in problem.candidates.values() for c in candidates}
    choices = {name: (known[name, choice.candidate.key], choice.replicas) for name, choice in allocation.choices.items()}
    return placed(choices, allocation.groups)


def with_errors(problem: PlanningProblem, share: float, seed: int, *, apart: bool = False) -> PlanningProblem:
    """Returns the same problem with costs that are wrong at random, for `regret`.

    Whatever a section's costs consist of is wrong by a factor of its own (its tasks' fixed time, time for a unit and for squares, forward
    and backward, and its update), and so is the delay of each edge. The candidates of a section are wrong together, as costs that follow
    from the same counted work and the same hardware are.

    Args:
        problem: with true costs.
        share: factors lie between 1 - share and 1 + share.
        seed: of the factors.
        apart: whether each candidate has factors of its own, as costs that were measured one by one do.
    """
    random = np.random.default_rng(seed)

    def off() -> float:
        return 1 + share * float(random.uniform(-1, 1))

    def wrong(cost: Cost, factors: Sequence[float]) -> Cost:
        fields = zip(dataclasses.asdict(cost).items(), factors, strict=True)
        return Cost(**{name: round(value * factor) for (name, value), factor in fields})

    def mistaken(candidate: Candidate, factors: Sequence[float]) -> Candidate:
        work = candidate.work
        work = dataclasses.replace(work, forward=wrong(work.forward, factors[:3]), backward=wrong(work.backward, factors[3:6]))
        return dataclasses.replace(candidate, work=work, updates={n: round(each * factors[6]) for n, each in candidate.updates.items()})

    found = {}
    for name, candidates in problem.candidates.items():
        together = [off() for _ in range(7)]
        found[name] = tuple(mistaken(each, [off() for _ in range(7)] if apart else together) for each in candidates)
    delays: dict[tuple[str, str], float] = {}

    def edges(chosen: Mapping[str, Candidate]) -> tuple[EdgeWork, ...]:
        true = problem.edges(chosen)
        return tuple(dataclasses.replace(e, delay=round(e.delay * delays[e.producer, e.consumer])) for e in true)

    for edge in problem.edges({name: candidates[0] for name, candidates in problem.candidates.items()}):
        delays[edge.producer, edge.consumer] = off()
    return dataclasses.replace(problem, candidates=found, edges=edges)


def _backward(problem: PlanningProblem) -> Mapping[str, bool]:
    first = {name: candidates[0] for name, candidates in problem.candidates.items() if candidates}
    if len(first) < len(problem.candidates):
        raise _infeasible(problem)
    allocation = placed({name: (c, min(c.updates)) for name, c in first.items()}, [[name] for name in first])
    return problem.workload(allocation).runs_backward


def _judged(problem: PlanningProblem, allocations: Sequence[Allocation], wanted: int, known: Known) -> list[Planned]:
    """The best of some allocations; those that a bound excludes, and those beyond the numbers above, are not scheduled."""

    def judged(allocation: Allocation, *, roughly: bool) -> Planned:
        key = allocation.sort_key, roughly
        if key not in known:
            known[key] = judge(problem, allocation, Wavefront(effort=0) if roughly else None)
        return known[key]

    samples = max(1, sum(len(step) for step in problem.steps))
    counted, tried, finalists = (min(most, max(least, budget // samples)) for least, most, budget in (BOUNDED, TRIED, FINALISTS))
    bounded = [(lower_bound(problem.workload(each)), each) for each in allocations[:counted]]
    bounded.sort(key=lambda pair: (pair[0], pair[1].devices, pair[1].sort_key))
    rough: list[Planned] = []
    for bound, allocation in bounded[: max(tried, wanted)]:
        nth = sorted(each.step for each in rough)[wanted - 1] if len(rough) >= wanted else None
        if nth is not None and bound / len(problem.steps) >= nth:
            break
        rough.append(judged(allocation, roughly=True))
    rough.sort(key=_order)
    # Those that were not chosen keep the schedule that was made with little effort.
    final = [judged(each.allocation, roughly=False) for each in rough[:finalists]]
    return sorted([*final, *rough[finalists:]], key=_order)[:wanted]


def _order(planned: Planned) -> tuple[object, ...]:
    return planned.step, planned.allocation.devices, planned.allocation.sort_key


def _one_layout(problem: PlanningProblem) -> Planned | None:
    """The best with one layout: what trainers made for one model do, but for their padding."""
    layouts: dict[object, dict[str, Candidate]] = {}
    for candidate in (candidate for candidates in problem.candidates.values() for candidate in candidates):
        layouts.setdefault(layout_of(candidate), {}).setdefault(candidate.section, candidate)
    found = []
    for chosen in layouts.values():
        counts = [set(c.updates) for c in chosen.values()]
        if len(chosen) < len(problem.candidates):
            continue
        devices = next(iter(chosen.values())).devices
        replicas = max((r for r in set.intersection(*counts) if r * devices <= problem.devices), default=0)
        if replicas and sum(c.memory(replicas) for c in chosen.values()) <= problem.memory:
            allocation = placed({name: (chosen[name], replicas) for name in problem.candidates}, [tuple(problem.candidates)])
            found.append((lower_bound(problem.workload(allocation)) / len(problem.steps), allocation))
    found.sort(key=lambda pair: (pair[0], pair[1].sort_key))
    best: Planned | None = None
    for bound, allocation in found:
        if best is not None and bound >= best.step:
            break
        best = min(filter(None, (best, judge(problem, allocation, Lockstep()))), key=_order)
    return best


def layout_of(candidate: Candidate) -> object:
    """Axes and micro-batch of a candidate: what one layout has in common for all sections."""
    return tuple(pair for pair in candidate.key if pair[0] in ("axes", "microbatch")), candidate.devices


def _infeasible(problem: PlanningProblem) -> ScheduleError:
    """Says which limit binds, and what the smallest change would be."""
    least: dict[str, int] = {}
    for name, candidates in problem.candidates.items():
        fitting = [
            candidate.memory(replicas)
            for candidate in candidates
            for replicas in candidate.updates
            if replicas * candidate.devices <= problem.devices
        ]
        if not fitting:
            fewest = min((c.devices * min(c.updates) for c in candidates if c.updates), default=0)
            wanted = f"{fewest} devices for section {name!r}" if fewest else f"a way to run section {name!r}"
            fix = f"plan for at least {fewest} devices" if fewest else "let its micro-batches and axes fit its sizes; --help lists them"
            return _refused(wanted, f"{problem.devices} devices", fix)
        least[name] = min(fitting)
    name = max(least, key=lambda each: least[each])
    if least[name] > problem.memory:
        wanted = f"{_gigabytes(least[name])} a device for section {name!r}, at its smallest"
        fix = f"use devices with {_gigabytes(least[name])}, more of them (axes split parameters), a smaller micro-batch, or remat"
        return _refused(wanted, f"{_gigabytes(problem.memory)} a device", fix)
    together = ", ".join(f"{each} {_gigabytes(size)}" for each, size in least.items())
    fewest = sum(min(c.devices for c in problem.candidates[each] if c.memory(1) <= problem.memory or len(c.updates) > 1) for each in least)
    fix = f"plan for at least {max(fewest, problem.devices + 1)} devices, or use smaller micro-batches or remat"
    return _refused(f"room for all sections: {together}", f"{problem.devices} devices of {_gigabytes(problem.memory)}", fix)


def _refused(wanted: str, have: str, fix: str) -> ScheduleError:
    return ScheduleError(
        "no plan fits the devices.", wanted=wanted, have=have, fix=fix, anchor="plan-infeasible", set_by="the planning problem"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
