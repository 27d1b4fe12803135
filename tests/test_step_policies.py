"""Warnings about a loss that jumps, and the end of a run whose steps are skipped."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from maestro_jax.errors import TrainingError
from maestro_jax.step_policies import LossWatch, SkipLimit

NAN_KL = ("objective student/kl is nan",)


def noisy(count: int, level: float = 2.0, spread: float = 0.1, seed: int = 0) -> list[float]:
    """Losses that differ by at most `spread` from `level`."""
    generator = random.Random(seed)
    return [level + generator.uniform(-spread, spread) for _ in range(count)]


def warned_steps(watch: LossWatch, losses: list[float], first: int = 1) -> list[int]:
    """Adds losses; returns the numbers of the steps with a warning."""
    return [step for step, loss in enumerate(losses, start=first) if watch.add(step, loss) is not None]


def skip(limit: SkipLimit, *steps: int, causes: tuple[str, ...] = NAN_KL, samples: tuple[str, ...] = ()) -> None:
    for step in steps:
        limit.add(step, applied=False, causes=causes, samples=samples)


def through_json(state: dict[str, Any]) -> Any:
    """What a checkpoint gives back; strict JSON, which has no NaN and no infinity."""
    return json.loads(json.dumps(state, allow_nan=False))


def test_noise_is_not_worth_a_warning() -> None:
    assert warned_steps(LossWatch(), noisy(300)) == []


def test_a_warning_says_what_was_measured() -> None:
    watch = LossWatch()
    # Median 2, median absolute deviation 0.1.
    assert warned_steps(watch, [1.9, 2.0, 2.1] * 10) == []
    assert watch.add(31, 3.0) == (
        "step 31: loss 3 is 10.0 median absolute deviations (0.1) above 2, the median of the last 30 applied steps; the limit is 6"
    )


@pytest.mark.parametrize(("loss", "warns"), [(2.0 + 5.9 / 8, False), (2.0 + 6.1 / 8, True), (-10.0, False)])
def test_only_losses_beyond_the_limit_and_above_the_median_warn(loss: float, warns: bool) -> None:
    watch = LossWatch()
    warned_steps(watch, [1.875, 2.0, 2.125] * 10)  # Median 2, median absolute deviation 1/8.
    assert (watch.add(31, loss) is not None) is warns


def test_nothing_is_said_before_enough_steps_were_seen() -> None:
    assert warned_steps(LossWatch(least=20), [*noisy(19), 50.0]) == []
    assert warned_steps(LossWatch(least=20), [*noisy(20), 50.0]) == [21]


def test_the_window_forgets_old_losses() -> None:
    watch = LossWatch(window=100)
    warned_steps(watch, [*noisy(100, level=20.0), *noisy(100, level=2.0)])
    assert warned_steps(watch, [20.0], first=201) == [201]


def test_steps_that_were_skipped_are_left_out() -> None:
    watch = LossWatch()
    losses = noisy(50)
    warned_steps(watch, losses)
    assert [watch.add(51 + number, 1e9, applied=False) for number in range(100)] == [None] * 100
    assert watch.state()["losses"] == losses


def test_losses_that_are_not_finite_stay_out_of_the_window() -> None:
    watch = LossWatch()
    losses = noisy(50)
    warned_steps(watch, losses)
    assert watch.add(51, math.nan) is None
    assert "loss inf is inf median absolute deviations" in str(watch.add(52, math.inf))
    assert through_json(watch.state())["losses"] == losses
    assert LossWatch(least=1).add(1, math.inf) is None


@pytest.mark.parametrize(("level", "inside", "beyond"), [(2.0, 2.011, 2.013), (0.0, 5e-6, 7e-6), (-2.0, -1.989, -1.987)])
def test_constant_losses_leave_room_for_rounding(level: float, inside: float, beyond: float) -> None:
    watch = LossWatch()
    assert warned_steps(watch, [level] * 50) == []
    assert watch.add(51, inside) is None
    assert watch.add(52, beyond) is not None


def test_a_loss_that_stays_high_is_reported_once() -> None:
    losses = [*noisy(150), *noisy(300, level=5.0)]
    assert warned_steps(LossWatch(), losses) == [151]


def test_a_much_higher_jump_is_reported_at_once() -> None:
    watch = LossWatch()
    warned_steps(watch, noisy(100))
    assert warned_steps(watch, [5.0, 5.0, 7.0, 20.0, 20.0], first=101) == [101, 104]


def test_jumps_far_apart_are_each_reported() -> None:
    watch = LossWatch(window=100)
    warned_steps(watch, noisy(100))
    losses = [5.0, *noisy(98, seed=1), 5.0, 5.0]
    assert warned_steps(watch, losses, first=101) == [101, 201]


@pytest.mark.parametrize("cut", [10, 151, 170, 400])
def test_a_restored_watch_warns_as_if_never_interrupted(cut: int) -> None:
    losses = [*noisy(150), 9.0, *noisy(30), 9.0, 30.0, math.inf, *noisy(120, level=3.0), 12.0, *noisy(150)]
    whole, first, second = LossWatch(), LossWatch(), LossWatch()
    wanted = warned_steps(whole, losses)
    before = warned_steps(first, losses[:cut])
    second.restore(through_json(first.state()))
    assert before + warned_steps(second, losses[cut:], first=cut + 1) == wanted
    assert len(wanted) >= 4
    assert second.state() == whole.state()


def test_as_many_skipped_steps_as_the_limit_go_on() -> None:
    limit = SkipLimit(3)
    skip(limit, 1, 2, 3)
    assert (limit.in_a_row, limit.skipped) == (3, 3)
    with pytest.raises(TrainingError):
        skip(limit, 4)


def test_a_limit_of_0_ends_at_the_first() -> None:
    with pytest.raises(TrainingError) as caught:
        skip(SkipLimit(0), 7)
    assert caught.value.have == "1 step skipped: 7\nobjective student/kl is nan (1 step)"


def test_an_applied_step_ends_a_row() -> None:
    limit = SkipLimit(2)
    for start in (1, 11, 21):
        skip(limit, start, start + 1)
        limit.add(start + 2, applied=True)
    assert (limit.in_a_row, limit.skipped) == (0, 6)


def test_causes_of_an_earlier_row_are_forgotten() -> None:
    limit = SkipLimit(1)
    skip(limit, 1, causes=("gradient of vision is inf",))
    limit.add(2, applied=True)
    with pytest.raises(TrainingError) as caught:
        skip(limit, 3, 4)
    assert "vision" not in str(caught.value)


def test_steps_in_which_nothing_counted_end_no_run() -> None:
    limit = SkipLimit(0)
    for step in range(1, 50):
        limit.add(step, applied=False)
    assert (limit.empty, limit.skipped, limit.in_a_row) == (49, 0, 0)


def test_a_step_in_which_nothing_counted_does_not_interrupt_a_row() -> None:
    limit = SkipLimit(2)
    skip(limit, 1, 2)
    limit.add(3, applied=False)
    with pytest.raises(TrainingError) as caught:
        skip(limit, 4)
    assert caught.value.have.startswith("3 steps skipped: 1-2, 4\n")


def test_the_error_names_cause_steps_and_samples() -> None:
    limit = SkipLimit(3, set_by="kd.gin:9  train.skip_limit")
    skip(limit, 8, causes=("gradient of student is inf",), samples=("x",))
    limit.add(9, applied=True)
    skip(limit, 401, 402)
    skip(limit, 403, causes=(*NAN_KL, "gradient of student is inf", *NAN_KL))
    with pytest.raises(TrainingError) as caught:
        skip(limit, 404, samples=("a", "b", "c", "d", "e", "f"))
    assert str(caught.value) == (
        "training ends at step 404: objective student/kl is nan.\n"
        "  wanted   no more than 3 steps in a row skipped because something is not finite\n"
        "  have     4 steps skipped: 401-404\n"
        "           objective student/kl is nan (4 steps)\n"
        "           gradient of student is inf (1 step)\n"
        "           samples of step 404: a, b, c, d and 2 more\n"
        "  set by   kd.gin:9  train.skip_limit\n"
        "  fix      look at these samples and at what is not finite; lower the learning rate or clip_norm, or raise the limit. "
        "The same command goes on from the last checkpoint\n"
        "  help     docs/errors.md#steps-not-finite"
    )


def test_a_restored_limit_ends_as_if_never_interrupted() -> None:
    first, second = SkipLimit(3), SkipLimit(3)
    first.add(1, applied=False)
    skip(first, 2, 3)
    second.restore(through_json(first.state()))
    assert (second.skipped, second.empty, second.in_a_row) == (2, 1, 2)
    skip(second, 4)
    with pytest.raises(TrainingError) as caught:
        skip(second, 5)
    assert caught.value.have == "4 steps skipped: 2-5\nobjective student/kl is nan (4 steps)"
