"""Going on with a run: which checkpoint, whether it fits what is configured now, and what has changed since.

Devices, replicas, axes and micro-batches may change: a checkpoint holds whole arrays, and the samples of a step depend on the seed and the
step alone. Parameters and optimizer state must have the same shapes. Anything else that changes what is computed is told.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .checkpoint import SECONDS, Checkpoints, Commit
from .errors import CheckpointError
from .meshes import ProcessGroup
from .run_folder import RunFolder
from .runtime import Plan
from .runtime.costs import Costs
from .runtime.snapshot import Snapshot

LINES = 12
"""Most lines of a difference that an error shows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run goes on from.

    Args:
        commit: the checkpoint.
        snapshot: its arrays, on the devices of the present plan.
    """

    commit: Commit
    snapshot: Snapshot


def resume(
    files: RunFolder | None,
    checkpoints: Checkpoints,
    shapes: Snapshot,
    data: Mapping[str, Any],
    config: str,
    steps: int,
    note: Callable[[str], None],
    plan: Plan | None = None,
) -> Resumed | None:
    """Finds out what a run goes on from, and prepares its folder. All processes of a run call this; the first one decides.

    Args:
        files: the run folder; None in other processes than the first.
        checkpoints: in it.
        shapes: what is configured now, with the shardings of the present plan.
        data: what decides which samples a step sees, as a checkpoint's state keeps it.
        config: the resolved configuration.
        steps: how many the run is to have.
        note: told what the user should know.
        plan: says which sections this process restores; None is all of them, in the only process.

    Returns:
        None when the run begins: the folder holds none, or one without a checkpoint, which is moved aside.

    Raises:
        CheckpointError: no checkpoint is whole, or it does not fit, or the run is complete and another one is configured now.
    """
    group = plan.group if plan is not None else ProcessGroup(0, 1)

    def choose() -> _Chosen | None:
        return _choose(files, checkpoints, shapes, data, config, steps, note) if files is not None else None

    # All files are read and hashed.
    chosen = group.lead("resume", choose, SECONDS)
    step = group.all_gather("resume step", chosen.commit.step if chosen is not None else None)[0]
    if step is None:
        return None
    found = [commit for commit in checkpoints.commits() if commit.step == step]
    seen = group.all_gather("resume seen", bool(found))
    if not all(seen):
        raise _not_shared(checkpoints, step, [n for n, sees in enumerate(seen) if not sees])
    commit = chosen.commit if chosen is not None else found[0]
    snapshot = checkpoints.restore(commit, shapes if plan is None else shapes.only(plan.local))

    def go_on() -> None:
        if files is None or chosen is None:
            raise RuntimeError("the first process has the run folder")
        for line in chosen.changes:
            note(line)
        if commit.step < steps:
            files.go_on(commit.step, config)
        checkpoints.disown_newer(commit)

    group.lead("go on", go_on)
    return Resumed(commit=commit, snapshot=snapshot)


def _not_shared(checkpoints: Checkpoints, step: int, processes: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        f"processes {list(processes)} do not see the checkpoint of step {step}.",
        wanted="one run folder that every process sees",
        have=f"no such checkpoint in {checkpoints.folder} there",
        fix="put the run folder on a file system that all machines share",
        anchor="checkpoint-not-shared",
        set_by="--workdir",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What a run goes on from, and what has changed since, in sentences."""

    commit: Commit
    changes: list[str]


def _choose(
    files: RunFolder,
    checkpoints: Checkpoints,
    shapes: Snapshot,
    data: Mapping[str, Any],
    config: str,
    steps: int,
    note: Callable[[str], None],
) -> _Chosen | None:
    if not files.holds_run:
        return None
    set_by = "--workdir"
    commit = newest_good(checkpoints, note, set_by)
    if commit is None:
        files.begin_anew()
        note("the folder holds a run without a checkpoint; it is kept in it as previous-N, and this one begins anew")
        return None
    settings = changed_settings(files.config(), config)
    new_data = changed_data(commit.state["data"], data, commit.step)
    # Without steps the command evaluates, as it says.
    if 0 < steps <= commit.step and (settings or new_data):
        raise _complete(files, commit, [*new_data, *settings])
    check_fits(commit, shapes, settings, set_by)
    changes = []
    for line in settings:
        kept = "; the run keeps the parameters of its checkpoint" if ".weights = " in line else ""
        changes.append(f"changed since step {commit.step}: {line}{kept}")
    return _Chosen(commit=commit, changes=[*changes, *new_data])


def _complete(files: RunFolder, commit: Commit, changed: Sequence[str]) -> CheckpointError:
    """Nothing would be trained with the new settings, and the folder would say that something was."""
    more = [f"and {len(changed) - LINES} more"] if len(changed) > LINES else []
    return CheckpointError(
        f"the run in {str(files.path)!r} is complete, and another one is configured now.",
        wanted=f"more steps than the {commit.step} that are trained, or a folder of its own for another run",
        have="\n".join(["changed:", *changed[:LINES], *more]),
        fix="choose another folder (--workdir=runs/NAME), raise the number of steps, or begin anew with --restart",
        anchor="run-complete",
        set_by="--workdir",
    )


