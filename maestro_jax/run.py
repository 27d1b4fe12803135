"""A run: a trainer that has been placed, compiled and initialised."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .data import Batches, Dataset
from .data.batches import heldout_places
from .errors import ConfigError, set_by
from .final_weights import save_sections
from .initial_weights import as_given
from .record import Record
from .runtime import Engine, Preparer, StepReport, Window
from .runtime.completions import Completions
from .runtime.costs import Costs
from .runtime.global_batch import BadSample, GlobalBatch
from .runtime.measure import fitted_costs, measure
from .runtime.prefetch import Prefetcher
from .runtime.startup import Exercise
from .verification import LIMIT, MOST_UNITS, Verification, verify_run

if TYPE_CHECKING:
    from .trainer import Trainer

LAG = 2
"""Steps between issuing a step and reading its numbers, so that reading never holds up the dispatcher."""

_HELDOUT = 0
"""Stands for the last evaluation among the numbers of steps."""


def never() -> bool:
    """Asks for no stop."""
    return False


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

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Waits for the step and says what was not finite in a step that was not applied."""
        return self.report.not_finite(self.objectives, self.weights)

    def __repr__(self) -> str:
        numbers = {name: round(value, 4) for name, value in self.metrics.items()}
        return f"StepResult(step={self.step}, {', '.join(f'{n}={v}' for n, v in numbers.items())}, tokens={self.tokens})"

    def _repr_html_(self) -> str:
        from .drawing.curves import step_html  # here, because only notebooks draw

        return step_html(self.step, self.metrics, self.tokens)

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
        group: the processes of the run.
        exercised: what came of trying the ways between processes.
        stopping: whether no more steps are issued, because a stop was asked for.
        skipped_samples: how often training samples were left out, by kind: the heading of docs/errors.md that explains it.
        skipped_heldout: how many held-out samples were left out of the last evaluation, by kind.
        records: what was measured of each window with a step that `Trainer.timelines` names; `Trainer.fit` moves them to the run folder.
        objectives: section -> names of its objectives.
        weights: "section/objective" -> weight in the loss.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        dataset: Dataset,
        batches: Batches | None,
        engine: Engine,
        preparer: Preparer,
        evaluation: bool,
        step: int = 0,
        exercised: Exercise | None = None,
        weights: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.trainer, self.dataset, self.engine = trainer, dataset, engine
        self._given = weights or {}
        self.step, self.exercised = step, exercised or Exercise()
        self.skipped_samples: collections.Counter[str] = collections.Counter()
        self.skipped_heldout: collections.Counter[str] = collections.Counter()
        self._batches, self._preparer, self._evaluation = batches, preparer, evaluation
        self._bad: dict[int, list[BadSample]] = {}
        self.group = engine.plan.group
        self._reader = trainer.reader(engine.plan, dataset)
        self._wants_stop: Callable[[], bool] = never
        self._stops: dict[int, bool] = {}
        self._timelines = set(trainer.timelines)
        self._watched: dict[int, Completions] = {}
        self.records: list[Record] = []
        self.stopping = False
        sections = trainer.graph.sections
        self.objectives = {s.name: tuple(s.objectives) for s in sections if s.objectives}
        self.weights = {f"{s.name}/{n}": o.weight for s in sections for n, o in s.objectives.items()}
        self._main = next((s.name for s in sections if any(o.weight for o in s.objectives.values())), sections[-1].name)

    def __repr__(self) -> str:
        return f"Run(step {self.step}/{self.trainer.steps}, sections {', '.join(s.name for s in self.trainer.graph.sections)})"

    def steps(self, stop: Callable[[], bool] = never) -> Iterator[StepResult]:
        """Trains, and yields each step some steps after it was issued; results are read when asked for.

        Args:
            stop: asked before each step; once it says so, no more steps are issued, and those that were are yielded. Where there are
                several processes, all of them stop at the same step when it says so in any of them, as soon as all know.

        Raises:
            DataError: for a bad sample, when `on_bad_sample` is "raise".
        """
        self._wants_stop, self.stopping = stop, False
        prefetcher = Prefetcher(self._prepare, self._windows())
        waiting: collections.deque[StepReport] = collections.deque()
        last = time.perf_counter()
        try:
            for window in self._waited(prefetcher):
                if self._stops.pop(self.step, False) or (self.group.count == 1 and stop()):
                    self.stopping = True
                    break
                for issued in self.engine.run(window, self._watch(window)):
                    waiting.append(issued)
                    self.step += 1
                    while len(waiting) > (0 if self.trainer.pauses(self.step) else LAG):
                        # Waiting for this step bounds how far the host runs ahead of the devices.
                        report = self._ended(waiting.popleft())
                        now = time.perf_counter()
                        yield self._result(report, now - last)
                        last = time.perf_counter()
            for report in waiting:
                yield self._result(self._ended(report), time.perf_counter() - last)
                last = time.perf_counter()
        finally:
            prefetcher.close()

    def _waited(self, windows: Iterable[Window]) -> Iterator[Window]:
        """The windows, while it is told that they are waited for."""
        standing, ready = self.engine.standing, iter(windows)
        while True:
            standing.waiting = "the next steps to be prepared"
            window = next(ready, None)
            standing.waiting = ""
            if window is None:
                return
            yield window

    def record(self) -> Record:
        """Trains the next steps, those that are scheduled together, and returns what was scheduled and what was measured of them.

        Raises:
            ConfigError: no step is left.
            DataError: for a bad sample, when `on_bad_sample` is "raise".
        """
        first = self.step
        if first >= self.trainer.steps:
            raise ConfigError(
                "no step is left that could be recorded.",
                wanted="a step that is still to be trained",
                have=f"{first} of {self.trainer.steps} steps are trained",
                fix="raise steps, or start another run",
                anchor="trainer-value",
                set_by=set_by(self.trainer, "steps"),
            )
        self._timelines.add(first + 1)
        collections.deque(self.steps(lambda: self.step > first), maxlen=0)
        return self.records.pop()

    def evaluate(self, stop: Callable[[], bool] = never) -> dict[str, float]:
        """Returns "section/objective" -> mean over the held-out data; empty when there is none. Training is not disturbed.

        Args:
            stop: asked before each batch; once it says so, nothing is returned.
        """
        if not self._evaluation:
            return {}
        self.skipped_heldout, self._bad[_HELDOUT] = collections.Counter(), []
        # Several processes could stop at different batches, and wait for each other.
        stops = stop if self.group.count == 1 else never
        places = itertools.islice(heldout_places(self.dataset, self.trainer.batch), self.trainer.evaluate_batches)
        going = itertools.takewhile(lambda _: not stops(), places)
        values = self.engine.evaluate(self._preparer.prepare(self._heldout(batch), 0, training=False) for batch in going)
        return {} if stops() else values

    @property
    def repeats(self) -> bool:
        """Whether training samples may have come more than once."""
        return self._batches is not None and self.step > self._batches.steps_without_repeats

    @property
    def costs(self) -> Costs:
        """What the policy takes tasks to cost."""
        return self._preparer.costs

    def measure_costs(self, steps: int = 3) -> None:
        """Runs tasks of the next steps one by one, the first step to warm up, and fits costs to what they took; trains nothing.

        All processes of a run call this.
        """
        skipped = self.skipped_samples.copy()
        windows = (self._prepare(range(n, n + 1)) for n in range(self.step, self.step + steps))
        fitted = fitted_costs(self._preparer.costs, measure(self.engine, windows), self.exercised.delays)
        # All schedule by the numbers of the first process: a fit may end in other last bits on another machine.
        self._preparer.costs = Costs.from_json(self.group.all_gather("costs", fitted.to_json())[0])
        # These samples come again.
        self.skipped_samples = skipped
        self._bad.clear()

    def verify(self, *, limit: float = LIMIT, most_units: int = MOST_UNITS) -> Verification:
        """Compares the gradient at the present parameters with that of one program, on samples of the next steps; changes nothing.

        Args:
            limit: largest relative difference that is right.
            most_units: most units (tokens) of any stream, each item padded to the longest.

        Returns:
            What was found; `require()` raises when gradients differ.

        Raises:
            MaestroError: see `maestro_jax.verification.verify_run`.
        """
        return verify_run(self, limit=limit, most_units=most_units)

    def save(self, folder: Path | str, parameters: Callable[[str], Mapping[str, np.ndarray]] | None = None) -> list[Path]:
        """Writes the parameters of every section that was trained, in the trainer's `save_dtype`.

        A model that came from a folder of Hugging Face goes into such a folder, `folder/SECTION` (`folder/SECTION_SECTION`, where sections
        hold parts of one model); everything else that was trained into `folder/SECTION.safetensors`.

        What is frozen in them and came from a file is as in that file.

        Args:
            folder: where to.
            parameters: section -> path -> value; None takes those on this process's devices.

        Returns:
            The files and folders.
        """
        read = parameters or self.engine.parameters
        trainer = self.trainer
        return save_sections(
            Path(folder),
            [trainer.graph[name] for name in self.engine.compiled.trained],
            lambda name: as_given(read(name), self._given.get(name, {})),
            self.dataset.tokenizer_fingerprint,
            trainer.save_dtype,
            trainer.save_shard_bytes,
        )

    def bad_samples(self, step: int) -> list[BadSample]:
        """Returns, once, the samples of a step (counted from 1; 0: of the last evaluation) that were left out, and why."""
        return self._bad.pop(step, [])

    def _windows(self) -> list[range]:
        """The steps that are scheduled together, from here to the end."""
        windows, first = [], self.step
        while first < self.trainer.steps:
            windows.append(self.trainer.window(first))
            first = windows[-1].stop
        return windows

    def _prepare(self, steps: range) -> Window:
        if self._batches is None:
            raise RuntimeError("a run of 0 steps has no training batches")
        if self.group.count > 1:
            self._stops[steps.start] = any(self.group.all_gather("stop", self._wants_stop()))
        standing, named = self.engine.standing, f"step {steps.start + 1}" + (f" to {steps.stop}" if len(steps) > 1 else "")
        standing.preparing = f"reads the samples of {named}"
        read = self._reader.read(self.dataset.train, [self._batches.places(step) for step in steps], "training samples")
        standing.preparing = f"prepares {named}"
        self._bad |= {step + 1: bad for step, (_, bad) in zip(steps, read, strict=True) if bad}
        window = self._preparer.prepare_window([batch for batch, _ in read], steps.start)
        standing.preparing = ""
        return window

    def _watch(self, window: Window) -> Completions | None:
        """Watches a window with a step of which a timeline is wanted."""
        if self._timelines.isdisjoint(step.step + 1 for step in window.steps):
            return None
        found = self._watched[window.steps[-1].step] = Completions(self.engine.plan, window)
        return found

    def _heldout(self, places: Sequence[int]) -> GlobalBatch:
        [(batch, bad)] = self._reader.read(self.dataset.heldout, [places], "held-out samples")
        self.skipped_heldout.update(sample.error.anchor for sample in bad)
        self._bad[_HELDOUT] += bad
        return batch

    def _ended(self, report: StepReport) -> StepReport:
        """Waits for a step."""
        standing = self.engine.standing
        standing.waiting = f"step {report.prepared.step + 1} to end"
        found = report.wait().shared(self.engine.plan)
        watched = self._watched.pop(report.prepared.step, None)
        if watched is not None:
            nominal = self.trainer.costs == "counted"
            self.records.append(dataclasses.replace(watched.record(), nominal=nominal))
        standing.waiting = ""
        standing.step_ended()
        return found

    def _result(self, report: StepReport, seconds: float) -> StepResult:
        step = report.prepared.step + 1
        # Counted here and not where they are found: steps that are prepared ahead do not count in a checkpoint.
        self.skipped_samples.update(sample.error.anchor for sample in self._bad.get(step, ()))
        return StepResult(
            step=step,
            seconds=seconds,
            report=report,
            objectives=self.objectives,
            weights=self.weights,
            tokens=report.prepared.units[self._main],
        )
