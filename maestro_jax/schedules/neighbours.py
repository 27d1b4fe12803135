"""Workloads that are one change of the plan away: a replica in another section, or another ladder of buckets."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from ..errors import ScheduleError
from .workload import EdgeWork, SectionWork, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One change.

    Args:
        change: what is changed, in words.
        workload: what results; None where the change is not possible.
        reason: why it is not possible.
    """

    change: str
    workload: Workload | None = None
    reason: str = ""


def neighbours(workload: Workload) -> list[Neighbour]:
    """Every move of a replica from a section to another, then for every section its neighbouring bucket ladders.

    A ladder's neighbours are: all sizes halved or doubled, a smaller size added, one size dropped. A replica keeps what its tasks cost;
    where replicas of the two sections have different numbers of devices, as many as make up one another move.
    """
    found = [_moved(workload, giver, taker) for giver, taker in itertools.permutations(workload.order, 2)]
    for name in workload.order:
        found += [_with_buckets(workload, name, what, buckets) for what, buckets in _ladders(workload.sections[name])]
    return found


def _moved(workload: Workload, giver: str, taker: str) -> Neighbour:
    devices = _devices(workload)
    per_giver, per_taker = (len(devices[name][0]) for name in (giver, taker))
    given = max(1, per_taker // per_giver)
    what = "a replica" if given == 1 else f"{given} replicas"
    change = f"move {what} from {giver} to {taker}"
    if per_giver % per_taker and per_taker % per_giver:
        return Neighbour(change=change, reason=f"replicas of {per_giver} devices do not make up replicas of {per_taker}")
    left = len(devices[giver]) - given
    if left < 1:
        return Neighbour(change=change, reason=f"{giver} has {len(devices[giver])} and needs one itself")
    freed = [device for replica in devices[giver][left:] for device in replica]
    users = sorted(n for n, replicas in devices.items() if any(set(r) & set(freed) for r in (replicas[:left] if n == giver else replicas)))
    if users:
        return Neighbour(change=change, reason=f"its devices also run {', '.join(users)}")
    gained = [tuple(freed[n : n + per_taker]) for n in range(0, len(freed), per_taker)]
    devices |= {giver: devices[giver][:left], taker: [*devices[taker], *gained]}
    sections = {
        name: dataclasses.replace(section, replicas=len(devices[name]), devices=tuple(devices[name]))
        for name, section in workload.sections.items()
    }
    if len(gained) > 1:
        change = f"{change}, where it makes {len(gained)}"
    return Neighbour(change=change, workload=dataclasses.replace(workload, sections=sections))


def _devices(workload: Workload) -> dict[str, list[tuple[int, ...]]]:
    """Section -> devices of each replica; those that have none in the workload get numbers of their own."""
    known = [d for s in workload.sections.values() for devices in s.devices or () for d in devices]
    numbers = itertools.count(max(known, default=-1) + 1)
    return {name: list(s.devices or [(next(numbers),) for _ in range(s.replicas)]) for name, s in workload.sections.items()}


def _ladders(section: SectionWork) -> Iterator[tuple[str, Sequence[int]]]:
    buckets = section.buckets
    halves = [bucket // 2 for bucket in buckets]
    yield "halve", halves
    yield "double", [bucket * 2 for bucket in buckets]
    yield f"add {halves[0]} to", [halves[0], *buckets]
    for dropped in buckets if len(buckets) > 1 else ():
        yield f"drop {dropped} from", [bucket for bucket in buckets if bucket != dropped]


def _with_buckets(workload: Workload, name: str, what: str, buckets: Sequence[int]) -> Neighbour:
    section = workload.sections[name]
    change = f"{what} the buckets of {name}: {_listed(section.buckets)} to {_listed(buckets)}"
    row, longest = section.row_length or 1, _longest(workload)[name]
    if what == "halve" and any(bucket % 2 for bucket in section.buckets):
        return Neighbour(change=change, reason="not all are even")
    if any(bucket < 1 or bucket % row for bucket in buckets):
        return Neighbour(change=change, reason=f"a row has {row} units" if row > 1 else "a bucket holds at least one unit")
    if buckets[-1] < longest:
        return Neighbour(change=change, reason=f"an item has {longest} units")
    sizes = _bytes(section, buckets)
    changed = dataclasses.replace(section, buckets=tuple(buckets), bucket_bytes=sizes)
    edges = tuple(_with_fans(edge, name, buckets[-1] / section.buckets[-1]) for edge in workload.edges)
    try:
        return Neighbour(change=change, workload=dataclasses.replace(workload, sections={**workload.sections, name: changed}, edges=edges))
    except ScheduleError:
        return Neighbour(change=change, reason=f"a micro-batch would take more than {section.max_bytes} bytes (max_bytes)")


def _longest(workload: Workload) -> Mapping[str, int]:
    found = dict.fromkeys(workload.order, 0)
    for sample in (sample for step in workload.steps for sample in step):
        for name, units in sample.items.items():
            found[name] = max(found[name], *units)
    return found


def _bytes(section: SectionWork, buckets: Sequence[int]) -> tuple[int, ...] | None:
    """What micro-batches of these sizes hold: a size that is not known, in proportion to the nearest one that is."""
    if section.bucket_bytes is None:
        return None
    known = dict(zip(section.buckets, section.bucket_bytes, strict=True))
    nearest = [min(section.buckets, key=lambda b, size=size: abs(math.log(b / size))) for size in buckets]
    return tuple(-(-known[near] * size // near) for near, size in zip(nearest, buckets, strict=True))


def _with_fans(edge: EdgeWork, name: str, factor: float) -> EdgeWork:
    """The fan limits that a plan would have: one more than the sizes at both ends need, so all but one grow with their ratio."""
    if name not in (edge.producer, edge.consumer):
        return edge
    into, out = (1 / factor, factor) if name == edge.producer else (factor, 1 / factor)
    scaled = {
        field: None if limit is None else math.ceil((limit - 1) * ratio) + 1
        for field, limit, ratio in (("fan_in", edge.fan_in, into), ("fan_out", edge.fan_out, out))
    }
    return dataclasses.replace(edge, **scaled)


def _listed(buckets: Sequence[int]) -> str:
    return ", ".join(map(str, buckets))
