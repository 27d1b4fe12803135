"""Looks for the order and the sizes of micro-batches that end soonest, with trial runs as the judge.

First rules (`sizes.py`) are tried one field at a time, then small random moves are kept where they do no harm. How many are
tried depends on the workload's size alone, and random numbers on the seed alone, so the same workload gives the same result.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .compact import Compact
from .moves import moved_order, moved_sizes
from .parts import Pairs, Part, Sizes, cut_section, cut_together, pairs_of, within_fans
from .sizes import Packer, Ramp, classes_of, lead_of, same_as, sizes_of, twins_of
from .trial import FED, STUCK, Graph, Rules, Trial

ENDS = 0.3
"""Weight of the mean end of a replica's work beside the end of everything: it tells apart trials with one makespan."""

HEAT = 0.15
"""How much worse than the best known, as a share of one micro-batch's time, a move may be at first; less and less towards the end."""

SMALL = 64
"""Samples up to which a step counts as small: its order is searched more than its ramps, and single samples matter."""

DRAWS = 4
"""Moves that may be drawn for each trial: many do not apply or change nothing, which costs next to nothing to see."""

RULES = 0.8
"""Most of the trials that rules may take, as a share: moves get the others."""

TOGETHER = 2
"""Trials that a cut of all sections together counts for, beside its own: it takes that much longer."""

PATIENCE = 120
"""Trials without a shorter makespan after which a search gives up, or a third of all trials where that is more."""

CLOSE = 1.01
"""Makespan over lower bound at which there is nothing left to look for."""

Ramps = tuple[Ramp, Ramp]
"""The lead's ramp of sizes and that of all other sections."""

Change = Callable[[Ramps], Ramps]
"""Makes other ramps from those of the best trial so far."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A cut of all steps and rules to run it, with what a trial found.

    Args:
        orders: per step, its samples.
        sizes: per step and section.
        rules: what starts first.
        aligned: whether the micro-batches of all sections are closed together.
        parts: per step and section.
        pairs: per step and link.
        makespan: nanoseconds, or `STUCK`.
        value: what the search makes small.
    """

    orders: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[Sizes, ...], ...]
    rules: Rules
    aligned: bool = False
    parts: tuple[tuple[Part, ...], ...] = ()
    pairs: tuple[tuple[Pairs, ...], ...] = ()
    makespan: int = STUCK
    value: float = STUCK


