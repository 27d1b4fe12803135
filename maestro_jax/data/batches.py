"""Which samples a step trains on: a Grain pipeline that is a pure function of the seed and the step.

Each epoch is shuffled anew and cut into batches. The samples that do not fill a last batch are left out of that
epoch (others in the next one), so no batch spans two epochs and none holds a sample twice: sample ids, which
dropout and routes depend on, are unique within a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import cast

from ..errors import DataError
from .samples import Sample
from .sources import Dataset


class Batches:
    """Batches of training samples, endless and with random access.

    Args:
        dataset: where the samples come from.
        batch: samples of one step (the global batch).
        seed: any whole number; another seed is another order in every epoch.

    Attributes:
        steps_per_epoch: batches in one pass over the training samples.

    Raises:
        DataError: the training samples do not fill one batch.

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
        import grain  # here, because it takes more than a second and imports JAX

        self.steps_per_epoch = available // batch
        source = grain.MapDataset.source(dataset.train)
        self._batches = source.shuffle(seed=_shuffle_seed(seed)).batch(batch, drop_remainder=True, batch_fn=list).repeat()

    def __call__(self, step: int) -> list[Sample]:
        """Returns the samples of a step, counted from 0; the same ones whichever steps were asked for before."""
        return cast("list[Sample]", self._batches[step])  # Grain allows for filters, which leave gaps (None); there is none here


def heldout_batches(dataset: Dataset, batch: int) -> Iterator[list[Sample]]:
    """Yields every held-out sample once, in order, in lists of `batch` samples; the last list may be shorter."""
    for start in range(0, len(dataset.heldout), batch):
        yield [dataset.heldout[n] for n in range(start, min(start + batch, len(dataset.heldout)))]


def _shuffle_seed(seed: int) -> int:
    """Grain adds the epoch to a 32-bit seed; without a hash, seed 1 would begin with the second epoch of seed 0."""
    return int.from_bytes(hashlib.sha256(f"shuffle:{seed}".encode()).digest()[:4], "big")
