"""Forecasts of plans as tables and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .plan_table import human_bytes, human_count
from .planner import VERIFIED, Forecast, Planner
from .simulation import markdown


def describe(planner: Planner, best: Sequence[Forecast], conventional: dict[str, Forecast | None]) -> str:
    """Writes plans as tables: first what they do, then what each section gets.

    Args:
        planner: that made them.
        best: the best plans, those with the shortest step first.
        conventional: name -> the best plan of a kind, or None where none fits.
    """
    named = {str(number): each for number, each in enumerate(best, start=1)} | conventional
    rows = [["plan", "step", "tokens/s", "MFU", "device-hours", "memory", "devices"]]
    rows += [_figures(name, each, planner) for name, each in named.items()]
    places = [["plan", "section", "devices", "replicas", "axes", "micro-batch", "remat", "attention", "memory", "busy"]]
    for name, each in named.items():
        places += _places(name, each, planner) if each is not None else []
    lines = [
        f"predictions for {planner.devices} x {planner.hardware.name}: {planner.trainer.steps} steps of {planner.trainer.batch} samples",
        "",
        markdown(rows),
        "",
        markdown(places),
        "",
        *_verdict(best[0], conventional),
    ]
    return "\n".join(lines)


def _figures(name: str, forecast: Forecast | None, planner: Planner) -> list[str]:
    if forecast is None:
        return [name, "does not fit", "", "", "", "", ""]
    planned = forecast.planned
    return [
        name,
        f"{forecast.seconds:.3g} s",
        human_count(forecast.tokens),
        f"{forecast.mfu:.0%}",
        f"{forecast.device_hours:.3g}",
        f"{human_bytes(planned.allocation.memory)} of {human_bytes(planner.problem.memory)}",
        f"{planned.allocation.devices} of {planner.devices}",
    ]


def _places(name: str, forecast: Forecast, planner: Planner) -> list[list[str]]:
    found = []
    for section, choice in forecast.planned.allocation.choices.items():
        key = dict(choice.candidate.key)
        last = choice.first + choice.devices - 1
        found.append(
            [
                name,
                section,
                f"{choice.first}-{last}" if last > choice.first else str(last),
                str(choice.replicas),
                key["axes"],
                ", ".join(map(str, choice.candidate.work.buckets)),
                key["remat"],
                planner.attention(section),
                human_bytes(choice.memory),
                f"{forecast.planned.utilization[section]:.0%}",
            ]
        )
    return found


def verified(found: Mapping[str, tuple[int, int]] | None) -> list[str]:
    """Says how the memory of the best plan was predicted.

    Args:
        found: section -> bytes with one replica, as predicted and as compiled; None where nothing was compiled.
    """
    if found is None:
        return [f"memory of plan 1 is not verified: one replica of each section takes more than {VERIFIED} devices"]
    lines = ["memory of plan 1 with one replica of each section, predicted and as its tasks were compiled (for CPUs: both in float32):"]
    for name, (predicted, compiled) in found.items():
        lines.append(f"  {name}: {human_bytes(predicted)}, compiled {human_bytes(compiled)} ({predicted / compiled - 1:+.1%})")
    return lines


def _verdict(best: Forecast, conventional: dict[str, Forecast | None]) -> list[str]:
    lines = []
    for name, other in conventional.items():
        if other is None:
            lines.append(f"{name}: no such plan fits")
        else:
            lines.append(f"{name}: {other.device_hours / best.device_hours:.2f} times the device-hours of plan 1")
    groups = [" and ".join(group) for group in best.planned.allocation.groups if len(group) > 1]
    if groups:
        lines.append(f"disjoint submeshes lose here: in plan 1, {'; '.join(groups)} take turns on the same devices")
    return lines


def to_json(forecast: Forecast) -> dict[str, Any]:
    """A forecast as JSON values."""
    sections = {}
    for name, choice in forecast.planned.allocation.choices.items():
        sections[name] = {
            "first_device": choice.first,
            "devices": choice.devices,
            "replicas": choice.replicas,
            **dict(choice.candidate.key),
            "buckets": list(choice.candidate.work.buckets),
            "memory": choice.memory,
            "utilization": forecast.planned.utilization[name],
        }
    return {
        "seconds": forecast.seconds,
        "lower_bound_seconds": forecast.planned.lower_bound / 1e9,
        "tokens_per_second": forecast.tokens,
        "mfu": forecast.mfu,
        "device_hours": forecast.device_hours,
        "sections": sections,
    }
