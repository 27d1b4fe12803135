"""A workload: what some steps must do, without the devices that do it. All times are integer nanoseconds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ScheduleError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """A task lasts `fixed + per_unit * bucket + per_unit_squared * sum(u * u) // 1000` over its items' units `u`.

    >>> Cost(fixed=10, per_unit=2, per_unit_squared=100).of(64, [10, 20])
    188
    """

    fixed: int = 0
    per_unit: int = 0
    per_unit_squared: int = 0

    def of(self, bucket: int, units: Iterable[int]) -> int:
        """Returns nanoseconds for a micro-batch of this bucket with items of these units."""
        return self.fixed + self.per_unit * bucket + self.per_unit_squared * sum(u * u for u in units) // 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionWork:
    """What a scheduler knows of a section.

    Args:
        replicas: data-parallel copies; each runs one task at a time.
        buckets: static micro-batch sizes in units, ascending.
        trainable: whether the section has parameters of its own to update.
        max_inflight: most units that one replica may hold at a time.
        forward: cost of a forward.
        backward: cost of a backward.
        update: nanoseconds of an update.
        devices: device numbers of each replica; tasks that share one never overlap. None: devices of its own.
        row_length: units in one row; items never straddle rows. None: a micro-batch is one row.
        packed: whether items share rows; where not, each has a row of its own.
        bucket_bytes: bytes that a micro-batch of each bucket holds on a device while it is in flight. None: not known.
        max_bytes: most of these bytes that one replica may hold at a time. None: no limit.
    """

    replicas: int
    buckets: tuple[int, ...]
    trainable: bool
    max_inflight: int
    forward: Cost
    backward: Cost
    update: int = 0
    devices: tuple[tuple[int, ...], ...] | None = None
    row_length: int | None = None
    packed: bool = True
    bucket_bytes: tuple[int, ...] | None = None
    max_bytes: int | None = None

    def taken(self, units: list[int]) -> list[int]:
        """Units of a row that each item takes: its own, or the whole row where items share none."""
        return units if self.packed else [self.row_length or self.buckets[-1]] * len(units)

    def bytes_of(self, bucket: int) -> int:
        """Bytes that a micro-batch of this bucket holds while it is in flight; 0 where that is not known."""
        return self.bucket_bytes[self.buckets.index(bucket)] if self.bucket_bytes else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeWork:
    """A dependency between two sections, for samples that have items at both ends.

    Args:
        producer: the section that runs forward first.
        consumer: the section that needs it.
        delay: nanoseconds of a transfer.
        fan_in: most producer micro-batches that feed one consumer micro-batch; None is no limit.
        fan_out: most consumer micro-batches that one producer micro-batch feeds; None is no limit.
        paired: item n of the consumer needs item n of the producer only; else each item of a sample needs all.
    """

    producer: str
    consumer: str
    delay: int = 0
    fan_in: int | None = None
    fan_out: int | None = None
    paired: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleWork:
    """One sample of a step.

    Args:
        id: a number that is unique in the workload.
        items: per section, the units of each item; a section left out does not run for this sample.
    """

    id: int
    items: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one or more steps.

    Args:
        sections: by name.
        edges: dependencies; they form no cycle.
        steps: the samples of each global batch, in arrival order.
        name: for people.

    Raises:
        ScheduleError: for a section that cannot run, two edges between the same sections, a cycle, an unknown section, a
            sample twice, or an item larger than the largest bucket.
    """

    sections: Mapping[str, SectionWork]
    edges: tuple[EdgeWork, ...]
    steps: tuple[tuple[SampleWork, ...], ...]
    name: str = "workload"

    def __post_init__(self) -> None:
        for name, section in self.sections.items():
            _check_section(name, section)
        pairs = [(edge.producer, edge.consumer) for edge in self.edges]
        for pair in pairs:
            if pairs.count(pair) > 1:
                raise _malformed(f"two edges lead from {pair[0]!r} to {pair[1]!r}", "one edge between two sections", str(pairs))
        for edge in self.edges:
            for end in (edge.producer, edge.consumer):
                if end not in self.sections:
                    raise _malformed(f"an edge names the section {end!r}", f"one of {sorted(self.sections)}", repr(end))
        if len(self.order) != len(self.sections):
            raise _malformed("the sections form a cycle", "edges without a cycle", str([(e.producer, e.consumer) for e in self.edges]))
        seen: set[int] = set()
        for sample in (s for step in self.steps for s in step):
            if sample.id in seen:
                raise _malformed(f"sample {sample.id} stands in it twice", "ids that are unique in the workload", f"{sample.id} again")
            seen.add(sample.id)
            self._check_items(sample)

    def _check_items(self, sample: SampleWork) -> None:
        for name, units in sample.items.items():
            section = self.sections.get(name)
            if section is None:
                raise _malformed(f"sample {sample.id} has items in {name!r}", f"one of {sorted(self.sections)}", repr(name))
            largest = min(section.buckets[-1], section.row_length or section.buckets[-1])
            if not units or min(units) < 1 or max(units) > largest:
                raise _malformed(f"an item of sample {sample.id} does not fit section {name!r}", f"1 to {largest} units", str(units))

    @functools.cached_property
    def order(self) -> tuple[str, ...]:
        """Section names, producers first; ties in the order in which sections were given."""
        order: list[str] = []
        while True:
            free = [n for n in self.sections if n not in order and all(e.producer in order for e in self.edges if e.consumer == n)]
            if not free:
                return tuple(order)
            order.append(free[0])

    @functools.cached_property
    def runs_backward(self) -> Mapping[str, bool]:
        """Whether each section runs backward: it, or anything upstream of it, is trainable."""
        found: dict[str, bool] = {}
        for name in self.order:
            found[name] = self.sections[name].trainable or any(found[e.producer] for e in self.edges if e.consumer == name)
        return found

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Workload:
        """Makes a workload from the shared file format.

        Raises:
            ScheduleError: when a key is missing or malformed.
        """
        try:
            _check_numbers(raw)
            sections = {name: _section_from_json(s) for name, s in raw["sections"].items()}
            edges = tuple(
                EdgeWork(
                    producer=e["from"],
                    consumer=e["to"],
                    delay=e["delay"],
                    fan_in=e.get("fan_in"),
                    fan_out=e.get("fan_out"),
                    paired=e.get("paired", False),
                )
                for e in raw["edges"]
            )
            steps = tuple(
                tuple(SampleWork(id=s["id"], items={n: tuple(u) for n, u in s["items"].items()}) for s in step) for step in raw["steps"]
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _malformed(
                "a workload file is malformed", "the keys sections, edges and steps", f"{type(error).__name__}: {error}"
            ) from error
        return cls(sections=sections, edges=edges, steps=steps, name=raw.get("name", "workload"))

    def to_json(self) -> dict[str, Any]:
        """Returns the workload in the shared file format."""
        usual = {"packed": True}
        sections = {
            name: {k: v for k, v in dataclasses.asdict(s).items() if v is not None and usual.get(k) != v}
            for name, s in self.sections.items()
        }
        edges = []
        for e in self.edges:
            fans = {k: v for k, v in (("fan_in", e.fan_in), ("fan_out", e.fan_out), ("paired", e.paired or None)) if v is not None}
            edges.append({"from": e.producer, "to": e.consumer, "delay": e.delay, **fans})
        steps = [[{"id": s.id, "items": {n: list(u) for n, u in s.items.items()}} for s in step] for step in self.steps]
        return {"name": self.name, "sections": sections, "edges": edges, "steps": steps}


def _check_section(name: str, section: SectionWork) -> None:
    buckets, devices, row = section.buckets, section.devices, section.row_length
    wrong = {
        "replicas of at least 1": section.replicas < 1,
        "ascending buckets of at least 1 unit": not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)),
        "devices for each replica": devices is not None and (len(devices) != section.replicas or not all(devices)),
        "a row_length that divides every bucket": row is not None and (row < 1 or any(b % row for b in buckets)),
        "as many bucket_bytes as buckets": section.bucket_bytes is not None and len(section.bucket_bytes) != len(buckets),
        "a max_bytes that holds its largest micro-batch": section.max_bytes is not None
        and section.max_bytes < max(section.bucket_bytes or (0,)),
    }
    for wanted, is_wrong in wrong.items():
        if is_wrong:
            raise _malformed(f"section {name!r} cannot run", wanted, str(section))


