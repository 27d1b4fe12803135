"""Rates, and signals that ask a run to stop."""

from __future__ import annotations

import dataclasses
import signal
import threading
from typing import Any

import pytest

from maestro_jax.pace import Interrupt, Pace, Preempted


@dataclasses.dataclass
class Result:
    """The part of a step that counts."""

    tokens: int
    seconds: float


def test_the_first_step_does_not_count() -> None:
    pace: Any = Pace()
    pace.add(Result(1000, 60.0))
    assert pace.tokens_per_second is None
    assert pace.seconds_a_step is None
    pace.add(Result(1000, 0.5))
    assert (pace.tokens_per_second, pace.seconds_a_step) == (2000.0, 0.5)


def test_a_line_has_its_own_rate_and_the_time_left_counts_all_steps() -> None:
    pace: Any = Pace()
    for seconds in (9.0, 1.0, 1.0):
        pace.add(Result(100, seconds))
    pace.printed()
    pace.add(Result(100, 4.0))
    assert (pace.tokens_per_second, pace.seconds_a_step) == (25.0, 2.0)


def test_the_first_interrupt_asks_and_the_second_raises() -> None:
    with Interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.quick
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted)])
def test_what_was_asked_for_is_raised_when_the_caller_is_ready(number: int, kind: type[BaseException]) -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(number)
    with pytest.raises(kind):
        interrupt.raise_it()


def test_nothing_is_raised_when_nothing_was_asked_for() -> None:
    with Interrupt() as interrupt:
        pass
    interrupt.raise_it()
    assert not interrupt.requested


def test_sigterm_may_come_again_and_again() -> None:
    with Interrupt() as interrupt:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
    assert interrupt.signal == signal.SIGTERM


def test_the_first_signal_decides_and_ctrl_c_still_breaks_off() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_other_threads_can_open_it_too() -> None:
    seen: list[bool] = []

    def work() -> None:
        with Interrupt() as interrupt:
            seen.append(interrupt.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
