"""Ways to run the sections of a config, costed without any of their devices: what the planner chooses among.

Each section is traced twice, with one row and with two in a micro-batch, on one device and without any axes. Everything else follows by
arithmetic: operations grow with rows and are shared by the devices of a replica; parameters lie as the logical rules say; what a
micro-batch keeps for its backward is split by rows over `fsdp`, and over `tensor` where a dimension is one that the rules split.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..graph import Section, SectionGraph
from ..graph.section import DEFAULT_RULES
from ..graph.shapes import Specs
from ..meshes import partition_spec
from ..meshes.rules import spread
from ..schedules import Cost, SectionWork, fitted_cost
from ..schedules.candidates import Candidate, Key
from .arguments import Arguments
from .compile import task_kinds
from .costs import counted_work
from .counts import Work
from .feeds import UNLIMITED
from .hardware import Hardware
from .liveness import peak_bytes
from .measured import MeasuredSection
from .plan import Plan, SectionPlan, make_plan
from .programs import SectionFunctions
from .task_programs import TaskPrograms

MOST_ROWS = 4
"""Rows of a micro-batch on each device, at most."""
MOST_DEVICES = 128
"""Of a replica."""

BETWEEN = 1.05
"""Scratch of a program over what lives at the same time: some of it falls between arrays."""

WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a replica of a section runs.

    Args:
        tensor: devices over which tensors are split.
        fsdp: devices over which rows and parameters are split.
        rows: of the largest micro-batch.
        remat: as `Section.remat`.
    """

    tensor: int
    fsdp: int
    rows: int
    remat: str

    @property
    def devices(self) -> int:
        """Of a replica."""
        return self.tensor * self.fsdp

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> its size, of those that are larger than 1."""
        return {name: size for name, size in (("fsdp", self.fsdp), ("tensor", self.tensor)) if size > 1}

    def buckets(self, row: int) -> tuple[int, ...]:
        """The ladder: as many rows as there are, and half of them where they can be split."""
        half = self.rows // 2
        return (half * row, self.rows * row) if self.rows % 2 == 0 and half and half % self.fsdp == 0 else (self.rows * row,)

    def key(self, row: int) -> Key:
        """Something that sorts; "axes" and "microbatch" are what one layout for all sections has in common."""
        axes = " ".join(f"{name}={size}" for name, size in self.sizes.items()) or "none"
        return ("axes", axes), ("microbatch", f"{self.rows * row:09d}"), ("remat", self.remat)


class Traced:
    """The sections of a graph as they were traced, and what that says of every layout.

    Args:
        graph: the sections; their replicas, axes, submeshes and micro-batches do not count.
        specs: stream -> array name -> spec, from the data set.
        optimizers: section -> optax transformation, for trainable sections.
        hardware: what they would run on.
        in_flight: most unfinished tasks of a replica.
        measured: section -> what its tasks took; predictions are corrected by it.
    """

    def __init__(
        self,
        graph: SectionGraph,
        specs: Specs,
        optimizers: Mapping[str, Any],
        hardware: Hardware,
        in_flight: int,
        measured: Mapping[str, MeasuredSection] | None = None,
    ) -> None:
        self.graph, self.hardware, self.in_flight = graph, hardware, in_flight
        self.rows = {s.name: s.row_length or s.buckets[-1] for s in graph.sections}
        self.plan = _alone(graph, specs, self.rows)
        self._sections = {name: _Section(self.plan, name, optimizers.get(name)) for name in self.plan.sections}
        self._corrections = {name: self._correction(self.graph[name], each) for name, each in (measured or {}).items()}

    def candidates(self, name: str, devices: int) -> tuple[Candidate, ...]:
        """Ways to run a section on so many devices, without those that its sizes do not allow.

        Args:
            name: of the section.
            devices: how many there are.
        """
        section = self.graph[name]
        layouts = [layout for layout in _layouts(section, devices, self.hardware.node) if self._sections[name].fits(layout)]
        return tuple(self._candidate(section, layout, devices) for layout in layouts)

    def candidate(self, name: str, key: Key, devices: int) -> Candidate:
        """Returns the way to run a section on so many devices that has this key.

        Raises:
            KeyError: there is none.
        """
        return {candidate.key: candidate for candidate in self.candidates(name, devices)}[key]

    def operations(self, name: str, units: int, squares: int) -> float:
        """Floating-point operations of a section for so many units, forward and backward, nothing computed twice."""
        return self._sections[name].operations(units, squares, self.rows[name])

    def _correction(self, section: Section, measured: MeasuredSection) -> dict[str, float]:
        """Factors between what was measured and what is predicted for the same, for the largest micro-batch of whole rows."""
        rows = measured.buckets[-1] // measured.row_length
        layout = Layout(tensor=measured.axes.get("tensor", 1), fsdp=measured.axes.get("fsdp", 1), rows=rows, remat=section.remat)
        traced, items, bucket = self._sections[section.name], [measured.row_length] * rows, measured.buckets[-1]
        found = {}
        for kind, cost in (("forward", measured.forward), ("backward", measured.backward)):
            predicted = self._cost(traced, layout, (bucket,), forward=kind == "forward").of(bucket, items)
            found[kind] = cost.of(bucket, items) / predicted if predicted else 1.0
        predicted = self._update(traced, layout, measured.replicas)
        return {**found, "update": measured.update / predicted if predicted else 1.0}

    def _candidate(self, section: Section, layout: Layout, devices: int) -> Candidate:
        correct = self._corrections.get(section.name, {"forward": 1.0, "backward": 1.0, "update": 1.0})
        traced, row = self._sections[section.name], self.rows[section.name]
        buckets = layout.buckets(row)
        state, shared = traced.state(layout)
        work = SectionWork(
            replicas=1,
            buckets=buckets,
            trainable=section.trainable,
            max_inflight=UNLIMITED,
            forward=_times(self._cost(traced, layout, buckets, forward=True), correct["forward"]),
            backward=_times(self._cost(traced, layout, buckets, forward=False), correct["backward"]),
            row_length=row,
            packed=section.packed,
            bucket_bytes=tuple(traced.in_flight(layout, bucket // row) for bucket in buckets),
            max_bytes=section.max_bytes,
        )
        return Candidate(
            section=section.name,
            key=layout.key(row),
            devices=layout.devices,
            work=work,
            state=state,
            shared_state=shared,
            scratch=traced.scratch(layout) + self.hardware.communicator * (len(layout.sizes) + section.trainable),
            in_flight=self.in_flight,
            updates={
                count: round(correct["update"] * self._update(traced, layout, count)) for count in range(1, devices // layout.devices + 1)
            },
        )

    def _cost(self, traced: _Section, layout: Layout, buckets: Sequence[int], *, forward: bool) -> Cost:
        """A line through the buckets, and what items do by their squares."""
        hardware, row = self.hardware, buckets[-1] // layout.rows
        if not forward and not traced.runs_backward:
            return Cost()
        times, squared = [], 0.0
        for bucket in buckets:
            work = traced.work(bucket // row, layout, forward=forward)
            operations = 2 * work.least / layout.devices
            taken = max(hardware.compute(operations, traced.dtype), hardware.move(traced.parameter_bytes / layout.devices))
            times.append(hardware.call + taken + self._exchanged(traced, layout, bucket, forward=forward))
            most = hardware.compute(2 * work.most / layout.devices, traced.dtype) - hardware.compute(operations, traced.dtype)
            squared = max(squared, most / (bucket // row * row**2))
        fitted = fitted_cost(buckets, [0] * len(buckets), times)
        return Cost(fixed=fitted.fixed, per_unit=max(1, fitted.per_unit), per_unit_squared=round(1000 * squared))

    def _exchanged(self, traced: _Section, layout: Layout, units: int, *, forward: bool) -> float:
        """Nanoseconds of collectives inside a replica: parameters over fsdp, activations over tensor."""
        gathered = traced.parameter_bytes / layout.tensor
        # The backward gathers again, and scatters gradients.
        passes = 1 if forward else 2
        over_fsdp = self.hardware.gather(gathered, layout.fsdp) * passes
        reduced, sums = traced.reduced_forward if forward else traced.reduced_backward
        over_tensor = self.hardware.reduce(reduced * units / layout.fsdp, layout.tensor)
        count = (traced.arrays * passes if layout.fsdp > 1 else 0) + (sums if layout.tensor > 1 else 0)
        return over_fsdp + over_tensor + self.hardware.latency * count

    def _update(self, traced: _Section, layout: Layout, replicas: int) -> int:
        """Nanoseconds of an update: the sum over replicas, the optimizer, and new parameters for every replica."""
        if not traced.trained_count:
            return 0
        hardware, devices = self.hardware, replicas * layout.devices
        gradients, compute = 4 * traced.trained_count / layout.devices, traced.trained_bytes / layout.devices
        exchanged = hardware.gather(gradients, replicas) + hardware.gather(compute, replicas) if replicas > 1 else 0.0
        exchanged += 2 * hardware.latency * len(traced.trained) if replicas > 1 else 0.0
        if devices > hardware.node and replicas > 1:
            exchanged *= hardware.link / hardware.network if replicas <= hardware.node else 1.0
        touched = 2 * (traced.optimizer_bytes + 4 * traced.trained_count) / devices + gradients
        return round(hardware.call + exchanged + hardware.move(touched))


class _Section:
    """What tracing says of one section."""

    def __init__(self, plan: Plan, name: str, optimizer: Any) -> None:
        self._plan, self._section = plan, plan.sections[name]
        section = self._section.section
        self.dtype, self.runs_backward = section.dtype, plan.graph.runs_backward[name]
        self._consumed = bool(plan.graph.out_of(name))
        self._rules = {**DEFAULT_RULES, **section.rules}
        shapes = {**self._section.compute, **self._section.frozen}
        self._shapes = shapes
        self.parameter_bytes = sum(_bytes(shape) for shape in shapes.values())
        self.trained = tuple(self._section.trained)
        self.arrays = sum(self._layers(path) for path in shapes)
        self.trained_bytes = sum(_bytes(shape) for shape in self._section.compute.values())
        self.trained_count = sum(math.prod(shape.shape) for shape in self._section.trained.values())
        state = Arguments(plan, self._section).optimizer_state(optimizer) if optimizer is not None else ()
        self.optimizer_bytes = sum(_bytes(leaf) for leaf in jax.tree.leaves(state))
        counted = counted_work(plan, name)
        one, two = sorted(counted)
        self._work = counted[one], counted[two]
        self._residuals = {bucket: _residuals(plan, self._section, bucket) for bucket in (one, two)}
        self._programs = [_program(plan, self._section, bucket) for bucket in (one, two)]
        self._peaks: dict[int, tuple[int, int]] = {}
        self.reduced_forward, self.reduced_backward = self._reduced()

    def fits(self, layout: Layout) -> bool:
        """Whether the axes divide something: an axis that splits no parameter would only repeat work."""
        if layout.tensor == 1:
            return True
        specs = self._specs(layout.sizes)
        split = sum(math.prod(s.shape) for path, s in self._shapes.items() if "tensor" in specs[path])
        return split > 0.5 * sum(math.prod(shape.shape) for shape in self._shapes.values())

    def work(self, rows: int, layout: Layout, *, forward: bool) -> Work:
        """Multiplications of a micro-batch of so many rows on all devices of a replica."""
        (one, one_back), (two, two_back) = self._work
        if forward:
            return _line(one, two, rows)
        found = _line(one_back, two_back, rows)
        # A forward of its own that kept its inputs only runs again.
        return found + _line(one, two, rows) if layout.remat == "inputs" and self._consumed else found

    def operations(self, units: int, squares: int, row: int) -> float:
        """See `Traced.operations`."""
        plain = Layout(tensor=1, fsdp=1, rows=1, remat="none")
        total = 0.0
        for forward in (True, False):
            work = self.work(1, plain, forward=forward)
            total += 2 * (work.least * units / row + (work.most - work.least) * squares / row**2)
        return total

    def state(self, layout: Layout) -> tuple[int, int]:
        """Bytes on a device that every replica holds, and those that replicas divide, with one replica."""
        section, specs, sizes = self._section, self._specs(layout.sizes), layout.sizes
        held = sum(_bytes(shape, specs[path], sizes) for path, shape in self._shapes.items())
        inside = sizes if section.section.scatter_gradients else {}
        gradients = {path: spread(shape.shape, specs[path], inside) for path, shape in section.trained.items()}
        held += sum(_bytes(shape, gradients[path], sizes) for path, shape in section.trained.items())
        masters = sum(_bytes(shape, gradients[path], sizes) for path, shape in section.trained.items())
        whole = 4 * self.trained_count
        # The optimizer's leaves lie as the masters do.
        return held, masters + (round(self.optimizer_bytes * masters / whole) if whole else 0)

    def in_flight(self, layout: Layout, rows: int) -> int:
        """Bytes on a device that a micro-batch of so many rows holds: data, payloads at both ends, residuals."""
        section, arguments = self._section, Arguments(self._plan, self._section)
        batch = sum(_bytes(shape) for shape in section.shapes.batch[section.section.buckets[0]].values()) * rows // layout.fsdp
        slots = 0
        for edge in (*arguments.into, *arguments.out):
            mine = edge.edge.producer == section.section.name
            fans = edge.fan_out if mine else edge.fan_in
            # The other end is not chosen yet: as if it had as many rows. Smaller slots of more of them come to the same.
            size = edge.slot_rows * rows // 2
            slots += fans * (size * _bytes(edge.row) // layout.devices + 4 * size)
        kept = 0
        if self._consumed and self.runs_backward and layout.remat != "inputs":
            kept = self._kept(layout, rows)
        return batch + slots + kept

    def scratch(self, layout: Layout) -> int:
        """Bytes on a device that the largest program needs beside its arguments.

        What grows with rows is that of the rows of one device; gradients are whole before they are scattered over `fsdp`.
        """
        if layout.tensor not in self._peaks:
            one, two = (peak_bytes(program, lambda shape, size: self._share(shape, size, layout.tensor)) for program in self._programs)
            self._peaks[layout.tensor] = one, two
        one, two = self._peaks[layout.tensor]
        found = one + (two - one) * (layout.rows // layout.fsdp - 1)
        if layout.fsdp > 1:
            found += self._gathered(layout)
        # Residuals that were kept in flight are not made again, where no micro-batch runs forward and backward at once.
        apart = "forward_backward" not in task_kinds(self._plan.graph, self._section.section.name, evaluation=False)
        before = self._kept(layout, layout.rows) if apart and layout.remat != "inputs" else 0
        return round(BETWEEN * max(found - before, 0))

    def _gathered(self, layout: Layout) -> int:
        """Bytes of parameters that are whole for a while: those of one layer, and those of none."""
        found = 0
        for path, shape in self._shapes.items():
            found += self._share(shape.shape, _bytes(shape), layout.tensor) // self._layers(path)
        return found

    def _kept(self, layout: Layout, rows: int) -> int:
        """Bytes on a device of what a backward needs of a forward of so many rows."""
        one, two = (sum(self._split(leaf, layout) for leaf in leaves) for leaves in self._residuals.values())
        return max(0, one + (rows // layout.fsdp - 1) * (two - one))

    def _split(self, leaf: jax.ShapeDtypeStruct, layout: Layout) -> int:
        """Bytes of a residual on each of the devices that `tensor` splits."""
        return self._share(leaf.shape, _bytes(leaf), layout.tensor)

    def _share(self, shape: tuple[int, ...], size: int, tensor: int) -> int:
        """Bytes of an array on each of the devices that `tensor` splits, if it has a dimension that the rules split."""
        split = tensor > 1 and any(length in self._split_sizes and length % tensor == 0 for length in shape)
        return size // (tensor if split else 1)

    @functools.cached_property
    def _split_sizes(self) -> set[int]:
        """Sizes of the dimensions of parameters that `tensor` splits."""
        names = self._section.shapes.names
        pairs = [pair for path, shape in self._shapes.items() for pair in zip(names.get(path) or (), shape.shape, strict=False)]
        return {size for name, size in pairs if name is not None and self._rules.get(name) == "tensor"}

    def _specs(self, sizes: Mapping[str, int]) -> dict[str, PartitionSpec]:
        names = self._section.shapes.names
        return {path: partition_spec(shape.shape, names.get(path), self._rules, sizes)[0] for path, shape in self._shapes.items()}

    def _layers(self, path: str) -> int:
        """How many layers' parameters one array holds."""
        return self._shapes[path].shape[0] if (self._section.shapes.names.get(path) or ("",))[0] == "layers" else 1

    def _reduced(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """Bytes for each unit that are summed over `tensor`, and how many sums there are, in a forward and in a backward.

        A product that runs over a split dimension gives sums: of a weight whose split dimension comes before its last one, forward; of one
        whose split dimension comes last, backward, once for all weights of a module that read the same.
        """
        forward, sums, backward = 0.0, 0, dict[str, tuple[float, int]]()
        itemsize = jnp.dtype(self.dtype).itemsize
        for path, shape in self._shapes.items():
            names = list(self._section.shapes.names.get(path) or ())
            split = [n for n, name in enumerate(names) if name is not None and self._rules.get(name) == "tensor"]
            if len(shape.shape) < 2 or not split:
                continue
            layers = self._layers(path)
            if "embed" in names[split[-1] + 1 :]:
                forward, sums = forward + layers * shape.shape[-1] * itemsize, sums + layers
            elif "embed" in names[: split[0]]:
                module = path.rpartition("/")[0]
                backward[module] = layers * shape.shape[names.index("embed")] * itemsize, layers
        sizes, counts = ([each[n] for each in backward.values()] for n in (0, 1))
        return (forward, sums), (sum(sizes), int(sum(counts)))


def _alone(graph: SectionGraph, specs: Specs, rows: Mapping[str, int]) -> Plan:
    """A plan of all sections on one device, with micro-batches of one row and of two."""
    sections = [
        dataclasses.replace(
            section,
            replicas=1,
            axes={},
            submesh="plan",
            row_length=rows[section.name],
            microbatch=(rows[section.name], 2 * rows[section.name]),
            remat="none" if section.remat == "inputs" else section.remat,
        )
        for section in graph.sections
    ]
    return make_plan(SectionGraph(sections=tuple(sections)), specs, jax.devices()[:1])


def _program(plan: Plan, section: SectionPlan, bucket: int) -> Any:
    """The traced program of a task, forward and backward where there is one."""
    functions = SectionFunctions(plan, section, bucket)
    programs = TaskPrograms(functions, Arguments(plan, section), bucket)
    both = plan.graph.runs_backward[section.section.name]
    kind, function = ("forward_backward", functions.forward_backward) if both else ("forward", functions.forward)
    with jax.set_mesh(section.submesh.replica_meshes[0]):
        return jax.make_jaxpr(function)(*programs.takes(kind, 0)).jaxpr


def _residuals(plan: Plan, section: SectionPlan, bucket: int) -> list[jax.ShapeDtypeStruct]:
    """What a backward needs of a forward, besides the arguments of both."""
    if not plan.graph.runs_backward[section.section.name]:
        return []
    arguments = Arguments(plan, section)
    functions = SectionFunctions(plan, section, bucket)
    programs = TaskPrograms(functions, arguments, bucket)
    with jax.set_mesh(section.submesh.replica_meshes[0]):
        return jax.tree.leaves(jax.eval_shape(functions.forward_residuals, *programs.takes("forward", 0))[2])


def _layouts(section: Section, devices: int, node: int) -> Iterator[Layout]:
    remats = dict.fromkeys((section.remat, "inputs")) if section.trainable or section.remat != "none" else (section.remat,)
    most = min(devices, MOST_DEVICES)
    for tensor, fsdp, each, remat in itertools.product(_powers(min(node, most)), _powers(most), _powers(MOST_ROWS), remats):
        if tensor * fsdp <= most:
            yield Layout(tensor=tensor, fsdp=fsdp, rows=each * fsdp, remat=remat)


def _times(cost: Cost, factor: float) -> Cost:
    return Cost(
        fixed=round(factor * cost.fixed),
        per_unit=round(factor * cost.per_unit),
        per_unit_squared=round(factor * cost.per_unit_squared),
    )


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _line(one: Work, two: Work, rows: int) -> Work:
    """The work of so many rows, of that of one and of two."""
    return Work(least=one.least + (rows - 1) * (two.least - one.least), most=one.most + (rows - 1) * (two.most - one.most))


def _bytes(shape: Any, spec: PartitionSpec = WHOLE, sizes: Mapping[str, int] | None = None) -> int:
    """Bytes of an array, or of its shard."""
    shards = math.prod((sizes or {}).get(axis, 1) for axis in spec if axis is not None)
    return math.prod(shape.shape) * shape.dtype.itemsize // shards
