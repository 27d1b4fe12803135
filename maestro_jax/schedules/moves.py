"""Random changes of sizes and orders: the neighbourhood of the local search.

All randomness comes from a function that draws from [0, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .parts import Sizes

Draw = Callable[[], float]


def moved_sizes(sizes: Sizes, buckets: Sequence[int], replicas: int, draw: Draw) -> Sizes | None:
    """Swaps two sizes, splits one, merges some, adds or drops one; None where the drawn move does not apply.

    Args:
        sizes: of a section's micro-batches, in order.
        buckets: the sizes that there are, ascending.
        replicas: of the section: sizes are swapped with those at most two rounds away.
        draw: a source of random numbers in [0, 1).
    """
    if not sizes or len(buckets) == 1:
        return None
    kind, at = draw(), int(draw() * len(sizes))
    if kind < 0.25:
        return _swapped(sizes, at, replicas, draw)
    level = buckets.index(sizes[at])
    # One micro-batch, or one of every replica.
    count = replicas if draw() < 0.5 else 1
    if kind < 0.55:
        return _split(sizes, at, count, buckets[level - 1]) if level else None
    if kind < 0.9:
        return _merged(sizes, at, count, buckets[level + 1]) if level + 1 < len(buckets) else None
    if kind < 0.95:
        return (*sizes[:at], buckets[int(draw() * len(buckets))], *sizes[at:])
    return (*sizes[:at], *sizes[at + 1 :])


def moved_order(order: Sequence[int], draw: Draw) -> tuple[int, ...]:
    """Swaps two samples, or moves one, or moves some that follow each other."""
    found, n = list(order), len(order)
    kind, a, b = draw(), int(draw() * n), int(draw() * n)
    if kind < 0.5:
        found[a], found[b] = found[b], found[a]
        return tuple(found)
    length = 1 if kind < 0.8 else 1 + int(draw() * max(1, n // 4))
    some = found[a : a + length]
    del found[a : a + length]
    b = min(b, len(found))
    found[b:b] = some
    return tuple(found)


def _swapped(sizes: Sizes, at: int, replicas: int, draw: Draw) -> Sizes | None:
    distance = 1 + int(draw() * 2 * replicas)
    other = at + distance if draw() < 0.5 else at - distance
    if not 0 <= other < len(sizes) or sizes[other] == sizes[at]:
        return None
    found = list(sizes)
    found[at], found[other] = found[other], found[at]
    return tuple(found)


def _split(sizes: Sizes, at: int, count: int, smaller: int) -> Sizes:
    """Some sizes that follow each other become as many of the next smaller one as hold them."""
    end = at + 1
    while end < len(sizes) and end - at < count and sizes[end] == sizes[at]:
        end += 1
    return (*sizes[:at], *[smaller] * -(-sum(sizes[at:end]) // smaller), *sizes[end:])


def _merged(sizes: Sizes, at: int, count: int, larger: int) -> Sizes | None:
    """As many equal sizes, nearest first, as `count` of the next larger one hold become these, or None where there are too few."""
    size = sizes[at]
    needed = -(-count * larger // size)
    near = sorted((n for n, other in enumerate(sizes) if other == size), key=lambda n: (abs(n - at), n))[:needed]
    if len(near) < needed:
        return None
    taken, first = set(near), min(near)
    return (*sizes[:first], *[larger] * count, *[s for n, s in enumerate(sizes) if n > first and n not in taken])
