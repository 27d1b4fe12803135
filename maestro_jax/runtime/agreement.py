"""What processes compare before anything of a window is issued: their schedules, and what they take the rows of payloads to be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import ClusterError
from ..meshes import processes_of
from ..schedules import Schedule
from .plan import Plan

if TYPE_CHECKING:
    from .feeds import Micro, Slot, TaskFeed


def agreed_feeds(plan: Plan, schedule: Schedule, feeds: Mapping[Micro, TaskFeed], channel: str) -> dict[Micro, TaskFeed]:
    """Compares schedules, and takes over the hashes of payloads that come from other processes.

    Args:
        plan: where sections run.
        schedule: of the window.
        feeds: of its micro-batches, with hashes that were all made here.
        channel: of the exchange; windows of training and of evaluations are prepared by different threads.

    Returns:
        The feeds, in which the hash of a payload is what its producer says.

    Raises:
        ClusterError: another process made another schedule, or knows nothing of a payload that is expected here.
    """
    replicas = {(task.section, task.items): task.replica for task in schedule.tasks if task.items}
    owners = {micro: processes_of(plan.sections[micro[0]].submesh.replica_meshes[replica]) for micro, replica in replicas.items()}
    sent = {
        _name(micro, slot): slot.pairing
        for micro, feed in feeds.items()
        for slot in feed.leaving
        if owners[micro][0] == plan.group.index and owners[slot.partner] != (plan.group.index,)
    }
    told = plan.group.all_gather(channel, {"schedule": schedule.digest(), "sent": sent})
    if any(other["schedule"] != told[0]["schedule"] for other in told):
        raise _disagree("; ".join(f"process {n}: {other['schedule'][:16]}" for n, other in enumerate(told[:8])))
    known = {name: pairing for other in told for name, pairing in other["sent"].items()}

    def heard(micro: Micro, slot: Slot) -> Slot:
        if plan.group.index in owners[micro]:
            return slot
        name = _name(micro, slot)
        if name not in known:
            raise _disagree(f"a payload of edge {slot.label} that its producer does not send")
        return dataclasses.replace(slot, pairing=known[name])

    return {m: dataclasses.replace(feed, leaving=tuple(heard(m, slot) for slot in feed.leaving)) for m, feed in feeds.items()}


def _name(producer: Micro, slot: Slot) -> str:
    return json.dumps([slot.label, producer, slot.partner])


def _disagree(have: str) -> ClusterError:
    return ClusterError(
        "the processes have made different schedules.",
        wanted="the same schedule in every process, from the same lengths, costs and policy",
        have=have,
        set_by="the processes of this run",
        fix="start every process with the same code, packages, configuration and data",
        anchor="processes-disagree",
    )
