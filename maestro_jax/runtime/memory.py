"""What a section holds on its busiest device: predicted from shapes, beside what XLA reports of the compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from .arguments import Arguments, bytes_on_a_device
from .compile import Compiled, task_kinds
from .plan import Plan, SectionPlan
from .programs import SectionFunctions
from .task_programs import TaskPrograms


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on one device of a section.

    Args:
        state: parameters, float32 masters and gradient accumulators.
        optimizer: optimizer state.
        microbatch: data, payloads and residuals of the largest micro-batch in flight.
        in_flight: most bytes of micro-batches in flight: `max_bytes` where it is set, else one micro-batch for each unfinished task.
        program: largest sum of arguments, results and scratch of any compiled program; None where there is none, or nothing tells.
    """

    state: int
    optimizer: int
    microbatch: int
    in_flight: int
    program: int | None

    @property
    def predicted(self) -> int:
        """State, optimizer and what is in flight, without the scratch of programs."""
        return self.state + self.optimizer + self.in_flight


def memory_use(compiled: Compiled, in_flight: int) -> dict[str, MemoryUse]:
    """Adds up what each section of a compiled plan holds on this process's devices.

    Args:
        compiled: the programs.
        in_flight: most unfinished tasks of a replica.
    """
    found = {}
    for name, section in compiled.plan.local.items():
        programs = [peak for p in compiled.programs if p.section == name if (peak := program_bytes(p.memory)) is not None]
        state = compiled.optimizer_states.get(name, ())
        found[name] = _use(section, state, max(compiled.bucket_bytes[name]), in_flight, max(programs, default=None))
    return found


def predict_memory(plan: Plan, optimizers: Mapping[str, Any], in_flight: int) -> dict[str, MemoryUse]:
    """Adds up what each section will hold, before anything is compiled.

    How residuals are split over the devices of a replica is known only when a forward has been compiled; until then, each device counts
    all of them.

    Args:
        plan: where the sections run.
        optimizers: section -> optax transformation, for trainable sections.
        in_flight: most unfinished tasks of a replica.
    """
    found = {}
    for name, section in plan.sections.items():
        arguments = Arguments(plan, section)
        state = arguments.optimizer_state(optimizers[name]) if name in optimizers else ()
        found[name] = _use(section, state, _predicted_bytes(plan, section, section.section.buckets[-1]), in_flight, None)
    return found


def predict_bucket_bytes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Section -> bytes that a micro-batch of each bucket will hold on a device in flight, before anything is compiled."""
    return {n: tuple(_predicted_bytes(plan, s, bucket) for bucket in s.section.buckets) for n, s in plan.sections.items()}


def compiled_bytes(plan: Plan, optimizers: Mapping[str, Any], in_flight: int) -> dict[str, int]:
    """Compiles the tasks of each section's largest micro-batch, and adds up what its busiest device holds.

    State and optimizer are those of the plan; what is in flight and the scratch of programs are those of what was compiled.

    Args:
        plan: of which every section has one replica.
        optimizers: section -> optax transformation, for trainable sections.
        in_flight: most unfinished tasks of a replica.

    Returns:
        Section -> bytes, by XLA's `memory_analysis()` for the platform of the plan's devices.
    """
    found = {}
    for name, section in plan.sections.items():
        arguments, bucket = Arguments(plan, section), section.section.buckets[-1]
        programs = TaskPrograms(SectionFunctions(plan, section, bucket), arguments, bucket)
        kinds = task_kinds(plan.graph, name, evaluation=False)
        sizes = [programs.make(kind, 0)[0].memory_analysis() for kind in kinds]
        scratch = max(m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes for m in sizes)
        largest = arguments.bytes_in_flight(bucket, programs.residuals(0) if "forward" in kinds else ())
        state = arguments.optimizer_state(optimizers[name]) if name in optimizers else ()
        found[name] = _use(section, state, largest, in_flight, None).predicted + scratch
    return found


def _predicted_bytes(plan: Plan, section: SectionPlan, bucket: int) -> int:
    arguments = Arguments(plan, section)
    programs = TaskPrograms(SectionFunctions(plan, section, bucket), arguments, bucket)
    return arguments.bytes_in_flight(bucket, programs.abstract_residuals())


def _use(section: SectionPlan, optimizer_state: Any, largest: int, in_flight: int, program: int | None) -> MemoryUse:
    return MemoryUse(
        state=section.bytes_per_device(),
        optimizer=sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(optimizer_state)),
        microbatch=largest,
        in_flight=section.section.max_bytes or in_flight * largest,
        program=program,
    )


def program_bytes(memory: Any) -> int | None:
    """Arguments, results and scratch of a program on one device, from XLA's memory analysis; None where there is none."""
    if memory is None:
        return None
    donated = memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - donated
