"""Trial runs obey the loop's rules to the nanosecond, and trial cuts those of `cut`."""

from __future__ import annotations

import random

import workload_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_support import judged

from maestro_jax.schedules import Workload
from maestro_jax.schedules.compact import Compact
from maestro_jax.schedules.search import Candidate, Search
from maestro_jax.schedules.trial import FED, STUCK, Graph, Rules, Trial
from maestro_jax.schedules.wavefront import replayed


def drawn(workload: Workload, seed: int) -> tuple[Compact, Candidate]:
    """A candidate with random orders, sizes and rules, and its trial."""
    model, draw = Compact(workload), random.Random(seed)
    orders, sizes = [], []
    for step in model.steps:
        order = list(range(step.samples))
        draw.shuffle(order)
        orders.append(tuple(order))
        sizes.append(tuple(tuple(draw.choices(s.buckets, k=4)) for s in model.sections))
    hunger = tuple(draw.choice((0.0, 1.0, FED)) for _ in model.sections)
    rules = Rules(hunger=hunger, strict=draw.random() < 0.5)
    search = Search(model, 0, 10, seed)
    return model, search.tried(Candidate(tuple(orders), tuple(sizes), rules, aligned=draw.random() < 0.3))


def assert_same_times(workload: Workload, seed: int) -> None:
    model, found = drawn(workload, seed)
    if found.makespan == STUCK:
        return
    trial = Trial(model, Graph(model, found.parts, found.pairs), found.rules, record=True)
    assert trial.run() == found.makespan
    schedule = replayed(model, found)
    judged(workload, schedule)
    assert schedule.makespan == found.makespan
    names = [(t.start, t.kind, model.base[model.names.index(t.section)] + t.replica) for t in schedule.tasks]
    assert names == [(start, kind, replica) for start, kind, _, replica in trial.started or ()]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(workload=support.workloads(), seed=st.integers(0, 99))
def test_a_trial_starts_every_task_when_the_loop_does(workload: Workload, seed: int) -> None:
    assert_same_times(workload, seed)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(workload=support.workloads(tight=True), seed=st.integers(0, 99))
def test_a_trial_keeps_memory_limits_as_the_loop_does(workload: Workload, seed: int) -> None:
    assert_same_times(workload, seed)
