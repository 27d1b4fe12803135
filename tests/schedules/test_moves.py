"""Moves of the local search: what they keep."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from maestro_jax.schedules.moves import moved_order, moved_sizes

BUCKETS = (2, 4, 8)
sizes = st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=12).map(tuple)
seeds = st.integers(0, 10**6)


@given(order=st.permutations(range(7)), seed=seeds)
def test_a_moved_order_has_the_same_samples(order: list[int], seed: int) -> None:
    assert sorted(moved_order(order, random.Random(seed).random)) == list(range(7))


@given(sizes=sizes, replicas=st.integers(1, 3), seed=seeds)
def test_moved_sizes_are_buckets_and_differ(sizes: tuple[int, ...], replicas: int, seed: int) -> None:
    found = moved_sizes(sizes, BUCKETS, replicas, random.Random(seed).random)
    assert found is None or (found != sizes and set(found) <= set(BUCKETS))


@given(sizes=sizes, replicas=st.integers(1, 3), seed=seeds)
def test_moved_sizes_hold_as_much_unless_one_is_added_or_dropped(sizes: tuple[int, ...], replicas: int, seed: int) -> None:
    found = moved_sizes(sizes, BUCKETS, replicas, random.Random(seed).random)
    if found is not None and abs(sum(found) - sum(sizes)) not in BUCKETS:
        assert sum(found) == sum(sizes)


def test_a_single_bucket_leaves_nothing_to_move() -> None:
    assert moved_sizes((8, 8), (8,), 1, random.Random(0).random) is None
