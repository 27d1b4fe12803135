"""Why a step took as long as it did, and what would make it shorter: a record, read for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .errors import ScheduleError
from .record import Record
from .schedules import IN_FLIGHT, Workload, fitted_call, fitted_workload, lower_bound, utilization_of
from .schedules.ledger import Ledger
from .schedules.neighbours import neighbours
from .schedules.queues import execute
from .schedules.stalls import Stalls, stalls_of
from .simulation import CAUSES, POLICIES, markdown, readable_time

WORDS = {
    "useful": "items",
    **CAUSES,
    "imbalance": "waiting for another replica",
    "sharing": "waiting for another section on its devices",
    "late": "longer than costs say, or later than possible",
}
"""What replicas spend their time on, in words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A change that was simulated; times in nanoseconds.

    Args:
        change: what is changed, in words.
        makespan: predicted for the whole window.
        gain: how much shorter that is than without the change.
    """

    change: str
    makespan: int
    gain: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a record says; times in nanoseconds.

    Args:
        first_step: number of the window's first step, from 1.
        steps: in the window.
        measured: from when the first task was issued until the last one ended.
        predicted: what the simulator says of the same schedule.
        fitted: whether it says so by costs fitted to the measured tasks, because the schedule's are nominal; else by the schedule's own.
        call: what the host takes to issue a task.
        lower_bound: no schedule of the same plan takes less, by the same costs.
        utilization: section -> share of `measured` in which its replicas ran tasks.
        spent: section -> cause -> nanoseconds, summed over replicas; they add up to replicas times `measured`.
        stalls: section -> head-of-line stalls.
    """

    first_step: int
    steps: int
    measured: int
    predicted: int
    fitted: bool
    call: int
    lower_bound: int
    utilization: Mapping[str, float]
    spent: Mapping[str, Mapping[str, int]]
    stalls: Mapping[str, Stalls]

    @property
    def bounding(self) -> str:
        """The section whose replicas have most to do."""
        return max(self.utilization, key=lambda name: self.utilization[name])

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {**dataclasses.asdict(self), "bounding": self.bounding}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """Changes of the plan, simulated.

    Args:
        policy: name of the policy that scheduled them.
        assumed: whether the recorded schedule is of another one, which is not known.
        makespan: predicted without a change, in nanoseconds.
        changes: those that could be scheduled, best first.
        refused: those that could not -> why.
    """

    policy: str
    assumed: bool
    makespan: int
    changes: tuple[Change, ...]
    refused: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return dataclasses.asdict(self)


def explain(record: Record) -> Explanation:
    """Says where the time of every replica went.

    Args:
        record: of a window with at least one task.
    """
    workload, measured = _real(record), record.measured
    ledger = Ledger(workload, measured, record.issued)
    spent = {name: dict.fromkeys(WORDS, 0) for name in workload.order}
    for name, section in workload.sections.items():
        for replica in range(section.replicas):
            for cause, nanoseconds in ledger.replica(name, replica).items():
                spent[name][cause] += nanoseconds
    return Explanation(
        first_step=record.first_step,
        steps=len(workload.steps),
        measured=measured.makespan,
        predicted=execute(workload, record.scheduled, call=_call(record)).measured.makespan,
        call=_call(record),
        fitted=record.nominal,
        lower_bound=lower_bound(workload),
        utilization=utilization_of(workload, measured),
        spent=spent,
        stalls=stalls_of(workload, measured, record.issued),
    )


def _real(record: Record) -> Workload:
    """What was done, with costs in real nanoseconds."""
    return fitted_workload(record.workload, record.measured) if record.nominal else record.workload


def _call(record: Record) -> int:
    return fitted_call(record.measured, record.issued, IN_FLIGHT)


def policy_of(record: Record) -> str | None:
    """The name of the policy that makes the recorded schedule of the recorded workload; None where no built-in one does by default."""
    return next((name for name, policy in POLICIES.items() if policy().schedule(record.workload) == record.scheduled), None)


