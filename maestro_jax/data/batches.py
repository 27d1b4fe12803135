"""Which samples a step trains on: a pure function of the seed and the step.

Each epoch is shuffled anew (by Grain) and cut into batches. The samples that do not fill a last batch are left out of
that epoch (others in the next one), so no batch spans two epochs and none holds a sample twice: sample ids, which
dropout and routes depend on, are unique within a step.

Where a data set has parts, each part has epochs of its own, of as many whole steps as its samples surely suffice for.
How many samples of a batch come from each part is the rule by which Grain mixes (`MapDataset.mix`), with the exact
weights: however long a run is, a part has had its share of all samples, but for fewer than there are parts. Grain's own
`mix` rounds weights, and repeats samples in a batch that spans two epochs of a part.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from ..errors import DataError
from .dataset import Dataset, Part, refuse_repeated_ids
from .samples import Sample

_MANY = 2**62  # steps that no run takes; ranges end below 2**63


class Batches:
    """Batches of training samples, endless and with random access.

    Args:
        dataset: where the samples come from.
        batch: samples of one step (the global batch).
        seed: any whole number; another seed is another order in every epoch.
        set_by: where `batch` was set, for error texts.

    Attributes:
        steps_per_epoch: batches in one pass over the training samples; with parts, over the one that takes longest.
        steps_without_repeats: in so many steps no sample comes twice.

    Raises:
        DataError: the training samples, or those of a part, do not fill one batch.

    >>> from maestro_jax.data.samples import Sample
    >>> samples = [Sample(id=str(n), items={}) for n in range(6)]
    >>> batches = Batches(Dataset(train=samples, specs={}), batch=2, seed=0)
    >>> sorted(sample.id for step in range(batches.steps_per_epoch) for sample in batches(step))
    ['0', '1', '2', '3', '4', '5']
    """

    def __init__(self, dataset: Dataset, batch: int, seed: int, *, set_by: str = "the calling program") -> None:
        available = len(dataset.train)
        if not 1 <= batch <= available:
            raise DataError(
                "the training samples do not make a batch.",
                wanted=f"at least 1 sample, and at most the {available} training samples that there are",
                have=f"batch={batch}",
                set_by=set_by,
                fix="lower batch, add text, or lower max_length or heldout_fraction of the data source for more samples",
                anchor="batch-larger-than-data",
            )
        parts = dataset.parts or (Part("", available, 1),)
        self._train, self._batch = dataset.train, batch
        self._weights = whole_weights([part.weight for part in parts])
        self._orders = []
        first = 0
        for number, part in enumerate(parts):
            steps = self._steps_per_epoch(number, part, set_by)
            self._orders.append(_Order(first, part.samples, steps, _shuffled(part, seed)))
            first += part.samples
        self.steps_per_epoch = max(order.steps for order in self._orders)
        self.steps_without_repeats = min(order.steps for order in self._orders)

    def __call__(self, step: int) -> list[Sample]:
        """Returns the samples of a step, counted from 0, part by part; the same ones whichever steps were asked for before.

        Raises:
            DataError: one of them cannot be read, or two have one id.
        """
        samples = [self._train[place] for place in self.places(step)]
        refuse_repeated_ids(samples, f"the batch of step {step}")
        return samples

    def places(self, step: int) -> list[int]:
        """Returns where in the training samples those of a step are; nothing is read."""
        before, after = (shares(n * self._batch, self._weights) for n in (step, step + 1))
        places = []
        for number, order in enumerate(self._orders):
            epoch = step // order.steps
            start = shares(epoch * order.steps * self._batch, self._weights)[number]
            places += [order.place(epoch, n - start) for n in range(before[number], after[number])]
        return places

    def _steps_per_epoch(self, number: int, part: Part, set_by: str) -> int:
        """The most steps in a row that never take more samples of a part than it has."""
        bound = min(part.samples * sum(self._weights) // (self._batch * self._weights[number]), _MANY)
        steps = bisect.bisect_right(range(bound + 1), part.samples, key=lambda n: most(n * self._batch, self._weights)[number]) - 1
        if steps < 1:
            share = self._batch * self._weights[number] / sum(self._weights)
            raise DataError(
                f"source {part.name!r} has too few training samples for its weight.",
                wanted=f"at least {most(self._batch, self._weights)[number]} samples, so that no batch holds one of them twice",
                have=f"{part.samples}, and a step takes {share:.3g} of its {self._batch} samples from them",
                set_by=set_by,
                fix="lower batch or the weight of this source, or give it more data (a lower max_length makes more samples of a text)",
                anchor="mixture-source-too-small",
            )
        return steps


@dataclasses.dataclass(frozen=True)
class _Order:
    """In which order the samples of a part are drawn: `samples` of them, from place `first` on, in epochs of `steps` steps."""

    first: int
    samples: int
    steps: int
    shuffled: Any

    def place(self, epoch: int, number: int) -> int:
        """Place in the data set of the sample that is drawn as `number` in an epoch."""
        return self.first + self.shuffled[epoch * self.samples + number]


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns whole numbers in exactly the proportions of the weights.

    >>> whole_weights([3.0, 0.5])
    (6, 1)
    """
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    return tuple(int(weight * unit) for weight in exact)


def shares(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Says how many of the first `total` samples each part gives; no part's number ever falls when `total` grows.

    >>> [shares(total, (3, 1)) for total in range(5)]
    [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)]
    """
    found, left = [], sum(weights)
    for weight in weights:
        rest = total * (left - weight) // left
        found.append(total - rest)
        total, left = rest, left - weight
    return tuple(found)


def most(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Says how many of any `total` samples in a row each part gives at most.

    >>> most(8, (3, 1)), most(2, (3, 1))
    ((6, 2), (2, 1))
    """
    found, left = [], sum(weights)
    for weight in weights:
        # Of n in a row, rounding takes at most the next whole number above n times the share, and passes on likewise.
        found.append(-(-total * weight // left))
        total, left = -(-total * (left - weight) // left), left - weight
    return tuple(found)


def heldout_places(dataset: Dataset, batch: int) -> Iterator[range]:
    """Yields the places of all held-out samples in order, `batch` at a time."""
    for start in range(0, len(dataset.heldout), batch):
        yield range(start, min(start + batch, len(dataset.heldout)))


def readable(samples: Sequence[Sample], places: Iterable[int]) -> tuple[list[Sample], list[DataError]]:
    """Reads the samples at some places: returns those that can be read, and the errors of the others."""
    good, bad = [], []
    for place in places:
        try:
            good.append(samples[place])
        except DataError as error:
            bad.append(error)
    return good, bad


def _shuffled(part: Part, seed: int) -> Any:
    """Grain's shuffle of the numbers below `part.samples`, another one in each epoch."""
    import grain  # here, because it takes more than a second and imports JAX

    # Grain adds the epoch to a 32-bit seed; without a hash, seed 1 would begin with the second epoch of seed 0.
    name = f"shuffle:{seed}:{part.name}" if part.name else f"shuffle:{seed}"
    hashed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return grain.MapDataset.source(range(part.samples)).shuffle(seed=hashed)
