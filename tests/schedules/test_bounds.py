"""The lower bound is the judge's, and no schedule ends before it."""

from __future__ import annotations

import json

import pytest
import workload_support as support
from hypothesis import given, settings
from workload_support import JUDGE, section, work

from maestro_jax.schedules import Cost, Workload, lower_bound


@pytest.mark.quick
@pytest.mark.parametrize("name", support.FILES)
def test_equals_the_judges_on_a_shared_workload(name: str) -> None:
    raw = support.raw_file(name)
    assert lower_bound(Workload.from_json(raw)) == JUDGE.lower_bound(JUDGE.Workload(raw))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(workload=support.workloads())
def test_equals_the_judges_on_random_workloads(workload: Workload) -> None:
    assert lower_bound(workload) == JUDGE.lower_bound(JUDGE.Workload(json.loads(json.dumps(workload.to_json()))))


def test_devices_that_sections_share_bound_the_total() -> None:
    each = {"forward": Cost(fixed=10), "trainable": False, "buckets": (8,)}
    sections = {"a": section(**each, devices=((0,),)), "b": section(**each, devices=((0,),))}
    assert lower_bound(work(sections, [], [{"a": (8,), "b": (8,)}] * 3)) == 60


def test_nothing_to_do_takes_no_time() -> None:
    assert lower_bound(work({"a": section(trainable=False)}, [], [])) == 0
