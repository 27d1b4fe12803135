"""How short a schedule can be: a time below which no valid schedule of a workload ends."""

from __future__ import annotations

import dataclasses

from .workload import Cost, SampleWork, SectionWork, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chain:
    """The longest way of one sample through a section: what must run upstream first, and that with the section itself."""

    before: int
    through: int


def lower_bound(workload: Workload) -> int:
    """Returns nanoseconds below which no valid schedule can end.

    A step needs, for every trainable section, the time until its first forward can start, its work spread over its
    replicas in full micro-batches, and the backward that must follow its last one upstream; and at least the longest chain
    of one sample. Steps with updates follow each other. Sections that run ahead, and devices that sections share, bound
    the total only.

    Args:
        workload: what is to be done.
    """
    steps, total, area = 0, dict.fromkeys(workload.order, 0), 0
    for number, samples in enumerate(workload.steps):
        loads = {name: load_of(workload, name, samples) for name in workload.order}
        steps += _step(workload, number, samples, loads)
        for name, load in loads.items():
            total[name] += load
            area += load * sum(len(d) for d in workload.sections[name].devices or [(0,)] * workload.sections[name].replicas)
    update = max((s.update for s in workload.sections.values() if s.trainable), default=0)
    return max(steps + update, max(total.values(), default=0), area // _devices(workload) if _shares(workload) else 0)


def load_of(workload: Workload, name: str, samples: tuple[SampleWork, ...]) -> int:
    """Nanoseconds of each replica when a section's items fill its largest micro-batches and are spread evenly."""
    section = workload.sections[name]
    items = [u for sample in samples for u in sample.items.get(name, ())]
    full = -(-sum(items) // section.buckets[-1])
    spent = 0
    for cost in _costs(workload, name):
        spent += full * cost.fixed + cost.per_unit * sum(items) + sum(cost.per_unit_squared * u * u // 1000 for u in items)
    return -(-spent // section.replicas)


def _costs(workload: Workload, name: str) -> list[Cost]:
    section = workload.sections[name]
    return [section.forward, section.backward] if workload.runs_backward[name] else [section.forward]


def _step(workload: Workload, number: int, samples: tuple[SampleWork, ...], loads: dict[str, int]) -> int:
    """Nanoseconds from the end of one step's last backward to that of the next."""
    bound = 0
    heads: dict[str, list[int]] = {}
    tails: dict[str, list[int]] = {}
    for sample in samples:
        forward = _chains(workload, sample, number, backward=False)
        backward = _chains(workload, sample, number, backward=True)
        for name in sample.items:
            heads.setdefault(name, []).append(forward[name].before)
            tails.setdefault(name, []).append(backward[name].before)
            ends_here = not any(e.producer == name and e.consumer in sample.items for e in workload.edges)
            if workload.runs_backward[name] and ends_here and (number == 0 or forward[name].through):
                bound = max(bound, forward[name].through + backward[name].through)
    for name, found in heads.items():
        section = workload.sections[name]
        if section.trainable:
            head = max(section.update if number else 0, min(found))
            bound = max(bound, head + loads[name] + min(tails[name]))
    return bound


def _chains(workload: Workload, sample: SampleWork, number: int, backward: bool) -> dict[str, _Chain]:
    """The longest chain of a sample through each of its sections: forward down to it, or backward up from it."""
    found: dict[str, _Chain] = {}
    for name in workload.order:
        if name not in sample.items:
            continue
        section, before = workload.sections[name], 0
        for edge in workload.edges:
            if edge.consumer == name and edge.producer in found and found[edge.producer].through:
                before = max(before, found[edge.producer].through + edge.delay)
        # What waits for no update may have run in an earlier step.
        ran_ahead = not backward and number > 0 and not before and not section.trainable
        if ran_ahead or (backward and not workload.runs_backward[name]):
            through = 0
        else:
            through = before + max(_alone(section, section.backward if backward else section.forward, u) for u in sample.items[name])
        found[name] = _Chain(before=before, through=through)
    return found


def _alone(section: SectionWork, cost: Cost, units: int) -> int:
    """Nanoseconds of one item in the smallest micro-batch that holds it."""
    return cost.of(next(b for b in section.buckets if b >= units), [units])


def _devices(workload: Workload) -> int:
    """How many devices there are."""
    own = sum(s.replicas for s in workload.sections.values() if not s.devices)
    return own + len({d for s in workload.sections.values() for devices in s.devices or () for d in devices})


def _shares(workload: Workload) -> bool:
    """Whether replicas share devices and each section's have as many devices each, so that a load per replica is an area."""
    replicas = [devices for s in workload.sections.values() for devices in s.devices or [(0,)] * s.replicas]
    equal = all(len({len(devices) for devices in s.devices}) == 1 for s in workload.sections.values() if s.devices)
    return equal and sum(map(len, replicas)) > _devices(workload)
