"""Costs: counted ones follow sizes and devices, measured ones follow the tasks, and both survive a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from engines import build, worst_leaf
from support import TEXT_SPECS, chain, text_samples

from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.models import Decoder
from maestro_jax.runtime import Plan, make_plan
from maestro_jax.runtime.costs import CALL, Costs, counted_costs, fitted_cost
from maestro_jax.runtime.measure import fitted_costs, measure
from maestro_jax.schedules import Cost


def plan(width: int = 128, **sections: Any) -> Plan:
    return make_plan(chain(width=width, **sections), TEXT_SPECS, jax.devices())


def test_a_backward_costs_about_twice_a_forward_and_a_frozen_section_nothing() -> None:
    costs = counted_costs(plan(teacher={"trainable": False}, student={"microbatch": (32, 64)})).sections
    student = costs["student"]
    assert 1.5 < student.backward.per_unit / student.forward.per_unit < 2.5
    assert student.update > CALL
    assert (costs["teacher"].backward, costs["teacher"].update) == (Cost(), 0)


def test_work_is_divided_by_the_devices_of_a_replica_and_not_by_replicas() -> None:
    one, split, many = (
        counted_costs(plan(teacher=layout)).sections["teacher"].forward.per_unit
        for layout in ({}, {"axes": {"fsdp": 2}, "row_length": 16}, {"replicas": 2})
    )
    assert one == many
    assert one == pytest.approx(2 * split, rel=0.1)


def test_recomputing_makes_the_backward_dearer() -> None:
    keeping, recomputing = (
        counted_costs(plan(teacher={"remat": remat})).sections["teacher"].backward.per_unit for remat in ("none", "inputs")
    )
    assert recomputing > 1.3 * keeping


def test_costs_survive_json() -> None:
    costs = counted_costs(plan(width=8))
    assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs


def test_a_fit_finds_the_costs_that_made_the_tasks() -> None:
    random = np.random.default_rng(0)
    true = Cost(fixed=50_000, per_unit=700, per_unit_squared=90)
    tasks = [(bucket, [int(u) for u in random.integers(1, bucket // 2, 2)]) for bucket in (256, 512, 1024) for _ in range(6)]
    found = fitted_cost([b for b, _ in tasks], [sum(u * u for u in units) for _, units in tasks], [true.of(b, u) for b, u in tasks])
    for name in ("fixed", "per_unit", "per_unit_squared"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.02)


def test_a_fit_has_no_negative_parts() -> None:
    found = fitted_cost([100, 200, 300], [0, 0, 0], [100.0, 400.0, 900.0])
    assert found.fixed == 0
    assert found.per_unit > 0


def test_measuring_covers_every_section_and_leaves_parameters_alone() -> None:
    setup = build(chain(teacher={"replicas": 2}, student={"microbatch": (32, 64)}))
    before = setup.parameters()
    windows = [setup.preparer.prepare(text_samples(12, seed=n), n) for n in range(2)]
    # The first window only warms up.
    tasks = [t for t in windows[1].schedule.tasks if t.kind != "update"]
    found = measure(setup.engine, windows)
    assert [(m.section, m.kind, m.bucket) for m in found if m.kind != "update"] == [(t.section, t.kind, t.bucket) for t in tasks]
    assert [m.section for m in found if m.kind == "update"] == ["teacher", "student"]
    assert all(each.nanoseconds > 0 for each in found)
    counted = setup.preparer.costs
    costs = fitted_costs(counted, found)
    for name, section in costs.sections.items():
        assert section.forward.of(64, ()) + section.backward.of(64, ()) > 0, name
    total = sum(each.nanoseconds for each in found if each.kind != "update")
    predicted = sum(
        costs.sections[t.section].forward.of(t.bucket, ()) * (t.kind != "backward")
        + costs.sections[t.section].backward.of(t.bucket, ()) * (t.kind != "forward")
        for t in tasks
    )
    assert predicted == pytest.approx(total, rel=0.5)
    after = setup.parameters()
    assert all(np.array_equal(before[n][p], after[n][p]) for n in before for p in before[n])
    # Accumulators are zero again: the next gradients are those of their step alone.
    batch = text_samples(12, seed=5)
    assert worst_leaf(setup.gradients(batch), setup.reference(batch)[1]) < 1e-5


def decoders(kind: str) -> Plan:
    module = Decoder(vocab_size=32, layers=1, embed=32, heads=4, kv_heads=2, mlp=32, attention=kind)
    objectives = {"cross_entropy": Objective()}
    model = Section(name="model", module=module, objectives=objectives, microbatch=(1024, 2048), row_length=1024)
    return make_plan(SectionGraph(sections=(model,)), TEXT_SPECS, jax.devices()[:1])


def test_attention_in_blocks_costs_by_the_squares_of_items_and_dense_attention_by_rows() -> None:
    dense, blocks = (counted_costs(decoders(kind)).sections["model"] for kind in ("dense", "blockwise"))
    for whole, cut in ((dense.forward, blocks.forward), (dense.backward, blocks.backward)):
        assert whole.per_unit_squared == 0
        one, many = (cut.of(2048, units) for units in ([1024] * 2, [64] * 32))
        assert many < 0.6 * one
        # One item that fills its row costs its half of all pairs, as attention is causal.
        assert one < whole.of(2048, [1024] * 2)