def newest_good(checkpoints: Checkpoints, note: Callable[[str], None], set_by: str) -> Commit | None:
    """Finds the newest checkpoint whose files are all as they were written.

    Args:
        checkpoints: of the run.
        note: told of each checkpoint that is damaged.
        set_by: where the folder was set, for error texts.

    Returns:
        The checkpoint; None when the run never completed one.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged.
    """
    problems = [f"{path.name}: its manifest is damaged" for path in checkpoints.unreadable()]
    for problem in problems:
        note(f"a checkpoint is not used: {problem}")
    for commit in checkpoints.commits():
        problem = checkpoints.problem(commit)
        if problem is None:
            return commit
        problems.append(f"step {commit.step}: {problem}")
        note(f"the checkpoint of step {commit.step} is not used: {problem}")
    if not problems:
        return None
    raise CheckpointError(
        "no checkpoint of the run is whole.",
        wanted="a checkpoint whose files are as they were written",
        have="\n".join(problems[:LINES]),
        fix="bring back the damaged files from a copy, or begin anew with --restart, which keeps the earlier run in previous-N",
        anchor="checkpoint-damaged",
        set_by=set_by,
    )


def check_fits(commit: Commit, shapes: Snapshot, settings: Sequence[str], set_by: str) -> None:
    """Refuses a checkpoint of other sections, or of sections with parameters or optimizer state of other shapes.

    Args:
        commit: the checkpoint.
        shapes: what is configured now.
        settings: settings that changed, see `changed_settings`.
        set_by: where the folder was set, for error texts.

    Raises:
        CheckpointError: lists what differs.
    """
    saved, now = commit.state["signature"], shapes.signature()
    lines = []
    for name in sorted(saved.keys() | now.keys()):
        before, after = saved.get(name, {}), now.get(name, {})
        for path in sorted(before.keys() | after.keys()):
            if before.get(path) != after.get(path):
                lines.append(f"{name}: {path} is {before.get(path, 'not there')} in the checkpoint, {after.get(path, 'not there')} now")
    if not lines:
        return
    more = [f"and {len(lines) - LINES} more"] if len(lines) > LINES else []
    changed = [f"changed setting: {line}" for line in settings[:LINES]]
    raise CheckpointError(
        f"the run cannot go on from its checkpoint of step {commit.step}: shapes have changed.",
        wanted="the sections, parameters and optimizer state of the checkpoint; replicas, axes and devices may change",
        have="\n".join([*lines[:LINES], *more, *changed]),
        fix="restore these settings, choose another run folder (--workdir), or begin anew with --restart",
        anchor="resume-shapes",
        set_by=set_by,
    )


def changed_settings(before: str | None, now: str) -> list[str]:
    """Lists the settings that differ between two resolved configurations, as "name = old -> new".

    >>> changed_settings("train.steps = 3  # default", "train.steps = 5  # command line  --gin.train.steps")
    ['train.steps = 3 -> 5']
    """
    old, new = _settings(before or ""), _settings(now)
    if not old or not new:
        return []
    lines = []
    for name in sorted(old.keys() | new.keys()):
        before_now = old.get(name, NOT_SET), new.get(name, NOT_SET)
        # What is left at its default in something that only one of the two has says nothing of its own.
        says_nothing = NOT_SET in before_now and all(is_default for _, is_default in before_now)
        if before_now[0][0] != before_now[1][0] and not says_nothing:
            lines.append(f"{name} = {before_now[0][0]} -> {before_now[1][0]}")
    return lines


def changed_data(saved: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    """Says in which ways the samples of the next steps are no longer those that the run would have seen.

    Args:
        saved: "data" of a checkpoint's state.
        now: the same of the present run.
        step: of the checkpoint.
    """
    words = {"fingerprint": "the training data", "seed": "the seed", "batch": "the number of samples in a step"}
    changed = [f"{word} ({saved[name]} -> {now[name]})" for name, word in words.items() if saved[name] != now[name]]
    if not changed:
        return []
    return [f"changed since step {step}: {', '.join(changed)}; the order of samples is a new one, and some may come again"]


def costs_state(plan: Plan, costs: Costs) -> dict[str, Any]:
    """What a checkpoint keeps of costs: their numbers, and what they were measured on."""
    return {"costs": costs.to_json(), "layout": _layout(plan)}


def saved_costs(plan: Plan, state: Mapping[str, Any]) -> Costs | None:
    """The costs of a checkpoint's state; None when they are those of another plan."""
    schedule = state["schedule"]
    return Costs.from_json(schedule["costs"]) if schedule["layout"] == _layout(plan) else None


def _layout(plan: Plan) -> dict[str, str]:
    """What decides how long a section's tasks take."""
    found = {}
    for name, section in plan.sections.items():
        s, devices = section.section, section.submesh.replica_devices(0)
        rows = f"{list(s.buckets)} {s.row_length}" + ("" if s.packed else " one item")
        found[name] = f"{len(devices)} x {devices[0].device_kind} {dict(s.axes)} {rows} {s.remat} {s.dtype}"
    return found


NOT_SET = ("(not set)", True)


def _settings(text: str) -> dict[str, tuple[str, bool]]:
    """The bindings of a resolved configuration: value, and whether it is a default."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([^#\s][^=]*?) = (.*)", line)
        if match:
            value, _, origin = match[2].partition("  # ")
            found[match[1]] = value, origin == "default"
    return found
