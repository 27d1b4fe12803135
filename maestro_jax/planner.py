"""Plans a config for devices that need not be there: costs of all ways to run its sections, sampled batches, and the search."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from .data import Batches, Dataset
from .runtime.candidates import Traced
from .runtime.feeds import sample_work
from .runtime.hardware import Hardware
from .runtime.measured import MeasuredSection
from .runtime.plan import fans
from .schedules import EdgeWork
from .schedules.candidates import Candidate, PlanningProblem
from .schedules.planning import Planned, Plans, plan
from .trainer import Trainer

SAMPLED = 1024
"""Samples that are scheduled together for every plan that is tried, at least: two global batches, or one that is larger."""
USABLE = 0.9
"""Of a device's memory: the rest is left to the driver, to communication and to what falls between allocations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan with what it would do.

    Args:
        planned: the plan.
        seconds: of a step.
        tokens: per second, of the section whose units are counted.
        mfu: share of the devices' peak that is spent on the model's own operations, without any that are done twice.
        memory: section -> bytes on its busiest device.
        device_hours: of all steps of the run.
    """

    planned: Planned
    seconds: float
    tokens: float
    mfu: float
    memory: Mapping[str, int]
    device_hours: float


class Planner:
    """Plans one config for one kind of hardware.

    Args:
        trainer: what is trained.
        hardware: what it would run on.
        devices: how many there are.
        measured: section -> what its tasks took on such devices.

    Raises:
        MaestroError: the data cannot be loaded, or sections do not fit together.
    """

    def __init__(self, trainer: Trainer, hardware: Hardware, devices: int, measured: Mapping[str, MeasuredSection] | None = None) -> None:
        self.trainer, self.hardware, self.devices = trainer, hardware, devices
        dataset = trainer.dataset()
        self.traced = Traced(trainer.graph, dataset.specs, trainer.optimizers(), hardware, trainer.in_flight, measured)
        self.problem = PlanningProblem(
            candidates={name: self.traced.candidates(name, devices) for name in self.traced.plan.sections},
            edges=self._edges,
            steps=self._steps(dataset),
            devices=devices,
            memory=int(USABLE * hardware.memory),
            node=hardware.node,
        )

    def plans(self, wanted: int = 5) -> Plans:
        """Searches.

        Raises:
            ScheduleError: nothing fits.
        """
        return plan(self.problem, wanted=wanted)

    def forecast(self, planned: Planned) -> Forecast:
        """Returns what a plan would do."""
        seconds = planned.step / 1e9
        steps = len(self.problem.steps)
        operations = sum(self.traced.operations(name, *total) for name, total in self.problem.totals.items()) / steps
        peak = sum(
            choice.devices * self.hardware.flops[self.trainer.graph[name].dtype] for name, choice in planned.allocation.choices.items()
        ) / max(1, sum(choice.devices for choice in planned.allocation.choices.values()))
        counted = next((s.name for s in self.trainer.graph.sections if s.objectives), self.trainer.graph.sections[-1].name)
        return Forecast(
            planned=planned,
            seconds=seconds,
            tokens=self.problem.totals[counted][0] / steps / seconds,
            mfu=operations / (seconds * self.devices * peak),
            memory={name: choice.memory for name, choice in planned.allocation.choices.items()},
            device_hours=self.trainer.steps * seconds * self.devices / 3600,
        )

    def bindings(self, planned: Planned) -> list[str]:
        """A plan as lines of a gin file."""
        lines = []
        for group in planned.allocation.groups:
            for name in group:
                choice = planned.allocation.choices[name]
                key = dict(choice.candidate.key)
                axes = {axis: int(size) for axis, _, size in (pair.partition("=") for pair in key["axes"].split()) if size}
                lines += [
                    f"{name}/Section.replicas = {choice.replicas}",
                    f"{name}/Section.axes = {axes}",
                    f"{name}/Section.row_length = {choice.candidate.work.row_length}",
                    f"{name}/Section.microbatch = {list(choice.candidate.work.buckets)}",
                    f"{name}/Section.remat = {key['remat']!r}",
                    f"{name}/Section.submesh = {'_'.join(group)!r}",
                ]
        return lines

    def _steps(self, dataset: Dataset) -> tuple[Any, ...]:
        batches = Batches(dataset, self.trainer.batch, self.trainer.seed)
        numbers = itertools.count()
        sampled = range(1 if self.trainer.batch >= SAMPLED or self.trainer.steps < 2 else 2)
        return tuple(
            tuple(sample_work(self.traced.plan, next(numbers), dataset.train[place]) for place in batches.places(step)) for step in sampled
        )

    def _edges(self, chosen: Mapping[str, Candidate]) -> tuple[EdgeWork, ...]:
        """Dependencies with the time of a slot's transfer; several edges between two sections are one."""
        found: dict[tuple[str, str], EdgeWork] = {}
        for edge in self.traced.plan.edges.values():
            producer, consumer = chosen[edge.edge.producer], chosen[edge.edge.consumer]
            large, small = producer.work.buckets[-1] // edge.merge, consumer.work.buckets[-1]
            size = min(large, small) * math.prod(edge.row.shape) * jnp.dtype(edge.row.dtype).itemsize
            parallel = min(producer.devices, consumer.devices)
            work = EdgeWork(
                producer=producer.section,
                consumer=consumer.section,
                delay=round(self.hardware.send(size / parallel, self.devices)),
                fan_in=self.trainer.graph[consumer.section].fan_in or fans(small, large, edge.edge),
                fan_out=self.trainer.graph[producer.section].fan_out or fans(large, small, edge.edge),
                paired=edge.edge.rows is None,
            )
            before = found.get((producer.section, consumer.section))
            found[producer.section, consumer.section] = work if before is None else _wider(before, work)
        return tuple(found.values())


def _wider(one: EdgeWork, other: EdgeWork) -> EdgeWork:
    return dataclasses.replace(
        one,
        delay=max(one.delay, other.delay),
        fan_in=max(one.fan_in or 0, other.fan_in or 0),
        fan_out=max(one.fan_out or 0, other.fan_out or 0),
        paired=one.paired and other.paired,
    )
