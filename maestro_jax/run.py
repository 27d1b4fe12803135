"""A run: a trainer that has been placed, compiled and initialised."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .data import Batches, Dataset, Sample
from .data.batches import heldout_batches
from .models.weights import save_weights
from .runtime import Engine, Preparer, StepReport
from .runtime.prefetch import Prefetcher

if TYPE_CHECKING:
    from .run_folder import RunFolder
    from .terminal import Terminal
    from .trainer import Trainer

LAG = 2
"""Steps between issuing a step and reading its numbers, so that reading never holds up the dispatcher."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step, as the iterator yields it.

    Args:
        step: number, from 1.
        seconds: wall time since the step before.
        report: the step on the devices.
        objectives: section -> names of its objectives.
        weights: "section/objective" -> weight in the loss.
        tokens: units in the items of the first section with a loss.
    """

    step: int
    seconds: float
    report: StepReport
    objectives: dict[str, tuple[str, ...]]
    weights: dict[str, float]
    tokens: int

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """Waits for the step and returns "loss", "section/objective" -> value, "gradient_norm" and "applied" (0 or 1)."""
        found = self.report.read(self.objectives)
        weighted = [w * found[n] for n, w in self.weights.items() if w and n in found and not self._uncounted(n)]
        return {"loss": float(sum(weighted)) if weighted else math.nan, **found}

    def _uncounted(self, name: str) -> bool:
        section, objective = name.split("/")
        return not self.report.prepared.counts[section, objective]


class Run:
    """The live side of a `Trainer`; made by `Trainer.start`.

    Attributes:
        trainer: what is being trained.
        dataset: the data.
        engine: parameters and compiled programs.
        step: optimizer steps that were issued.
        skipped_samples: samples left out because they fit no micro-batch.
    """

    def __init__(
        self, *, trainer: Trainer, dataset: Dataset, batches: Batches | None, engine: Engine, preparer: Preparer, evaluation: bool
    ) -> None:
        self.trainer, self.dataset, self.engine = trainer, dataset, engine
        self.step = 0
        self.skipped_samples = 0
        self._batches, self._preparer, self._evaluation = batches, preparer, evaluation
        sections = trainer.graph.sections
        self._objectives = {s.name: tuple(s.objectives) for s in sections if s.objectives}
        self._weights = {f"{s.name}/{n}": o.weight for s in sections for n, o in s.objectives.items()}
        self._main = next((s.name for s in sections if any(o.weight for o in s.objectives.values())), sections[-1].name)

    def steps(self) -> Iterator[StepResult]:
        """Trains, and yields each step some steps after it was issued; results are read when asked for.

        Raises:
            DataError: for a bad sample, when `on_bad_sample` is "raise".
        """
        prefetcher = Prefetcher(self._prepare, self.step, self.trainer.steps)
        waiting: collections.deque[StepResult] = collections.deque()
        last = time.perf_counter()
        try:
            for prepared in prefetcher:
                report = self.engine.step(prepared)
                self.step += 1
                now = time.perf_counter()
                waiting.append(self._result(report, now - last))
                last = now
                # Nothing waits where an evaluation is due, so that it sees the parameters of that very step.
                pause = self.trainer.evaluate_every and self.step % self.trainer.evaluate_every == 0
                while len(waiting) > (0 if pause else LAG):
                    # Reading here bounds how far the host runs ahead of the devices.
                    _ = waiting[0].metrics
                    yield waiting.popleft()
            yield from waiting
        finally:
            prefetcher.close()

    def fit(self, *, folder: RunFolder | None, terminal: Terminal) -> dict[str, float]:
        """Trains to the end with reports, evaluations and final weights; returns the last evaluation."""
        terminal.start(self._start_line(folder))
        values = self._report_evaluation(folder, terminal)
        skipped_steps, seconds = 0, 0.0
        every = self.trainer.evaluate_every
        for result in self.steps():
            seconds += result.seconds
            skipped_steps += not result.metrics["applied"]
            record = self._record(result, seconds, skipped_steps)
            if folder is not None:
                folder.append(record)
            if result.step % self.trainer.log_every == 0 or result.step in (1, self.trainer.steps) or not record["applied"]:
                terminal.step(record)
            if every and result.step % every == 0 and result.step != self.trainer.steps:
                values = self._report_evaluation(folder, terminal)
        if self.trainer.steps:
            values = self._report_evaluation(folder, terminal)
        terminal.finish(self._last_lines(folder, skipped_steps))
        return values

    def evaluate(self) -> dict[str, float]:
        """Returns "section/objective" -> mean over the held-out data; empty when there is none. Training is not disturbed."""
        if not self._evaluation:
            return {}
        batches = itertools.islice(heldout_batches(self.dataset, self.trainer.batch), self.trainer.evaluate_batches)
        return self.engine.evaluate(self._preparer.prepare(self._fitting(batch), 0, training=False) for batch in batches)

    def save(self, folder: Path | str) -> list[Path]:
        """Writes the parameters of every section that was trained to `folder/SECTION.safetensors`, in the trainer's `save_dtype`."""
        written = []
        for name in self.engine.compiled.trained:
            path = Path(folder) / f"{name}.safetensors"
            save_weights(path, self.engine.parameters(name), tokenizer=self.dataset.tokenizer_fingerprint, dtype=self.trainer.save_dtype)
            written.append(path)
        return written

    def _start_line(self, folder: RunFolder | None) -> str:
        where = f", run folder {folder.path}" if folder is not None else ""
        return f"training {self.trainer.steps} steps of {self.trainer.batch} samples{where}"

    def _report_evaluation(self, folder: RunFolder | None, terminal: Terminal) -> dict[str, float]:
        values = self.evaluate()
        if values:
            terminal.evaluation(self.step, values)
            if folder is not None:
                folder.append({"step": self.step, "heldout": values}, name="evaluations.jsonl")
        return values

    def _record(self, result: StepResult, seconds: float, skipped_steps: int) -> dict[str, Any]:
        metrics = result.metrics
        return {
            "step": result.step,
            "steps": self.trainer.steps,
            "loss": metrics["loss"],
            "objectives": {name: metrics[name] for name in self._weights if name in metrics},
            "gradient_norm": metrics["gradient_norm"],
            "applied": bool(metrics["applied"]),
            "tokens_per_second": result.tokens / result.seconds,
            "seconds": result.seconds,
            "eta_seconds": seconds / result.step * (self.trainer.steps - result.step),
            "padding": dict(result.report.prepared.padding),
            "skipped_steps": skipped_steps,
        }

    def _last_lines(self, folder: RunFolder | None, skipped_steps: int) -> list[str]:
        lines = [f"{skipped_steps} steps were skipped because a gradient was not finite or nothing counted"] if skipped_steps else []
        lines += [f"{self.skipped_samples} samples were skipped because they fit no micro-batch"] if self.skipped_samples else []
        if folder is not None:
            saved = self.save(folder.path / "weights") if self.trainer.steps else []
            lines += [f"weights: {path}" for path in saved]
            lines.append(f"run folder: {folder.path}")
        return lines

    def _prepare(self, step: int) -> Any:
        if self._batches is None:
            raise RuntimeError("a run of 0 steps has no training batches")
        return self._preparer.prepare(self._fitting(self._batches(step)), step)

    def _fitting(self, samples: Sequence[Sample]) -> list[Sample]:
        good, bad = self.trainer.fitting(self.engine.plan, self.dataset, samples)
        self.skipped_samples += len(bad)
        return good

    def _result(self, report: StepReport, seconds: float) -> StepResult:
        return StepResult(
            step=self.step,
            seconds=seconds,
            report=report,
            objectives=self._objectives,
            weights=self._weights,
            tokens=report.prepared.units[self._main],
        )
