"""Tries every way on which arrays will go between processes, with known contents, before training begins.

What arrives in the wrong place raises no error by itself, so it is looked for here, where it costs little.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..errors import ClusterError, error_of
from ..meshes import Parcel, Wire, move, processes_of, put_whole
from ..meshes.transport import Transport
from .plan import EdgePlan, Plan

TRIALS = 3
"""How often the first wire of each edge is tried; the fastest time counts, because the others may have waited for their sender."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exercise:
    """What came of trying the ways between processes.

    Args:
        pairs: of devices in different processes between which rows crossed, each direction counted.
        delays: edge label -> nanoseconds of a transfer, for edges between processes.
    """

    pairs: int = 0
    delays: Mapping[str, int] = dataclasses.field(default_factory=dict)


def exercise(plan: Plan) -> Exercise:
    """Sends a slot over every wire between processes, forward and, where gradients flow, back; all processes call this.

    Raises:
        ClusterError: in every process, when something else arrived in one of them than was sent.
    """
    group, pairs, problem = plan.group, set(), None
    delays: dict[str, list[int]] = {}
    if group.count == 1:
        return Exercise()
    # All processes connect, also one that takes part in no transfer.
    transport = group.transport
    for edge, wire, back, name in _ways(plan):
        pairs |= _pairs(wire, back)
        if group.index in (*processes_of(wire.source), *processes_of(wire.target)):
            try:
                taken = _try(edge, wire, back, group.index, transport, name)
            except ClusterError as error:
                # The others wait for what comes after it.
                problem = problem or error
            else:
                delays.setdefault(edge.edge.label, []).extend([] if taken is None else [taken])
    fastest = {label: min(found) for label, found in delays.items() if found}
    told = group.all_gather("exercise", {"delays": fastest, "problem": problem and problem.to_json()})
    for part in told:
        if part["problem"] is not None:
            raise problem or error_of(part["problem"])
    labels = sorted({label for part in told for label in part["delays"]})
    return Exercise(pairs=len(pairs), delays={n: max(part["delays"].get(n, 0) for part in told) for n in labels})


def _ways(plan: Plan) -> Iterator[tuple[EdgePlan, Wire, bool, str]]:
    """(edge, wire, whether backward, name) of each transfer to try; the first wire of each edge several times."""
    for label, edge in plan.edges.items():
        trials = TRIALS
        for replicas, wire in edge.wires.items():
            # Asked of all processes and not of this one: they must try equally often.
            if len({*processes_of(wire.source), *processes_of(wire.target)}) > 1:
                for back in (False, True)[: 1 + edge.backward]:
                    for trial in range(trials):
                        yield edge, wire, back, f"exercise {label} {replicas} {back} {trial}"
                trials = 1


def _pairs(wire: Wire, back: bool) -> set[tuple[Any, Any]]:
    here, there = (list(mesh.devices.flat) for mesh in ((wire.target, wire.source) if back else (wire.source, wire.target)))
    crossing = ((here[k % len(here)], there[k % len(there)]) for k in range(wire.stripes))
    return {(a.id, b.id) for a, b in crossing if a.process_index != b.process_index}


def _try(edge: EdgePlan, wire: Wire, back: bool, index: int, transport: Transport | None, name: str) -> int | None:
    """Sends a slot; returns nanoseconds until it had arrived, or None where nothing of it arrives."""
    here = wire.target if back else wire.source
    sent = _contents(wire, name)
    slot = None
    if index in processes_of(here):
        shapes = wire.shapes(here)
        parts = np.split(sent, len(shapes))
        slot = tuple(put_whole(part, shape.sharding) for part, shape in zip(parts, shapes, strict=True))
        jax.block_until_ready(slot)
    begin = time.perf_counter_ns()
    [arrived] = move([Parcel(wire, slot, back)], transport, name)
    if arrived is None:
        return None
    jax.block_until_ready(arrived)
    taken = time.perf_counter_ns() - begin
    found = {(j, shard.device): shard.data for j, array in enumerate(arrived) for shard in array.addressable_shards}
    stripes = np.split(sent, wire.stripes)
    for k, source, target in wire.expected(back):
        if not np.array_equal(np.asarray(found[k * len(arrived) // wire.stripes, target]), stripes[k]):
            raise ClusterError(
                f"rows of edge {edge.edge.label} arrive in the wrong place between processes.",
                wanted=f"on {target} of process {target.process_index}, the rows that {source} of process {source.process_index} sent",
                have="other rows",
                set_by="the transfers between the processes of this run",
                fix="report this with the versions of jax and drivers; inside one process nothing goes this way",
                anchor="transfer-misplaced",
            )
    return taken


def _contents(wire: Wire, name: str) -> np.ndarray:
    """Rows of a slot, drawn from the name of the transfer, so that those of another are told from them; small, for narrow dtypes."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return random.integers(0, 16, (wire.rows, *wire.row.shape), dtype=np.uint8).astype(wire.row.dtype)
