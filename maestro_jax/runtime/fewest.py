"""Chooses the fewest samples on which a plan can be judged: every section, every edge and, where possible, every replica runs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from ..data import Sample
from ..errors import DataError, set_by
from ..graph import SectionGraph
from ..schedules import Policy, Schedule, Workload
from .costs import Costs
from .feeds import make_workload
from .plan import Plan

FORWARDS = ("forward", "forward_backward")

RUNS = 2
"""Micro-batches that each replica should run: the second adds to what the first left in the accumulators."""


FEWEST_TO_SPLIT = 4
"""Samples of which two are left on either side, so that items still share a micro-batch."""


@dataclasses.dataclass(frozen=True)
class InTwo:
    """Never puts all samples of a step into one micro-batch: each half is scheduled as a step of its own, then both as one.

    Args:
        policy: schedules the halves.
    """

    policy: Policy

    def schedule(self, workload: Workload) -> Schedule:
        """Schedules a workload of one step."""
        (samples,) = workload.steps
        # Samples that run the same sections stand next to each other, so that both halves run them.
        alike = sorted(samples, key=lambda sample: sorted(sample.items))
        tasks = self.policy.schedule(dataclasses.replace(workload, steps=(tuple(alike[::2]), tuple(alike[1::2])))).tasks
        # Without the update between them, the tasks wait for less than before, so their order holds.
        return Schedule(tasks=tuple(dataclasses.replace(t, step=0) for t in tasks if (t.kind, t.step) != ("update", 0)))


def several_micro_batches(plan: Plan, samples: Sequence[Sample], policy: Policy, costs: Costs) -> Policy:
    """Returns the policy itself, or `InTwo` of it where it would run some loss in one micro-batch.

    In one micro-batch, a mean is as right as a sum.
    """
    schedule = policy.schedule(make_workload(plan, [samples], True, costs))
    return InTwo(policy) if len(samples) >= FEWEST_TO_SPLIT and run_once(plan, schedule) else policy


def run_once(plan: Plan, schedule: Schedule) -> list[str]:
    """The sections with a loss to which a schedule gives fewer than two micro-batches."""
    ran = collections.Counter(t.section for t in schedule.tasks if t.kind in FORWARDS)
    return [name for name, s in plan.sections.items() if ran[name] < 2 and any(o.weight for o in s.section.objectives.values())]


def enough_samples(graph: SectionGraph, candidates: Iterable[Sample], most_units: int, look: int) -> list[Sample]:
    """Takes candidates from the front until they reach every section and fill `most_units`.

    Args:
        graph: the sections.
        candidates: samples, read one by one.
        most_units: see `fewest_samples`.
        look: most candidates to read.

    Raises:
        DataError: when none of them reaches some section.
    """
    taken: list[Sample] = []
    for sample in candidates:
        if len(taken) == look or (padded_units(taken) >= most_units and not _unreached(graph, taken)):
            break
        taken.append(sample)
    _check_reached(graph, taken)
    return taken


def fewest_samples(plan: Plan, samples: Sequence[Sample], policy: Policy, most_units: int, costs: Costs) -> list[Sample]:
    """Chooses samples in their order, besides the first ones that a section or an edge needs.

    Args:
        plan: where the graph runs.
        samples: to choose from; every one fits the plan, and some reach every section.
        policy: decides which replica runs what.
        most_units: most units of any stream, each item padded to the longest, unless fewer samples would leave a section out.
        costs: of tasks and transfers.

    Returns:
        At least two samples for each replica of the most replicated section, and as many as it takes until every replica runs two
        micro-batches, within `most_units`.
    """
    needed = _needed(plan.graph, samples)
    # Needed samples first, so that any beginning of the list reaches every section.
    order = [*needed, *(n for n in range(len(samples)) if n not in needed)]
    most = max((n for n in range(len(order) + 1) if padded_units([samples[i] for i in order[:n]]) <= most_units), default=0)
    most = max(most, len(needed))
    least = RUNS * max(s.submesh.replicas for s in plan.sections.values())
    count = min(max(least, len(needed)), most)
    while True:
        chosen = [samples[i] for i in sorted(order[:count])]
        if count == most or not idle_replicas(plan, policy.schedule(make_workload(plan, [chosen], True, costs)), RUNS):
            return chosen
        count = min(count + max(least, count // 4), most)


def idle_replicas(plan: Plan, schedule: Schedule, runs: int = 1) -> dict[str, list[int]]:
    """Section -> replicas to which a schedule gives fewer than `runs` micro-batches; sections without such are left out."""
    ran = collections.Counter((t.section, t.replica) for t in schedule.tasks if t.kind in FORWARDS)
    found = {n: [r for r in range(s.submesh.replicas) if ran[n, r] < runs] for n, s in plan.sections.items()}
    return {name: replicas for name, replicas in found.items() if replicas}


def padded_units(samples: Sequence[Sample]) -> int:
    """Units of the largest stream when each item has a row of its own, padded to the longest."""
    streams = {stream for sample in samples for stream in sample.items}
    units = [[item.units for sample in samples for item in sample.items.get(stream, ())] for stream in streams]
    return max((len(found) * max(found) for found in units if found), default=0)


def _wants(graph: SectionGraph) -> set[frozenset[str]]:
    """Streams that one sample must have together: a section's own, and those at both ends of an edge."""
    ends = [{graph[e.producer].reads, graph[e.consumer].reads} for e in graph.edges]
    return {frozenset({section.reads}) for section in graph.sections} | {frozenset(streams) for streams in ends}


def _unreached(graph: SectionGraph, samples: Sequence[Sample]) -> set[frozenset[str]]:
    return {want for want in _wants(graph) if not any(all(s.items.get(stream) for stream in want) for s in samples)}


def _needed(graph: SectionGraph, samples: Sequence[Sample]) -> list[int]:
    """Numbers of the first samples that reach what no earlier one of them does."""
    needed: list[int] = []
    left = _wants(graph) - _unreached(graph, samples)
    for number, sample in enumerate(samples):
        reached = {want for want in left if all(sample.items.get(stream) for stream in want)}
        if reached:
            needed.append(number)
            left -= reached
    return needed


def _check_reached(graph: SectionGraph, samples: Sequence[Sample]) -> None:
    for section in graph.sections:
        if not any(sample.items.get(section.reads) for sample in samples):
            raise DataError(
                f"section {section.name!r} cannot be verified: no sample reaches it.",
                wanted=f"at least one sample with items in stream {section.reads!r}",
                have=f"{len(samples)} samples, none of them with such items",
                fix="pass samples that every section runs for, or correct Section.reads",
                anchor="verify-samples",
                set_by=set_by(section, "reads"),
            )
