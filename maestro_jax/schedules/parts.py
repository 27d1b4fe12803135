"""Trial cuts: one step's micro-batches of one section, from an order of samples and a list of sizes.

Without fan limits every section is cut alone, so a search that changes one section's sizes cuts only that section again.
Where the result breaks a fan limit, `cut_together` cuts all sections of the step sample by sample, as `cutting.cut` does.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence

from .compact import Compact, Link
from .workload import SectionWork

Sizes = tuple[int, ...]
"""Largest size in units of each micro-batch of a section and step, in order; those after the last one may be as large as the
largest bucket."""

Pairs = list[tuple[int, int]]
"""Micro-batches that depend on each other over one link, by their numbers within section and step, ascending."""


@dataclasses.dataclass(slots=True)
class Part:
    """The micro-batches of one section in one step.

    Args:
        items: positions of each micro-batch's items.
        units: of each micro-batch.
        buckets: of each micro-batch.
        forward: nanoseconds of each micro-batch.
        backward: nanoseconds of each micro-batch.
        where: per item, the number of its micro-batch.
    """

    items: list[list[int]]
    units: list[int]
    buckets: list[int]
    forward: list[int]
    backward: list[int]
    where: list[int]


class _Filler:
    """Fills micro-batches of one section one item at a time."""

    __slots__ = ("buckets", "capacity", "is_open", "items", "row", "rows", "sizes", "units", "work")

    def __init__(self, work: SectionWork, units: list[int], sizes: Sizes) -> None:
        self.work, self.units, self.sizes = work, work.taken(units), sizes
        self.buckets, self.row = work.buckets, work.row_length
        self.items: list[list[int]] = []
        self.rows: list[int] = []
        self.capacity = 0
        self.is_open = False

    def fits(self, rows: list[int], capacity: int, unit: int) -> list[int] | None:
        """The filled rows with an item added by first fit, or None where the open micro-batch has no room for it."""
        if self.row is None:
            filled = rows[0] + unit
            return [filled] if filled <= capacity else None
        for n, filled in enumerate(rows):
            if filled + unit <= self.row:
                return [*rows[:n], filled + unit, *rows[n + 1 :]]
        return [*rows, unit] if (len(rows) + 1) * self.row <= capacity else None

    def tried(self, items: Sequence[int], new: bool, large: bool = False) -> tuple[list[list[int]], list[int], int]:
        """Groups of items by micro-batch: the first goes to the open one, every other to a new one; and rows and capacity after."""
        groups: list[list[int]] = [[]]
        rows, capacity, made = self.rows, self.capacity, len(self.items)
        is_open = self.is_open and not new
        for item in items:
            unit = self.units[item]
            filled = self.fits(rows, capacity, unit) if is_open else None
            if filled is None:
                is_open = True
                groups.append([])
                capacity = self.sizes[made] if made < len(self.sizes) and not large else self.buckets[-1]
                made += 1
                if capacity < unit:
                    capacity = self.buckets[bisect_left(self.buckets, unit)]
                filled = [unit]
            groups[-1].append(item)
            rows = filled
        return groups, rows, capacity

    def room(self, items: Sequence[int]) -> list[int] | None:
        """The filled rows with all of some items added to the open micro-batch, or None where they do not fit there."""
        if not self.is_open:
            return None
        rows: list[int] | None = self.rows
        for item in items:
            rows = self.fits(rows, self.capacity, self.units[item])
            if rows is None:
                return None
        return rows

    def take(self, groups: list[list[int]], rows: list[int], capacity: int) -> None:
        """Makes what was tried real."""
        if groups[0]:
            self.items[-1] += groups[0]
        self.items += groups[1:]
        self.rows, self.capacity, self.is_open = rows, capacity, True

    def used(self, groups: list[list[int]]) -> list[int]:
        """The number of the micro-batch of each item that was tried."""
        start = len(self.items) - 1
        return [start + n for n, group in enumerate(groups) for _ in group]


def cut_section(model: Compact, step: int, section: int, order: Sequence[int], sizes: Sizes) -> Part:
    """Cuts one section's items of a step in an order of samples, micro-batch n up to `sizes[n]` units."""
    items = model.steps[step]
    work, units = model.sections[section], items.units[section]
    first, count = items.first[section], items.count[section]
    if work.row_length is not None or not work.packed:
        return _part(
            work, units, _in_rows(work, work.taken(units), sizes, [i for s in order for i in range(first[s], first[s] + count[s])])
        )
    buckets = work.buckets
    top, known = buckets[-1], len(sizes)
    made: list[list[int]] = []
    current: list[int] = []
    filled, capacity = 0, sizes[0] if sizes else top
    for sample in order:
        a = first[sample]
        for item in range(a, a + count[sample]):
            unit = units[item]
            if filled + unit > capacity:
                if filled:
                    made.append(current)
                    current, filled = [], 0
                    capacity = sizes[len(made)] if len(made) < known else top
                if unit > capacity:
                    capacity = buckets[bisect_left(buckets, unit)]
            filled += unit
            current.append(item)
    if current:
        made.append(current)
    return _part(work, units, made)