class Search:
    """A search on one workload.

    Args:
        model: the workload.
        bound: nanoseconds below which no schedule can end.
        trials: how many cuts may be tried.
        seed: of the random moves.
    """

    def __init__(self, model: Compact, bound: int, trials: int, seed: int) -> None:
        self.model, self.bound, self.left = model, bound, trials
        self.lead = lead_of(model)
        self.twins = twins_of(model, self.lead)
        self.same = same_as(model)
        self.random = random.Random(seed)
        classes = [classes_of(model, self.lead, t) for t in range(len(model.steps))]
        largest = model.sections[self.lead].row_length or model.sections[self.lead].buckets[-1]
        self.packers = [Packer(step.totals[self.lead], found, largest) for step, found in zip(model.steps, classes, strict=True)]

    def run(self) -> Candidate | None:
        """Returns the best candidate, or None where none of them runs to its end."""
        best = self._by_rule()
        if best.makespan == STUCK:
            best = self._careful(best)
        return None if best.makespan == STUCK else self._improved(best)

    # -- trials

    def tried(self, wanted: Candidate, base: Candidate | None = None) -> Candidate:
        """Cuts and runs a candidate; parts that it shares with `base` are taken from there."""
        parts, pairs, sizes = [], [], []
        for t in range(len(self.model.steps)):
            made, connected = self._cut(t, wanted, base)
            parts.append(made)
            pairs.append(connected)
            sizes.append(tuple(tuple(part.buckets) for part in made))
        if base is not None and wanted.rules == base.rules and _same_cut(parts, base.parts):
            return base
        self.left -= 1
        found = dataclasses.replace(wanted, parts=tuple(parts), pairs=tuple(pairs), sizes=tuple(sizes))
        if not parts or not self._possible(found):
            return found
        trial = Trial(self.model, Graph(self.model, parts, pairs), wanted.rules)
        makespan = trial.run()
        mean = sum(trial.ends.values()) / len(trial.ends) if trial.ends else 0.0
        return dataclasses.replace(found, makespan=makespan, value=makespan + ENDS * mean)

    def _cut(self, t: int, wanted: Candidate, base: Candidate | None) -> tuple[tuple[Part, ...], tuple[Pairs, ...]]:
        model, order, sizes = self.model, wanted.orders[t], wanted.sizes[t]
        same = base is not None and base.parts[t] != () and order is base.orders[t] and wanted.aligned == base.aligned
        if base is not None and same and sizes == base.sizes[t]:
            return base.parts[t], base.pairs[t]
        if not wanted.aligned:
            made = []
            for n in range(len(model.sections)):
                if base is not None and same and sizes[n] == base.sizes[t][n]:
                    made.append(base.parts[t][n])
                elif self.same[n] < n and sizes[n] == sizes[self.same[n]]:
                    made.append(made[self.same[n]])
                else:
                    made.append(cut_section(model, t, n, order, sizes[n]))
            pairs = []
            for n, link in enumerate(model.links):
                if base is not None and base.parts[t] and all(made[end] is base.parts[t][end] for end in (link.producer, link.consumer)):
                    pairs.append(base.pairs[t][n])
                else:
                    pairs.append(pairs_of(model, t, made, n))
            if not model.has_fans or within_fans(model, pairs):
                return tuple(made), tuple(pairs)
        self.left -= TOGETHER
        together = cut_together(model, t, order, sizes, wanted.aligned)
        if together is None:
            return (), ()
        return tuple(together), tuple(pairs_of(model, t, together, n) for n in range(len(model.links)))

    def _possible(self, found: Candidate) -> bool:
        return all(len(parts) == len(self.model.sections) for parts in found.parts)

    def _packed(self, t: int, sizes: Sizes) -> tuple[int, ...]:
        """An order of a step's samples that fills the lead's micro-batches, row by row where items may not straddle rows."""
        row = self.model.sections[self.lead].row_length
        return self.packers[t].order(sizes if row is None else tuple(row for size in sizes for _ in range(size // row)))

    # -- by rule

    def _by_rule(self) -> Candidate:
        """The best of some rules, field by field and step by step."""
        steps = range(len(self.model.steps))
        tops = [len(s.buckets) - 1 for s in self.model.sections]
        top = max(tops, default=0)
        flat = Ramp(up=top + 1, down=top + 1, top=top)
        ramps: list[Ramps] = [(flat, flat) for _ in steps]
        hungry = Rules(hunger=(FED,) * len(self.model.sections))
        best = self.tried(self._ramped(ramps, hungry, None))
        arrival = tuple(tuple(range(step.samples)) for step in self.model.steps)
        full = tuple(((),) * len(self.model.sections) for _ in steps)
        best = self._better(best, self.tried(Candidate(arrival, full, hungry)))
        # Moves get what is left.
        enough = self.left * (1 - RULES)
        for t in steps:
            known: set[Ramps] = {ramps[t]}
            # A small step is cut in few ways, which moves find sooner than ramps do.
            small = self.model.steps[t].samples <= SMALL
            for stage in (_flat(top),) if small else (_pairs_of_ramps(top), _other_fields(top), _other_fields(top)):
                for change in stage:
                    pair = change(ramps[t])
                    if pair in known or self.left <= enough:
                        continue
                    known.add(pair)
                    trial = self.tried(self._ramped([*ramps[:t], pair, *ramps[t + 1 :]], best.rules, best, t), best)
                    if trial.value < best.value:
                        best, ramps[t] = trial, pair
        for hunger in (0.0, 1.0):
            rules = Rules(hunger=(hunger,) * len(self.model.sections))
            best = self._better(best, self.tried(dataclasses.replace(best, rules=rules), best))
        return best

    @staticmethod
    def _better(best: Candidate, trial: Candidate) -> Candidate:
        return trial if trial.value < best.value else best

    def _ramped(self, ramps: Sequence[Ramps], rules: Rules, base: Candidate | None, changed: int | None = None) -> Candidate:
        """A candidate whose sizes follow ramps; steps other than `changed` are as they are in `base`."""
        orders, sizes = [], []
        for t, (lead, other) in enumerate(ramps):
            if base is not None and t != changed:
                orders.append(base.orders[t])
                sizes.append(base.sizes[t])
                continue
            found = tuple(sizes_of(self.model, n, t, lead if twin else other, twin) for n, twin in enumerate(self.twins))
            orders.append(self._packed(t, found[self.lead]))
            sizes.append(found)
        return Candidate(tuple(orders), tuple(sizes), rules)

    def _careful(self, stuck: Candidate) -> Candidate:
        """Where memory is too tight for that: forwards in order, then micro-batches that are closed together."""
        rules = Rules(hunger=(0.0,) * len(self.model.sections), strict=True)
        for aligned in (False, True):
            orders = tuple(tuple(range(step.samples)) for step in self.model.steps) if aligned else stuck.orders
            sizes = tuple(((),) * len(self.model.sections) for _ in self.model.steps)
            found = self.tried(Candidate(orders, sizes, rules, aligned))
            if found.makespan != STUCK:
                return found
        return stuck

    # -- by moves

    def _improved(self, best: Candidate) -> Candidate:
        """Random moves, kept where they make the value smaller or hardly larger."""
        now, shortest, trials = best, best, max(self.left, 1)
        since, patience = self.left, max(PATIENCE, trials // 3)
        hottest = HEAT / max(1, sum(len(part.units) for parts in best.parts for part in parts))
        for _ in range(DRAWS * trials):
            if self.left <= 0 or since - self.left >= patience or shortest.makespan <= CLOSE * self.bound:
                break
            wanted = self._moved(now)
            if wanted is None:
                continue
            trial = self.tried(wanted, now)
            if trial is now:
                continue
            heat = hottest * self.left / trials * self.random.random()
            if trial.makespan != STUCK and trial.value <= now.value + heat * shortest.value:
                now = trial
            if (trial.makespan, trial.value) < (shortest.makespan, shortest.value):
                shortest, since = trial, self.left
        return shortest

    def _pick(self, options: Sequence[T]) -> T:
        """One of the options. Only `random()` is used: its numbers are the same in every version of Python."""
        return options[int(self.random.random() * len(options))]

    def _moved(self, now: Candidate) -> Candidate | None:
        """A neighbour of a candidate, or None where the move that was drawn does not apply."""
        t = self._pick(range(len(now.orders)))
        samples = len(now.orders[t])
        drawn = self.random.random()
        if drawn < 0.03:
            n = self._pick(range(len(self.model.sections)))
            hunger = list(now.rules.hunger)
            hunger[n] = self._pick((0.0, 0.3, 1.0, 3.0, FED))
            return dataclasses.replace(now, rules=dataclasses.replace(now.rules, hunger=tuple(hunger)))
        if samples > 1 and drawn < 0.03 + min(0.5, 10 / samples):
            order = moved_order(now.orders[t], self.random.random)
            return dataclasses.replace(now, orders=(*now.orders[:t], order, *now.orders[t + 1 :]))
        n = self._pick(range(len(self.model.sections)))
        work = self.model.sections[n]
        sizes = moved_sizes(now.sizes[t][n], work.buckets, work.replicas, self.random.random)
        if sizes is None:
            return None
        alike = [n]
        if self.twins[n] and (samples > SMALL or self.random.random() < 0.5):
            alike = [m for m, twin in enumerate(self.twins) if twin]
        found = tuple(sizes if m in alike else old for m, old in enumerate(now.sizes[t]))
        orders = now.orders
        if self.lead in alike and not now.aligned and (samples > SMALL or self.random.random() < 0.5):
            orders = (*orders[:t], self._packed(t, sizes), *orders[t + 1 :])
        return dataclasses.replace(now, orders=orders, sizes=(*now.sizes[:t], found, *now.sizes[t + 1 :]))


def _same_cut(parts: Sequence[tuple[Part, ...]], others: Sequence[tuple[Part, ...]]) -> bool:
    """Whether two cuts put the same items together, in the same buckets and order."""

    def same(a: Part, b: Part) -> bool:
        return a is b or (a.where == b.where and a.buckets == b.buckets)

    return all(len(step) == len(other) and all(map(same, step, other)) for step, other in zip(parts, others, strict=True))


def _with(pair: Ramps, which: int, field: str, value: Any) -> Ramps:
    """The pair with one field of one of its ramps changed."""
    lead, other = pair
    if which:
        return lead, dataclasses.replace(other, **{field: value})
    return dataclasses.replace(lead, **{field: value}), other


def _flat(top: int) -> Iterator[Change]:
    """Micro-batches of one size in the lead and of one in all others: every pair of sizes."""
    levels = [Ramp(up=top + 1, down=top + 1, top=n) for n in range(top, -1, -1)]
    for pair in [(lead, other) for lead in levels for other in levels]:
        yield lambda _, pair=pair: pair


def _pairs_of_ramps(top: int) -> Iterator[Change]:
    """Ramps of the lead together with ramps of the others."""
    flat = Ramp(up=top + 1, down=top + 1, top=top)
    less = max(0, top - 1)
    leads = [flat, dataclasses.replace(flat, odd_first=True), dataclasses.replace(flat, up=0), dataclasses.replace(flat, up=0, down=0)]
    leads += [dataclasses.replace(flat, up=less, rounds=rounds, down=down) for rounds in (1, 2) for down in (top + 1, 0)]
    leads += [dataclasses.replace(flat, top=less)]
    others = [flat, dataclasses.replace(flat, up=0), dataclasses.replace(flat, up=1, rounds=2), dataclasses.replace(flat, top=less)]
    for pair in [(lead, other) for other in others for lead in leads]:
        yield lambda _, pair=pair: pair


def _other_fields(top: int) -> Iterator[Change]:
    """One field of one ramp at a time."""
    fields = {"up": range(top + 2), "down": range(top + 2), "rounds": (1, 2, 3), "top": range(top + 1), "odd_first": (False, True)}
    for which in (1, 0):
        for field, values in fields.items():
            for value in values:
                yield lambda pair, which=which, field=field, value=value: _with(pair, which, field, value)
