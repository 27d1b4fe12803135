"""The numbers of steps and evaluations, and how they draw themselves."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from maestro_jax import History


@dataclasses.dataclass
class Result:
    """What a history reads of a `StepResult`."""

    step: int
    metrics: dict[str, float]
    weights: dict[str, float] = dataclasses.field(default_factory=lambda: {"s/kl": 0.5, "s/ce": 2.0, "s/accuracy": 0.0})


def results(*losses: float) -> Any:
    return [Result(step, {"loss": loss, "s/kl": loss / 2, "gradient_norm": 1.0, "applied": 1.0}) for step, loss in enumerate(losses, 1)]


def headers(html: str) -> list[str]:
    return re.findall(r"<th[^>]*>([^<]+)<", html)


def test_values_of_all_steps_under_their_name() -> None:
    history = History(results(4.0, 3.0))
    history.add(results(0.0, 0.0, 2.0)[2])
    assert (history.steps, history["loss"], history["s/kl"]) == ([1, 2, 3], [4.0, 3.0, 2.0], [2.0, 1.5, 1.0])
    assert len(history) == 3


def test_names_leave_out_whether_a_step_was_applied() -> None:
    history = History(results(4.0))
    history.add_heldout(1, {"s/ce": 1.0})
    assert history.names == ("loss", "s/kl", "gradient_norm", "s/ce")


def test_a_step_without_a_number_has_nan() -> None:
    history = History([*results(4.0), Result(2, {"loss": 1.0})])
    assert math.isnan(history["s/kl"][1])


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="'los' is not one of loss, s/kl, gradient_norm"):
        History(results(4.0))["los"]


def test_an_evaluation_without_heldout_data_leaves_nothing() -> None:
    history = History(results(4.0))
    history.add_heldout(0, {})
    assert history.heldout == {}


def test_the_table_has_first_and_last_values_and_the_loss_on_heldout_data() -> None:
    history = History(results(4.0, 3.0, 2.5))
    history.add_heldout(0, {"s/kl": 3.0, "s/ce": 1.0, "s/accuracy": 9.0})
    history.add_heldout(3, {"s/kl": 2.0, "s/ce": math.nan})
    html = history._repr_html_()
    assert headers(html) == ["step 1", "step 3", "held-out, step 0", "held-out, step 3"]
    assert re.findall(r"<td[^>]*>([^<]+)<", html)[:5] == ["loss", "4.000", "2.500", "3.500", "1.000"]


def test_a_curve_for_each_name() -> None:
    html = History(results(4.0, 3.0))._repr_html_()
    assert re.findall(r'aria-label="([^ ]+) over', html) == ["loss", "s/kl", "gradient_norm"]


def test_one_step_is_a_table_alone() -> None:
    html = History(results(4.0))._repr_html_()
    assert "svg" not in html
    assert headers(html) == ["step 1"]


def test_nothing_yet() -> None:
    assert History()._repr_html_() == "<p>no steps yet</p>"
    assert repr(History()) == "History(no steps, 0 evaluations)"


def test_repr_is_one_line() -> None:
    assert repr(History(results(4.0, 3.0, 2.0))) == "History(steps 1-3, loss 4.000 to 2.000, 0 evaluations)"