def _in_rows(work: SectionWork, units: list[int], sizes: Sizes, items: Sequence[int]) -> list[list[int]]:
    """Fills micro-batches whose rows no item may straddle, by first fit; `units` are those that items take."""
    row, top = work.row_length or work.buckets[-1], work.buckets[-1]
    made: list[list[int]] = []
    rows: list[int] = []
    capacity = 0
    for item in items:
        unit = units[item]
        for n, filled in enumerate(rows):
            if filled + unit <= row:
                rows[n] += unit
                break
        else:
            if (len(rows) + 1) * row > capacity:
                capacity = sizes[len(made)] if len(made) < len(sizes) else top
                rows = []
                made.append([])
            rows.append(unit)
        made[-1].append(item)
    return made


def pairs_of(model: Compact, step: int, parts: Sequence[Part], link: int) -> Pairs:
    """Which micro-batches of a step depend on each other over a link."""
    found = model.steps[step].dependent[link]
    if found is None:
        return []
    produced, consumed = found
    ends = model.links[link]
    return sorted(set(zip(produced(parts[ends.producer].where), consumed(parts[ends.consumer].where), strict=True)))


def within_fans(model: Compact, pairs: Sequence[Pairs]) -> bool:
    """Whether the pairs of all links of a step keep the fan limits."""
    for link, found in zip(model.links, pairs, strict=True):
        for limit, end in ((link.fan_out, 0), (link.fan_in, 1)):
            if limit is not None and found:
                ends = [pair[end] for pair in found]
                if max(map(ends.count, set(ends))) > limit:
                    return False
    return True


def cut_together(model: Compact, step: int, order: Sequence[int], sizes: Sequence[Sizes], aligned: bool = False) -> list[Part] | None:
    """Cuts all sections of a step sample by sample, closing micro-batches early where a fan limit would be broken.

    Args:
        model: the workload.
        step: number of the step.
        order: its samples.
        sizes: per section, as for `cut_section`.
        aligned: close the micro-batches of all sections together, so that those of one group of samples need no others.

    Returns:
        A part for each section, or None where a sample needs more than a fan limit allows.
    """
    items = model.steps[step]
    fillers = [_Filler(work, units, size) for work, units, size in zip(model.sections, items.units, sizes, strict=True)]
    fans = _Fans(model.links)
    for sample in order:
        active = [n for n in range(len(fillers)) if items.count[n][sample]]
        ranges = [range(items.first[n][sample], items.first[n][sample] + items.count[n][sample]) for n in active]
        if _joined([fillers[n] for n in active], ranges, active, fans):
            continue
        new: set[int] = set()
        large = False
        while True:
            tried = {n: fillers[n].tried(found, n in new, large) for n, found in zip(active, ranges, strict=True)}
            if aligned and not new and any(len(groups) > 1 for groups, _, _ in tried.values()):
                new = set(range(len(fillers)))
                continue
            used = {n: fillers[n].used(groups) for n, (groups, _, _) in tried.items()}
            crowded = fans.crowded(used)
            if not crowded:
                break
            if new.issuperset(active):
                if large:
                    return None
                # Its items lie in too many micro-batches of the sizes that are wanted: as few as there can be, then.
                large = True
                continue
            # As in `cutting`: where a crowded section has a new micro-batch already, the other end may need one.
            new |= set(active) if crowded <= new else crowded
        if aligned and new:
            for filler in fillers:
                filler.is_open = False
        fans.add(used)
        for n in active:
            fillers[n].take(*tried[n])
    return [_part(f.work, units, f.items) for f, units in zip(fillers, items.units, strict=True)]


