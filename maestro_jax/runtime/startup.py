"""Tries every way on which arrays will go between processes, with known contents, before training begins.

What arrives in the wrong place raises no error by itself, so it is looked for here, where it costs little.
"""

from __future__ import annotations

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
    slot = None
    if plan.group.index in processes_of(here):
        slot = tuple(put_whole(_contents(shape, n), shape.sharding) for n, shape in enumerate(wire.shapes(here)))
        jax.block_until_ready(slot)
    [arrived] = move([Parcel(wire, slot, back)], plan.group.transport, name)
    if arrived is None:
        return
    sent = np.concatenate([_contents(shape, n) for n, shape in enumerate(wire.shapes(here))])
    wanted = np.split(sent, len(arrived))
    for array, whole in zip(arrived, wanted, strict=True):
        for shard in array.addressable_shards:
            if not np.array_equal(np.asarray(shard.data), whole[shard.index]):
                raise ClusterError(
                    f"rows of edge {edge.edge.label} arrive in the wrong place between processes.",
                    wanted="the rows that were sent, on every device",
                    have=f"other rows on device {shard.device} of process {plan.group.index}",
                    set_by="the transfers between the processes of this run",
                    fix="report this with the versions of jax and drivers; inside one process nothing goes this way",
                    anchor="transfer-misplaced",
                )


def _contents(shape: jax.ShapeDtypeStruct, number: int) -> np.ndarray:
    """Rows that all differ."""
    rows = shape.shape[0]
    values = (np.arange(rows) + number * rows).reshape(rows, *(1,) * (len(shape.shape) - 1))
    return np.broadcast_to(values, shape.shape).astype(shape.dtype)
