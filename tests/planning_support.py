"""Made-up planning problems: sections in a chain, whose tasks take their work divided by what a replica's devices reach together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from maestro_jax.schedules import Cost, EdgeWork, SampleWork, SectionWork
from maestro_jax.schedules.bounding import groupings
from maestro_jax.schedules.candidates import Allocation, Candidate, PlanningProblem, placed

NAMES = ("first", "second", "third")
CALL = 20_000


def made_up(
    seed: int,
    *,
    sections: int = 3,
    devices: int = 8,
    samples: int = 24,
    tensors: tuple[int, ...] = (1, 2, 4),
    rows: tuple[int, ...] = (1,),
    memory: int = 10**9,
) -> PlanningProblem:
    """Makes a problem.

    Args:
        seed: of everything random.
        sections: how many there are.
        devices: how many there are.
        samples: of a global batch; all have items in the last section, and fewer in those before.
        tensors: devices of a replica.
        rows: rows of 64 units in a micro-batch.
        memory: bytes of a device; a section's state takes 4e8 to 12e8 bytes, split over a replica's devices.
    """
    random = np.random.default_rng(seed)
    names = NAMES[:sections]
    candidates = {}
    for number, name in enumerate(names):
        work, trainable, state = math.exp(random.uniform(math.log(2e3), math.log(4e4))), bool(number or random.random() < 0.5), 0
        if memory < 10**9:
            state = int(random.uniform(4e8, 12e8))
        candidates[name] = tuple(
            _candidate(name, work, trainable, tensor, each, devices, state)
            for tensor, each in itertools.product(tensors, rows)
            if tensor <= devices
        )
    step = []
    for number in range(samples):
        items = {name: (int(random.integers(8, 64)),) for name in names[:-1] if random.random() < 0.7}
        step.append(SampleWork(id=number, items={**items, names[-1]: (int(random.integers(8, 64)),)}))
    return PlanningProblem(candidates=candidates, edges=_chain, steps=(tuple(step),), devices=devices, memory=memory)


def _candidate(name: str, work: float, trainable: bool, tensor: int, rows: int, devices: int, state: int) -> Candidate:
    # Each doubling of the devices of a replica loses a tenth.
    rate = tensor * 0.9 ** math.log2(tensor)
    cost = Cost(fixed=CALL, per_unit=max(1, round(work / rate)))
    section = SectionWork(
        replicas=1,
        buckets=tuple(64 * count for count in sorted({1, rows})),
        trainable=trainable,
        max_inflight=2**60,
        forward=cost,
        backward=Cost(fixed=CALL, per_unit=2 * cost.per_unit),
        row_length=64,
    )
    return Candidate(
        section=name,
        key=(("axes", f"tensor={tensor}"), ("microbatch", f"{64 * rows:05d}")),
        devices=tensor,
        work=section,
        state=state // tensor,
        shared_state=0,
        scratch=0,
        in_flight=8,
        updates={replicas: CALL * (1 + replicas.bit_length()) for replicas in range(1, devices // tensor + 1)},
    )


def _chain(chosen: Mapping[str, Candidate]) -> tuple[EdgeWork, ...]:
    return tuple(EdgeWork(producer=one, consumer=two, delay=10_000) for one, two in itertools.pairwise(chosen))


def all_allocations(problem: PlanningProblem) -> Iterator[Allocation]:
    """Every candidate with every number of replicas, apart and in every group that takes turns."""
    names = list(problem.candidates)
    options = [[(c, r) for c in problem.candidates[name] for r in c.updates if r * c.devices <= problem.devices] for name in names]
    for groups in groupings(names):
        for chosen in itertools.product(*options):
            choices = dict(zip(names, chosen, strict=True))
            allocation = placed(choices, groups)
            taken = sum(max(choices[name][1] * choices[name][0].devices for name in group) for group in groups)
            if taken <= problem.devices and allocation.memory <= problem.memory:
                yield allocation
