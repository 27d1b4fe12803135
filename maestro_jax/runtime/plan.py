"""The plan: which devices, meshes, specs and edge layouts each section gets. Made before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import ClusterError, ConfigError, did_you_mean, set_by
from ..graph import Edge, GraphShapes, Section, SectionGraph, SectionShapes, graph_shapes
from ..graph.section import DEFAULT_RULES
from ..graph.shapes import Specs, compute_shape
from ..meshes import ProcessGroup, Request, Submesh, Wire, carve, partition_spec, process_group, processes_of, shrink, spread
from ..meshes.transfers import stripes

SPARE_FANS, MOST_FANS = 3, 8
"""Slots beyond what sizes need, and most slots, of an edge whose rows may go anywhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionPlan:
    """A section with its place.

    Args:
        section: the section.
        shapes: what abstract evaluation found.
        submesh: its devices.
        trained: path -> shape of the parameters that are updated, as master copies (float32).
        frozen: path -> shape of the others, in compute precision.
        specs: path -> how compute parameters lie inside a replica.
        master_specs: path -> how master parameters lie over the section's mesh (spread over replicas).
        gradient_specs: path -> how the gradient accumulators lie inside a replica.
        keeps_residuals: whether a forward keeps residuals for a backward.
    """

    section: Section
    shapes: SectionShapes
    submesh: Submesh
    trained: Mapping[str, jax.ShapeDtypeStruct]
    frozen: Mapping[str, jax.ShapeDtypeStruct]
    specs: Mapping[str, PartitionSpec]
    master_specs: Mapping[str, PartitionSpec]
    gradient_specs: Mapping[str, PartitionSpec]
    keeps_residuals: bool

    @property
    def compute(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Path -> shape in compute precision of the parameters that are updated."""
        return {path: compute_shape(shape, self.section.dtype) for path, shape in self.trained.items()}

    def micro_shape(self, bucket: int) -> tuple[int, int]:
        """(rows, length) of a micro-batch of this bucket."""
        length = self.section.row_length or bucket
        return bucket // length, length

    def bytes_per_device(self) -> int:
        """Parameters, gradients and master copies on the busiest device, without optimizer state and activations."""
        mesh = self.submesh.mesh
        total = sum(_shard_bytes(s, NamedSharding(mesh, self.specs[p])) for p, s in {**self.compute, **self.frozen}.items())
        total += sum(_shard_bytes(s, NamedSharding(mesh, self.gradient_specs[p])) for p, s in self.trained.items())
        return total + sum(_shard_bytes(s, NamedSharding(mesh, self.master_specs[p])) for p, s in self.trained.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgePlan:
    """An edge with the layout in which its rows cross.

    Args:
        edge: the edge.
        row: shape `[d]` and dtype of a row.
        merge: how many units of the producer become one row.
        slot_rows: rows in a slot (G).
        fan_in: slots of a consumer micro-batch.
        fan_out: slots of a producer micro-batch.
        wires: (producer replica, consumer replica) -> wire.
        backward: whether gradients flow back over it.
    """

    edge: Edge
    row: jax.ShapeDtypeStruct
    merge: int
    slot_rows: int
    fan_in: int
    fan_out: int
    wires: Mapping[tuple[int, int], Wire]
    backward: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is decided before anything is allocated.

    Args:
        graph: the sections.
        sections: name -> plan, producers first.
        edges: label -> plan.
        notes: sentences that the user should read (sections that share devices, parameters that stay whole).
        group: the processes whose devices these are.
    """

    graph: SectionGraph
    sections: Mapping[str, SectionPlan]
    edges: Mapping[str, EdgePlan]
    notes: tuple[str, ...] = ()
    group: ProcessGroup = dataclasses.field(default_factory=lambda: ProcessGroup(0, 1))

    @property
    def local(self) -> dict[str, SectionPlan]:
        """The sections of which this process has devices."""
        return {name: section for name, section in self.sections.items() if section.submesh.is_local}

    def is_local(self, section: str, replica: int) -> bool:
        """Whether this process has devices of a replica."""
        return replica in self.sections[section].submesh.local_replicas

    def _repr_html_(self) -> str:
        from ..plan_html import plan_html  # here, because it imports this module

        return plan_html(self)

    def into(self, section: str) -> tuple[EdgePlan, ...]:
        """Edges that end in a section."""
        return tuple(self.edges[e.label] for e in self.graph.into(section))

    def out_of(self, section: str) -> tuple[EdgePlan, ...]:
        """Edges that start in a section."""
        return tuple(self.edges[e.label] for e in self.graph.out_of(section))


def requests_of(graph: SectionGraph) -> list[Request]:
    """What the sections of a graph ask for, in their order."""
    return [
        Request(section=s.name, submesh=s.submesh or s.name, replicas=s.replicas, axes=dict(s.axes), origin=_origin(s))
        for s in graph.sections
    ]


def make_plan(graph: SectionGraph, specs: Specs, devices: Sequence[Any], *, share: bool = False) -> Plan:
    """Places a graph on devices.

    Args:
        graph: the sections.
        specs: stream -> array name -> spec, from the data set.
        devices: JAX devices, taken in order.
        share: with fewer devices than asked for, lower replicas and axes and let sections share what is here.

    Raises:
        MeshError: when the devices do not suffice and `share` is off, or an edge cannot cross.
        ConfigError: when a micro-batch cannot be split over the axes of a replica.
        ClusterError: when processes could wait for each other for ever.
    """
    requests, notes = requests_of(graph), []
    if share:
        requests, notes = shrink(requests, len(devices))
    submeshes = carve(requests, devices)
    shapes = graph_shapes(graph, specs)
    sections = {}
    for name in graph.order:
        sections[name], more = _plan_section(graph, name, shapes.sections[name], submeshes[name])
        notes += [*more, *shapes.sections[name].notes]
    edges = _with_equal_fans({e.label: _plan_edge(graph, e, shapes, submeshes) for e in graph.edges})
    plan = Plan(graph=graph, sections=sections, edges=edges, notes=tuple(notes), group=process_group())
    _check_processes(plan)
    return plan


def _plan_section(graph: SectionGraph, name: str, shapes: SectionShapes, submesh: Submesh) -> tuple[SectionPlan, list[str]]:
    section = graph[name]
    rules = {**DEFAULT_RULES, **section.rules}
    _check_axes(section, rules)
    unknown = {name: axis for name, axis in section.rules.items() if axis is not None and axis not in submesh.axes}
    if unknown:
        raise ConfigError(
            f"section {section.name!r} has a rule for an axis that its mesh does not have.",
            wanted=f"one of the axes {list(submesh.axes)}, or None",
            have=str(unknown),
            fix="correct the axis name, or add it to Section.axes",
            anchor="unknown-axis",
            set_by=set_by(section, "rules"),
        )
    specs, notes = {}, []
    for path, shape in shapes.params.items():
        specs[path], whole = partition_spec(shape.shape, shapes.names.get(path), rules, submesh.mesh.shape)
        notes += [f"section {section.name!r}: {path} stays whole: {text} is not divisible" for text in whole]
    _check_rows(section, submesh)
    is_trained = {p: jnp.issubdtype(s.dtype, jnp.floating) and not section.is_frozen(p) for p, s in shapes.params.items()}
    trained = {p: compute_shape(s, "float32") for p, s in shapes.params.items() if is_trained[p]}
    frozen = {p: compute_shape(s, section.dtype) for p, s in shapes.params.items() if not is_trained[p]}
    inside = {axis: submesh.mesh.shape[axis] for axis in submesh.axes} if section.scatter_gradients else {}
    gradients = {p: spread(s.shape, specs[p], inside) for p, s in trained.items()}
    # Master copies lie as gradients do, and over replicas besides: a sum of gradients goes straight into their shards.
    master = {p: spread(s.shape, gradients[p], {"replica": submesh.replicas}) for p, s in trained.items()}
    _check_patterns(section, shapes)
    plan = SectionPlan(
        section=section,
        shapes=shapes,
        submesh=submesh,
        trained=trained,
        frozen=frozen,
        specs=specs,
        master_specs=master,
        gradient_specs=gradients,
        keeps_residuals=graph.runs_backward[name] and section.remat != "inputs",
    )
    return plan, notes


def _check_processes(plan: Plan) -> None:
    """Refuses replicas over several processes that also have devices of others: their programs wait for each other inside the devices.

    All processes issue in one order, but a process with several devices runs what it has issued to them in any order. Where a program
    spans processes, each of them must therefore have one queue: no device outside of that program's own.
    """
    meshes = [(name, n, mesh) for name, s in plan.sections.items() for n, mesh in enumerate(s.submesh.replica_meshes)]
    for name, replica, mesh in meshes:
        processes = processes_of(mesh)
        if len(processes) == 1:
            continue
        inside = set(mesh.devices.flat)
        for other, number, there in meshes:
            if any(d.process_index in processes and d not in inside for d in there.devices.flat):
                raise ClusterError(
                    f"replica {replica} of section {name!r} spans processes that also run other replicas.",
                    wanted="processes of their own for a replica that spans several, or all of its devices in one process",
                    have=f"processes {list(processes)}, and replica {number} of section {other!r} on one of them: they could wait "
                    "for each other for ever",
                    fix="give each process the devices of whole replicas, or one device each; docs/cluster.md shows layouts",
                    anchor="replica-spans-processes",
                    set_by=_origin(plan.sections[name].section),
                )


def _check_axes(section: Section, rules: Mapping[str, str | None]) -> None:
    """An axis that no rule uses would only repeat the same work on more devices; most often it is mistyped. `fsdp` splits data too."""
    idle = [axis for axis, size in section.axes.items() if size > 1 and axis not in (*rules.values(), "fsdp")]
    if idle:
        used = sorted({axis for axis in rules.values() if axis})
        raise ConfigError(
            f"section {section.name!r} has an axis that no rule uses.",
            wanted=f"one of {used}{did_you_mean(idle[0], used)}, or a rule that maps a logical name to it",
            have=f"axes={dict(section.axes)}",
            fix=f"correct the name, or add for example rules={{'mlp': {idle[0]!r}}}",
            anchor="unknown-axis",
            set_by=set_by(section, "axes"),
        )


def _check_patterns(section: Section, shapes: SectionShapes) -> None:
    for pattern in section.frozen:
        alone = dataclasses.replace(section, frozen=(pattern,), trainable=True)
        if not any(alone.is_frozen(path) for path in shapes.params):
            raise ConfigError(
                f"a frozen pattern of section {section.name!r} matches no parameter.",
                wanted=f"a pattern for one of {sorted(shapes.params)[:12]}",
                have=repr(pattern),
                fix="correct the pattern: parts of a path are joined by '/', '*' matches anything",
                anchor="frozen-pattern",
                set_by=set_by(section, "frozen"),
            )


def _check_rows(section: Section, submesh: Submesh) -> None:
    """Rows of a micro-batch are split over `fsdp` inside a replica."""
    split = submesh.mesh.shape["fsdp"]
    rows = [bucket // (section.row_length or bucket) for bucket in section.buckets]
    if any(r % split for r in rows):
        raise ConfigError(
            f"the micro-batches of section {section.name!r} cannot be split over its axes.",
            wanted=f"numbers of rows that fsdp={split} divides",
            have=f"buckets {section.buckets} with row_length={section.row_length}: {rows} rows",
            fix="set row_length so that every bucket has enough rows, or lower fsdp",
            anchor="microbatch-rows",
            set_by=set_by(section, "row_length"),
        )


def _plan_edge(graph: SectionGraph, edge: Edge, shapes: GraphShapes, submeshes: Mapping[str, Submesh]) -> EdgePlan:
    producer, consumer = graph[edge.producer], graph[edge.consumer]
    merge = shapes.merges[edge.label]
    large, small = producer.buckets[-1] // merge, consumer.buckets[-1]
    source, target = submeshes[edge.producer], submeshes[edge.consumer]
    count = stripes(source.replica_meshes[0].size, target.replica_meshes[0].size)
    slot_rows = -(-min(large, small) // count) * count
    wires = {
        (p, c): Wire(source.replica_meshes[p], target.replica_meshes[c], slot_rows, shapes.edges[edge.label], edge.label)
        for p in range(source.replicas)
        for c in range(target.replicas)
    }
    return EdgePlan(
        edge=edge,
        row=shapes.edges[edge.label],
        merge=merge,
        slot_rows=slot_rows,
        fan_in=consumer.fan_in or fans(small, large, edge),
        fan_out=producer.fan_out or fans(large, small, edge),
        wires=wires,
        backward=graph.runs_backward[edge.producer],
    )


def fans(own: int, other: int, edge: Edge) -> int:
    """How many micro-batches of `other` units one of `own` units may meet, where the section does not say.

    Each is an argument or a result of every program, so where only some rows are wanted, sizes alone would ask for far too many:
    a language model's micro-batch for every single state that a small head takes. The cut keeps within the limit.
    """
    fewest = math.ceil(own / other)
    return fewest + 1 if edge.rows is None else min(fewest + SPARE_FANS, MOST_FANS)


def _with_equal_fans(edges: Mapping[str, EdgePlan]) -> dict[str, EdgePlan]:
    """Several edges between two sections get the largest fans of any of them: to a schedule they are one dependency."""
    found = {}
    for label, edge in edges.items():
        ends = edge.edge.producer, edge.edge.consumer
        beside = [e for e in edges.values() if (e.edge.producer, e.edge.consumer) == ends]
        found[label] = dataclasses.replace(edge, fan_in=max(e.fan_in for e in beside), fan_out=max(e.fan_out for e in beside))
    return found


def _shard_bytes(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
    return math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize


def _origin(section: Section) -> str:
    field = "axes" if section.axes else "replicas"
    return set_by(section, field)