def _joined(fillers: Sequence[_Filler], ranges: Sequence[range], active: Sequence[int], fans: _Fans) -> bool:
    """Adds a sample to the micro-batches that are open, where they have room and depend on each other already: most samples."""
    rows = []
    for filler, items in zip(fillers, ranges, strict=True):
        found = filler.room(items)
        if found is None:
            return False
        rows.append(found)
    if not fans.known({n: len(filler.items) - 1 for n, filler in zip(active, fillers, strict=True)}):
        return False
    for filler, items, found in zip(fillers, ranges, rows, strict=True):
        filler.items[-1] += items
        filler.rows = found
    return True


class _Fans:
    """Which micro-batches depend on each other so far, over links that have limits."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = [link for link in links if link.fan_in is not None or link.fan_out is not None]
        self.feeds: list[dict[int, set[int]]] = [{} for _ in self.links]
        self.fed: list[dict[int, set[int]]] = [{} for _ in self.links]

    def crowded(self, used: dict[int, list[int]]) -> set[int]:
        """Sections that should open a new micro-batch so that a sample breaks no limit."""
        found: set[int] = set()
        for link, feeds, fed in zip(self.links, self.feeds, self.fed, strict=True):
            new = _connected(link, used)
            if link.fan_out is not None and _over(link.fan_out, feeds, new):
                found.add(link.producer)
            if link.fan_in is not None and _over(link.fan_in, fed, [(b, a) for a, b in new]):
                found.add(link.consumer)
        return found

    def known(self, numbers: dict[int, int]) -> bool:
        """Whether micro-batches, one of each section that a sample visits, all depend on each other already."""
        for link, feeds in zip(self.links, self.feeds, strict=True):
            a, b = numbers.get(link.producer), numbers.get(link.consumer)
            if a is not None and b is not None and b not in feeds.get(a, ()):
                return False
        return True

    def add(self, used: dict[int, list[int]]) -> None:
        for link, feeds, fed in zip(self.links, self.feeds, self.fed, strict=True):
            for a, b in _connected(link, used):
                feeds.setdefault(a, set()).add(b)
                fed.setdefault(b, set()).add(a)


def _connected(link: Link, used: dict[int, list[int]]) -> Pairs:
    produced, consumed = used.get(link.producer, []), used.get(link.consumer, [])
    return list(zip(produced, consumed, strict=False)) if link.paired else [(a, b) for a in produced for b in consumed]


def _over(limit: int, known: dict[int, set[int]], new: Pairs) -> bool:
    added: dict[int, set[int]] = {}
    for a, b in new:
        added.setdefault(a, set()).add(b)
    return any(len(known.get(a, set()) | found) > limit for a, found in added.items())


def _part(work: SectionWork, units: list[int], made: list[list[int]]) -> Part:
    """Takes the smallest bucket that holds each micro-batch, and its costs."""
    where = [0] * len(units)
    sums, buckets, forward, backward = [], [], [], []
    f, b = work.forward, work.backward
    squared = f.per_unit_squared or b.per_unit_squared
    for n, items in enumerate(made):
        lengths = [units[i] for i in items]
        for item in items:
            where[item] = n
        needed = sum(lengths)
        sums.append(needed)
        if work.row_length is not None:
            needed = _rows(work.taken(lengths), work.row_length) * work.row_length
        bucket = work.buckets[bisect_left(work.buckets, needed)]
        squares = sum(u * u for u in lengths) if squared else 0
        buckets.append(bucket)
        forward.append(f.fixed + f.per_unit * bucket + f.per_unit_squared * squares // 1000)
        backward.append(b.fixed + b.per_unit * bucket + b.per_unit_squared * squares // 1000)
    return Part(made, sums, buckets, forward, backward, where)


def _rows(lengths: list[int], row: int) -> int:
    """How many rows first fit needs."""
    filled: list[int] = []
    for unit in lengths:
        n = next((n for n, used in enumerate(filled) if used + unit <= row), None)
        if n is None:
            filled.append(unit)
        else:
            filled[n] += unit
    return len(filled)
