"""What sections hold on a device as their compiled tasks say: the check of what a planner predicted without compiling anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from .arguments import Arguments, bytes_on_a_device
from .compile import task_kinds
from .plan import Plan
from .programs import SectionFunctions
from .task_programs import TaskPrograms


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
        flight = arguments.bytes_in_flight(bucket, programs.residuals(0) if "forward" in kinds else ())
        state = arguments.optimizer_state(optimizers[name]) if name in optimizers else ()
        held = section.bytes_per_device() + sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(state))
        found[name] = held + (section.section.max_bytes or in_flight * flight) + scratch
    return found
