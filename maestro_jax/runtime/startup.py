"""Tries every way on which arrays will go between processes, with known contents, before training begins.

What arrives in the wrong place raises no error by itself, so it is looked for here, where it costs little.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np

from ..errors import ClusterError
from ..meshes import Parcel, Wire, move, processes_of, put_whole
from .plan import EdgePlan, Plan


def exercise(plan: Plan) -> int:
    """Sends a slot over every wire between processes, forward and, where gradients flow, back; all processes call this.

    Returns:
        The number of pairs of devices in different processes between which rows crossed, each direction counted.

    Raises:
        ClusterError: something else arrived than was sent.
    """
    group, pairs = plan.group, set()
    if group.count == 1:
        return 0
    for label, edge in plan.edges.items():
        for replicas, wire in edge.wires.items():
            for back in (False, True)[: 1 + edge.backward]:
                pairs |= _pairs(wire, back)
                here, there = (wire.target, wire.source) if back else (wire.source, wire.target)
                if len({*processes_of(here), *processes_of(there)}) > 1 and group.index in (*processes_of(here), *processes_of(there)):
                    _try(plan, edge, wire, back, f"exercise {label} {replicas} {back}")
    group.all_gather("exercise", None)
    return len(pairs)


def _pairs(wire: Wire, back: bool) -> set[tuple[Any, Any]]:
    here, there = (list(mesh.devices.flat) for mesh in ((wire.target, wire.source) if back else (wire.source, wire.target)))
    crossing = ((here[k % len(here)], there[k % len(there)]) for k in range(wire.stripes))
    return {(a.id, b.id) for a, b in crossing if a.process_index != b.process_index}


def _try(plan: Plan, edge: EdgePlan, wire: Wire, back: bool, name: str) -> None:
    here = wire.target if back else wire.source
    sent = _contents(wire, name)
    slot = None
    if plan.group.index in processes_of(here):
        shapes = wire.shapes(here)
        parts = np.split(sent, len(shapes))
        slot = tuple(put_whole(part, shape.sharding) for part, shape in zip(parts, shapes, strict=True))
        jax.block_until_ready(slot)
    [arrived] = move([Parcel(wire, slot, back)], plan.group.transport, name)
    if arrived is None:
        return
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


def _contents(wire: Wire, name: str) -> np.ndarray:
    """Rows of a slot, drawn from the name of the transfer, so that those of another are told from them; small, for narrow dtypes."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return random.integers(0, 16, (wire.rows, *wire.row.shape), dtype=np.uint8).astype(wire.row.dtype)
