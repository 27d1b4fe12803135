"""Where it runs: submeshes, logical axis rules and transfers between meshes."""

from __future__ import annotations

from .rules import partition_spec, spread
from .submeshes import Request, Submesh, carve, devices_wanted, shrink
from .transfers import Parcel, Wire, move, on_every_device, rewrapped

__all__ = [
    "Parcel",
    "Request",
    "Submesh",
    "Wire",
    "carve",
    "devices_wanted",
    "move",
    "on_every_device",
    "partition_spec",
    "rewrapped",
    "shrink",
    "spread",
]
