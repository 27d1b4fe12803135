"""One process of a way of training: compiles, warms up, and then trains a window whenever it is told to.

`python -m benchmarks.pinned.worker SPEC` with a JSON object: "case", "way", "quick", "windows" and "cores", to which the process is pinned.
Lines come in on standard input ("go"), and answers go out as JSON, one a line. When the input ends, so does the process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Way(Protocol):
    """A way of training, compiled."""

    def window(self) -> list[float]:
        """Trains a window of steps; returns their losses when all has ended."""
        ...

    def facts(self) -> dict[str, Any]:
        """What is known of the window that ran last."""
        ...

    def close(self) -> None:
        """Ends what runs in the background."""
        ...


def started(spec: dict[str, Any]) -> Way:
    """Connects with the other process of the way, and compiles."""
    # JAX counts cores when it starts, so only a process that is pinned by now computes with one thread.
    from maestro_jax.cluster import connect

    from .cases import case_of

    connect()
    case, way, windows = case_of(spec["case"], quick=spec["quick"]), spec["way"], spec["windows"]
    # Only what a way needs is imported: Tunix's environment has nothing else.
    if way.startswith("tunix"):
        from .tunix_way import Tunix

        return Tunix(case, way, windows)
    if way.startswith("one_"):
        from .one_program import OneProgram

        return OneProgram(case, way, windows)
    from .system import System

    return System(case, way, windows)


def timed(way: Way) -> dict[str, Any]:
    """Trains a window; returns when it began and ended on the clock of the machine, and what this process computed meanwhile."""
    busy, begin = time.process_time(), time.monotonic()
    losses = way.window()
    end = time.monotonic()
    return {"begin": begin, "end": end, "busy": time.process_time() - busy, "losses": losses}


def give_back() -> None:
    """Returns to the machine what the compiler and ended windows have left behind: all ways are in memory, and one of them trains."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def answered(start: Callable[[], Way]) -> None:
    """Starts a way, trains a window to warm up, and another one for each line of the input until that ends."""
    # Whatever else is printed must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    way = start()
    warm = timed(way)
    give_back()
    answer({"warm": warm})
    for _ in sys.stdin:
        found = {**timed(way), **way.facts()}
        give_back()
        answer(found)
    way.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.sched_setaffinity(0, given["cores"])
    answered(lambda: started(given))