def advise(record: Record) -> Advice:
    """Simulates every move of a replica, every neighbouring ladder of buckets, other policies, and scheduling by real costs.

    Each is scheduled as the run would schedule it, by the recorded costs, and then takes what its tasks really cost.

    Args:
        record: what was measured.
    """
    recorded, real, own, call = record.workload, _real(record), policy_of(record), _call(record)
    policy = own or next(iter(POLICIES))
    without = _simulated(recorded, real, policy, call)
    made: dict[str, int] = {}
    refused: dict[str, str] = {}
    # Both lists have the same order: changes do not depend on costs.
    for known, changed in zip(neighbours(recorded), neighbours(real), strict=True):
        if known.workload is None or changed.workload is None:
            refused[known.change] = known.reason
            continue
        try:
            made[known.change] = _simulated(known.workload, changed.workload, policy, call)
        except ScheduleError as error:
            refused[known.change] = f"it cannot be scheduled: {str(error).splitlines()[0]}"
    made |= {f"schedule by {name} instead of {policy}": _simulated(recorded, real, name, call) for name in POLICIES if name != policy}
    if record.nominal:
        made["schedule by measured costs (train.costs = 'measured')"] = _simulated(real, real, policy, call)
    changes = [Change(change=change, makespan=makespan, gain=without - makespan) for change, makespan in made.items()]
    changes.sort(key=lambda change: change.makespan)
    return Advice(policy=policy, assumed=own is None, makespan=without, changes=tuple(changes), refused=refused)


def _simulated(known: Workload, real: Workload, policy: str, call: int) -> int:
    """Nanoseconds that a policy's schedule takes when it knows other costs than the real ones."""
    return execute(real, POLICIES[policy]().schedule(known), call=call).measured.makespan


def describe(found: Explanation) -> str:
    """Writes an explanation in lines for people."""
    last = found.first_step + found.steps - 1
    steps = f"step {last}" if found.steps == 1 else f"steps {found.first_step} to {last}, which are scheduled together"
    off = found.predicted / found.measured - 1 if found.measured else 0.0
    costs = "costs fitted to the measured tasks" if found.fitted else "the costs that the run schedules by"
    lines = [
        steps,
        f"measured     {readable_time(found.measured):>10}",
        f"predicted    {readable_time(found.predicted):>10}  {off:+.1%}: the simulator, by {costs}",
        f"             {'':>10}  and {readable_time(found.call)} of the host for each task",
        f"lower bound  {readable_time(found.lower_bound):>10}  of any schedule of this plan, by the same costs",
        "",
        f"{found.bounding} bounds the step: its replicas run tasks {found.utilization[found.bounding]:.0%} of the time.",
        "",
    ]
    totals = {name: sum(spent.values()) for name, spent in found.spent.items()}
    rows = [["seconds of all replicas", *found.spent]]
    for cause, words in WORDS.items():
        rows.append([words, *(_cell(spent[cause], totals[name]) for name, spent in found.spent.items())])
    rows.append(["all", *(_cell(total, total) for total in totals.values())])
    lines.append(markdown(rows))
    stalled = [f"{s.nanoseconds / 1e9:.3f} s in {name} ({s.count} times)" for name, s in found.stalls.items() if s.count]
    text = "The first task of a queue waited for data while a later one could have run"
    lines += ["", f"{text}: {', '.join(stalled) or 'never'}."]
    return "\n".join(lines)


def describe_advice(found: Advice, steps: int) -> str:
    """Writes advice in lines for people.

    Args:
        found: the advice.
        steps: in the window; gains are told for one of them.
    """
    helpful = [change for change in found.changes if change.gain > 0]
    lines = []
    if found.assumed:
        lines += ["The schedule is of no built-in policy with its defaults, so all of this is scheduled by wavefront.", ""]
    if helpful:
        rows = [["predicted to help", "a step", "gain", "share"]]
        rows.append(["(no change)", readable_time(found.makespan / steps), "", ""])
        for each in helpful:
            gain = f"{each.gain / steps / 1e9:.3f} s"
            rows.append([each.change, readable_time(each.makespan / steps), gain, f"{each.gain / found.makespan:.1%}"])
        lines.append(markdown(rows))
    else:
        lines.append(f"Nothing helps: none of {len(found.changes)} changes is predicted to shorten the step.")
    if found.refused:
        lines += ["", "Not considered:", *(f"- {change}: {reason}" for change, reason in found.refused.items())]
    return "\n".join(lines)


def _cell(nanoseconds: int, of: int) -> str:
    return f"{nanoseconds / 1e9:.3f} {nanoseconds / of if of else 0:>4.0%}"
