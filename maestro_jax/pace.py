"""How fast a run goes, and how it is asked to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import StepResult


class Pace:
    """Tokens a second since the last printed line, and seconds a step since the first step.

    The first step counts for neither: it waits until the pipeline of the host has filled.
    """

    def __init__(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._line_tokens, self._line_seconds = 0, 0.0
        self._begun = False

    def add(self, result: StepResult) -> None:
        """Counts a step."""
        if self._begun:
            self._steps, self._seconds = self._steps + 1, self._seconds + result.seconds
            self._line_tokens, self._line_seconds = self._line_tokens + result.tokens, self._line_seconds + result.seconds
        self._begun = True

    def printed(self) -> None:
        """Begins a new line."""
        self._line_tokens, self._line_seconds = 0, 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Since the last printed line; None before the second step."""
        return self._line_tokens / self._line_seconds if self._line_seconds else None

    @property
    def seconds_a_step(self) -> float | None:
        """Mean over all steps but the first; None before the second step."""
        return self._seconds / self._steps if self._steps else None


class Preempted(Exception):
    """The process was asked to end (SIGTERM), as schedulers of clusters do; the run goes on when its command is given again."""


class Interrupt:
    """While it is open, the first Ctrl-C or SIGTERM asks for a stop between two steps; the second Ctrl-C raises as usual.

    An update donates its arrays, so that an exception in its midst could leave parameters neither old nor new. Signals can
    be taken in the main thread only; elsewhere (some notebooks) nothing changes.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal is not None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def raise_it(self) -> None:
        """Raises what the signal stands for, if there was one.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            Preempted: after SIGTERM.
        """
        if self.signal == signal.SIGTERM:
            raise Preempted
        if self.signal is not None:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
