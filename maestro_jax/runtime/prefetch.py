"""Prepares the next window of steps in a background thread while the current one runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from .feeds import Window


class Prefetcher:
    """Iterates over prepared windows, at most `ahead` of which wait.

    Args:
        prepare: makes the window of some steps; called in one thread, in order.
        windows: the steps of each window.
        ahead: windows that may wait ready.

    An error in the thread is raised by the iterator, at the window where it happened. `close` ends the thread.
    """

    def __init__(self, prepare: Callable[[range], Window], windows: Sequence[range], ahead: int = 1) -> None:
        self._prepare, self._windows = prepare, windows
        # Bounded, so that the arrays of only a few steps are on the devices.
        self._queue: queue.Queue[Window | BaseException] = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        # A thread and not a process: what it does most is numpy copies and device puts, which release the GIL.
        self._thread = threading.Thread(target=self._work, name="maestro-prepare", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Window]:
        """Yields the windows in order."""
        for _ in self._windows:
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Ends the thread; windows that wait are dropped."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _work(self) -> None:
        try:
            for steps in self._windows:
                self._offer(self._prepare(steps))
                if self._closed.is_set():
                    return
        except BaseException as error:  # passed on to the consumer, who raises it
            self._offer(error)

    def _offer(self, item: Window | BaseException) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=0.05)
            except queue.Full:
                continue
