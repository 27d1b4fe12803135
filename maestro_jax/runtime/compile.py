"""Compiles every program of a plan ahead of time: once per section, bucket and kind, and loads it for each replica.

Compiled programs are contracts: they reject arguments of another shape or sharding, and nothing compiles in a step.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConfigError, set_by
from ..graph import SectionGraph
from .arguments import Arguments, shardings
from .plan import Plan
from .program_cache import kept_by
from .programs import SectionFunctions
from .task_programs import TaskPrograms
from .update import make_apply, make_reduce, zero

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What one compiled program is.

    Args:
        section: name.
        kind: "forward", "backward", "forward_backward", "evaluate", "reduce", "zero" or "apply".
        bucket: size in units; 0 for the update.
        replica: number; 0 for the update, which spans all replicas.
        seconds: wall time of tracing and compiling, or of loading.
        loaded: whether it was compiled for another replica and loaded for this one.
        memory: XLA's `memory_analysis()`, or None where the backend has none.
    """

    section: str
    kind: str
    bucket: int
    replica: int
    seconds: float
    loaded: bool
    memory: Any


COMPILE_SECONDS = 4 * 3600.0
"""How long a process waits for the others to compile; the watchdog notices those that died."""

Job = Callable[[], tuple[Any, bool]]
"""Makes a program; returns it, and whether it was loaded rather than compiled."""

Progress = Callable[[Program, int, int], None]
"""Called after each program with (program, number compiled, number in all)."""


