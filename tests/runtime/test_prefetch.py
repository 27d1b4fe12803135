"""Windows of steps are prepared ahead, in order, in a thread that ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from maestro_jax.runtime.prefetch import Prefetcher


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "maestro-prepare"]


def test_steps_arrive_in_order() -> None:
    windows = [range(3, 5), range(5, 9)]
    made: Any = Prefetcher(lambda steps: steps, windows)  # pyright: ignore[reportArgumentType]
    assert list(made) == windows
    made.close()
    assert threads() == []


def test_no_more_steps_wait_than_allowed() -> None:
    begun: list[int] = []
    enough = threading.Event()

    def prepare(steps: range) -> Any:
        begun.append(steps.start)
        if len(begun) == 3:
            enough.set()
        return steps

    made = Prefetcher(prepare, [range(n, n + 1) for n in range(100)], ahead=2)
    assert enough.wait(5)
    made.close()
    # Two wait, and one more is ready in the thread's hands; close lets a few through while it empties the queue.
    assert len(begun) < 10
    assert threads() == []


def test_an_error_is_raised_at_its_step() -> None:
    def prepare(steps: range) -> Any:
        if 2 in steps:
            raise ValueError("step 2 is bad")
        return steps.start

    made = Prefetcher(prepare, [range(n, n + 1) for n in range(5)])
    steps: Any = iter(made)
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(ValueError, match="step 2 is bad"):
        next(steps)
    made.close()
    assert threads() == []
