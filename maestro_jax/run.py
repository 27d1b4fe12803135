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
from .pace import Interrupt, Pace
from .runtime import Engine, Preparer, StepReport
from .runtime.prefetch import Prefetcher

if TYPE_CHECKING:
    from .run_folder import RunFolder
    from .terminal import Terminal
    from .trainer import Trainer

LAG = 2
"""Steps between issuing a step and reading its numbers, so that reading never holds up the dispatcher."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class StepResult:
    """One step, as the iterator yields it.

    Args:
        step: number, from 1.
        seconds: wall time since the result before, without what the caller did meanwhile.
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

    def __repr__(self) -> str:
        numbers = {name: round(value, 4) for name, value in self.metrics.items()}
        return f"StepResult(step={self.step}, {', '.join(f'{n}={v}' for n, v in numbers.items())}, tokens={self.tokens})"

    def _uncounted(self, name: str) -> bool:
        section, objective = name.split("/", 1)
        return not self.report.prepared.counts[section, objective]


class Run:
    """The live side of a `Trainer`; made by `Trainer.start`.

    Attributes:
        trainer: what is being trained.
        dataset: the data.
        engine: parameters and compiled programs.
        step: optimizer steps that were issued.
        skipped_samples: samples left out because no micro-batch could hold them.
        skipped_steps: steps that `fit` saw whose update was not applied.
    """

    def __init__(
        self, *, trainer: Trainer, dataset: Dataset, batches: Batches | None, engine: Engine, preparer: Preparer, evaluation: bool
    ) -> None:
        self.trainer, self.dataset, self.engine = trainer, dataset, engine
        self.step = 0
        self.skipped_samples = self.skipped_steps = 0
        self._batches, self._preparer, self._evaluation = batches, preparer, evaluation
        sections = trainer.graph.sections
        self._objectives = {s.name: tuple(s.objectives) for s in sections if s.objectives}
        self._weights = {f"{s.name}/{n}": o.weight for s in sections for n, o in s.objectives.items()}
        self._main = next((s.name for s in sections if any(o.weight for o in s.objectives.values())), sections[-1].name)

    def __repr__(self) -> str:
        return f"Run(step {self.step}/{self.trainer.steps}, sections {', '.join(s.name for s in self.trainer.graph.sections)})"

    def steps(self) -> Iterator[StepResult]:
        """Trains, and yields each step some steps after it was issued; results are read when asked for.

        Raises:
            DataError: for a bad sample, when `on_bad_sample` is "raise".
        """
        prefetcher = Prefetcher(self._prepare, self.step, self.trainer.steps)
        waiting: collections.deque[StepReport] = collections.deque()
        last = time.perf_counter()
        try:
            for prepared in prefetcher:
                waiting.append(self.engine.step(prepared))
                self.step += 1
                # Nothing waits where an evaluation is due, so that it sees the parameters of that very step; nor at the end.
                pause = self.step == self.trainer.steps or (self.trainer.evaluate_every and self.step % self.trainer.evaluate_every == 0)
                while len(waiting) > (0 if pause else LAG):
                    # Waiting for this step bounds how far the host runs ahead of the devices.
                    report = waiting.popleft().wait()
                    now = time.perf_counter()
                    yield self._result(report, now - last)
                    last = time.perf_counter()
        finally:
            prefetcher.close()

    def fit(self, folder: RunFolder | None, terminal: Terminal) -> dict[str, float]:
        """Trains to the end with reports, evaluations and final weights; returns the last evaluation.

        Args:
            folder: where metrics and weights go; None writes nothing.
            terminal: the screen.

        Raises:
            KeyboardInterrupt: after Ctrl-C: the step that runs is finished and the weights are written first.
        """
        where = f", run folder {folder.path}" if folder is not None else ""
        terminal.start(f"training {self.trainer.steps} steps of {self.trainer.batch} samples{where}")
        values = self._report_evaluation(folder, terminal)
        pace = Pace()
        every = self.trainer.evaluate_every
        with Interrupt() as interrupt:
            for result in self.steps():
                pace.add(result)
                self._report_step(result, pace, folder, terminal)
                if interrupt.requested:
                    break
                if every and result.step % every == 0 and result.step != self.trainer.steps:
                    values = self._report_evaluation(folder, terminal)
            # Still inside: a Ctrl-C in the last evaluation must not lose the weights.
            if self.trainer.steps and not interrupt.requested:
                values = self._report_evaluation(folder, terminal)
            terminal.finish(self._last_lines(folder, interrupt.requested))
        if interrupt.requested:
            raise KeyboardInterrupt
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

    def _report_evaluation(self, folder: RunFolder | None, terminal: Terminal) -> dict[str, float]:
        values = self.evaluate()
        if values:
            terminal.evaluation(self.step, values)
            if folder is not None:
                folder.append({"step": self.step, "heldout": values}, name="evaluations.jsonl")
        return values

    def _report_step(self, result: StepResult, pace: Pace, folder: RunFolder | None, terminal: Terminal) -> None:
        metrics = result.metrics
        self.skipped_steps += not metrics["applied"]
        record = {
            "step": result.step,
            "steps": self.trainer.steps,
            "loss": metrics["loss"],
            "objectives": {name: metrics[name] for name in self._weights if name in metrics},
            "gradient_norm": metrics["gradient_norm"],
            "applied": bool(metrics["applied"]),
            "seconds": result.seconds,
            "tokens": result.tokens,
            "tokens_per_second": pace.tokens_per_second,
            "eta_seconds": pace.seconds_a_step * (self.trainer.steps - result.step) if pace.seconds_a_step else None,
            "padding": dict(result.report.prepared.padding),
            "skipped_steps": self.skipped_steps,
        }
        if folder is not None:
            folder.append(record)
        terminal.tick(result.step, self.trainer.steps)
        if result.step % self.trainer.log_every == 0 or result.step in (1, self.trainer.steps) or not record["applied"]:
            terminal.step(record)
            pace.printed()

    def _last_lines(self, folder: RunFolder | None, interrupted: bool) -> list[str]:
        lines = [f"interrupted after step {self.step}/{self.trainer.steps}"] if interrupted else []
        if self.skipped_steps:
            lines.append(f"{self.skipped_steps} steps were skipped because a gradient was not finite or nothing counted")
        if self.skipped_samples:
            lines.append(f"{self.skipped_samples} samples were skipped because no micro-batch could hold them")
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
            step=report.prepared.step + 1,
            seconds=seconds,
            report=report,
            objectives=self._objectives,
            weights=self._weights,
            tokens=report.prepared.units[self._main],
        )
