"""Plans a config for devices that need not be there: costs of all ways to run its sections, sampled batches, and the search."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from .data import Batches, Dataset
from .errors import ScheduleError
from .graph import SectionGraph
from .models import traced_for
from .runtime.candidates import Traced
from .runtime.feeds import sample_work
from .runtime.hardware import Hardware
from .runtime.measured import MeasuredSection
from .runtime.memory import compiled_bytes
from .runtime.plan import fans, make_plan
from .schedules import EdgeWork, Workload
from .schedules.candidates import Allocation, Candidate, Choice, PlanningProblem
from .schedules.planning import Planned, Plans, judge, plan, with_candidates
from .trainer import Trainer

SAMPLED = 256
"""Samples that are scheduled together for every plan that is tried, at least."""
MOST_STEPS = 8
"""Of a run, that are scheduled together; at least two, but where a global batch is four times as large as the above."""
VERIFIED = 32
"""Devices of a plan's replicas, one of each section, up to which its tasks are compiled."""
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
        steps: the samples of some global batches; None takes them from the data.

    Raises:
        MaestroError: the data cannot be loaded, or sections do not fit together.
    """

    def __init__(
        self,
        trainer: Trainer,
        hardware: Hardware,
        devices: int,
        measured: Mapping[str, MeasuredSection] | None = None,
        steps: Workload | None = None,
    ) -> None:
        self.trainer, self.hardware, self.devices = trainer, hardware, devices
        self._dataset = dataset = trainer.dataset()
        with traced_for(hardware.platform):
            self.traced = Traced(trainer.graph, dataset.specs, trainer.optimizers(), hardware, trainer.in_flight, measured)
        self.problem = PlanningProblem(
            candidates={name: self.traced.candidates(name, devices) for name in self.traced.plan.sections},
            edges=self._edges,
            steps=self._steps(dataset) if steps is None else self._checked(steps),
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
                fields = {**fields_of(planned.allocation.choices[name]), "submesh": "_".join(group)}
                lines += [f"{name}/Section.{field} = {value!r}" for field, value in fields.items()]
        return lines

    def attention(self, name: str) -> str:
        """The kinds of attention that a section has on the hardware; "none" where it has none of ours."""
        return ", ".join(self.traced.plan.sections[name].shapes.attention) or "none"

    def compiled(self, planned: Planned) -> dict[str, tuple[int, int]] | None:
        """Compiles the tasks of a plan, for CPU devices unless there are enough others, and compares what sections hold with one replica.

        CPUs compute bfloat16 in float32, with copies of all weights; for them, both are those of sections in float32.

        Args:
            planned: the plan.

        Returns:
            Section -> bytes on its busiest device: as predicted, and as compiled. None: one replica of each takes more than `VERIFIED`
            devices.
        """
        choices, trainer = planned.allocation.choices, self.trainer
        wanted = sum(choice.candidate.devices for choice in choices.values())
        if wanted > VERIFIED:
            return None
        at_hand = jax.devices() if len(jax.devices()) >= wanted else jax.devices("cpu")
        kept = {"dtype": "float32"} if at_hand[0].platform == "cpu" else {}
        graph = SectionGraph(sections=tuple(dataclasses.replace(section, **kept) for section in trainer.graph.sections))
        # Buffers of communication are no part of a program.
        hardware = dataclasses.replace(self.hardware, communicator=0)
        traced = Traced(graph, self._dataset.specs, trainer.optimizers(), hardware, trainer.in_flight)
        sections = [
            dataclasses.replace(section, **{**fields_of(choices[section.name]), "replicas": 1, "submesh": section.name})
            for section in graph.sections
        ]
        made = make_plan(SectionGraph(sections=tuple(sections)), self._dataset.specs, at_hand)
        found = compiled_bytes(made, trainer.optimizers(), trainer.in_flight)
        return {
            name: (traced.candidate(name, choice.candidate.key, choice.devices).memory(1), found[name]) for name, choice in choices.items()
        }

    def regret(self, allocation: Allocation, best: Planned) -> float:
        """By which share a step of an allocation is longer than that of the best plan, by the costs of this planner.

        Args:
            allocation: as another planner of the same config, with other costs, chose it.
            best: what this planner found.
        """
        return judge(self.problem, with_candidates(self.problem, allocation)).step / best.step - 1

    def _steps(self, dataset: Dataset) -> tuple[Any, ...]:
        batches = Batches(dataset, self.trainer.batch, self.trainer.seed)
        numbers = itertools.count()
        least = 1 if self.trainer.batch >= 4 * SAMPLED else 2
        sampled = range(min(self.trainer.steps, max(least, min(MOST_STEPS, SAMPLED // self.trainer.batch))))
        return tuple(
            tuple(sample_work(self.traced.plan, next(numbers), dataset.train[place]) for place in batches.places(step)) for step in sampled
        )

    def _checked(self, workload: Workload) -> tuple[Any, ...]:
        """The steps of a workload, whose sections must be those of the config, and whose items must fit their rows."""
        known, named = set(self.traced.rows), set(workload.sections)
        if known != named:
            self._refuse_workload(f"the sections {', '.join(sorted(known))}", ", ".join(sorted(named)))
        for name, longest in self.traced.rows.items():
            most = max((u for step in workload.steps for sample in step for u in sample.items.get(name, ())), default=0)
            if most > longest:
                self._refuse_workload(f"items of at most {longest} units, a row of section {name!r}", f"one of {most} units")
        if not any(workload.steps):
            self._refuse_workload("at least one sample", "none")
        return workload.steps

    def _refuse_workload(self, wanted: str, have: str) -> NoReturn:
        raise ScheduleError(
            "the workload is not one of this config.",
            wanted=wanted,
            have=have,
            fix="write it with maestro_jax.train --dump_workload and the same config",
            anchor="workload-malformed",
            set_by="command line  --workload",
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


def fields_of(choice: Choice) -> dict[str, Any]:
    """The fields of a section that runs as a choice says, but for its submesh."""
    key = dict(choice.candidate.key)
    return {
        "replicas": choice.replicas,
        "axes": {axis: int(size) for axis, _, size in (pair.partition("=") for pair in key["axes"].split()) if size},
        "row_length": choice.candidate.work.row_length,
        "microbatch": list(choice.candidate.work.buckets),
        "remat": key["remat"],
    }


def _wider(one: EdgeWork, other: EdgeWork) -> EdgeWork:
    return dataclasses.replace(
        one,
        delay=max(one.delay, other.delay),
        fan_in=max(one.fan_in or 0, other.fan_in or 0),
        fan_out=max(one.fan_out or 0, other.fan_out or 0),
        paired=one.paired and other.paired,
    )
