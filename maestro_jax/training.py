"""A run to its end, with everything around its steps: reports, evaluations, checkpoints, and what is made of bad steps."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bad_samples import BadSampleLimit, cause_of, count_lines
from .checkpoint import Checkpoints, Commit
from .errors import set_by
from .pace import Interrupt, Pace
from .run import Run, StepResult
from .step_policies import LossWatch, SkipLimit

if TYPE_CHECKING:
    from .metrics import Writer
    from .run_folder import RunFolder
    from .runtime.global_batch import BadSample
    from .terminal import Terminal


class Training:
    """Trains a run to its end.

    Args:
        run: what is trained; its step is where training begins.
        terminal: the screen.
        folder: where metrics and weights go; None writes nothing.
        checkpoints: where checkpoints go; None writes none.
        writer: where numbers go besides the run folder; None nowhere.
        state: what a checkpoint keeps beside arrays and does not change while training.
    """

    def __init__(
        self,
        run: Run,
        terminal: Terminal,
        *,
        folder: RunFolder | None = None,
        checkpoints: Checkpoints | None = None,
        writer: Writer | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.run, self.trainer = run, run.trainer
        self._terminal, self._folder, self._checkpoints, self._writer = terminal, folder, checkpoints, writer
        self._state = dict(state or {})
        self._watch = LossWatch()
        self._skips = SkipLimit(self.trainer.skip_limit, set_by=set_by(self.trainer, "skip_limit"))
        limit, batch, steps = self.trainer.skip_limit, self.trainer.batch, self.trainer.steps
        self._bad_limit = BadSampleLimit(limit, batch=batch, steps=steps, set_by=set_by(self.trainer, "skip_limit"))
        self._pace = Pace()
        self._drawing, self._drawn = ThreadPoolExecutor(1, "timelines"), list[Future[None]]()
        self._named: set[str] = set()
        self._units: collections.Counter[str] = collections.Counter()
        self._scheduled: collections.Counter[str] = collections.Counter()
        self._saved_step = run.step if run.step else None
        self._best: float | None = None
        self._last: dict[str, float] = {}
        self._evaluated_step: int | None = None

    def restore(self, commit: Commit) -> None:
        """Takes back what the checkpoint that the run goes on from kept."""
        state = commit.state
        self._watch.restore(state["watch"])
        self._skips.restore(state["skips"])
        # Checkpoints of earlier versions know nothing of it.
        self._bad_limit.restore(state.get("bad_samples", self._bad_limit.state()))
        self.run.skipped_samples = collections.Counter(state["skipped_samples"])
        self._last, self._evaluated_step = dict(commit.heldout or state["heldout"]), commit.step if commit.heldout else None
        best = self._checkpoints.best() if self._checkpoints is not None else None
        self._best = best[0] if best is not None else None

    def fit(self) -> dict[str, float]:
        """Trains to the end; returns the last evaluation.

        Raises:
            KeyboardInterrupt: after Ctrl-C: the step that runs is finished, and checkpoint and weights are written first.
            Preempted: after SIGTERM: the same.
            TrainingError: too many steps in a row were skipped.
            CheckpointError: something cannot be written.
        """
        with Interrupt() as interrupt, self._drawing:
            self._terminal.start(self._first_line())
            self.run.engine.standing.begin()
            # A run that was stopped at a step with an evaluation has not made it.
            missed = self._evaluates_at(self.run.step) and self._evaluated_step != self.run.step
            if missed or not self.run.step or not self.trainer.steps:
                self._evaluate(interrupt)
            for result in self.run.steps(lambda: interrupt.requested):
                self._report(result)
                # Of several processes, one may have been asked earlier than the others know: all stop at one step.
                if not (self.run.stopping or (self.run.group.count == 1 and interrupt.requested)):
                    self._between_steps(result.step, interrupt)
            interrupt.signal = next((asked for asked in self.run.group.all_gather("signal", interrupt.signal) if asked is not None), None)
            # Still inside: a Ctrl-C in the last evaluation must lose neither checkpoint nor weights.
            if self._saved_step != self.run.step:
                self._save()
            if self._checkpoints is not None:
                with self.run.engine.standing.pause():
                    self._checkpoints.wait()
            for drawn in self._drawn:
                drawn.result()
            self._terminal.finish(self._last_lines(interrupt))
        interrupt.raise_it()
        return self._last

    def _between_steps(self, step: int, interrupt: Interrupt) -> None:
        """Evaluates and saves where that is due; the engine stands at this very step then."""
        trainer, improved = self.trainer, False
        at_end = step == trainer.steps
        if self._evaluates_at(step):
            improved = self._evaluate(interrupt)
        if improved or at_end or (trainer.checkpoint_every and step % trainer.checkpoint_every == 0):
            self._save()

    def _evaluates_at(self, step: int) -> bool:
        every = self.trainer.evaluate_every
        return step == self.trainer.steps or bool(every and step % every == 0)

    def _evaluate(self, interrupt: Interrupt) -> bool:
        """Evaluates and reports; returns whether the objective that decides which checkpoint is the best has improved."""
        values = self.run.evaluate(lambda: interrupt.requested)
        self._tell("held out", self.run.bad_samples(0))
        if not values:
            return False
        self._last, self._evaluated_step = values, self.run.step
        self._terminal.evaluation(self.run.step, values)
        if self.run.step and not self.trainer.steps:
            # Only a look at a run that stays as it is.
            return False
        if self._folder is not None:
            self._folder.append({"step": self.run.step, "heldout": values}, name="evaluations.jsonl")
        if self._writer is not None:
            self._writer.heldout(self.run.step, values)
        saved = self.run.step == self._saved_step
        if saved and self._checkpoints is not None:
            self._checkpoints.add_heldout(self.run.step, values)
        value = values.get(self.trainer.keep_best or "", math.nan)
        # No checkpoint can be the best of step 0.
        if not math.isfinite(value) or not self.run.step or (self._best is not None and value >= self._best):
            return False
        self._best = value
        return not saved

    def _save(self) -> None:
        # After a skipped step, parameters may be what made it so: the checkpoint before it stays the newest.
        if self._checkpoints is None or not self.run.step or self._skips.in_a_row:
            return
        step, state = self.run.step, {**self._state, "watch": self._watch.state(), "skips": self._skips.state()}
        state |= {"skipped_samples": dict(self.run.skipped_samples), "bad_samples": self._bad_limit.state(), "heldout": self._last}
        with self.run.engine.standing.pause():
            self._checkpoints.save(step, self.run.engine.snapshot(), state, self._last if self._evaluated_step == step else None)
        self._saved_step = step

    def _report(self, result: StepResult) -> None:
        self._pace.add(result)
        self._units.update(result.report.prepared.units)
        self._scheduled.update(result.report.prepared.scheduled)
        metrics, trainer = result.metrics, self.trainer
        applied = bool(metrics["applied"])
        causes = () if applied else result.not_finite
        bad = self.run.bad_samples(result.step)
        record = {
            "step": result.step,
            "steps": trainer.steps,
            "loss": metrics["loss"],
            "objectives": {name: metrics[name] for name in self.run.weights if name in metrics},
            "gradient_norm": metrics["gradient_norm"],
            "applied": applied,
            "seconds": result.seconds,
            "tokens": result.tokens,
            "tokens_per_second": self._pace.tokens_per_second,
            "eta_seconds": self._pace.seconds_a_step * (trainer.steps - result.step) if self._pace.seconds_a_step else None,
            "padding": dict(result.report.prepared.padding),
            "busy": dict(result.report.prepared.busy),
            "skipped_steps": self._skips.skipped + self._skips.empty + (not applied),
            **({"not_finite": list(causes)} if causes else {}),
            **({"bad_samples": [sample.error.what for sample in bad]} if bad else {}),
        }
        if self._folder is not None:
            self._folder.append(record)
        if self._writer is not None:
            self._writer.steps(record)
        while self._folder is not None and self.run.records:
            # Beside the steps: drawing thousands of tasks takes a second, and meanwhile nothing would be issued.
            self._drawn.append(self._drawing.submit(self._folder.write_timeline, self.run.records.pop(0)))
        self._terminal.tick(result.step, trainer.steps)
        if result.step % trainer.log_every == 0 or result.step in (1, trainer.steps) or not applied:
            self._terminal.step(record)
            self._pace.printed()
        self._judge(result, applied, causes, bad)

    def _judge(self, result: StepResult, applied: bool, causes: tuple[str, ...], bad: list[BadSample]) -> None:
        self._tell(f"step {result.step}", bad)
        for cause in causes:
            self._terminal.note(f"step {result.step} is skipped in every section: {cause}")
        warning = self._watch.add(result.step, result.metrics["loss"], applied=applied)
        if warning is not None:
            self._terminal.note(warning)
        samples = result.report.prepared.samples
        self._skips.add(result.step, applied=applied, causes=causes, samples=[sample.id for sample in samples])
        self._bad_limit.add(result.step, [tuple(sample.items) for sample in samples], bad)

    def _tell(self, where: str, bad: list[BadSample]) -> None:
        """Says why the first sample of each kind is left out; all of a step are named in metrics.jsonl."""
        for error in (sample.error for sample in bad):
            if error.anchor not in self._named:
                self._named.add(error.anchor)
                self._terminal.note(f"{where}: {cause_of(error)} It is left out; others of this kind ({error.anchor}) are counted.")

    def _save_weights(self, folder: Path) -> list[Path]:
        """Writes final weights; of several processes, the first one reads those of the others from the last checkpoint."""
        checkpoints = self._checkpoints
        if self.run.group.count == 1 or checkpoints is None:
            return self.run.save(folder)
        newest = checkpoints.commits()[:1]
        return self.run.save(folder, lambda section: checkpoints.read_parameters(newest[0], section)) if newest else []

    def _first_line(self) -> str:
        trainer, step = self.trainer, self.run.step
        where = f", run folder {self._folder.path}" if self._folder is not None else ""
        if not trainer.steps:
            return f"evaluating after {step} steps{where}"
        if not step:
            go_on = " (the same command goes on with it)" if self._checkpoints is not None else ""
            return f"training {trainer.steps} steps of {trainer.batch} samples{where}{go_on}"
        if step >= trainer.steps:
            return (
                f"complete: {step} of {trainer.steps} steps are trained{where}; nothing to do. Raise the number of steps to go on, "
                "name another --workdir for another run, or begin anew with --restart"
            )
        return f"resuming from step {step} of {trainer.steps}{where} (--restart begins anew)"

    def _last_lines(self, interrupt: Interrupt) -> list[str]:
        run, lines = self.run, []
        if interrupt.requested:
            lines.append(f"interrupted after step {run.step}/{self.trainer.steps}")
        if self._skips.skipped or self._skips.empty:
            count = self._skips.skipped + self._skips.empty
            lines.append(f"{count} steps were skipped because a gradient was not finite or nothing counted")
        if self._scheduled.total():
            lines.append(padding_line(self._units, self._scheduled))
        lines += count_lines(run.skipped_samples, run.skipped_heldout, repeats=run.repeats)
        if self._folder is not None:
            saved = self._save_weights(self._folder.path / "weights") if run.step else []
            lines += [f"weights: {path}" for path in saved]
            if self._checkpoints is not None and self._saved_step is not None:
                lines.append(f"checkpoint: step {self._saved_step}; the same command goes on from there")
            lines.append(f"run folder: {self._folder.path}")
        return lines


def padding_line(units: Mapping[str, int], scheduled: Mapping[str, int]) -> str:
    """Says what share of the units of all micro-batches held no item: over all sections together, and in each.

    Args:
        units: section -> units in its items.
        scheduled: section -> units of its micro-batches.

    >>> padding_line({"vision": 90, "llm": 380}, {"vision": 100, "llm": 400})
    'padding: 6.0 % of all units (vision 10.0 %, llm 5.0 %)'
    """
    shares = [f"{name} {100 * (1 - units[name] / total):.1f} %" for name, total in scheduled.items() if total]
    whole = 1 - sum(units[name] for name in scheduled) / sum(scheduled.values())
    return f"padding: {100 * whole:.1f} % of all units ({', '.join(shares)})"
