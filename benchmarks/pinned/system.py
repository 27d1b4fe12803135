"""Training by this system: what a user's run does, one window at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from maestro_jax import Trainer
from maestro_jax.run import StepResult
from maestro_jax.runtime import make_workload
from maestro_jax.runtime.dispatcher import Dispatcher
from maestro_jax.schedules import InOrder, Lockstep, Policy, Sequential, Task, Wavefront, lower_bound

from .cases import CLIP_NORM, SEED, Case, optimizer

POLICIES: dict[str, Policy] = {
    "wavefront": Wavefront(),
    "in_order": InOrder(),
    "sequential": Sequential(),
    "lockstep": Lockstep(),
    "shared": Wavefront(),
}


class OneAtATime(Dispatcher):
    """Waits for each task, in all processes: an order alone does not keep devices from running what they were given."""

    def start(self, task: Task) -> int:
        """Issues a task, and waits until it and what it sends have ended everywhere."""
        end = super().start(task)
        jax.block_until_ready((self.latest, [payload.arrays for payload in self.payloads.values()], self.returned))
        self.plan.group.all_gather("one at a time", None)
        return end


class System:
    """A run of the trainer, with costs that were measured at its beginning.

    Args:
        case: what is trained.
        way: name of a policy; "shared" puts all sections on all devices.
        windows: how many there will be.
    """

    def __init__(self, case: Case, way: str, windows: int) -> None:
        trainer = Trainer(
            graph=case.graph(shared=way == "shared"),
            data=case.dataset,
            steps=windows * case.window,
            batch=case.batch,
            seed=SEED,
            optimizer=optimizer(),
            clip_norm=CLIP_NORM,
            policy=POLICIES[way],
            costs="measured",
            run_ahead=case.window,
            # Nothing is evaluated; it makes the run wait at the end of each window, where the clock is stopped.
            evaluate_every=case.window,
            evaluate_batches=0,
            checkpoint_every=0,
            metrics=None,
        )
        self.case, self.run = case, trainer.start()
        if way == "sequential":
            self.run.engine.dispatcher = OneAtATime
        self._steps: Iterator[StepResult] = self.run.steps()
        self.last: list[StepResult] = []

    def window(self) -> list[float]:
        """Trains a window of steps; returns their losses when all has ended."""
        self.last = [next(self._steps) for _ in range(self.case.window)]
        return [result.metrics["loss"] for result in self.last]

    def facts(self) -> dict[str, Any]:
        """What is known of the window that ran last: units of a step with padding, and nanoseconds that were predicted for all steps."""
        engine, prepared = self.run.engine, [result.report.prepared for result in self.last]
        bytes_of = engine.compiled.bucket_bytes
        workload = make_workload(engine.plan, [step.samples for step in prepared], True, self.run.costs, bytes_of)
        return {
            "scheduled": dict(prepared[-1].scheduled),
            "predicted": max(task.end for task in engine.last_tasks) / 1e9,
            "bound": lower_bound(workload) / 1e9,
            "costs": self.run.costs.to_json(),
        }

    def close(self) -> None:
        """Ends the thread that prepares steps."""
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()
