"""What tasks cost, in the integer nanoseconds that schedules are made of: counted by default, measured on request.

Counted costs come from the traced programs alone, so that they are the same on every machine and in every run; only their ratios matter
to a schedule. A cost is `fixed + per_unit * bucket + per_unit_squared * sum(u * u) // 1000` for a micro-batch with items of u units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..schedules import Cost, fitted_cost
from .arguments import Arguments
from .counts import Work, work
from .plan import EdgePlan, Plan, SectionPlan
from .programs import SectionFunctions
from .task_programs import TaskPrograms

MULTIPLICATIONS_PER_NANOSECOND = 10
"""Of a nominal device. A unit and no claim: schedules depend on ratios of costs."""
BYTES_PER_NANOSECOND = 4
"""Of a nominal link."""
CALL = 20_000
"""Nanoseconds of a task however small, on a nominal device."""
UPDATE = 20
"""Multiplications of an update for each parameter: moments, norm, and reading all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionCosts:
    """Costs of one section.

    Args:
        forward: of a forward.
        backward: of a backward; a fused task costs both.
        update: nanoseconds of an update.
    """

    forward: Cost
    backward: Cost
    update: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of everything that is scheduled.

    Args:
        sections: by name.
        delays: edge label -> nanoseconds of a transfer.
    """

    sections: Mapping[str, SectionCosts]
    delays: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Returns them as JSON values, for checkpoints."""
        return {"sections": {name: dataclasses.asdict(costs) for name, costs in self.sections.items()}, "delays": dict(self.delays)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Costs:
        """Takes what `to_json` returned."""
        sections = {
            name: SectionCosts(forward=Cost(**c["forward"]), backward=Cost(**c["backward"]), update=c["update"])
            for name, c in raw["sections"].items()
        }
        return cls(sections=sections, delays=dict(raw["delays"]))


def counted_costs(plan: Plan) -> Costs:
    """Counts the multiplications of every section's programs at every bucket, and the bytes of every edge.

    Args:
        plan: where the sections run; a task is spread over the devices of its replica.
    """
    sections = {name: _counted(plan, name) for name in plan.sections}
    return Costs(sections=sections, delays={label: _delay(edge) for label, edge in plan.edges.items()})


def counted_work(plan: Plan, name: str) -> dict[int, tuple[Work, Work]]:
    """Counts the multiplications of a section's tasks.

    Args:
        plan: where it runs.
        name: of the section.

    Returns:
        Bucket -> those of a forward and of a backward on all devices of a replica, padding included.
    """
    section, arguments = plan.sections[name], Arguments(plan, plan.sections[name])
    found = {}
    for bucket in section.section.buckets:
        functions = SectionFunctions(plan, section, bucket)
        programs = TaskPrograms(functions, arguments, bucket)
        with jax.set_mesh(section.submesh.replica_meshes[0]):
            forward = work(functions.forward, *programs.takes("forward", 0))
            both = forward
            if plan.graph.runs_backward[name]:
                both = work(functions.forward_backward, *programs.takes("forward_backward", 0))
                # A forward of its own keeps its inputs only, and the backward runs it again.
                both += forward if functions.recomputes and plan.graph.out_of(name) else Work()
        found[bucket] = forward, Work(least=both.least - forward.least, most=both.most - forward.most)
    return found


def _counted(plan: Plan, name: str) -> SectionCosts:
    section, counted = plan.sections[name], counted_work(plan, name)
    devices = len(section.submesh.replica_devices(0))
    forwards, backwards = zip(*counted.values(), strict=True)
    parameters = sum(int(np.prod(shape.shape)) for shape in section.trained.values())
    update = parameters * UPDATE // (MULTIPLICATIONS_PER_NANOSECOND * section.submesh.mesh.devices.size)
    return SectionCosts(
        forward=_cost(section, forwards, devices),
        backward=_cost(section, backwards, devices) if plan.graph.runs_backward[name] else Cost(),
        update=update + CALL if section.section.trainable else 0,
    )


def _cost(section: SectionPlan, works: Sequence[Work], devices: int) -> Cost:
    """What a call costs: what it always does, as a line through the buckets, and what items of its rows do by their squares.

    At least a nanosecond a unit, so that padding is never free.
    """
    buckets, rate = section.section.buckets, devices * MULTIPLICATIONS_PER_NANOSECOND
    always = fitted_cost(buckets, [0] * len(buckets), [each.least / rate for each in works])
    # A row of one item does all that there can be; several items do the sum of their squares of that.
    rows = [section.micro_shape(bucket) for bucket in buckets]
    squared = max((each.most - each.least) / (count * length**2) for each, (count, length) in zip(works, rows, strict=True))
    return Cost(fixed=CALL + always.fixed, per_unit=max(1, always.per_unit), per_unit_squared=round(1000 * squared / rate))


def _delay(edge: EdgePlan) -> int:
    size = edge.slot_rows * edge.row.dtype.itemsize * int(np.prod(edge.row.shape))
    return size // BYTES_PER_NANOSECOND
