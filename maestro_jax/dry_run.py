"""What a config would do as it is: a sampled step in simulated time, what bounds it, and what is worth a warning; compiles nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .runtime.memory import MemoryUse
from .schedules import Schedule, Workload, utilization_of
from .schedules.bounds import load_of, lower_bound

if TYPE_CHECKING:
    from .trainer import Setup, Trainer

SIGNS = {"forward": ">", "backward": "<", "forward_backward": "x", "update": "u"}
"""Kind of task -> how it is drawn."""
MOST_LINES = 16
"""Replicas that are drawn."""


def sampled_step(trainer: Trainer, setup: Setup, uses: Mapping[str, MemoryUse], width: int = 72) -> list[str]:
    """Schedules the first steps that belong together, and says in lines what that shows.

    Args:
        trainer: what is trained.
        setup: of it.
        uses: section -> memory that it will take.
        width: columns of the drawing.

    Raises:
        MaestroError: a sample is bad, or nothing can be scheduled.
    """
    workload = trainer.workload(0, setup)
    schedule = trainer.policy.schedule(workload)
    loads = {name: sum(load_of(workload, name, samples) for samples in workload.steps) for name in workload.order}
    bounding = max(loads, key=lambda name: loads[name])
    busy = ", ".join(f"{name} {share:.0%}" for name, share in utilization_of(workload, schedule).items())
    steps = "step 1" if len(workload.steps) == 1 else f"steps 1 to {len(workload.steps)}"
    bound = lower_bound(workload)
    lines = [
        f"{steps}, as scheduled by counted costs: {bounding} bounds the step; busy: {busy}",
        f"{schedule.makespan / bound:.2f} times the lower bound" if bound else "nothing to do",
        *drawn(workload, schedule, width),
        "  ".join(f"{sign} {kind.replace('_', ' and ')}" for kind, sign in SIGNS.items()) + "  . idle",
    ]
    return lines + [f"warning: {each}" for each in warnings(trainer, setup, uses)]


def drawn(workload: Workload, schedule: Schedule, width: int = 72) -> list[str]:
    """Draws a schedule as text, a line for each replica; a column shows what takes most of its time.

    Args:
        workload: what was scheduled.
        schedule: of it.
        width: columns of the time.
    """
    replicas = [(name, replica) for name in workload.order for replica in range(workload.sections[name].replicas)]
    column = max(1, -(-schedule.makespan // width))
    found = []
    names = [f"{name} {replica}" for name, replica in replicas[:MOST_LINES]]
    for label, (name, replica) in zip(names, replicas, strict=False):
        shares: list[dict[str, int]] = [{".": column} for _ in range(-(-schedule.makespan // column))]
        for task in (t for t in schedule.tasks if t.section == name and t.replica == replica):
            for number in range(task.start // column, min(len(shares), -(-task.end // column))):
                part = min(task.end, (number + 1) * column) - max(task.start, number * column)
                shares[number][SIGNS[task.kind]] = shares[number].get(SIGNS[task.kind], 0) + part
                shares[number]["."] -= part
        found.append(label.ljust(max(map(len, names))) + "  " + "".join(max(s, key=lambda sign: s[sign]) for s in shares))
    left = len(replicas) - len(found)
    return found + ([f"and {left} more replicas"] if left else [])


def warnings(trainer: Trainer, setup: Setup, uses: Mapping[str, MemoryUse]) -> list[str]:
    """What a plan wastes or lacks, in sentences.

    Args:
        trainer: what is trained.
        setup: of it.
        uses: section -> memory that it will take.
    """
    found = [note for note in setup.plan.notes if "stay idle" in note]
    for name, section in setup.plan.sections.items():
        replicas = section.submesh.replicas
        if trainer.batch < replicas:
            found.append(f"section {name!r} has {replicas} replicas for {trainer.batch} samples of a step: some have nothing to do")
        elif trainer.batch % replicas:
            found.append(f"a batch of {trainer.batch} samples does not divide by the {replicas} replicas of section {name!r}")
    held: dict[int, int] = {}
    limits: dict[int, int] = {}
    for name, use in uses.items():
        for device in setup.plan.sections[name].submesh.mesh.devices.flat:
            held[device.id] = held.get(device.id, 0) + use.predicted
            limit = (device.memory_stats() or {}).get("bytes_limit")
            if limit is not None:
                limits[device.id] = limit
    over = {device: (held[device], limit) for device, limit in limits.items() if held[device] > limit}
    if over:
        device, (size, limit) = max(over.items(), key=lambda pair: pair[1][0])
        found.append(f"device {device} is predicted to hold {size / 1e9:.3g} GB of {limit / 1e9:.3g} GB")
    return found
