"""Allocations that may be the best, found by bounds alone: how long the busiest devices compute at least.

For every group of sections that share devices and every number of devices it is known how much work each device has at least; what
matters of an allocation is its busiest group. For each way to group the sections, devices go to the groups so that the busiest has as
little as possible, and allocations near that are kept as well: a bound knows nothing of waiting, so the best plan may be one with a
slightly higher bound.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .candidates import Allocation, Candidate, PlanningProblem, placed

Groups = tuple[tuple[str, ...], ...]

EVERY = 20_000
"""Where there are no more combinations of candidates and replicas, all of them are allocations."""

MOST_OPTIONS = 4
"""Candidates of a section on so many devices that are kept, by work and by memory."""
NEAR = 1.3
"""How much higher than the lowest a bound may be."""
FEW = 16
"""Up to so many devices, a group may have any number of them; beyond, a multiple of a 64th of all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Option:
    """A section on some devices."""

    candidate: Candidate
    replicas: int
    load: int
    memory: int

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.replicas * self.candidate.devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Placed:
    """A group of sections on some devices: nanoseconds that a device computes at least, in all steps, and how."""

    load: int
    options: tuple[_Option, ...]


class Bounds:
    """What allocations of a problem take at least.

    Args:
        problem: what is planned.
        backward: section -> whether it runs backward.
    """

    def __init__(self, problem: PlanningProblem, backward: Mapping[str, bool]) -> None:
        self._problem, self._backward = problem, backward
        self._kept: dict[tuple[str, int], list[_Option]] = {}
        count = problem.devices
        step = max(1, count // 64)
        self.sizes = sorted({*range(1, min(count, FEW) + 1), *range(step, count + 1, step), count})

    def load(self, candidate: Candidate, replicas: int) -> int:
        """Nanoseconds of each replica in all steps: full micro-batches, spread evenly, and the largest item of a step at least."""
        work, (units, squares) = candidate.work, self._problem.totals[candidate.section]
        costs = [work.forward, work.backward] if self._backward[candidate.section] else [work.forward]
        full = -(-units // work.buckets[-1])
        total = sum(full * cost.fixed + cost.per_unit * units + cost.per_unit_squared * squares // 1000 for cost in costs)
        update = candidate.updates[replicas] * len(self._problem.steps) if work.trainable else 0
        return -(-total // replicas) + update

    def every(self, section: str) -> list[_Option]:
        """All ways to run a section that fit alone."""
        found = [
            self._option(candidate, replicas)
            for candidate in self._problem.candidates[section]
            for replicas in candidate.updates
            if replicas * candidate.devices <= self._problem.devices
        ]
        return [option for option in found if option.memory <= self._problem.memory]

    def options(self, section: str, devices: int) -> list[_Option]:
        """Ways to run a section alone on so many devices at most, those with the least work first; one of them needs the least memory."""
        if (section, devices) not in self._kept:
            found = []
            for candidate in self._problem.candidates[section]:
                replicas = next((r for r in range(devices // candidate.devices, 0, -1) if r in candidate.updates), 0)
                if replicas and candidate.memory(replicas) <= self._problem.memory:
                    found.append(self._option(candidate, replicas))
            found.sort(key=lambda o: (o.load, o.memory, o.candidate.key))
            smallest = min(found, key=lambda o: (o.memory, o.load, o.candidate.key), default=None)
            kept = found[:MOST_OPTIONS]
            self._kept[section, devices] = kept if smallest is None or smallest in kept else [*kept, smallest]
        return self._kept[section, devices]

    def group(self, sections: Sequence[str], devices: int) -> list[_Placed]:
        """Ways to run sections in turns on so many devices, those with the least work first."""
        found = []
        for options in itertools.product(*(self.options(section, devices) for section in sections)):
            if sum(option.memory for option in options) <= self._problem.memory:
                found.append(_Placed(load=sum(option.load for option in options), options=options))
        return sorted(found, key=lambda p: (p.load, [o.candidate.key for o in p.options]))[:MOST_OPTIONS]

    def _option(self, candidate: Candidate, replicas: int) -> _Option:
        return _Option(candidate=candidate, replicas=replicas, load=self.load(candidate, replicas), memory=candidate.memory(replicas))


def promising(problem: PlanningProblem, bounds: Bounds, groupings: Sequence[Groups]) -> list[tuple[int, Allocation]]:
    """Allocations whose busiest group computes little, with that bound in nanoseconds; the lowest first.

    Args:
        problem: what is planned.
        bounds: of it.
        groupings: the ways to share devices that are tried.
    """
    found: dict[tuple[object, ...], tuple[int, Allocation]] = {}
    every = [bounds.every(name) for name in problem.candidates]
    if math.prod(map(len, every)) <= EVERY:
        for options, groups in itertools.product(itertools.product(*every), groupings):
            _keep(found, problem, groups, options)
        return _near(found)
    for groups in groupings:
        ways = [{size: bounds.group(group, size) for size in bounds.sizes} for group in groups]
        for sizes in _splits(problem, ways):
            for chosen in itertools.product(*(way[size] for way, size in zip(ways, sizes, strict=True))):
                _keep(found, problem, groups, [option for each in chosen for option in each.options])
    return _near(found)


def _keep(
    found: dict[tuple[object, ...], tuple[int, Allocation]], problem: PlanningProblem, groups: Groups, options: Iterable[_Option]
) -> None:
    """Adds an allocation, with its bound, where it fits."""
    chosen = {option.candidate.section: option for option in options}
    taken = sum(max(chosen[name].devices for name in group) for group in groups)
    held = max(sum(chosen[name].memory for name in group) for group in groups)
    if taken <= problem.devices and held <= problem.memory:
        bound = max(sum(chosen[name].load for name in group) for group in groups)
        allocation = placed({name: (chosen[name].candidate, chosen[name].replicas) for name in problem.candidates}, groups)
        found[allocation.sort_key] = bound, allocation


def _near(found: Mapping[tuple[object, ...], tuple[int, Allocation]]) -> list[tuple[int, Allocation]]:
    """Those whose bound is near the lowest, in order."""
    lowest = min((bound for bound, _ in found.values()), default=0)
    kept = [(bound, allocation) for bound, allocation in found.values() if bound <= NEAR * lowest]
    return sorted(kept, key=lambda pair: (pair[0], pair[1].devices, pair[1].sort_key))


def _splits(problem: PlanningProblem, ways: Sequence[Mapping[int, Sequence[_Placed]]]) -> Iterator[tuple[int, ...]]:
    """Numbers of devices for each group, near those of which the busiest has the least work."""
    loads = sorted({found[0].load for way in ways for found in way.values() if found})
    lowest: int | None = None
    seen = set()
    for limit in loads:
        split = [next((size for size, found in way.items() if found and found[0].load <= limit), None) for way in ways]
        fewest = tuple(size for size in split if size is not None)
        if len(fewest) < len(ways) or sum(fewest) > problem.devices:
            continue
        lowest = limit if lowest is None else lowest
        if limit > NEAR * lowest:
            return
        for full in _filled(problem.devices, fewest, ways):
            if full not in seen:
                seen.add(full)
                yield full


def _filled(devices: int, fewest: tuple[int, ...], ways: Sequence[Mapping[int, Sequence[_Placed]]]) -> Iterator[tuple[int, ...]]:
    """The split itself, and with the devices that are left given to one of the groups."""
    yield fewest
    left = devices - sum(fewest)
    for n, way in enumerate(ways):
        larger = [size for size, found in way.items() if found and size <= fewest[n] + left]
        yield (*fewest[:n], max(larger), *fewest[n + 1 :])


def groupings(sections: Sequence[str]) -> list[Groups]:
    """All ways to put sections into groups that share devices; for more than four sections, all apart and all together.

    >>> groupings(["a", "b", "c"])
    [(('a', 'b', 'c'),), (('a', 'b'), ('c',)), (('a', 'c'), ('b',)), (('a',), ('b', 'c')), (('a',), ('b',), ('c',))]
    """
    names = list(sections)
    if len(names) > 4:
        return [(tuple(names),), tuple((name,) for name in names)]

    def cut(rest: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
        if not rest:
            yield ()
            return
        head, others = rest[0], rest[1:]
        for count in range(len(others), -1, -1):
            for beside in itertools.combinations(others, count):
                group = (head, *beside)
                for more in cut([name for name in others if name not in beside]):
                    yield (group, *more)

    return list(cut(names))
