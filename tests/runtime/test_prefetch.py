"""Steps are prepared ahead, in order, in a thread that ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from maestro_jax.runtime.prefetch import Prefetcher


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "maestro-prepare"]


def test_steps_arrive_in_order() -> None:
    made: Any = Prefetcher(lambda step: step, 3, 9)  # pyright: ignore[reportArgumentType]
    assert list(made) == [3, 4, 5, 6, 7, 8]
    made.close()
    assert threads() == []


def test_no_more_steps_wait_than_allowed() -> None:
    begun: list[int] = []
    enough = threading.Event()

    def prepare(step: int) -> Any:
        begun.append(step)
        if len(begun) == 3:
            enough.set()
        return step

    made = Prefetcher(prepare, 0, 100, ahead=2)
    assert enough.wait(5)
    made.close()
    # Two wait, and one more is ready in the thread's hands; close lets a few through while it empties the queue.
    assert len(begun) < 10
    assert threads() == []


def test_an_error_is_raised_at_its_step() -> None:
    def prepare(step: int) -> Any:
        if step == 2:
            raise ValueError("step 2 is bad")
        return step

    made = Prefetcher(prepare, 0, 5)
    steps: Any = iter(made)
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(ValueError, match="step 2 is bad"):
        next(steps)
    made.close()
    assert threads() == []
