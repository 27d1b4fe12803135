"""What a training yielded so far, as numbers that draw themselves in a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .drawing.curves import curve, legend
from .drawing.svg import readable
from .drawing.tables import table_html

if TYPE_CHECKING:
    from .run import StepResult


class History:
    """The numbers of steps, and of evaluations between them: curves and a table in a notebook.

    It keeps numbers alone; a `StepResult` holds on to the samples of its step and to arrays on the devices.

    Args:
        results: of steps, for example `run.steps()`: then training goes on to its end.

    Attributes:
        steps: numbers of the steps, from 1.
        heldout: step -> "section/objective" -> mean over the held-out data.
    """

    def __init__(self, results: Iterable[StepResult] = ()) -> None:
        self.steps: list[int] = []
        self.heldout: dict[int, dict[str, float]] = {}
        self._numbers: list[Mapping[str, float]] = []
        self._weights: Mapping[str, float] = {}
        self.extend(results)

    def add(self, result: StepResult) -> None:
        """Takes the numbers of a step; waits for it."""
        self.steps.append(result.step)
        self._numbers.append(dict(result.metrics))
        self._weights = result.weights

    def extend(self, results: Iterable[StepResult]) -> None:
        """Takes the numbers of steps as they come."""
        for result in results:
            self.add(result)

    def add_heldout(self, step: int, values: Mapping[str, float]) -> None:
        """Takes an evaluation.

        Args:
            step: steps trained before it.
            values: what `Run.evaluate` returned.
        """
        if values:  # without held-out data there are none
            self.heldout[step] = dict(values)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all numbers: "loss", "section/objective", "gradient_norm"."""
        found = dict.fromkeys(name for numbers in (*self._numbers, *self.heldout.values()) for name in numbers)
        return tuple(name for name in found if name != "applied")

    def __getitem__(self, name: str) -> list[float]:
        """The values of one of `names`, one a step; NaN where a step has none."""
        if name not in self.names:
            raise KeyError(f"{name!r} is not one of {', '.join(self.names)}")
        return [numbers.get(name, math.nan) for numbers in self._numbers]

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        if not self.steps:
            return f"History(no steps, {len(self.heldout)} evaluations)"
        losses = self["loss"]
        steps = f"steps {self.steps[0]}-{self.steps[-1]}, loss {readable(losses[0])} to {readable(losses[-1])}"
        return f"History({steps}, {len(self.heldout)} evaluations)"

    def _repr_html_(self) -> str:
        """The curves and the table, for notebooks."""
        if not self.names:
            return "<p>no steps yet</p>"
        if max(len(self.steps), len(self.heldout)) < 2:
            return self._table()  # a curve of one point shows nothing
        series = {name: (list(zip(self.steps, self[name], strict=True)), list(self._heldout_of(name).items())) for name in self.names}
        curves = " ".join(curve(name, line, dots) for name, (line, dots) in series.items())
        return f"<div>{curves}</div>" + legend("training, each step", "held-out data" if self.heldout else "") + self._table()

    def _heldout_of(self, name: str) -> dict[int, float]:
        """Step -> value in evaluations; the loss is that of training, on held-out data."""
        found = {}
        for step, values in self.heldout.items():
            terms = [weight * values.get(each, math.nan) for each, weight in self._weights.items() if weight]
            terms = [term for term in terms if not math.isnan(term)]
            found[step] = (sum(terms) if terms else math.nan) if name == "loss" else values.get(name, math.nan)
        return {step: value for step, value in found.items() if not math.isnan(value)}

    def _table(self) -> str:
        """First and last values."""
        steps = list(dict.fromkeys([0, len(self.steps) - 1])) if self.steps else []
        tests = list(dict.fromkeys([min(self.heldout), max(self.heldout)])) if self.heldout else []
        header = ["", *(f"step {self.steps[n]}" for n in steps), *(f"held-out, step {step}" for step in tests)]
        rows = []
        for name in self.names:
            heldout = self._heldout_of(name)
            values = [*(self[name][n] for n in steps), *(heldout.get(step, math.nan) for step in tests)]
            rows.append([name, *map(readable, values)])
        return table_html(header, rows, numbers=range(1, len(header)))
