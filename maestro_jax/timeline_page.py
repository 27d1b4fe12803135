"""Recorded windows as a page that needs nothing else: scheduled above measured, on one time scale.

The page is `timeline.html` with the tasks put into it as JSON; what it does with them is said there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .record import Record
from .schedules import lower_bound


def timeline_page(records: Sequence[Record]) -> str:
    """Makes the page.

    Args:
        records: the windows, in their order; the last one is shown first.
    """
    page = Path(__file__).with_name("timeline.html").read_text(encoding="utf-8")
    # No name of a section may end the element that the data lie in.
    data = json.dumps([_shown(record) for record in records], separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("DATA", data, 1)


def _shown(record: Record) -> dict[str, Any]:
    """A record as the page reads it."""
    lanes = [(name, replica) for name in record.workload.order for replica in range(record.workload.sections[name].replicas)]
    numbers = {lane: number for number, lane in enumerate(lanes)}
    units = record.units
    rows = []
    for n, (scheduled, measured) in enumerate(zip(record.scheduled.tasks, record.measured.tasks, strict=True)):
        times = [round(scheduled.start * record.stretch), round(scheduled.end * record.stretch), measured.start, measured.end]
        rows.append(
            [
                numbers[measured.section, measured.replica],
                measured.kind,
                record.first_step + measured.step,
                measured.bucket,
                units[n],
                len(measured.items),
                list(dict.fromkeys(sample for sample, _ in measured.items)),
                times,
                record.issued[n],
                record.producers[n],
            ]
        )
    bound = round(lower_bound(record.workload) * record.stretch)
    return {
        "title": record.title,
        "nominal": record.nominal,
        "stretch": record.stretch,
        "bound": bound,
        "lanes": lanes,
        "tasks": rows,
    }
