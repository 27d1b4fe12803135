"""Rules that a search begins with: sizes hold everything, orders fill them, and samples with backward upstream go first."""

from __future__ import annotations

import workload_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_support import section, work

from maestro_jax.schedules import Cost, Workload
from maestro_jax.schedules.compact import Compact
from maestro_jax.schedules.sizes import Packer, Ramp, classes_of, lead_of, same_as, sizes_of, twins_of

numbers = st.integers(0, 3)
ramps = st.builds(Ramp, up=numbers, down=numbers, top=numbers, rounds=st.integers(1, 3), odd_first=st.booleans())


@settings(derandomize=True, deadline=None, max_examples=100)
@given(workload=support.workloads(), ramp=ramps, even=st.booleans())
def test_sizes_hold_all_units_and_are_buckets(workload: Workload, ramp: Ramp, even: bool) -> None:
    model = Compact(workload)
    for n, work_ in enumerate(model.sections):
        for t in range(len(model.steps)):
            sizes = sizes_of(model, n, t, ramp, even)
            assert sum(sizes) >= model.total(n, t)
            assert set(sizes) <= set(work_.buckets)
            assert len(sizes) % work_.replicas == 0


def test_sizes_grow_and_shrink_along_a_ramp() -> None:
    model = Compact(work({"a": section(buckets=(2, 4, 8))}, [], [{"a": (8,)}] * 4))
    assert sizes_of(model, 0, 0, Ramp(up=0, down=1, top=2), even=True) == (2, 4, 8, 8, 8, 4)


def test_what_is_left_over_from_full_ones_costs_least() -> None:
    dear = section(buckets=(2, 4, 8), forward=Cost(fixed=100, per_unit=1), backward=Cost())
    cheap = section(buckets=(2, 4, 8), forward=Cost(per_unit=1), backward=Cost())
    flat = Ramp(up=3, down=3, top=2)
    items = [{"a": (8,)}, {"a": (6,)}]
    assert sizes_of(Compact(work({"a": dear}, [], items)), 0, 0, flat, even=True) == (8, 8)
    assert sizes_of(Compact(work({"a": cheap}, [], items)), 0, 0, flat, even=True) == (8, 4, 2)


@given(totals=st.lists(st.integers(0, 20), max_size=12), sizes=st.lists(st.sampled_from([4, 8, 16]), max_size=4))
def test_an_order_has_every_sample_once(totals: list[int], sizes: list[int]) -> None:
    samples = range(len(totals))
    packer = Packer(totals, [list(samples[::2]), list(samples[1::2])], 16)
    assert sorted(packer.order(tuple(sizes))) == list(samples)


def test_each_micro_batch_takes_the_longest_sample_that_fits() -> None:
    assert Packer([3, 7, 5, 1, 2], [[0, 1, 2, 3, 4]], 8).order((8, 8, 8)) == (1, 3, 2, 0, 4)


def test_samples_with_more_backward_upstream_go_first() -> None:
    sections = {"encoder": section(), "model": section(forward=Cost(per_unit=50))}
    items = [{"model": (8,)}, {"model": (8,), "encoder": (8,)}, {"model": (2,)}]
    model = Compact(work(sections, ["encoder model"], items))
    assert model.names[lead_of(model)] == "model"
    assert classes_of(model, lead_of(model), 0) == [[1], [0, 2]]


def test_stages_of_one_model_are_twins() -> None:
    items = [{"a": (8,), "b": (8,), "c": (4,)}, {"a": (2,), "b": (2,), "c": (2,)}]
    sections = {"a": section(), "b": section(backward=Cost(fixed=9)), "c": section()}
    model = Compact(work(sections, [], items))
    assert twins_of(model, 0) == [True, True, False]
    assert same_as(model) == [0, 1, 2]