def _check_numbers(raw: Mapping[str, Any]) -> None:
    """Every number is whole and not negative; JSON knows other ones, and texts that look like numbers."""
    found: list[tuple[str, Any]] = []
    for name, section in raw["sections"].items():
        found += [(f"{name}.{key}", section[key]) for key in ("replicas", "max_inflight", "update")]
        found += [(f"{name}.{key}", section[key]) for key in ("row_length", "max_bytes") if section.get(key) is not None]
        found += [(f"{name}.{key}", n) for key in ("buckets", "bucket_bytes") for n in section.get(key) or ()]
        found += [(f"{name}.devices", n) for devices in section.get("devices") or () for n in devices]
        found += [(f"{name}.{key}", n) for key in ("forward", "backward") for n in section[key].values()]
        for key in ("trainable", "packed"):
            if not isinstance(section.get(key, True), bool):
                raise TypeError(f"{name}.{key} is {section[key]!r}, neither true nor false")
    for edge in raw["edges"]:
        found += [("delay", edge["delay"]), *((key, edge[key]) for key in ("fan_in", "fan_out") if edge.get(key) is not None)]
    for sample in (sample for step in raw["steps"] for sample in step):
        found += [("id", sample["id"]), *(("items", n) for units in sample["items"].values() for n in units)]
    for name, value in found:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise TypeError(f"{name} holds {value!r}, which is no whole number of at least 0")


def _section_from_json(raw: Mapping[str, Any]) -> SectionWork:
    devices = raw.get("devices")
    return SectionWork(
        replicas=raw["replicas"],
        buckets=tuple(raw["buckets"]),
        trainable=raw["trainable"],
        max_inflight=raw["max_inflight"],
        forward=Cost(**raw["forward"]),
        backward=Cost(**raw["backward"]),
        update=raw["update"],
        devices=tuple(tuple(d) for d in devices) if devices else None,
        row_length=raw.get("row_length"),
        packed=raw.get("packed", True),
        bucket_bytes=tuple(raw["bucket_bytes"]) if raw.get("bucket_bytes") else None,
        max_bytes=raw.get("max_bytes"),
    )


def _malformed(what: str, wanted: str, have: str) -> ScheduleError:
    return ScheduleError(
        what + ".", wanted=wanted, have=have, fix="correct the workload", anchor="workload-malformed", set_by="the workload"
    )
