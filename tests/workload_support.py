"""What the tests of schedules build: small workloads by hand, random ones, and the independent judge of schedules."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import Cost, EdgeWork, InOrder, SampleWork, Schedule, SectionWork, Workload

FOLDER = Path(__file__).parent / "schedules"
FILES = tuple(sorted(path.stem for path in (FOLDER / "workloads").glob("*.json")))
UNLIMITED = 10**9


@dataclasses.dataclass(frozen=True)
class Talkative:
    """A policy that prints, which must not get into what another process answers."""

    def schedule(self, workload: Workload) -> Schedule:
        print("hello")
        return InOrder().schedule(workload)


@dataclasses.dataclass(frozen=True)
class Refusing:
    """A policy that raises an error with every part."""

    def schedule(self, workload: Workload) -> Schedule:
        raise ScheduleError("no.", wanted="a", have="b", fix="c", anchor="schedule-stuck", set_by="here")


Items = Mapping[str, tuple[int, ...]]


def _load_judge() -> Any:
    spec = importlib.util.spec_from_file_location("check_schedule", FOLDER / "check_schedule.py")
    if spec is None or spec.loader is None:
        raise ImportError(FOLDER / "check_schedule.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


JUDGE = _load_judge()


def judged(workload: Workload, schedule: Schedule) -> dict[str, Any]:
    """Returns what the judge finds, or fails with the rule that the schedule breaks. Both pass through text, as files would."""
    return JUDGE.check(json.loads(json.dumps(workload.to_json())), json.loads(json.dumps(schedule.to_json())))


def raw_file(name: str) -> dict[str, Any]:
    """The content of one of the shared workload files."""
    return json.loads((FOLDER / "workloads" / f"{name}.json").read_text(encoding="utf-8"))


def section(**fields: Any) -> SectionWork:
    """A trainable section with one replica, buckets of 8 and 16 units and no limit of memory, except for `fields`."""
    defaults: dict[str, Any] = {
        "replicas": 1,
        "buckets": (8, 16),
        "trainable": True,
        "max_inflight": UNLIMITED,
        "forward": Cost(fixed=5, per_unit=1),
        "backward": Cost(fixed=5, per_unit=2),
        "update": 3,
    }
    return SectionWork(**{**defaults, **fields})


def work(sections: Mapping[str, SectionWork], edges: Iterable[EdgeWork | str], *steps: Iterable[Items]) -> Workload:
    """A workload whose samples are numbered from 0; an edge may be written "producer consumer"."""
    made = []
    for edge in edges:
        if isinstance(edge, str):
            producer, consumer = edge.split()
            edge = EdgeWork(producer=producer, consumer=consumer)
        made.append(edge)
    numbered, count = [], 0
    for step in steps:
        samples = []
        for items in step:
            samples.append(SampleWork(id=count, items=items))
            count += 1
        numbered.append(tuple(samples))
    return Workload(sections=sections, edges=tuple(made), steps=tuple(numbered))


costs = st.builds(Cost, fixed=st.integers(0, 20), per_unit=st.integers(0, 3), per_unit_squared=st.integers(0, 300))
limits = st.one_of(st.none(), st.integers(1, 4))


@st.composite
def random_sections(draw: st.DrawFn, tight: bool) -> dict[str, SectionWork]:
    """One to four sections, on devices of their own or on shared ones."""
    shared = draw(st.booleans())
    sections = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        buckets = tuple(sorted(draw(st.sets(st.sampled_from([4, 8, 12, 16, 24]), min_size=1, max_size=3))))
        replicas = draw(st.integers(1, 3))
        devices = None
        if shared and draw(st.booleans()):
            groups = st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True).map(tuple)
            devices = tuple(draw(st.lists(groups, min_size=replicas, max_size=replicas)))
        sections[name] = section(
            replicas=replicas,
            buckets=buckets,
            trainable=draw(st.booleans()),
            max_inflight=buckets[-1] * draw(st.integers(1, 3)) if tight else UNLIMITED,
            forward=draw(costs),
            backward=draw(costs),
            update=draw(st.integers(0, 10)),
            devices=devices,
        )
    return sections


@st.composite
def workloads(draw: st.DrawFn, *, tight: bool = False, fans: bool | None = None, most_items: int = 3) -> Workload:
    """Random chains, diamonds and trees, over one to three steps, with samples that skip sections.

    Args:
        draw: given by hypothesis.
        tight: whether memory may be too small for a schedule to exist.
        fans: whether edges have fan limits; None: either, with one item a sample where they do, so that a cut exists.
        most_items: of one sample in one section.
    """
    if fans is None:
        fans = draw(st.booleans())
        most_items = 1 if fans else most_items
    sections = draw(random_sections(tight))
    names = list(sections)
    edges = []
    for first, producer in enumerate(names):
        for consumer in names[first + 1 :]:
            if draw(st.booleans()):
                into, out = (draw(limits), draw(limits)) if fans else (None, None)
                edges.append(EdgeWork(producer=producer, consumer=consumer, delay=draw(st.integers(0, 15)), fan_in=into, fan_out=out))
    items = {}
    for name, each in sections.items():
        items[name] = st.lists(st.integers(1, each.buckets[-1]), max_size=most_items).map(tuple)
    samples = st.fixed_dictionaries(items).map(lambda found: {name: units for name, units in found.items() if units})
    steps = draw(st.lists(st.lists(samples, max_size=6), min_size=1, max_size=3))
    return work(sections, edges, *steps)
