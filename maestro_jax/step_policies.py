"""What is made of the numbers of a step: a warning when the loss jumps, an end when too many steps in a row are skipped.

Both hold a little state, which a checkpoint keeps (`state`, plain values that JSON can hold) and a resumed run takes back (`restore`), so
that a run that was interrupted warns and ends where it would have without. Neither reads a device.
"""

from __future__ import annotations

import collections
import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import TrainingError

LEAST_RELATIVE, LEAST_ABSOLUTE = 1e-3, 1e-6
"""Least deviation that losses are taken to have: a part of their median, and a number. Nearly constant losses have a median absolute
deviation of nearly 0, and every rounding error would be a jump."""

SHOWN_SAMPLES = 4
"""Most sample ids in an error."""


class LossWatch:
    """Warns when a loss lies far above those before it.

    Far is more than `deviations` median absolute deviations above the median of the last applied steps: unlike mean and variance, these
    two hardly move when a spike enters the window. For normal noise, beyond 6 of them lies about one step in 10,000.

    A loss that stays high would be a jump at each step until half of the window is high. So for `window` steps after a warning there is
    another one only for a jump that is more than twice as high.

    >>> watch = LossWatch(least=3)
    >>> [watch.add(step, loss) for step, loss in enumerate([2.0, 2.1, 1.9, 2.0], start=1)]
    [None, None, None, None]
    >>> watch.add(5, 4.0)
    'step 5: loss 4 is 40.0 median absolute deviations (0.05) above 2, the median of the last 4 applied steps; the limit is 6'

    Args:
        window: number of steps before this one that a loss is compared with.
        least: steps that must have been seen before anything is said.
        deviations: median absolute deviations above the median that are still in order.
    """

    def __init__(self, *, window: int = 100, least: int = 20, deviations: float = 6.0) -> None:
        self._window, self._least, self._deviations = window, least, deviations
        self._losses: collections.deque[float] = collections.deque(maxlen=window)
        self._warned: tuple[int, float] | None = None  # Step, and how far its loss was above the median.

    def add(self, step: int, loss: float, *, applied: bool = True) -> str | None:
        """Takes the loss of a step; returns the text of a warning, or None.

        Args:
            step: number of the step; steps come in order.
            loss: its loss. NaN says nothing here; infinity is a jump, but does not enter the window.
            applied: whether its update was applied; a step that was skipped is left out.
        """
        if not applied or math.isnan(loss):
            return None
        warning = self._judge(step, loss) if len(self._losses) >= self._least else None
        if math.isfinite(loss):
            self._losses.append(loss)
        return warning

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"losses": list(self._losses), "warned": list(self._warned) if self._warned else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self._losses = collections.deque(map(float, state["losses"]), maxlen=self._window)
        warned = state["warned"]
        self._warned = (int(warned[0]), float(warned[1])) if warned else None

    def _judge(self, step: int, loss: float) -> str | None:
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(each - median) for each in self._losses)
        deviation = max(deviation, LEAST_RELATIVE * abs(median), LEAST_ABSOLUTE)
        # JSON knows no infinity.
        excess = min(loss - median, sys.float_info.max)
        if excess <= self._deviations * deviation:
            return None
        if self._warned is not None and step - self._warned[0] < self._window and excess / 2 <= self._warned[1]:
            return None
        self._warned = step, excess
        far = (loss - median) / deviation
        return (
            f"step {step}: loss {loss:.4g} is {far:.1f} median absolute deviations ({deviation:.2g}) above {median:.4g}, "
            f"the median of the last {len(self._losses)} applied steps; the limit is {self._deviations:g}"
        )


class SkipLimit:
    """Ends a run whose steps are skipped again and again because something was not finite.

    A step in which nothing counted (no token of any objective) is not applied either. It is counted apart, ends no run, and does not
    interrupt a row: only an applied step does.

    Args:
        limit: most steps in a row that may be skipped; 0 ends the run at the first.
        set_by: where the limit was set, for the error.

    Attributes:
        skipped: steps in all that were skipped because something was not finite.
        empty: steps in all in which nothing counted.
    """

    def __init__(self, limit: int, *, set_by: str = "the calling program: SkipLimit.limit") -> None:
        self._limit, self._set_by = limit, set_by
        self.skipped = self.empty = 0
        self._row: list[int] = []
        self._causes: collections.Counter[str] = collections.Counter()

    @property
    def in_a_row(self) -> int:
        """Skipped steps since the last applied one."""
        return len(self._row)

    def add(self, step: int, *, applied: bool, causes: Sequence[str] = (), samples: Sequence[str] = ()) -> None:
        """Takes a step.

        Args:
            step: number of the step; steps come in order.
            applied: whether its update was applied.
            causes: what was not finite, such as "objective student/kl is nan"; none when nothing counted.
            samples: ids of the samples of the step, for the error.

        Raises:
            TrainingError: more than `limit` steps in a row were skipped.
        """
        if applied:
            self._row.clear()
            self._causes.clear()
        elif not causes:
            self.empty += 1
        else:
            self.skipped += 1
            self._row.append(step)
            # A cause counts once a step, however often it is named.
            self._causes.update(dict.fromkeys(causes, 1))
            if len(self._row) > self._limit:
                raise self._end(samples)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"skipped": self.skipped, "empty": self.empty, "row": list(self._row), "causes": dict(self._causes)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self.skipped, self.empty = int(state["skipped"]), int(state["empty"])
        self._row = [int(step) for step in state["row"]]
        self._causes = collections.Counter({str(cause): int(count) for cause, count in state["causes"].items()})

    def _end(self, samples: Sequence[str]) -> TrainingError:
        causes = [f"{cause} ({_steps(count)})" for cause, count in self._causes.most_common()]
        have = [f"{_steps(len(self._row))} skipped: {_ranges(self._row)}", *causes]
        if samples:
            more = f" and {len(samples) - SHOWN_SAMPLES} more" if len(samples) > SHOWN_SAMPLES else ""
            have.append(f"samples of step {self._row[-1]}: {', '.join(map(str, samples[:SHOWN_SAMPLES]))}{more}")
        return TrainingError(
            f"training ends at step {self._row[-1]}: {self._causes.most_common(1)[0][0]}.",
            wanted=f"no more than {_steps(self._limit)} in a row skipped because something is not finite",
            have="\n".join(have),
            fix="look at these samples and at what is not finite; lower the learning rate or clip_norm, or raise the limit. "
            "The same command goes on from the last checkpoint",
            anchor="steps-not-finite",
            set_by=self._set_by,
        )


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _ranges(numbers: Iterable[int]) -> str:
    """Writes rising numbers with runs shortened.

    >>> _ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    # Within a run, number and place rise together.
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
