"""Routes pair equal rows of two micro-batches, and their hashes tell when rows met the wrong sample."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_jax.data import ArraySpec, Item, Packed, Route, Sample, pack, route
from maestro_jax.data.routes import Wiring, expected, sent
from maestro_jax.errors import DataError
from maestro_jax.schedules import place

LABEL = "teacher.hidden->student.hidden"
SPECS = {"values": ArraySpec(dtype="int32")}
SAMPLES = [Sample(id=f"s{n}", items={}) for n in range(10)]
PAIRED = Wiring(LABEL, SAMPLES, "text")

Pieces = dict[tuple[int, int], int]
"""(sample, item) -> units, in row order."""


def packed(pieces: Pieces, rows: int = 1, length: int = 24) -> Packed:
    """A micro-batch in which every unit of every piece has a value of its own."""
    items = [
        (SAMPLES[sample].number, Item(units=units, arrays={"values": np.arange(units, dtype=np.int32) + 1000 * sample + 100 * number}))
        for (sample, number), units in pieces.items()
    ]
    places = place(pieces.values(), rows * length, length)
    assert places is not None
    return pack(list(pieces), items, places, SPECS, (rows, length))


def routed(producer: Packed, consumer: Packed, slot_rows: int = 24) -> Route:
    found = route(producer, consumer, slot_rows, PAIRED)
    assert found is not None
    return found


def carried(producer: Packed, consumer: Packed, found: Route) -> np.ndarray:
    """The values that arrive in the consumer's rows, flat, -1 where none does."""
    source = producer.arrays["values"].reshape(-1)
    target = np.full(consumer.arrays["values"].size, -1)
    for gather, put in zip(found.gather, found.place, strict=True):
        if gather < source.size:
            target[put] = source[gather]
    return target


