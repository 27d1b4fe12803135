"""Ways to run a section, and allocations of devices to sections, in numbers: what a planner chooses among.

A *candidate* is one way to run one replica of a section. An *allocation* gives each section a candidate, a number of replicas and a
range of devices; sections whose ranges are the same take turns. Nothing here knows what a candidate's key means.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from .workload import EdgeWork, SampleWork, SectionWork, Workload

Key = tuple[tuple[str, str], ...]
"""What a candidate is, as pairs of texts that sort: the section's fields are made of it again elsewhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a replica of a section.

    Args:
        section: name of the section.
        key: what it is.
        devices: of one replica.
        work: buckets, costs and limits of one replica; its `replicas`, `devices` and `update` are not looked at.
        state: bytes on a device of what every replica holds: parameters, gradients.
        shared_state: bytes on a device, with one replica, of what replicas divide among each other: masters, optimizer state.
        scratch: most bytes of a program on a device, beside its arguments.
        in_flight: most micro-batches that a replica holds.
        updates: number of replicas -> nanoseconds of an update, the reduction between them included; other numbers cannot be had.
    """

    section: str
    key: Key
    devices: int
    work: SectionWork
    state: int
    shared_state: int
    scratch: int
    in_flight: int
    updates: Mapping[int, int]

    def memory(self, replicas: int) -> int:
        """Bytes on the busiest device."""
        flight = self.work.max_bytes or self.in_flight * max(self.work.bucket_bytes or (0,))
        return self.state + -(-self.shared_state // replicas) + flight + self.scratch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A section in an allocation.

    Args:
        candidate: how each replica runs.
        replicas: how many there are.
        first: number of its first device.
    """

    candidate: Candidate
    replicas: int
    first: int = 0

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.replicas * self.candidate.devices

    @property
    def memory(self) -> int:
        """Bytes on the busiest device."""
        return self.candidate.memory(self.replicas)

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Device numbers of each replica."""
        size = self.candidate.devices
        return tuple(tuple(range(start, start + size)) for start in range(self.first, self.first + self.devices, size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """Devices for every section.

    Args:
        choices: name of the section -> choice.
        groups: the sections that share a range of devices, group by group in the order of the ranges.
    """

    choices: Mapping[str, Choice]
    groups: tuple[tuple[str, ...], ...]

    @property
    def devices(self) -> int:
        """Devices that some section uses."""
        return len({device for choice in self.choices.values() for place in choice.places for device in place})

    @property
    def memory(self) -> int:
        """Bytes on the busiest device: sections that share one hold what they hold at the same time."""
        return max(sum(self.choices[name].memory for name in group) for group in self.groups)

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Something by which allocations of equal worth are ordered, always in the same way."""
        return self.groups, tuple((name, c.replicas, c.candidate.key) for name, c in sorted(self.choices.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """What is to be planned.

    Args:
        candidates: name of the section, producers first -> ways to run it.
        edges: the chosen candidates -> dependencies; delays and fans depend on both ends.
        steps: samples of some global batches, which are judged together.
        devices: how many there are.
        memory: bytes of each.
        node: devices of a node; replicas lie inside nodes, or take whole ones.
    """

    candidates: Mapping[str, Sequence[Candidate]]
    edges: Callable[[Mapping[str, Candidate]], tuple[EdgeWork, ...]]
    steps: tuple[tuple[SampleWork, ...], ...]
    devices: int
    memory: int
    node: int = 8

    @functools.cached_property
    def totals(self) -> Mapping[str, tuple[int, int]]:
        """Section -> units of its items in all steps, and the sum of their squares."""
        found: dict[str, tuple[int, int]] = dict.fromkeys(self.candidates, (0, 0))
        for sample in (sample for step in self.steps for sample in step):
            for name, units in sample.items.items():
                one, two = found[name]
                found[name] = one + sum(units), two + sum(u * u for u in units)
        return found

    def workload(self, allocation: Allocation) -> Workload:
        """What is scheduled under an allocation."""
        sections = {}
        for name in self.candidates:
            choice = allocation.choices[name]
            work, update = choice.candidate.work, choice.candidate.updates[choice.replicas]
            sections[name] = dataclasses.replace(
                work, replicas=choice.replicas, devices=choice.places, update=update if work.trainable else 0
            )
        edges = self.edges({name: choice.candidate for name, choice in allocation.choices.items()})
        return Workload(sections=sections, edges=edges, steps=self.steps, name="plan")


def placed(choices: Mapping[str, tuple[Candidate, int]], groups: Sequence[Sequence[str]]) -> Allocation:
    """Gives each group of sections a range of devices, as large as its largest section needs; large replicas come first.

    Replicas of 2^n devices then begin at multiples of their size, and lie inside nodes where they fit.

    Args:
        choices: name of the section -> candidate and number of replicas.
        groups: of sections that share devices.
    """
    order = sorted(groups, key=lambda group: (-max(choices[name][0].devices for name in group), tuple(group)))
    found, first = {}, 0
    for group in order:
        for name in group:
            candidate, replicas = choices[name]
            found[name] = Choice(candidate=candidate, replicas=replicas, first=first)
        first += max(found[name].devices for name in group)
    return Allocation(choices={name: found[name] for name in choices}, groups=tuple(tuple(group) for group in order))
