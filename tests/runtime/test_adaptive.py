"""Adaptive dispatch: replicas overtake what waits for its inputs, and the step stays exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from engines import Setup, build, worst_leaf
from support import TEXT_SPECS, chain, text_samples

from maestro_jax.data import Dataset, Sample
from maestro_jax.errors import ConfigError
from maestro_jax.meshes import ProcessGroup
from maestro_jax.runtime import make_plan
from maestro_jax.runtime.feeds import Window
from maestro_jax.runtime.memory import predict_bucket_bytes
from maestro_jax.schedules import Task
from maestro_jax.trainer import Trainer

SAMPLES = text_samples(24, seed=3, shortest=20, longest=30)
"""One sample fills a micro-batch of 32 units."""

ROUNDS = 6_000
"""Of a multiplication that delays a task by about a tenth of a second."""


@jax.jit
def slowly(tokens: jax.Array) -> jax.Array:
    """The tokens, after work whose result nobody needs but everybody has to wait for."""
    matrix = jnp.full((96, 96), 1 / 96, jnp.float32) + tokens.ravel()[0] * 1e-6
    done = jax.lax.fori_loop(0, ROUNDS, lambda _, value: jnp.tanh(value @ matrix), matrix)
    return tokens + jnp.isnan(done.sum()).astype(tokens.dtype)


def delayed(window: Window, section: str, replica: int) -> Window:
    """The window, with the data of a replica's first two forwards arriving late on its devices."""
    late = [(t.section, t.items) for t in window.schedule.tasks if (t.section, t.replica, t.kind) == (section, replica, "forward")][:2]

    def feed(micro: Any) -> Any:
        found = window.feeds[micro]
        if micro not in late:
            return found
        batch = {**found.arrays["batch"], "tokens": slowly(found.arrays["batch"]["tokens"])}
        return dataclasses.replace(found, arrays={**found.arrays, "batch": batch})

    return dataclasses.replace(window, feeds={micro: feed(micro) for micro in window.feeds})


def order_of(tasks: list[Task], section: str, replica: int) -> list[Any]:
    return [(t.kind, t.items) for t in tasks if (t.section, t.replica) == (section, replica)]


@pytest.fixture(params=[1, 8])
def made(request: pytest.FixtureRequest) -> Setup:
    """An adaptive engine of two teachers, a frozen middle and a student, with this depth of queues."""
    graph = chain(teacher={"replicas": 2, "microbatch": 32}, middle={"microbatch": 32})
    return build(graph, adaptive=True, optimizer=optax.sgd(0.1), debug=True, in_flight=request.param)


def run(made: Setup, samples: Sequence[Sample], late: tuple[str, int] = ("teacher", 0)) -> tuple[dict[str, Any], list[Task], list[Task]]:
    """The gradients of a step in which a replica is late, its tasks as issued, and as scheduled."""
    window = delayed(made.preparer.prepare(samples, 0), *late)
    dispatcher = made.engine._dispatcher()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.engine, "_dispatcher", lambda *_: dispatcher)
        gradients = jax.device_get(made.engine.accumulate(window))
    return gradients, dispatcher.issued, list(window.schedule.tasks)


@pytest.mark.quick
def test_what_is_late_is_overtaken_and_gradients_stay_exact(made: Setup) -> None:
    run(made, SAMPLES[:2])  # what runs for the first time is late for other reasons
    gradients, issued, scheduled = run(made, SAMPLES)
    assert worst_leaf(gradients, made.reference(SAMPLES)[1]) < 1e-5
    assert sorted(map(repr, issued)) == sorted(map(repr, scheduled))
    late = next(t.items for t in scheduled if (t.section, t.replica, t.kind) == ("teacher", 0, "forward"))
    # The consumer was to take it before most others; it took most others first.
    before, after = ([items for kind, items in order_of(tasks, "middle", 0) if kind == "forward"] for tasks in (scheduled, issued))
    assert before.index(late) < 2
    assert after.index(late) > 2


def test_a_run_of_steps_learns_what_one_in_order_learns() -> None:
    """Updates stay barriers for what they change, and a teacher that is frozen runs ahead over several steps."""
    results = []
    for adaptive in (True, False):
        graph = chain(teacher={"replicas": 2, "microbatch": 32, "trainable": False}, student={"replicas": 2})
        made = build(graph, adaptive=adaptive, optimizer=optax.sgd(0.1))
        window = made.preparer.prepare_window([SAMPLES[:12], SAMPLES[12:], SAMPLES[4:16]], 0)
        reports = [report.read(made.objectives()) for report in made.engine.run(delayed(window, "teacher", 0))]
        results.append((reports, made.parameters()))
    (adapted, parameters), (ordered, expected) = results
    assert [r["student/cross_entropy"] for r in adapted] == pytest.approx([r["student/cross_entropy"] for r in ordered], rel=1e-5)
    assert worst_leaf(parameters, expected) < 1e-5


def test_memory_limits_hold_while_tasks_overtake() -> None:
    """Two micro-batches of a teacher fit; whatever overtakes leaves room, so that nothing gets stuck."""
    layout: dict[str, Any] = {"teacher": {"replicas": 2, "microbatch": 32}, "middle": {"microbatch": 32}}
    most = max(predict_bucket_bytes(make_plan(chain(**layout), TEXT_SPECS, jax.devices()))["teacher"])
    made = build(chain(**{**layout, "teacher": {**layout["teacher"], "max_bytes": 2 * most}}), adaptive=True)
    gradients, issued, _ = run(made, SAMPLES)
    assert worst_leaf(gradients, made.reference(SAMPLES)[1]) < 1e-5
    held, highest = {0: 0, 1: 0}, 0
    for task in issued:
        if task.section == "teacher" and task.kind != "update":
            held[task.replica] += 1 if task.kind == "forward" else -1
            highest = max(highest, held[task.replica])
    assert highest == 2


def test_evaluations_are_the_same() -> None:
    made = build(chain(), evaluation=True)
    values = []
    for made.engine.adaptive in (True, False):
        values.append(made.engine.evaluate([made.preparer.prepare(SAMPLES, 0, training=False)]))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset(train=list(SAMPLES), heldout=[], specs=TEXT_SPECS)
    trainer = Trainer(graph=chain(), data=data, steps=1, batch=4, adaptive=True)
    assert trainer.start().engine.adaptive
    plan = dataclasses.replace(make_plan(chain(), TEXT_SPECS, jax.devices()), group=ProcessGroup(0, 2))
    monkeypatch.setattr(Trainer, "plan", lambda self, dataset: plan)
    with pytest.raises(ConfigError, match="all must issue tasks in one order"):
        trainer.setup()
