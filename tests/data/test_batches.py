"""Batches are a function of seed and step, and an epoch is one pass over the samples."""

from __future__ import annotations

import subprocess
import sys

import pytest

from maestro_jax.data.batches import Batches, heldout_batches
from maestro_jax.data.samples import Sample
from maestro_jax.data.sources import Dataset
from maestro_jax.errors import DataError


def numbered(train: int, heldout: int = 0) -> Dataset:
    sides = [[Sample(id=f"{side}:{n}", items={}) for n in range(count)] for side, count in (("train", train), ("heldout", heldout))]
    return Dataset(train=sides[0], heldout=sides[1], specs={})


def ids(samples: list[Sample]) -> list[str]:
    return [sample.id for sample in samples]


def test_batch_depends_on_seed_and_step_alone() -> None:
    forwards, backwards = Batches(numbered(20), 4, seed=7), Batches(numbered(20), 4, seed=7)
    steps = [0, 1, 4, 5, 13, 1000]
    expected = {step: ids(forwards(step)) for step in steps}
    assert {step: ids(backwards(step)) for step in reversed(steps)} == expected


def test_batch_is_the_same_in_another_process() -> None:
    program = (
        "from maestro_jax.data.batches import Batches; from maestro_jax.data.samples import Sample; "
        "from maestro_jax.data.sources import Dataset; "
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
    assert [ids(batch) for batch in heldout_batches(numbered(2, heldout=5), 2)] == [
        ["heldout:0", "heldout:1"],
        ["heldout:2", "heldout:3"],
        ["heldout:4"],
    ]


def test_no_heldout_samples_make_no_batch() -> None:
    assert list(heldout_batches(numbered(2), 4)) == []
