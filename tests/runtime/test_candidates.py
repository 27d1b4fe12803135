"""Candidates of a config: what they hold against compiled programs, what they cost against counted ones, and which there are."""

from __future__ import annotations

import dataclasses
import functools

import jax
import pytest

from maestro_jax import configurables
from maestro_jax.config import load
from maestro_jax.graph import SectionGraph
from maestro_jax.runtime import Compiled, make_plan
from maestro_jax.runtime.arguments import bytes_on_a_device
from maestro_jax.runtime.candidates import Layout, Traced
from maestro_jax.runtime.hardware import HARDWARE
from maestro_jax.runtime.measured import MeasuredSection
from maestro_jax.schedules import Cost

LAYOUTS = [
    Layout(tensor=1, fsdp=1, rows=1, remat="none"),
    Layout(tensor=2, fsdp=1, rows=2, remat="none"),
    Layout(tensor=1, fsdp=2, rows=2, remat="none"),
    Layout(tensor=2, fsdp=2, rows=4, remat="none"),
]


@functools.cache
def trainer() -> configurables.trainer.Trainer:
    return load("kd_tiny.gin", [], root="train").build()


@functools.cache
def traced() -> Traced:
    made = trainer()
    return Traced(made.graph, made.dataset().specs, made.optimizers(), HARDWARE["cpu"], made.in_flight)


@functools.cache
def compiled(layout: Layout) -> Compiled:
    """The plan of a layout for both sections, on the same devices."""
    sections = [
        dataclasses.replace(
            section,
            replicas=1,
            axes=layout.sizes,
            submesh="plan",
            row_length=traced().rows[section.name],
            microbatch=layout.buckets(traced().rows[section.name]),
            remat=layout.remat,
        )
        for section in trainer().graph.sections
    ]
    plan = make_plan(SectionGraph(sections=tuple(sections)), trainer().dataset().specs, jax.devices()[: layout.devices])
    return Compiled(plan, trainer().optimizers(), trainer().clip_norm, False, None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["teacher", "student"])
def test_state_and_micro_batches_are_those_of_the_compiled_plan(name: str, layout: Layout) -> None:
    made = compiled(layout)
    wanted = next(c for c in traced().candidates(name, 8) if c.key == layout.key(traced().rows[name]))
    optimizer = sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(made.optimizer_states.get(name, ())))
    # But for the optimizer's count of steps, which is no parameter's.
    assert wanted.state + wanted.shared_state == pytest.approx(made.plan.sections[name].bytes_per_device() + optimizer, abs=16)
    assert max(wanted.work.bucket_bytes or ()) == pytest.approx(max(made.bucket_bytes[name]), abs=64)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["teacher", "student"])
def test_what_a_device_holds_in_all_is_near_what_xla_reports(name: str, layout: Layout) -> None:
    made = compiled(layout)
    candidate = next(c for c in traced().candidates(name, 8) if c.key == layout.key(traced().rows[name]))
    optimizer = sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(made.optimizer_states.get(name, ())))
    tasks = [p.memory for p in made.programs if p.section == name and p.bucket]
    scratch = max(m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes for m in tasks)
    flight = trainer().in_flight * max(made.bucket_bytes[name])
    actual = made.plan.sections[name].bytes_per_device() + optimizer + flight + scratch
    assert 0.92 * actual <= candidate.memory(1) <= 1.30 * actual


def test_fsdp_splits_rows_and_gathers_weights_and_sums_no_activations() -> None:
    whole, split = (compiled(Layout(tensor=1, fsdp=size, rows=4, remat="none"))["teacher", "forward", 1024, 0] for size in (1, 4))
    assert "all-gather(" in split.as_text()
    assert "all-reduce(" not in split.as_text()
    assert split.memory_analysis().temp_size_in_bytes < 0.5 * whole.memory_analysis().temp_size_in_bytes


def test_replicas_divide_masters_and_optimizer_state() -> None:
    candidate = traced().candidates("student", 8)[0]
    assert candidate.memory(1) - candidate.memory(4) == pytest.approx(0.75 * candidate.shared_state, abs=1)


def test_more_devices_take_less_time_and_less_memory() -> None:
    found = {dict(c.key)["axes"]: c for c in traced().candidates("teacher", 4) if dict(c.key)["microbatch"] == "000000512"}
    one, two = found["none"], found["tensor=2"]
    assert two.work.forward.of(512, [256, 256]) < one.work.forward.of(512, [256, 256])
    assert two.state < one.state


def test_measured_tasks_correct_what_is_predicted() -> None:
    made = trainer()
    plain = {c.key: c for c in traced().candidates("student", 2)}
    key = (("axes", "none"), ("microbatch", "000000256"), ("remat", "none"))
    measured = MeasuredSection(
        axes={},
        buckets=(256,),
        row_length=256,
        replicas=1,
        forward=Cost(fixed=10_000_000),
        backward=Cost(fixed=30_000_000),
        update=5_000_000,
    )
    specs = made.dataset().specs
    corrected = Traced(made.graph, specs, made.optimizers(), HARDWARE["cpu"], made.in_flight, {"student": measured})
    found = {c.key: c for c in corrected.candidates("student", 2)}
    assert found[key].work.forward.of(256, [256]) == pytest.approx(10_000_000, rel=0.01)
    assert found[key].updates[1] == pytest.approx(5_000_000, rel=0.01)
    other = next(k for k in plain if k != key)
    ratio = found[other].work.backward.of(512, [256]) / plain[other].work.backward.of(512, [256])
    assert ratio == pytest.approx(30_000_000 / plain[key].work.backward.of(256, [256]), rel=0.02)
