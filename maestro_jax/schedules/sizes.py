"""Where a search begins: sizes of micro-batches and orders of samples, made by rule.

Sizes come in ramps: a pipeline fills sooner from small micro-batches and drains sooner through small ones, and in between
large ones cost least. Samples are put into them by best fit: every micro-batch takes the longest sample that still fits,
so that short ones are left for the gaps (best-fit decreasing, one bin at a time).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence

from .compact import Compact
from .parts import Sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Ramp:
    """How the sizes of a section's micro-batches grow and shrink.

    Args:
        up: number of the smallest bucket at the beginning; as many as there are buckets: no growth.
        down: number of the smallest bucket at the end, likewise.
        rounds: micro-batches of each growing size, per replica.
        top: number of the largest bucket in use.
        odd_first: whether the micro-batches that are left over from full ones come at the beginning.
    """

    up: int
    down: int
    top: int
    rounds: int = 1
    odd_first: bool = False


def sizes_of(model: Compact, section: int, step: int, ramp: Ramp, even: bool) -> Sizes:
    """Sizes along a ramp that hold all units of a section in a step.

    Args:
        model: the workload.
        section: its number.
        step: number of the step.
        ramp: how sizes grow and shrink.
        even: every replica gets the same sizes, so that they end together; else the last size is as it comes.
    """
    work = model.sections[section]
    buckets, replicas = work.buckets[: ramp.top + 1], work.replicas
    total = model.total(section, step)
    ups = [b for b in buckets[ramp.up : -1] for _ in range(ramp.rounds)]
    downs = list(buckets[ramp.down : -1][::-1])
    rest = -(-total // replicas) - sum(ups) - sum(downs)
    full, left = divmod(max(rest, 0), buckets[-1])
    if not even:
        each = [*ups, *[buckets[-1]] * (full + (left > 0)), *downs]
        return tuple(b for b in each for _ in range(replicas))
    odd = _odd(left, buckets, model, section)
    if ramp.odd_first:
        each = [*sorted(ups + odd), *[buckets[-1]] * full, *downs]
    else:
        each = [*ups, *[buckets[-1]] * full, *sorted(odd + downs, reverse=True)]
    return tuple(b for b in each for _ in range(replicas))


def _odd(left: int, buckets: Sequence[int], model: Compact, section: int) -> list[int]:
    """The cheapest sizes that hold what is left over from full micro-batches: one, or a large one and what that leaves over."""
    if left <= 0:
        return []
    work, backward = model.sections[section], model.runs_backward[section]
    fixed = work.forward.fixed + (work.backward.fixed if backward else 0)
    each = work.forward.per_unit + (work.backward.per_unit if backward else 0)
    # Left over are less than a full one, so that a single bucket always holds it.
    one = next(b for b in buckets if b >= left)
    smaller = [b for b in buckets if b < left]
    if not smaller:
        return [one]
    several = [smaller[-1], *_odd(left - smaller[-1], buckets, model, section)]
    return several if sum(fixed + each * b for b in several) <= fixed + each * one else [one]


def lead_of(model: Compact) -> int:
    """The section that everything else is arranged around: the one whose replicas have most to do."""
    return max(range(len(model.sections)), key=lambda n: (model.loads[n], -n))


def twins_of(model: Compact, lead: int) -> list[bool]:
    """Which sections see the same lengths as the lead through the same buckets, as stages of one model do: they are cut alike."""
    return [_alike(model, lead, n) for n in range(len(model.sections))]


def same_as(model: Compact) -> list[int]:
    """Per section, the first one that has the same items, buckets and costs: one cut serves both."""
    found = []
    for n, b in enumerate(model.sections):
        costs = b.forward, b.backward
        found.append(next(m for m, a in enumerate(model.sections) if (a.forward, a.backward) == costs and _alike(model, m, n)))
    return found


def _alike(model: Compact, first: int, second: int) -> bool:
    a, b = model.sections[first], model.sections[second]
    if a.buckets != b.buckets or a.row_length != b.row_length:
        return False
    return all(s.units[first] == s.units[second] and s.count[first] == s.count[second] for s in model.steps)


def classes_of(model: Compact, lead: int, step: int) -> list[list[int]]:
    """The samples of a step by the sections that they visit: first those with most backward work left after the lead's.

    Samples that need nothing upstream come last: they fill in wherever the others are not there yet, and whatever is left
    of them ends the step with nothing upstream to wait for.
    """
    items = model.steps[step]
    found: dict[tuple[int, ...], list[int]] = {}
    for sample in range(items.samples):
        found.setdefault(tuple(n for n in range(len(model.sections)) if items.count[n][sample]), []).append(sample)
    tails = {signature: sum(_tail(model, lead, step, s) for s in samples) / len(samples) for signature, samples in found.items()}
    return [found[signature] for signature in sorted(found, key=lambda x: (-tails[x], x))]


def _tail(model: Compact, lead: int, step: int, sample: int) -> int:
    """Nanoseconds of backward in sections other than the lead."""
    totals = model.steps[step].totals
    return sum(s.backward.per_unit * totals[n][sample] for n, s in enumerate(model.sections) if n != lead and model.runs_backward[n])


class Packer:
    """Orders samples so that the lead's micro-batches of given sizes are full.

    Args:
        totals: units of each sample in the lead.
        classes: samples that go first, those that go next, and so on.
        largest: units of the lead's largest bucket.
    """

    def __init__(self, totals: Sequence[int], classes: Sequence[Sequence[int]], largest: int) -> None:
        self.largest = largest
        self.classes = []
        for samples in classes:
            ascending = sorted(samples, key=lambda s: (totals[s], s))
            self.classes.append(([totals[s] for s in ascending], ascending))

    def order(self, sizes: Sizes) -> tuple[int, ...]:
        """Fills micro-batch after micro-batch; each takes the longest sample of the first class that has one that fits."""
        classes = [(list(lengths), list(samples)) for lengths, samples in self.classes]
        found: list[int] = []
        wanted = sum(len(samples) for _, samples in classes)
        n = 0
        while len(found) < wanted:
            room, before = sizes[n] if n < len(sizes) else self.largest, len(found)
            n += 1
            for lengths, samples in classes:
                while lengths and lengths[0] <= room:
                    best = bisect_right(lengths, room) - 1
                    room -= lengths.pop(best)
                    found.append(samples.pop(best))
            if len(found) == before and n >= len(sizes):
                # Longer than the largest bucket: its items lie in several micro-batches.
                lengths, samples = next(entry for entry in classes if entry[0])
                lengths.pop()
                found.append(samples.pop())
        return tuple(found)
