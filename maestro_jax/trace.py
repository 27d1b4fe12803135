"""Recorded windows in the trace event format, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is described in https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Processes are sections, once
as scheduled and once as measured; threads are replicas. Arrows lead from a task to those of other sections that take its payloads, or the
gradients that it makes. Windows come one after the other, with some room between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from .record import Record
from .schedules import Task

GAP = 10
"""A window is as many times as long as the room after it."""

Event = dict[str, Any]


def trace(records: Sequence[Record]) -> dict[str, Any]:
    """Makes the object that the format asks for; times are in microseconds.

    Args:
        records: the windows, in their order.
    """
    events: list[Event] = []
    places: dict[tuple[str, str, int], None] = {}
    flows, begins = itertools.count(1), 0
    for record in records:
        for group, tasks, factor in (("scheduled", record.scheduled.tasks, record.stretch), ("measured", record.measured.tasks, 1.0)):
            places |= dict.fromkeys(
                (group, name, r) for name in record.workload.order for r in range(record.workload.sections[name].replicas)
            )
            processes = _processes(places)
            slices = [_slice(record, n, task, processes[group, task.section], factor, begins) for n, task in enumerate(tasks)]
            events += slices
            for n, made in enumerate(record.producers):
                for producer in made:
                    events += _arrow(slices[producer], slices[n], next(flows))
        length = max(record.measured.makespan, round(record.scheduled.makespan * record.stretch))
        begins += length + length // GAP
    return {"traceEvents": [*_names(places), *events], "displayTimeUnit": "ms"}


def _processes(places: dict[tuple[str, str, int], None]) -> dict[tuple[str, str], int]:
    """(group, section) -> number of its process, from 1."""
    return {process: number for number, process in enumerate(dict.fromkeys((group, name) for group, name, _ in places), 1)}


def _names(places: dict[tuple[str, str, int], None]) -> Iterator[Event]:
    for (group, section), pid in _processes(places).items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{group} {section}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for replica in (r for g, name, r in places if (g, name) == (group, section)):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": replica, "args": {"name": f"{section} {replica}"}}


def _slice(record: Record, number: int, task: Task, pid: int, factor: float, begins: int) -> Event:
    # Whole nanoseconds, or rounding could make a task begin before the one before it has ended.
    start, end = round(task.start * factor), round(task.end * factor)
    args: dict[str, Any] = {"step": record.first_step + task.step}
    if task.items:
        args |= {"samples": list(dict.fromkeys(sample for sample, _ in task.items)), "items": len(task.items)}
        args |= {"units": record.units[number], "bucket": task.bucket, "padding": 1 - record.units[number] / task.bucket}
    return {
        "ph": "X",
        "name": task.kind.replace("_", " and "),
        "cat": task.kind,
        "pid": pid,
        "tid": task.replica,
        "ts": (begins + start) / 1000,
        "dur": (end - start) / 1000,
        "args": args,
    }


def _arrow(producer: Event, consumer: Event, number: int) -> list[Event]:
    """An arrow belongs to the slices that are open where it begins and ends, so it leaves within the producer's."""
    shared = {"cat": "payload", "name": "payload", "id": number}
    leaves = producer["ts"] + max(0.0, producer["dur"] - 0.001)
    start = {**shared, "ph": "s", "pid": producer["pid"], "tid": producer["tid"], "ts": round(leaves, 3)}
    return [start, {**shared, "ph": "f", "bp": "e", "pid": consumer["pid"], "tid": consumer["tid"], "ts": consumer["ts"]}]
