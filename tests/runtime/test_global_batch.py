"""What is known of a step's samples: those that can be used, the errors of the others, and counts over all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jax
import pytest
from support import TEXT_SPECS, chain, text_samples

from maestro_jax.data import LazySamples, Sample
from maestro_jax.errors import DataError
from maestro_jax.runtime import Plan, make_plan
from maestro_jax.runtime.global_batch import BadSample, GlobalBatch, Reader, _heard, _Known, _told, counts_of, whole_batch

SAMPLES = text_samples(10)


class Unreadable(LazySamples):
    """Ten samples, of which those whose number is odd cannot be read."""

    def __len__(self) -> int:
        return 10

    def read(self, number: int) -> Sample:
        if number % 2:
            raise DataError(f"sample {number} is odd.", wanted="an even one", have="an odd one", fix="leave it out", anchor="odd")
        return SAMPLES[number]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(chain(), TEXT_SPECS, jax.devices()[:4])


def read(plan: Plan, source: Sequence[Sample], places: Sequence[int], skip: bool = True) -> tuple[GlobalBatch, list[BadSample]]:
    [found] = Reader(plan, TEXT_SPECS, skip=skip).read(source, [places], "test")
    return found


def test_samples_that_cannot_be_read_are_left_out_and_told(plan: Plan) -> None:
    batch, bad = read(plan, Unreadable(), [3, 4, 1, 0])
    assert [sample.id for sample in batch.samples] == ["s4", "s0"]
    assert [(sample.error.what, sample.streams) for sample in bad] == [("sample 3 is odd.", ()), ("sample 1 is odd.", ())]
    assert batch.read(1) is SAMPLES[0]


def test_the_first_bad_sample_is_raised_where_none_is_to_be_skipped(plan: Plan) -> None:
    with pytest.raises(DataError, match="sample 7 is odd"):
        read(plan, Unreadable(), [2, 7, 5], skip=False)


def test_a_sample_that_no_micro_batch_holds_is_bad(plan: Plan) -> None:
    [long] = text_samples(1, shortest=60, longest=60)
    batch, [bad] = read(plan, [*SAMPLES, long], [0, 10])
    assert len(batch.samples) == 1
    assert (bad.error.anchor, bad.streams) == ("sample-too-long", ("text",))


def test_counts_are_those_of_the_samples_that_are_used(plan: Plan) -> None:
    batch, _ = read(plan, Unreadable(), range(10))
    used = [SAMPLES[n] for n in range(0, 10, 2)]
    masks = sum(float(sample.items["text"][0].arrays["loss_mask"].sum()) for sample in used)
    assert batch.counts["student", "cross_entropy"] == masks
    assert batch.counts == whole_batch(plan, TEXT_SPECS, used).counts


def test_two_samples_of_one_id_are_refused(plan: Plan) -> None:
    with pytest.raises(DataError, match="s1"):
        read(plan, SAMPLES, [1, 2, 1])


def test_what_one_process_tells_of_a_sample_is_what_others_know(plan: Plan) -> None:
    known = _heard(json.loads(json.dumps(_told(_Known(SAMPLES[3], counts_of(plan, SAMPLES[3]))))))
    assert isinstance(known, _Known)
    assert known.counts == counts_of(plan, SAMPLES[3])
    assert (known.sample.id, known.sample.number) == ("s3", SAMPLES[3].number)
    assert [item.units for item in known.sample.items["text"]] == [item.units for item in SAMPLES[3].items["text"]]
    assert all(not item.arrays for item in known.sample.items["text"])


def test_an_error_crosses_with_all_its_parts() -> None:
    error = DataError("no.", wanted="a", have="b", fix="c", anchor="d", set_by="e")
    heard = _heard(json.loads(json.dumps(_told(BadSample(error, ("text",))))))
    assert isinstance(heard, BadSample)
    assert (str(heard.error), heard.streams) == (str(error), ("text",))
