"""What is told of a record: times that add up, the bounding section, planted faults, and changes that help."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from workload_support import raw_file, section, work

from maestro_jax.explanation import WORDS, advise, describe, describe_advice, explain, policy_of
from maestro_jax.record import Record
from maestro_jax.schedules import Cost, InOrder, Policy, Schedule, Wavefront, Workload
from maestro_jax.schedules.queues import execute, perturbed
from maestro_jax.simulation import POLICIES


def recorded(
    workload: Workload, policy: Policy | None = None, *, noise: float = 0.0, scale: int = 1, call: int = 0, **fields: Any
) -> Record:
    """What a run with these durations would record: those of the costs times `scale`, with noise."""
    schedule = (policy or InOrder()).schedule(workload)
    take = perturbed(schedule, noise)
    run = execute(workload, schedule, lambda task: scale * take(task), call=call)
    return Record(first_step=4, workload=workload, scheduled=schedule, measured=run.measured, issued=run.issued, **fields)


@pytest.mark.quick
@pytest.mark.parametrize("nominal", [True, False])
@pytest.mark.parametrize("name", ["omni_three_encoders", "kd_three_steps", "mllm_tiny_batch"])
def test_causes_add_up_to_replicas_times_what_was_measured(name: str, nominal: bool) -> None:
    workload = Workload.from_json(raw_file(name))
    found = explain(recorded(workload, noise=0.2, scale=5, call=50_000, nominal=nominal))
    for section_name, spent in found.spent.items():
        assert sum(spent.values()) == workload.sections[section_name].replicas * found.measured
        assert min(spent.values()) >= 0
        assert spent["useful"] > 0


def test_nominal_costs_are_fitted_and_real_ones_are_kept() -> None:
    workload = Workload.from_json(raw_file("mllm_half_images"))
    nominal, real = (explain(recorded(workload, scale=3, nominal=nominal)) for nominal in (True, False))
    assert nominal.predicted == pytest.approx(nominal.measured, rel=0.01)
    # But for transfers, which take as long as they did.
    assert real.predicted * 3 == pytest.approx(real.measured, rel=0.01)
    late = [
        sum(spent["late"] for spent in found.spent.values()) / sum(spent["useful"] for spent in found.spent.values())
        for found in (nominal, real)
    ]
    assert late[0] < 0.01
    # Two thirds of every task are late, and what is left holds the padding.
    assert late[1] > 2


def chain(**fields: Any) -> Workload:
    """Producer a with three replicas of 10 ns a task, consumer b with one of 40 ns."""
    a = section(buckets=(8,), replicas=3, trainable=False, forward=Cost(fixed=10))
    b = section(**{"buckets": (8,), "forward": Cost(fixed=20), "backward": Cost(fixed=20), "update": 0, **fields})
    return work({"a": a, "b": b}, ["a b"], [{"a": (8,), "b": (8,)}] * 6)


def test_the_bounding_section_and_the_change_that_helps_by_hand() -> None:
    record = recorded(chain())
    found = explain(record)
    # b waits 10 ns for a, then runs six tasks of 40 ns; a runs 6 x 10 ns on three replicas.
    assert (found.bounding, found.measured, found.predicted) == ("b", 250, 250)
    assert {cause: n for cause, n in found.spent["b"].items() if n} == {"fill": 10, "useful": 240}
    assert {cause: n for cause, n in found.spent["a"].items() if n} == {"useful": 60, "drain": 3 * 230}
    best = advise(record).changes[0]
    # Two replicas of b run three tasks each.
    assert (best.change, best.makespan, best.gain) == ("move a replica from a to b", 130, 120)


def test_changes_are_sorted_and_the_impossible_ones_have_reasons() -> None:
    found = advise(recorded(chain()))
    assert [change.makespan for change in found.changes] == sorted(change.makespan for change in found.changes)
    assert all(change.gain == found.makespan - change.makespan for change in found.changes)
    assert found.refused["move a replica from b to a"] == "b has 1 and needs one itself"
    assert found.refused["halve the buckets of b: 8 to 4"] == "an item has 8 units"


def test_a_ladder_that_fits_is_found() -> None:
    a = section(buckets=(16,), forward=Cost(per_unit=10), backward=Cost(per_unit=20), update=0)
    found = advise(recorded(work({"a": a}, [], *[[{"a": (4,)}]] * 3)))
    assert found.changes[0].change.startswith(("halve", "add 8"))
    assert found.changes[0].gain == 3 * 8 * 30


def test_nothing_helps_is_an_answer() -> None:
    a = section(buckets=(8,), trainable=False, forward=Cost(fixed=10, per_unit=1))
    record = recorded(work({"a": a}, [], [{"a": (8,)}]))
    assert describe_advice(advise(record), 1).startswith("Nothing helps: none of ")


def test_measured_costs_are_a_change_where_costs_are_nominal() -> None:
    changes = [{change.change for change in advise(recorded(chain(), nominal=nominal)).changes} for nominal in (True, False)]
    assert changes[0] - changes[1] == {"schedule by measured costs (train.costs = 'measured')"}


@pytest.mark.parametrize("name", POLICIES)
def test_the_policy_is_known_by_its_schedule(name: str) -> None:
    workload = Workload.from_json(raw_file("mllm_mostly_text"))
    assert policy_of(recorded(workload, POLICIES[name]())) == name


def test_another_policy_is_not_taken_for_a_built_in_one() -> None:
    workload = Workload.from_json(raw_file("mllm_tiny_batch"))
    record = recorded(workload, Wavefront(seed=1))
    assert policy_of(record) is None
    found = advise(record)
    assert (found.assumed, found.policy) == (True, "wavefront")
    assert "no built-in policy" in describe_advice(found, 1)


def test_people_read_times_causes_stalls_and_changes() -> None:
    record = recorded(chain(), call=1)
    text = describe(explain(record))
    assert text.splitlines()[0] == "step 4"
    assert "b bounds the step: its replicas run tasks 96% of the time." in text
    assert all(f"| {words} " in text for words in WORDS.values())
    assert "could have run: never." in text
    assert "| move a replica from a to b " in describe_advice(advise(record), 1)


def test_a_stall_is_told() -> None:
    a = section(buckets=(8,), replicas=2, trainable=False, forward=Cost(fixed=10))
    b = section(buckets=(8,), trainable=False, forward=Cost(fixed=10))
    workload = work({"a": a, "b": b}, ["a b"], [{"a": (8,), "b": (8,)}] * 2)
    schedule = InOrder().schedule(workload)
    late = [t for t in schedule.tasks if t.section == "a" and t.items == ((0, 0),)]
    run = execute(workload, schedule, lambda task: 10**9 if task in late else 10)
    record = Record(first_step=1, workload=workload, scheduled=schedule, measured=run.measured, issued=run.issued)
    assert "could have run: 1.000 s in b (1 times)." in describe(explain(record))


def test_a_record_survives_json() -> None:
    record = recorded(chain(), nominal=True)
    assert Record.from_json(record.to_json()) == record
    assert isinstance(record.measured, Schedule)
    assert dataclasses.asdict(explain(record)) == dataclasses.asdict(explain(Record.from_json(record.to_json())))