@pytest.mark.quick
def test_rows_of_shared_samples_are_paired() -> None:
    producer, consumer = packed({(0, 0): 3, (1, 0): 2, (2, 0): 4}), packed({(2, 0): 4, (3, 0): 1, (0, 0): 3}, length=10)
    found = routed(producer, consumer, slot_rows=8)
    assert found.rows == 7
    assert found.gather.tolist() == [5, 6, 7, 8, 0, 1, 2, 24]
    assert found.place.tolist() == [0, 1, 2, 3, 5, 6, 7, 10]
    assert (found.gather.dtype, found.place.dtype) == (np.int32, np.int32)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    units=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    left_out=st.sets(st.integers(0, 7)),
    rows=st.integers(1, 3),
)
def test_every_shared_row_arrives_where_the_consumer_has_it(units: list[int], order: object, left_out: set[int], rows: int) -> None:
    pieces = [((n // 2, n % 2), size) for n, size in enumerate(units)]
    consumer_pieces = [piece for n, piece in enumerate(pieces) if n not in left_out]
    order.shuffle(consumer_pieces)  # type: ignore[attr-defined]
    producer, consumer = packed(dict(pieces), rows=8, length=6), packed(dict(consumer_pieces), rows=rows, length=48)
    if not consumer_pieces:
        assert route(producer, consumer, 48, PAIRED) is None
        return
    found = routed(producer, consumer, slot_rows=48)
    wanted = np.where(consumer.arrays["segment_ids"] > 0, consumer.arrays["values"], -1).reshape(-1)
    np.testing.assert_array_equal(carried(producer, consumer, found), wanted)
    assert found.rows == sum(size for _, size in consumer_pieces)
    assert sent(PAIRED, 3, producer, found.gather) == expected(PAIRED, 3, consumer, found.place)


def test_microbatches_without_a_shared_sample_have_no_route() -> None:
    assert route(packed({(0, 0): 3}), packed({(1, 0): 3, (0, 1): 3}), 24, PAIRED) is None


@pytest.mark.quick
def test_unequal_units_are_refused_and_the_sample_is_named() -> None:
    with pytest.raises(DataError) as caught:
        routed(packed({(0, 0): 3, (4, 0): 5}), packed({(0, 0): 3, (4, 0): 2}))
    assert str(caught.value) == (
        "sample 's4' cannot cross edge teacher.hidden->student.hidden.\n"
        "  wanted   items of equal units at both ends\n"
        "  have     5 units at the producer and 2 at the consumer\n"
        "  set by   the data of sample 's4'\n"
        "  fix      let both sections read the same stream, or give both streams items of equal length\n"
        "  help     docs/errors.md#route-units"
    )


@pytest.mark.quick
def test_shuffled_rows_give_another_hash() -> None:
    producer, consumer = packed({(0, 0): 3, (1, 0): 2}), packed({(1, 0): 2, (0, 0): 3})
    found = routed(producer, consumer, slot_rows=5)
    right = sent(PAIRED, 0, producer, found.gather)
    assert right == expected(PAIRED, 0, consumer, found.place)
    orders = [list(order) for order in itertools.permutations(range(5)) if order != (0, 1, 2, 3, 4)]
    assert all(sent(PAIRED, 0, producer, found.gather[order]) != right for order in orders)
    assert all(expected(PAIRED, 0, consumer, found.place[order]) != right for order in orders)


def test_rows_of_another_microbatch_give_another_hash() -> None:
    rows = np.arange(3, dtype=np.int32)
    hashes = {sent(PAIRED, 0, packed({(sample, 0): 3}), rows) for sample in range(10)}
    assert len(hashes) == 10


def test_another_item_of_the_same_sample_gives_another_hash() -> None:
    rows = np.arange(3, dtype=np.int32)
    assert sent(PAIRED, 0, packed({(0, 0): 3}), rows) != sent(PAIRED, 0, packed({(0, 1): 3}), rows)


@pytest.mark.quick
def test_hash_depends_on_edge_and_step_and_not_on_padding() -> None:
    micro, rows = packed({(0, 0): 3}), np.arange(3, dtype=np.int32)
    right = sent(PAIRED, 7, micro, rows)
    assert right != sent(PAIRED, 8, micro, rows)
    assert right != sent(Wiring("teacher.other->student.hidden", SAMPLES, "text"), 7, micro, rows)
    assert right != sent(PAIRED, 7, micro, rows[:2])
    assert right == sent(PAIRED, 7, packed({(0, 0): 3}, length=9), np.array([0, 1, 2, 9, 9], np.int32))


IMAGES = [(4, 2), (2,), (), (6, 2, 2)]
"""Units of the images of each sample; two units become one row."""


def pictures() -> tuple[list[Sample], Packed, Wiring]:
    """Samples with images, all images in one micro-batch, and the wiring of an edge whose rows may go anywhere."""
    samples = [
        Sample(id=f"s{n}", items={"image": tuple(Item(units=u, arrays={}) for u in units)} if units else {})
        for n, units in enumerate(IMAGES)
    ]
    pieces = {(s, n): units for s, found in enumerate(IMAGES) for n, units in enumerate(found)}
    values = [(samples[s].number, Item(units=u, arrays={"values": np.arange(u, dtype=np.int32)})) for (s, _), u in pieces.items()]
    places = place(pieces.values(), 24, 24)
    assert places is not None
    return samples, pack(list(pieces), values, places, SPECS, (1, 24)), Wiring(LABEL, samples, "image", 2, "image_rows")


def texts(samples: list[Sample], pointers: dict[int, list[int]]) -> Packed:
    """Texts that take the rows of the given numbers."""
    items = [(samples[s].number, Item(units=len(p), arrays={"image_rows": np.array(p, np.int32)})) for s, p in pointers.items()]
    places = place([len(p) for p in pointers.values()], 24, 24)
    assert places is not None
    return pack([(s, 0) for s in pointers], items, places, {"image_rows": ArraySpec()}, (1, 24))


@pytest.mark.quick
def test_rows_go_where_the_consumer_asks_for_them() -> None:
    samples, images, wiring = pictures()
    # Sample 3 has rows 0-2, 3, 4; sample 0 has rows 0-1 and 2, and takes them backwards with gaps.
    consumer = texts(samples, {3: [-1, 4, -1], 0: [2, -1, 1, 0]})
    found = route(images, consumer, 8, wiring)
    assert found is not None
    assert found.rows == 4
    # Flat rows of the producer: sample 0 begins at 0 (two rows, then one), sample 1 at 3, sample 3 at 4 (three rows, then 7, then 8).
    assert found.gather.tolist() == [8, 2, 1, 0, 12, 12, 12, 12]
    assert found.place.tolist() == [1, 3, 5, 6, 24, 24, 24, 24]
    assert sent(wiring, 1, images, found.gather) == expected(wiring, 1, consumer, found.place)


def test_swapped_images_of_one_sample_give_another_hash() -> None:
    samples, images, wiring = pictures()
    consumer = texts(samples, {3: [0, 1, 2, 3, 4]})
    found = route(images, consumer, 5, wiring)
    assert found is not None
    right = sent(wiring, 0, images, found.gather)
    assert right == expected(wiring, 0, consumer, found.place)
    for order in ([0, 1, 2, 4, 3], [1, 0, 2, 3, 4], [4, 3, 2, 1, 0]):
        assert sent(wiring, 0, images, found.gather[order]) != right
        assert expected(wiring, 0, consumer, found.place[order]) != right


def test_texts_that_take_no_image_have_no_route() -> None:
    samples, images, wiring = pictures()
    assert route(images, texts(samples, {2: [-1, -1], 1: [-1]}), 8, wiring) is None
