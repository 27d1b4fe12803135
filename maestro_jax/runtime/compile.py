"""Compiles every program of a plan ahead of time: once per section, bucket, kind and replica.

Compiled programs are contracts: they reject arguments of another shape or sharding, and nothing compiles in a step.
Argument shapes are made here in one place (`Arguments`), for programs, feeds and state alike.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .plan import Plan, SectionPlan
from .programs import SectionFunctions, make_apply, reduce_gradients

Tree = Any
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What one compiled program is.

    Args:
        section: name.
        kind: "forward", "backward", "forward_backward", "evaluate", "reduce" or "apply".
        bucket: size in units; 0 for the update.
        replica: number; 0 for the update, which spans all replicas.
        seconds: wall time of tracing and compiling.
        memory: XLA's `memory_analysis()`, or None where the backend has none.
    """

    section: str
    kind: str
    bucket: int
    replica: int
    seconds: float
    memory: Any


Progress = Callable[[Program, int, int], None]
"""Called after each program with (program, number compiled, number in all)."""


class Arguments:
    """Shapes, dtypes and shardings of what the programs of one section take."""

    def __init__(self, plan: Plan, section: SectionPlan) -> None:
        self.plan = plan
        self.section = section
        self.into = plan.into(section.section.name)
        self.out = plan.out_of(section.section.name)

    def params(self, replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Compute parameters that are updated."""
        return self._in_replica(self.section.compute, replica)

    def frozen(self, replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Parameters that are not updated."""
        return self._in_replica(self.section.frozen, replica)

    def _in_replica(self, shapes: Mapping[str, jax.ShapeDtypeStruct], replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        place = self.section.submesh.in_replica
        return {p: _shaped(s.shape, s.dtype, place(replica, self.section.specs[p])) for p, s in shapes.items()}

    def gradients(self, replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Accumulators `[1, ...]` of one replica."""
        place = self.section.submesh.in_replica
        return {
            p: _shaped((1, *s.shape), jnp.float32, place(replica, PartitionSpec(None, *self.section.specs[p])))
            for p, s in self.section.trained.items()
        }

    def sums(self, replica: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Objective sums `[1, M]` of one replica; empty without objectives."""
        count = len(self.section.section.objectives)
        sharding = self.section.submesh.in_replica(replica, REPLICATED)
        return {"sums": _shaped((1, count), jnp.float32, sharding)} if count else {}

    def feed(self, bucket: int, replica: int, training: bool) -> dict[str, Any]:
        """Data, routes and scales of one micro-batch."""
        place = self.section.submesh.in_replica
        whole = place(replica, REPLICATED)
        rows = place(replica, PartitionSpec("fsdp"))
        batch = {name: _shaped(s.shape, s.dtype, rows) for name, s in self.section.shapes.batch[bucket].items()}
        if training and self.section.section.trainable:
            batch["key"] = _shaped((2,), jnp.uint32, whole)
        return {
            "batch": batch,
            "place": {e.edge.label: _shaped((e.fan_in, e.slot_rows), jnp.int32, whole) for e in self.into},
            "gather": {e.edge.label: _shaped((e.fan_out, e.slot_rows), jnp.int32, whole) for e in self.out},
            "scale": _shaped((len(self.section.section.objectives),), jnp.float32, whole),
        }

    def slots_in(self, replica: int) -> dict[str, tuple[tuple[jax.ShapeDtypeStruct, ...], ...]]:
        """Payloads that arrive: per edge S_in slots."""
        mesh = self.section.submesh.replica_meshes[replica]
        return {e.edge.label: (e.wires[0, replica].shapes(mesh),) * e.fan_in for e in self.into}

    def slots_out(self, replica: int) -> dict[str, tuple[tuple[jax.ShapeDtypeStruct, ...], ...]]:
        """Payloads that leave, and the gradients that come back for them: per edge S_out slots."""
        mesh = self.section.submesh.replica_meshes[replica]
        return {e.edge.label: (e.wires[replica, 0].shapes(mesh),) * e.fan_out for e in self.out}

    def master(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Master parameters over the section's mesh."""
        return {
            p: _shaped(s.shape, s.dtype, self.section.submesh.whole(self.section.master_specs[p])) for p, s in self.section.trained.items()
        }

    def compute(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Compute parameters over the section's mesh, equal on all replicas."""
        return {p: _shaped(s.shape, s.dtype, self.section.submesh.whole(self.section.specs[p])) for p, s in self.section.compute.items()}

    def gradient_stack(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Accumulators of all replicas `[replica, ...]`."""
        mesh = self.section.submesh
        return {
            p: _shaped((mesh.replicas, *s.shape), jnp.float32, mesh.whole(PartitionSpec("replica", *self.section.specs[p])))
            for p, s in self.section.trained.items()
        }

    def sums_stack(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Objective sums of all replicas `[replica, M]`."""
        mesh, count = self.section.submesh, len(self.section.section.objectives)
        return {"sums": _shaped((mesh.replicas, count), jnp.float32, mesh.whole(PartitionSpec("replica")))} if count else {}

    def scalar(self, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        """A number that is whole on every device of the section."""
        return _shaped((), dtype, self.section.submesh.whole(REPLICATED))


class Compiled:
    """The compiled programs of a plan.

    Args:
        plan: what to compile for.
        optimizers: section name -> optax transformation, for trainable sections.
        clip_norm: bound on the joint gradient norm, or None.
        evaluation: whether forward programs without residuals are needed for trainable sections too.
        progress: called after each program.
    """

    def __init__(
        self, plan: Plan, optimizers: Mapping[str, Any], clip_norm: float | None, evaluation: bool, progress: Progress | None = None
    ) -> None:
        self.plan = plan
        self.arguments = {name: Arguments(plan, section) for name, section in plan.sections.items()}
        self.trained = tuple(name for name, section in plan.sections.items() if section.section.trainable)
        self.optimizers = optimizers
        self.optimizer_states = {name: self._optimizer_state(name) for name in self.trained}
        self.programs: list[Program] = []
        self._table: dict[tuple[str, str, int, int], Any] = {}
        jobs = [*self._task_jobs(evaluation), *self._update_jobs(clip_norm)]
        for section, kind, bucket, replica, job in jobs:
            start = time.perf_counter()
            compiled = job()
            self._table[section, kind, bucket, replica] = compiled
            seconds = time.perf_counter() - start
            program = Program(section=section, kind=kind, bucket=bucket, replica=replica, seconds=seconds, memory=_memory(compiled))
            self.programs.append(program)
            if progress is not None:
                progress(program, len(self.programs), len(jobs))

    def __getitem__(self, key: tuple[str, str, int, int]) -> Any:
        """The compiled program of (section, kind, bucket, replica)."""
        return self._table[key]

    def kinds(self, name: str, evaluation: bool) -> list[str]:
        """The kinds of task program that a section needs."""
        graph = self.plan.graph
        if not graph.runs_backward[name]:
            return ["forward"]
        consumers = graph.out_of(name)
        # A sample runs in both sections when they read one stream; only otherwise may a micro-batch have no consumer.
        fused = not consumers or any(graph[e.consumer].reads != graph[name].reads for e in consumers)
        return (["forward", "backward"] if consumers else []) + ["forward_backward"] * fused + ["evaluate"] * evaluation

    def _task_jobs(self, evaluation: bool) -> list[tuple[str, str, int, int, Callable[[], Any]]]:
        jobs = []
        for name, section in self.plan.sections.items():
            for bucket in section.section.buckets:
                functions = SectionFunctions(self.plan, section, bucket)
                for replica in range(section.submesh.replicas):
                    compiler = _TaskCompiler(functions, self.arguments[name], bucket, replica)
                    for kind in self.kinds(name, evaluation):
                        make = compiler.plain if kind == "forward" and not self.plan.graph.runs_backward[name] else getattr(compiler, kind)
                        jobs.append((name, kind, bucket, replica, make))
        return jobs

    def _update_jobs(self, clip_norm: float | None) -> Iterator[tuple[str, str, int, int, Callable[[], Any]]]:
        for name in self.trained:
            yield name, "reduce", 0, 0, lambda name=name: self._reduce(name)
            yield name, "apply", 0, 0, lambda name=name: self._apply(name, clip_norm)

    def _optimizer_state(self, name: str) -> Tree:
        """Shapes of the optimizer state; leaves that belong to a parameter lie as its master copy does."""
        master = self.arguments[name].master()
        abstract = jax.eval_shape(self.optimizers[name].init, master)
        whole = self.plan.sections[name].submesh.whole(REPLICATED)

        def placed(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
            owner = next((k.key for k in reversed(path) if isinstance(k, jax.tree_util.DictKey) and k.key in master), None)
            if owner is None or master[owner].shape != leaf.shape:
                return _shaped(leaf.shape, leaf.dtype, whole)
            return _shaped(leaf.shape, leaf.dtype, master[owner].sharding)

        return jax.tree_util.tree_map_with_path(placed, abstract)

    def _reduce(self, name: str) -> Any:
        arguments, mesh = self.arguments[name], self.plan.sections[name].submesh.mesh
        stack, sums = arguments.gradient_stack(), arguments.sums_stack()
        whole = arguments.scalar().sharding
        out = (_shardings(arguments.master()), whole, jax.tree.map(lambda _: whole, sums), _shardings(stack), _shardings(sums))
        with jax.set_mesh(mesh):
            # Both stacks are donated: the zeros that come back take their place.
            return jax.jit(reduce_gradients, donate_argnums=(0, 1), out_shardings=out).lower(stack, sums).compile()

    def _apply(self, name: str, clip_norm: float | None) -> Any:
        arguments, mesh = self.arguments[name], self.plan.sections[name].submesh.mesh
        master, compute, state = arguments.master(), arguments.compute(), self.optimizer_states[name]
        squares = {other: arguments.scalar() for other in self.trained}
        whole = arguments.scalar().sharding
        out = (_shardings(master), _shardings(state), _shardings(compute), whole, whole)
        apply = make_apply(self.optimizers[name], clip_norm)
        with jax.set_mesh(mesh):
            # Master, optimizer state and old compute parameters are donated. The last are never read, and would be
            # dropped as unused arguments without keep_unused.
            program = jax.jit(apply, donate_argnums=(0, 1, 2), keep_unused=True, out_shardings=out)
            return program.lower(master, state, compute, master, squares, arguments.scalar(jnp.bool_)).compile()


class _TaskCompiler:
    """Compiles the task programs of one section, bucket and replica; the forward before its backward."""

    def __init__(self, functions: SectionFunctions, arguments: Arguments, bucket: int, replica: int) -> None:
        self.functions, self.arguments = functions, arguments
        self.bucket, self.replica = bucket, replica
        self.mesh = arguments.section.submesh.replica_meshes[replica]
        self.kept: Tree = None

    def plain(self) -> Any:
        """The forward of a section that never runs backward."""
        return self._forward(training=False)

    def evaluate(self) -> Any:
        """A forward without residuals, for evaluation."""
        return self._forward(training=False)

    def _forward(self, training: bool) -> Any:
        sums = self.arguments.sums(self.replica)
        out = (_shardings(self.arguments.slots_out(self.replica)), _shardings(sums), None)
        return self._compile(self.functions.forward, (4,), out, *self._inputs(training), sums)

    def forward(self) -> Any:
        """A forward that keeps residuals."""
        sums = self.arguments.sums(self.replica)
        out = (_shardings(self.arguments.slots_out(self.replica)), _shardings(sums), None, None)
        lowered = self._lower(self.functions.forward_residuals, (4,), out, *self._inputs(True), sums)
        compiled = lowered.compile()
        # The backward takes residuals as the compiled forward lays them out; a lowered program does not know that yet.
        self.kept = jax.tree.map(lambda info, s: _shaped(info.shape, info.dtype, s), lowered.out_info[2], compiled.output_shardings[2])
        return compiled

    def backward(self) -> Any:
        """A backward from residuals; accumulators are donated, and so are the residuals, which nothing else reads."""
        gradients = self.arguments.gradients(self.replica)
        out = (self._back(), _shardings(gradients), None)
        cotangents = self.arguments.slots_out(self.replica)
        return self._compile(self.functions.backward, (6,), out, *self._inputs(True), self.kept, cotangents, gradients)

    def forward_backward(self) -> Any:
        """Forward and backward in one; sums and accumulators are donated."""
        gradients, sums = self.arguments.gradients(self.replica), self.arguments.sums(self.replica)
        out = (self._back(), _shardings(sums), _shardings(gradients), None)
        return self._compile(self.functions.forward_backward, (4, 5), out, *self._inputs(True), sums, gradients)

    def _inputs(self, training: bool) -> tuple[Tree, ...]:
        a = self.arguments
        return a.params(self.replica), a.frozen(self.replica), a.feed(self.bucket, self.replica, training), a.slots_in(self.replica)

    def _back(self) -> Tree:
        slots = self.arguments.slots_in(self.replica)
        return _shardings({e.edge.label: slots[e.edge.label] for e in self.arguments.into if e.backward})

    def _compile(self, function: Callable[..., Any], donate: tuple[int, ...], out: Tree, *args: Tree) -> Any:
        return self._lower(function, donate, out, *args).compile()

    def _lower(self, function: Callable[..., Any], donate: tuple[int, ...], out: Tree, *args: Tree) -> Any:
        with jax.set_mesh(self.mesh):
            return jax.jit(function, donate_argnums=donate, out_shardings=out).lower(*args)


def _shaped(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda s: s.sharding, tree)


def _memory(compiled: Any) -> Any:
    try:
        return compiled.memory_analysis()
    except NotImplementedError:
        return None
