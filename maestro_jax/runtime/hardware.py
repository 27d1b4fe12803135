"""What devices can do, for plans of clusters that are not there: a small table of accelerators, and how long work takes on them.

Peak rates and sizes are the vendor's, without sparsity; docs/planning.md has the sources. What share of the peak large products of matrices
reach, and how large they have to be, are assumptions for all accelerators alike, until measurements replace what follows from them.

Times are in nanoseconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device, and how devices are connected.

    Args:
        name: as on the command line.
        flops: dtype -> floating-point operations per second of products of matrices, at most.
        memory: bytes of a device.
        bandwidth: bytes per second between a device and its memory.
        link: bytes per second that a device sends to others of its node.
        network: bytes per second that a device sends to other nodes.
        node: devices of a node.
        reached: share of the peak that large products reach.
        half: operations of a task on one device at which half of that is reached.
        call: nanoseconds of a task however small.
        latency: nanoseconds of a collective however small.
        communicator: bytes of a device's memory that communication over one axis, or among replicas, takes for its buffers.
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    bandwidth: float
    link: float
    network: float
    node: int = 8
    reached: float = 0.6
    half: float = 2e10
    call: int = 100_000
    latency: int = 10_000
    communicator: int = 0

    @property
    def platform(self) -> str:
        """As JAX calls it."""
        return "cpu" if self.name == "cpu" else "gpu"

    def compute(self, operations: float, dtype: str) -> float:
        """Nanoseconds of so many floating-point operations on one device.

        >>> round(HARDWARE["h200"].compute(1e12, "bfloat16") / 1e6, 2)
        1.72
        """
        return 1e9 * (operations + self.half) / (self.reached * self.flops[dtype]) if operations else 0.0

    def move(self, size: float) -> float:
        """Nanoseconds in which a device reads or writes so many bytes of its memory."""
        return 1e9 * size / self.bandwidth

    def send(self, size: float, devices: int) -> float:
        """Nanoseconds in which a device sends so many bytes, among so many devices: in one node, or in several."""
        return 1e9 * size / (self.link if devices <= self.node else self.network)

    def gather(self, size: float, devices: int) -> float:
        """Nanoseconds of an all-gather, or of a reduce-scatter, of so many bytes in all, in a ring of devices."""
        return self.send(size * (devices - 1) / devices, devices) if devices > 1 else 0.0

    def reduce(self, size: float, devices: int) -> float:
        """Nanoseconds of an all-reduce of so many bytes: a reduce-scatter and an all-gather."""
        return 2 * self.gather(size, devices)


def _gpu(name: str, half: float, single: float, memory: float, bandwidth: float, link: float, network: float) -> Hardware:
    """A GPU: teraflops in bfloat16, and in float32 as JAX computes it by default; gigabytes, and gigabytes per second."""
    return Hardware(
        name=name,
        flops={"bfloat16": half * 1e12, "float32": single * 1e12},
        memory=int(memory * 1e9),
        bandwidth=bandwidth * 1e9,
        link=link * 1e9,
        network=network * 1e9,
        communicator=200 * 10**6,
    )


HARDWARE: Mapping[str, Hardware] = {
    "a100": _gpu("a100", 312, 156, 80, 2039, 300, 25),
    "h100": _gpu("h100", 989, 495, 80, 3350, 450, 50),
    "h200": _gpu("h200", 989, 495, 141, 4800, 450, 50),
    "b200": _gpu("b200", 2250, 1100, 180, 8000, 900, 50),
    "cpu": Hardware(
        name="cpu",
        flops={"bfloat16": 2e10, "float32": 2e10},
        memory=4 * 10**9,
        bandwidth=1e10,
        link=4e9,
        network=1e9,
        reached=1.0,
        half=0.0,
        call=20_000,
    ),
}
"""Name -> hardware. The one called cpu is nominal: that of costs which are counted (`runtime/costs.py`)."""


def hardware_named(name: str, *, set_by: str) -> Hardware:
    """Finds hardware.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in HARDWARE:
        raise ConfigError(
            "the hardware is not known.",
            wanted=f"one of {', '.join(HARDWARE)}{did_you_mean(name, list(HARDWARE))}, or a file that python -m maestro_jax.profile wrote",
            have=repr(name),
            set_by=set_by,
            fix="correct the name",
            anchor="unknown-hardware",
        )
    return HARDWARE[name]
