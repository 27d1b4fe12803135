"""Random graphs of sections for tests, with samples that run in some sections and not in others, and layouts for the sections.

A graph has two to five sections. Each reads one of four streams, takes rows of earlier sections (paired unit by unit, or by pointers of
its own), and may have a loss. "notes" are as long as "text" in each sample, so that their items can be paired where a sample has both.

Dimensions: R rows, L length, D width, F features.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from support import WIDTH, Functions, Named

from maestro_jax.data import ArraySpec, Item, Sample
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.graph.section import POLICIES
from maestro_jax.meshes.submeshes import devices_wanted
from maestro_jax.runtime.plan import requests_of
from maestro_jax.schedules import InOrder, Lockstep, Policy, Sequential, Wavefront

FEATURES = 4
DEVICES = 8
STREAMS = ("text", "notes", "image", "audio")
PAIRED: Mapping[str, tuple[str, ...]] = {"text": ("text", "notes"), "notes": ("text", "notes"), "image": ("image",), "audio": ("audio",)}
"""Stream -> those whose items have the same units."""

Layout = dict[str, dict[str, Any]]
"""Section -> fields."""

ROW = 8
LADDERS = ((8,), (24,), (12, 20))
LADDERS_IN_ROWS = ((16,), (8, 24))
LADDERS_IN_EVEN_ROWS = ((16,), (16, 32))
"""Ladders in rows of 8 units; fsdp splits only even numbers of rows. Every item has at most 8 units."""


class WavefrontHere(Wavefront):
    """The default policy without the process that it would start."""

    in_worker: ClassVar[bool] = False


POLICIES_OF_ORDER: tuple[Policy, ...] = (InOrder(), Sequential(), Lockstep(), WavefrontHere(effort=0.2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """An input of a part: an output of an earlier one, by pointers where `pointers` says so, else paired."""

    producer: str
    output: str
    pointers: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A section without its layout."""

    name: str
    stream: str
    merge: int
    taken: tuple[Taken, ...]
    objectives: Mapping[str, Objective]

    @property
    def inputs(self) -> dict[str, str]:
        """What `Section.inputs` says."""
        return {f"in{n}": f"{t.producer}.{t.output}" + f"[{self.pointers(n)}]" * t.pointers for n, t in enumerate(self.taken)}

    def pointers(self, number: int) -> str:
        """The item array that says which rows an input takes."""
        return f"{self.name}_in{number}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A graph with its layout, and a batch.

    Args:
        graph: the sections.
        specs: stream -> array name -> spec.
        samples: the batch.
        absent: samples of zero weight with items in the streams that no sample of the batch has, for a reference that needs some.
        policy: the order of tasks.
    """

    graph: SectionGraph
    specs: Mapping[str, Mapping[str, ArraySpec]]
    samples: Sequence[Sample]
    absent: Sequence[Sample]
    policy: Policy

    def runs(self, section: str) -> bool:
        """Whether any sample has items for a section."""
        return any(self.graph[section].reads in sample.items for sample in self.samples)


def functions(part: Part) -> Functions:
    """(init, apply) of a part: units look at the others of their item, every input is a factor, and `merge` units become one row."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        embed, inner, head = jax.random.split(key, 3)
        made = {"embed": jax.random.normal(embed, (FEATURES, WIDTH)) * 0.7, "inner": jax.random.normal(inner, (WIDTH, WIDTH)) * 0.4}
        return made | ({"head": jax.random.normal(head, (FEATURES, WIDTH))} if part.objectives else {})

    def apply(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], **inputs: jax.Array) -> dict[str, jax.Array]:
        ids_RL = batch["segment_ids"]
        same_RLL = (ids_RL[:, :, None] == ids_RL[:, None, :]).astype(jnp.float32)
        x_RLD = jnp.tanh(batch["features"] @ params["embed"]) * math.prod(1.0 + jnp.tanh(inputs[name]) for name in sorted(inputs))
        x_RLD += (same_RLL / same_RLL.sum(-1, keepdims=True)) @ x_RLD
        x_RLD = jnp.tanh(x_RLD @ params["inner"])
        rows, length, width = x_RLD.shape
        parts = x_RLD.reshape(rows, length // part.merge, part.merge, width)
        hidden = sum(parts[:, :, n] * (1.0 + n) for n in range(part.merge))
        found = {"hidden": hidden, "extra": jnp.sin(2.0 * hidden)}
        if part.objectives:
            score_RLF = x_RLD @ params["head"].T
            sums = {"square": jnp.square(score_RLF).sum(-1), "wave": jnp.cos(score_RLF).sum(-1)}
            found |= {name: (sums[name] * batch["weights"]).sum() for name in part.objectives}
        return found

    return init, apply


COUNTS: tuple[Any, ...] = ("weights", "units", lambda item: 1.0)
"""What an objective may be divided by: a mask, units, or items."""


@st.composite
def parts(draw: st.DrawFn) -> tuple[Part, ...]:
    """Two to five parts, each with what it takes of those before it. What nobody takes has a loss."""
    names = "abcde"[: draw(st.integers(2, 5))]
    made: list[Part] = []
    for name in names:
        stream, merge, taken = draw(st.sampled_from(STREAMS)), draw(st.sampled_from((1, 1, 2))), []
        # Repeated: two edges between the same two sections.
        for producer in draw(st.lists(st.sampled_from(made), min_size=1, max_size=3)) if made else ():
            can_pair = producer.merge == 1 and producer.stream in PAIRED[stream]
            pointers = not can_pair or draw(st.booleans())
            taken.append(Taken(producer=producer.name, output=draw(st.sampled_from(("hidden", "extra"))), pointers=pointers))
        made.append(Part(name=name, stream=stream, merge=merge, taken=tuple(taken), objectives={}))
    consumed = {t.producer for part in made for t in part.taken}
    return tuple(dataclasses.replace(p, objectives=draw(objectives(p.name not in consumed))) for p in made)


@st.composite
def objectives(draw: st.DrawFn, needed: bool) -> dict[str, Objective]:
    """Objectives of a part, at least one with a weight where one is needed."""
    names = draw(st.sampled_from((("square",), ("wave", "square")) if needed else ((), (), ("wave",), ("wave", "square"))))
    weights = {name: draw(st.sampled_from((0.0, 0.3, 2.0))) if n else 1.0 for n, name in enumerate(names)}
    return {name: Objective(weight=weight, count=draw(st.sampled_from(COUNTS))) for name, weight in weights.items()}


@st.composite
def section_layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of one section."""
    fsdp, tensor = draw(st.sampled_from((1, 1, 2))), draw(st.sampled_from((1, 1, 2)))
    fields: dict[str, Any] = {
        "replicas": draw(st.sampled_from((1, 2, 3, 4))),
        "axes": {axis: size for axis, size in (("fsdp", fsdp), ("tensor", tensor)) if size > 1},
        "trainable": draw(st.sampled_from((True, True, False))),
        "submesh": draw(st.sampled_from((None, "first", "second"))),
        "remat": draw(st.sampled_from(("none", "inputs", *POLICIES))),
        "scatter_gradients": draw(st.booleans()),
    }
    if fsdp > 1:
        # Parameters are split over fsdp too, unless a rule says otherwise.
        fields |= {"row_length": ROW, "microbatch": draw(st.sampled_from(LADDERS_IN_EVEN_ROWS))}
        fields["rules"] = draw(st.sampled_from(({}, {"embed": None})))
    elif draw(st.booleans()):
        fields |= {"row_length": ROW, "microbatch": draw(st.sampled_from(LADDERS_IN_ROWS))}
    else:
        fields["microbatch"] = draw(st.sampled_from(LADDERS))
    return fields


@st.composite
def layouts(draw: st.DrawFn, names: Sequence[str], graph: Callable[[Layout], SectionGraph]) -> Layout:
    """Fields for each section of a graph, at least one of which is trained; all fit on eight devices."""
    layout = {name: draw(section_layouts()) for name in names}
    if not any(fields["trainable"] for fields in layout.values()):
        layout[draw(st.sampled_from(names))]["trainable"] = True
    for fields in layout.values():
        if fields["replicas"] * 2 ** len(fields["axes"]) > DEVICES:
            fields["replicas"] = 2
    # Too many devices: more sections share a submesh, until all do.
    for name in names:
        if devices_wanted(requests_of(graph(layout))) > DEVICES:
            layout[name]["submesh"] = "first"
    return layout


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A graph, a layout, a batch and a policy."""
    made = draw(parts())
    layout = draw(layouts([part.name for part in made], lambda found: graph_of(made, found)))
    for fields in layout.values():
        fields["frozen"] = draw(st.sampled_from(((), (), ("inner",))))
    used = sorted({part.stream for part in made} - {made[-1].stream})
    missing = draw(st.sets(st.sampled_from(used))) if used and draw(st.booleans()) else set()
    rare = draw(st.sampled_from((None, *used)))
    seed = draw(st.integers(0, 2**20))
    return Case(
        graph=graph_of(made, layout),
        specs=specs_of(made),
        samples=samples_of(made, seed, missing, rare),
        absent=[silent(each) for each in samples_of(made, seed + 1, {*STREAMS} - missing, None, 1)] if missing else (),
        policy=draw(st.sampled_from(POLICIES_OF_ORDER)),
    )


def graph_of(made: Sequence[Part], layout: Layout) -> SectionGraph:
    """The graph of some parts."""
    sections = []
    for part in made:
        module = functools.partial(Named, functions(part))
        fields = {"module": module, "reads": part.stream, "inputs": part.inputs, "objectives": part.objectives, "microbatch": 24}
        sections.append(Section(name=part.name, **{**fields, **layout.get(part.name, {})}))
    return SectionGraph(sections=tuple(sections))


def specs_of(made: Sequence[Part]) -> dict[str, dict[str, ArraySpec]]:
    """Arrays of each stream: features, weights, and pointers of the parts that read it."""
    own = {"features": ArraySpec(shape=(FEATURES,), dtype="float32"), "weights": ArraySpec(dtype="float32")}
    found = {stream: dict(own) for stream in STREAMS}
    for part in made:
        found[part.stream] |= {part.pointers(n): ArraySpec() for n, taken in enumerate(part.taken) if taken.pointers}
    return found


def samples_of(made: Sequence[Part], seed: int, missing: set[str], rare: str | None, count: int = 9) -> list[Sample]:
    """Random samples.

    Args:
        made: the parts that will read them.
        seed: another seed is another list.
        missing: streams that no sample has.
        rare: a stream that the fifth sample alone has; None: none is.
        count: how many; a single one has all the streams that are not missing.
    """
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        present = {stream for stream in STREAMS if count == 1 or random.random() < 0.6 or number == 4}
        present -= missing | ({rare} if rare and number != 4 else set())
        lengths = {"text": [int(u) for u in random.choice((2, 4, 6, 8), random.integers(1, 3))]}
        lengths["notes"] = lengths["text"]
        lengths |= {s: [int(u) for u in random.choice((2, 4, 6), random.integers(1, 4))] for s in ("image", "audio")}
        found.append(_sample(f"s{seed}-{number}", made, {s: lengths[s] for s in sorted(present)}, random))
    return found


def _sample(name: str, made: Sequence[Part], lengths: Mapping[str, Sequence[int]], random: np.random.Generator) -> Sample:
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for stream, units in lengths.items():
        total = sum(units)
        arrays[stream] = {
            "features": random.normal(size=(total, FEATURES)).astype(np.float32),
            "weights": (random.random(total) > 0.3).astype(np.float32) * 0.5,
        }
    of = {part.name: part for part in made}
    for part in (part for part in made if part.stream in lengths):
        for number, taken in ((n, t) for n, t in enumerate(part.taken) if t.pointers):
            rows = sum(lengths.get(of[taken.producer].stream, ())) // of[taken.producer].merge
            arrays[part.stream][part.pointers(number)] = _pointers(sum(lengths[part.stream]), rows, random)
    items = {}
    for stream, units in lengths.items():
        cuts = np.cumsum(units)[:-1]
        pieces = {key: np.split(array, cuts) for key, array in arrays[stream].items()}
        items[stream] = tuple(Item(units=u, arrays={key: piece[n] for key, piece in pieces.items()}) for n, u in enumerate(units))
    return Sample(id=name, items=items)


def _pointers(units: int, rows: int, random: np.random.Generator) -> np.ndarray:
    """Some rows at some units, in any order."""
    count = min(units, rows, int(random.integers(0, rows + 1)) if random.random() < 0.3 else rows)
    found = np.full(units, -1, np.int32)
    found[random.permutation(units)[:count]] = random.permutation(rows)[:count]
    return found


def silent(sample: Sample) -> Sample:
    """A sample whose weights are zero."""
    items = {
        stream: tuple(dataclasses.replace(i, arrays={**i.arrays, "weights": np.zeros(i.units, np.float32)}) for i in found)
        for stream, found in sample.items.items()
    }
    return dataclasses.replace(sample, items=items)
