"""`measured.json`: what tasks of a config took on the devices at hand, which `maestro_jax.profile` writes and `maestro_jax.plan` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..schedules import Cost
from .hardware import Hardware

FORMAT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredSection:
    """Costs of a section's tasks on one replica, fitted to what they took.

    Args:
        axes: mesh axis -> its size, of those that are larger than 1.
        buckets: of the micro-batches that were measured.
        row_length: units of a row.
        replicas: of the section while updates were measured.
        forward: of a forward.
        backward: of a backward.
        update: nanoseconds of an update; 0 where there is none.
    """

    axes: Mapping[str, int]
    buckets: tuple[int, ...]
    row_length: int
    replicas: int
    forward: Cost
    backward: Cost
    update: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured on one kind of device.

    Args:
        hardware: name of the kind in the table of hardware.
        device: as JAX calls it.
        sections: by name.
        link: bytes per second that a device sends to others; None where there was one device.
        latency: nanoseconds of a collective however small; None as above.
    """

    hardware: str
    device: str
    sections: Mapping[str, MeasuredSection]
    link: float | None = None
    latency: int | None = None

    def corrected(self, hardware: Hardware) -> Hardware:
        """Returns hardware with the link that was measured, if one was."""
        if self.link is None or self.latency is None:
            return hardware
        return dataclasses.replace(hardware, link=self.link, network=min(self.link, hardware.network), latency=self.latency)

    def to_json(self) -> dict[str, Any]:
        """Returns them as JSON values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Measurements:
        """Makes them of JSON values.

        Raises:
            KeyError, TypeError, ValueError: these are of another form.
        """
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']}")
        sections = {name: _section(each) for name, each in raw["sections"].items()}
        more = {name: raw[name] for name in ("link", "latency")}
        return cls(hardware=raw["hardware"], device=raw["device"], sections=sections, **more)

    @classmethod
    def read(cls, path: Path, *, set_by: str) -> Measurements:
        """Reads a file.

        Raises:
            ConfigError: it cannot be read, or is of another form.
        """
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the measurements {str(path)!r} cannot be read.",
                wanted=f"a file as python -m maestro_jax.profile writes it, of format {FORMAT}",
                have=f"{type(error).__name__}: {error}",
                set_by=set_by,
                fix="correct the path, or measure again",
                anchor="unknown-hardware",
            ) from error


def _section(raw: Mapping[str, Any]) -> MeasuredSection:
    costs = {kind: Cost(**raw[kind]) for kind in ("forward", "backward")}
    return MeasuredSection(**{**raw, **costs, "buckets": tuple(raw["buckets"])})
