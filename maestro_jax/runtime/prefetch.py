"""Prepares the next steps in a background thread while the current one runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from .feeds import PreparedStep


class Prefetcher:
    """Iterates over prepared steps, at most `ahead` of which wait.

    Args:
        prepare: makes the step of a number; called in one thread, in order.
        start: first step.
        stop: one after the last step.
        ahead: steps that may wait ready.

    An error in the thread is raised by the iterator, at the step where it happened. `close` ends the thread.
    """

    def __init__(self, prepare: Callable[[int], PreparedStep], start: int, stop: int, ahead: int = 1) -> None:
        self._prepare, self._start, self._stop = prepare, start, stop
        # Bounded, so that the arrays of only a few steps are on the devices.
        self._queue: queue.Queue[PreparedStep | BaseException] = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        # A thread and not a process: what it does most is numpy copies and device puts, which release the GIL.
        self._thread = threading.Thread(target=self._work, name="maestro-prepare", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[PreparedStep]:
        """Yields the steps in order."""
        for _ in range(self._start, self._stop):
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Ends the thread; steps that wait are dropped."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _work(self) -> None:
        try:
            for step in range(self._start, self._stop):
                self._offer(self._prepare(step))
                if self._closed.is_set():
                    return
        except BaseException as error:  # passed on to the consumer, who raises it
            self._offer(error)

    def _offer(self, item: PreparedStep | BaseException) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=0.05)
            except queue.Full:
                continue
