"""Batches are a function of seed and step, and an epoch is one pass over the samples."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import subprocess
import sys
from fractions import Fraction

import grain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_jax.data.batches import Batches, heldout_places, most, shares, whole_weights
from maestro_jax.data.dataset import Dataset, Part
from maestro_jax.data.samples import Sample
from maestro_jax.errors import DataError


def numbered(train: int, heldout: int = 0) -> Dataset:
    sides = [[Sample(id=f"{side}:{n}", items={}) for n in range(count)] for side, count in (("train", train), ("heldout", heldout))]
    return Dataset(train=sides[0], heldout=sides[1], specs={})


def ids(samples: list[Sample]) -> list[str]:
    return [sample.id for sample in samples]


def in_parts(*parts: tuple[int, float]) -> Dataset:
    named = tuple(Part(f"part{n}", count, weight) for n, (count, weight) in enumerate(parts))
    return Dataset(train=[Sample(id=f"{part.name}:{n}", items={}) for part in named for n in range(part.samples)], specs={}, parts=named)


def of_part(samples: list[Sample], number: int) -> list[str]:
    return [name for name in ids(samples) if name.startswith(f"part{number}:")]


def test_batch_depends_on_seed_and_step_alone() -> None:
    forwards, backwards = Batches(numbered(20), 4, seed=7), Batches(numbered(20), 4, seed=7)
    steps = [0, 1, 4, 5, 13, 1000]
    expected = {step: ids(forwards(step)) for step in steps}
    assert {step: ids(backwards(step)) for step in reversed(steps)} == expected


def test_batch_is_the_same_in_another_process() -> None:
    program = (
        "from maestro_jax.data.batches import Batches; from maestro_jax.data.samples import Sample; "
        "from maestro_jax.data.dataset import Dataset, Part; "
        "data = Dataset(train=[Sample(id=f'train:{n}', items={}) for n in range(20)], specs={}); "
        "print([sample.id for sample in Batches(data, 4, seed=7)(9)])"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == str(ids(Batches(numbered(20), 4, seed=7)(9)))


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_epoch_covers_each_sample_once(epoch: int) -> None:
    data = numbered(20)
    batches = Batches(data, 4, seed=0)
    assert batches.steps_per_epoch == 5
    seen = [name for step in range(5 * epoch, 5 * epoch + 5) for name in ids(batches(step))]
    assert sorted(seen) == sorted(ids(list(data.train)))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch(seed: int, number: int) -> list[str]:
        batches = Batches(numbered(40), 4, seed=seed)
        return [name for step in range(10 * number, 10 * number + 10) for name in ids(batches(step))]

    orders = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert all(one != two for place, one in enumerate(orders) for two in orders[:place])


def test_no_batch_holds_a_sample_twice_where_the_batch_does_not_divide_the_data() -> None:
    batches = Batches(numbered(10), 4, seed=1)
    assert batches.steps_per_epoch == 2
    for epoch in range(20):
        seen = ids(batches(2 * epoch)) + ids(batches(2 * epoch + 1))
        assert len(set(seen)) == len(seen) == 8


def test_samples_left_out_of_an_epoch_come_in_others() -> None:
    batches = Batches(numbered(10), 4, seed=1)
    assert len({name for step in range(20) for name in ids(batches(step))}) == 10


def test_batch_of_the_whole_data_works() -> None:
    batches = Batches(numbered(3), 3, seed=-5)
    assert sorted(ids(batches(0))) == sorted(ids(batches(1))) == ["train:0", "train:1", "train:2"]


@pytest.mark.parametrize(("train", "batch"), [(3, 4), (0, 1), (3, 0)])
def test_batch_that_cannot_be_filled_is_an_error(train: int, batch: int) -> None:
    with pytest.raises(DataError, match=f"have     batch={batch}") as caught:
        Batches(numbered(train), batch, seed=0, set_by="kd.gin:3  train.batch")
    assert caught.value.anchor == "batch-larger-than-data"
    assert caught.value.set_by == "kd.gin:3  train.batch"


def test_heldout_batches_come_in_order_with_a_shorter_last_one() -> None:
    assert [list(places) for places in heldout_places(numbered(2, heldout=5), 2)] == [[0, 1], [2, 3], [4]]


def test_no_heldout_samples_make_no_batch() -> None:
    assert list(heldout_places(numbered(2), 4)) == []


@pytest.mark.parametrize(("train", "batch", "seed"), [(20, 4, 0), (10, 4, 1), (3, 3, -5), (1, 1, 0), (100, 7, 3)])
def test_batches_are_those_of_a_grain_pipeline(train: int, batch: int, seed: int) -> None:
    data, batches = numbered(train), Batches(numbered(train), batch, seed)
    shuffle_seed = int.from_bytes(hashlib.sha256(f"shuffle:{seed}".encode()).digest()[:4], "big")
    pipeline = grain.MapDataset.source(data.train).shuffle(seed=shuffle_seed).batch(batch, drop_remainder=True, batch_fn=list).repeat()
    for step in (0, 1, 2, 5, 30, 1000, 10**6):
        assert ids(batches(step)) == ids(pipeline[step] or [])


def test_a_sample_that_comes_twice_in_a_batch_is_an_error() -> None:
    # A sequence that is neither list nor tuple, which a data set does not read ahead of time.
    data = Dataset(train=collections.UserList([*numbered(2).train] * 3), specs={})
    with pytest.raises(DataError, match="two samples have the id") as caught:
        Batches(data, 3, seed=0)(4)
    assert caught.value.set_by == "the batch of step 4"
    assert caught.value.anchor == "repeated-sample-id"


# --- parts with weights

WEIGHTS = st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 9)), min_size=1, max_size=5)


@given(weights=WEIGHTS, batch=st.integers(1, 24), steps=st.integers(1, 10), step=st.integers(0, 10**6))
@settings(deadline=None)
def test_shares_add_up_never_fall_and_stay_below_the_most(weights: list[float], batch: int, steps: int, step: int) -> None:
    whole = whole_weights(weights)
    before, after = shares(step * batch, whole), shares((step + steps) * batch, whole)
    assert sum(before) == step * batch
    given_each = [last - first for first, last in zip(before, after, strict=True)]
    assert all(0 <= count <= bound for count, bound in zip(given_each, most(steps * batch, whole), strict=True))


@given(weights=WEIGHTS, total=st.integers(0, 10**9))
@settings(deadline=None)
def test_shares_stay_close_to_the_weights(weights: list[float], total: int) -> None:
    whole = whole_weights(weights)
    for count, weight in zip(shares(total, whole), whole, strict=True):
        assert abs(count - Fraction(total * weight, sum(whole))) < len(weights)


@given(
    parts=st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 5)), min_size=1, max_size=4),
    batch=st.integers(1, 8),
    seed=st.integers(-3, 3),
)
@settings(deadline=None, max_examples=15)
def test_no_batch_of_parts_holds_a_sample_twice(parts: list[tuple[int, float]], batch: int, seed: int) -> None:
    needed = most(batch, whole_weights([weight for _, weight in parts]))
    data = in_parts(*((max(count, least), weight) for (count, weight), least in zip(parts, needed, strict=True)))
    batches = Batches(data, min(batch, len(data.train)), seed)
    for step in range(12):
        names = ids(batches(step))
        assert len(set(names)) == len(names) == min(batch, len(data.train))


def test_batch_of_parts_depends_on_seed_and_step_alone() -> None:
    forwards, backwards = (Batches(in_parts((11, 0.7), (5, 0.3)), 4, seed=7) for _ in range(2))
    steps = [0, 1, 2, 5, 13, 1000]
    expected = {step: ids(forwards(step)) for step in steps}
    assert {step: ids(backwards(step)) for step in reversed(steps)} == expected
    assert ids(Batches(in_parts((11, 0.7), (5, 0.3)), 4, seed=8)(0)) != expected[0]


def test_epoch_of_a_part_covers_each_of_its_samples_once() -> None:
    batches = Batches(in_parts((12, 3), (8, 1)), 4, seed=0)
    for epoch in range(3):
        seen = [name for step in range(4 * epoch, 4 * epoch + 4) for name in of_part(batches(step), 0)]
        assert len(set(seen)) == len(seen) == 12
        seen = [name for step in range(8 * epoch, 8 * epoch + 8) for name in of_part(batches(step), 1)]
        assert len(set(seen)) == len(seen) == 8
    assert batches.steps_per_epoch == 8


def test_epochs_of_a_part_have_orders_of_their_own() -> None:
    batches = Batches(in_parts((12, 3), (8, 1)), 4, seed=0)
    orders = [[name for step in range(4 * epoch, 4 * epoch + 4) for name in of_part(batches(step), 0)] for epoch in range(4)]
    assert all(one != two for place, one in enumerate(orders) for two in orders[:place])


def test_a_part_of_tiny_weight_still_comes() -> None:
    batches = Batches(in_parts((12, 1.0), (3, 0.01)), 4, seed=0)
    seen = [of_part(batches(step), 1) for step in range(101)]
    assert sum(map(len, seen)) == 4
    assert {len(names) for names in seen} == {0, 1}


def test_one_part_is_drawn_like_data_without_parts() -> None:
    data = numbered(10)
    whole, part = Batches(data, 4, 0), Batches(dataclasses.replace(data, parts=(Part("", 10, 0.3),)), 4, 0)
    assert [ids(whole(step)) for step in range(9)] == [ids(part(step)) for step in range(9)]