class Compiled:
    """The compiled programs of a plan.

    Args:
        plan: what to compile for.
        optimizers: section name -> optax transformation, for trainable sections.
        clip_norm: bound on the joint gradient norm, or None.
        evaluation: whether forward programs without residuals are needed for trainable sections too.
        progress: called after each program.

    Attributes:
        bucket_bytes: section -> bytes that a micro-batch of each bucket holds on a device while it is in flight.

    Raises:
        ConfigError: a section's `max_bytes` does not hold its largest micro-batch.
    """

    def __init__(
        self, plan: Plan, optimizers: Mapping[str, Any], clip_norm: float | None, evaluation: bool, progress: Progress | None = None
    ) -> None:
        self.plan = plan
        self.arguments = {name: Arguments(plan, section) for name, section in plan.sections.items()}
        self.trained = tuple(name for name, section in plan.sections.items() if section.section.trainable)
        self.reduced = tuple(n for n, s in plan.sections.items() if s.section.trainable or s.section.objectives)
        self.optimizers = optimizers
        self.optimizer_states = {name: self.arguments[name].optimizer_state(optimizers[name]) for name in self.trained}
        self.programs: list[Program] = []
        self._table: dict[tuple[str, str, int, int], Any] = {}
        self._task_programs: dict[tuple[str, int], TaskPrograms] = {}
        jobs = [*self._task_jobs(evaluation), *self._update_jobs(clip_norm)]
        for (section, kind, bucket, replica), job in jobs:
            start = time.perf_counter()
            with kept_by(plan.sections[section].submesh.processes[0], plan.group):
                compiled, loaded = job()
            self._table[section, kind, bucket, replica] = compiled
            program = Program(
                section=section,
                kind=kind,
                bucket=bucket,
                replica=replica,
                seconds=time.perf_counter() - start,
                loaded=loaded,
                memory=_memory(compiled),
            )
            self.programs.append(program)
            if progress is not None:
                progress(program, len(self.programs), len(jobs))
        self.bucket_bytes = self._told_bytes()
        self._check_bytes()

    def __getitem__(self, key: tuple[str, str, int, int]) -> Any:
        """The compiled program of (section, kind, bucket, replica)."""
        return self._table[key]

    def _task_jobs(self, evaluation: bool) -> Iterator[tuple[tuple[str, str, int, int], Job]]:
        """Programs of tasks: compiled for the first replica here, loaded for the others where that works."""
        for name, section in self.plan.local.items():
            for bucket in section.section.buckets:
                task_programs = TaskPrograms(SectionFunctions(self.plan, section, bucket), self.arguments[name], bucket)
                self._task_programs[name, bucket] = task_programs
                for kind in task_kinds(self.plan.graph, name, evaluation):
                    for replica in section.submesh.local_replicas:
                        yield (name, kind, bucket, replica), functools.partial(task_programs.make, kind, replica)

    def _update_jobs(self, clip_norm: float | None) -> Iterator[tuple[tuple[str, str, int, int], Job]]:
        for name in (n for n in self.reduced if self.trained and n in self.plan.local):
            yield (name, "reduce", 0, 0), functools.partial(self._reduce, name)
            yield (name, "zero", 0, 0), functools.partial(self._zero, name)
        for name in (n for n in self.trained if n in self.plan.local):
            yield (name, "apply", 0, 0), functools.partial(self._apply, name, clip_norm)

    def _told_bytes(self) -> dict[str, tuple[int, ...]]:
        """Bytes in flight of every section, which the process that compiled its programs tells the others: schedules depend on them."""
        group, local = self.plan.group, self.plan.local
        mine = {
            n: [self._bytes_in_flight(n, b) for b in s.section.buckets] for n, s in local.items() if s.submesh.processes[0] == group.index
        }
        # Others may have far more to compile.
        told = {name: tuple(found) for part in group.all_gather("bytes", mine, COMPILE_SECONDS) for name, found in part.items()}
        return {name: told[name] for name in self.plan.sections}

    def _bytes_in_flight(self, name: str, bucket: int) -> int:
        replica = self.plan.sections[name].submesh.local_replicas[0]
        runs_forward = (name, "forward", bucket, replica) in self._table
        return self.arguments[name].bytes_in_flight(bucket, self._task_programs[name, bucket].residuals(replica) if runs_forward else ())

    def _check_bytes(self) -> None:
        for section in self.plan.graph.sections:
            needed = max(self.bucket_bytes[section.name])
            if section.max_bytes is not None and section.max_bytes < needed:
                raise ConfigError(
                    f"section {section.name!r} may not hold even one of its micro-batches.",
                    wanted=f"max_bytes of at least {needed}: data, payloads and residuals of the largest micro-batch on one device",
                    have=str(section.max_bytes),
                    fix="raise max_bytes, lower microbatch, or keep less for the backward (remat='inputs')",
                    anchor="max-bytes",
                    set_by=set_by(section, "max_bytes"),
                )

    def _reduce(self, name: str) -> tuple[Any, bool]:
        arguments, section = self.arguments[name], self.plan.sections[name]
        stack, sums, whole = arguments.gradient_stack(), arguments.sums_stack(), arguments.scalar().sharding
        out = (shardings(stack), whole, jax.tree.map(lambda _: whole, sums))
        with jax.set_mesh(section.submesh.mesh):
            return jax.jit(make_reduce(section), donate_argnums=0, out_shardings=out).lower(stack, sums).compile(), False

    def _zero(self, name: str) -> tuple[Any, bool]:
        stack, sums = self.arguments[name].gradient_stack(), self.arguments[name].sums_stack()
        with jax.set_mesh(self.plan.sections[name].submesh.mesh):
            # Both are donated and never read, so they would be dropped as unused without keep_unused.
            program = jax.jit(zero, donate_argnums=(0, 1), keep_unused=True, out_shardings=(shardings(stack), shardings(sums)))
            return program.lower(stack, sums).compile(), False

    def _apply(self, name: str, clip_norm: float | None) -> tuple[Any, bool]:
        arguments, section = self.arguments[name], self.plan.sections[name]
        master, compute, state = arguments.master(), arguments.compute(), self.optimizer_states[name]
        squares = {other: arguments.scalar() for other in self.reduced}
        whole = arguments.scalar().sharding
        out = (shardings(master), shardings(state), shardings(compute), whole, whole)
        apply = make_apply(section, self.optimizers[name], clip_norm)
        with jax.set_mesh(section.submesh.mesh):
            # Master, optimizer state and old compute parameters are donated. The last are never read, and would be
            # dropped as unused arguments without keep_unused.
            program = jax.jit(apply, donate_argnums=(0, 1, 2), keep_unused=True, out_shardings=out)
            return program.lower(master, state, compute, arguments.gradient_stack(), squares, arguments.scalar(jnp.bool_)).compile(), False


def task_kinds(graph: SectionGraph, name: str, evaluation: bool) -> list[str]:
    """The kinds of task program that a section needs.

    Args:
        graph: with the section.
        name: of the section.
        evaluation: whether forwards without residuals are needed for trainable sections too.
    """
    if not graph.runs_backward[name]:
        return ["forward"]
    consumers = graph.out_of(name)
    # A sample runs in both sections when they read one stream; only otherwise may a micro-batch have no consumer.
    fused = not consumers or any(graph[e.consumer].reads != graph[name].reads for e in consumers)
    return (["forward", "backward"] if consumers else []) + ["forward_backward"] * fused + ["evaluate"] * evaluation


def _memory(compiled: Any) -> Any:
    try:
        return compiled.memory_analysis()
    except NotImplementedError:
        return None
