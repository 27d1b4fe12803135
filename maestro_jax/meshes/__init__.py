"""Where it runs: submeshes, logical axis rules and transfers between meshes."""

from __future__ import annotations

from .processes import ProcessGroup, local, process_group, processes_of
from .rules import partition_spec, spread
from .submeshes import Request, Submesh, carve, devices_wanted, shrink
from .transfers import Parcel, Wire, move, on_every_device, put_whole, rewrapped

__all__ = [
    "Parcel",
    "ProcessGroup",
    "Request",
    "Submesh",
    "Wire",
    "carve",
    "devices_wanted",
    "local",
    "move",
    "on_every_device",
    "partition_spec",
    "process_group",
    "processes_of",
    "put_whole",
    "rewrapped",
    "shrink",
    "spread",
]
