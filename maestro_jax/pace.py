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


class Interrupt:
    """While it is open, the first Ctrl-C asks for a stop between two steps; the second one raises as usual.

    An update donates its arrays, so that an exception in its midst could leave parameters neither old nor new. Signals can
    be taken in the main thread only; elsewhere (some notebooks) nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._before)
