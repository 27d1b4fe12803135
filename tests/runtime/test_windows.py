"""Steps that are scheduled together: forward-only sections run ahead, and every step stays exactly what it is alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import Setup, build
from support import WIDTH, chain, middle_functions, text_samples

from maestro_jax.graph import Objective
from maestro_jax.runtime import StepReport

BATCHES = [text_samples(10, seed=seed) for seed in range(4)]


def reporting() -> Any:
    """(init, apply) of a section that passes rows on and reports a sum."""
    init, apply = middle_functions(WIDTH)

    def report(params: Any, batch: Any, hidden: jax.Array) -> dict[str, jax.Array]:
        found = apply(params, batch, hidden)["hidden"]
        return {"hidden": found, "square": (jnp.square(found).sum(-1) * batch["loss_mask"]).sum()}

    return init, report


def made() -> Setup:
    """A frozen teacher, a frozen middle that reports sums of its own, and a student."""
    middle = {"trainable": False, "module": reporting(), "objectives": {"square": Objective(weight=0.0)}, "replicas": 2}
    return build(chain(teacher={"trainable": False}, middle=middle, student={"replicas": 2}))


def values(setup: Setup, reports: list[StepReport]) -> list[dict[str, float]]:
    return [report.read(setup.objectives()) for report in reports]


@pytest.fixture(scope="module")
def alone() -> list[dict[str, float]]:
    setup = made()
    return values(setup, [setup.engine.step(setup.preparer.prepare(batch, n)) for n, batch in enumerate(BATCHES)])


@pytest.mark.quick
def test_a_window_gives_the_numbers_of_its_steps_alone(alone: list[dict[str, float]]) -> None:
    setup = made()
    window = setup.preparer.prepare_window(BATCHES, 0)
    assert [step.step for step in window.steps] == [0, 1, 2, 3]
    assert [step.units for step in window.steps] == [setup.preparer.prepare(b, n).steps[0].units for n, b in enumerate(BATCHES)]
    found = values(setup, list(setup.engine.run(window)))
    for have, want in zip(found, alone, strict=True):
        assert have == pytest.approx(want, rel=1e-5)
        assert "middle/square" in have


def test_forward_only_sections_run_ahead_of_the_update() -> None:
    setup = made()
    window = setup.preparer.prepare_window(BATCHES, 0)
    list(setup.engine.run(window))
    tasks = setup.engine.last_tasks
    first_update = next(n for n, t in enumerate(tasks) if t.kind == "update")
    ahead = {t.section for t in tasks[:first_update] if t.step > 0}
    assert ahead == {"teacher", "middle"}
    # What is trained waits: each of its tasks comes after the updates of the steps before.
    seen = set()
    for task in tasks:
        if task.kind == "update":
            seen.add(task.step)
        elif task.section == "student":
            assert set(range(task.step)) <= seen


def test_a_window_that_is_broken_off_leaves_nothing_behind(alone: list[dict[str, float]]) -> None:
    """Whoever stops after a step of a window, and goes on with another window, gets the same numbers."""
    setup = made()
    broken = setup.engine.run(setup.preparer.prepare_window(BATCHES, 0))
    found = [next(broken), next(broken)]
    del broken
    found += setup.engine.run(setup.preparer.prepare_window(BATCHES[2:], 2))
    for have, want in zip(values(setup, found), alone, strict=True):
        assert have == pytest.approx(want, rel=1e-5)


def test_two_samples_of_one_id_in_different_steps_are_two_samples() -> None:
    """Epochs meet in a window."""
    setup = made()
    reports = list(setup.engine.run(setup.preparer.prepare_window([BATCHES[0], BATCHES[0]], 0)))
    first, second = values(setup, reports)
    assert first["middle/square"] == pytest.approx(second["middle/square"], rel=1e-6)
    assert second["student/cross_entropy"] < first["student/cross_entropy"]


def test_an_empty_step_in_a_window_changes_nothing() -> None:
    setup = made()
    reports = list(setup.engine.run(setup.preparer.prepare_window([BATCHES[0], [], BATCHES[1]], 0)))
    assert [v["applied"] for v in values(setup, reports)] == [1, 0, 1]
    assert all(np.isfinite(v).all() for v in setup.parameters()["student"].values())
