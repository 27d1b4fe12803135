"""Moves arrays from process to process, each transfer by a name that both ends give it.

JAX's own `device_put` between processes numbers its transfers: every process, also one that has no part in a transfer, would have to make
every call in the same order ("Every process must call it, regardless of whether it participates", says `CreateNewTransferKey` in openxla's
`pjrt_ifrt/pjrt_client.h`), and one call with pieces for several pairs of devices delivers them to the wrong places. Here the sender offers
arrays under a number made from their name, and the receiver fetches them under the same one (`jax.experimental.transfer`; CPU, jax 0.10.2
and 0.12 were tried). Neither waits: what is fetched is a future.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding


class Transport:
    """The connections of one process to the others.

    Args:
        index: number of this process.
        server: of `jax.experimental.transfer`.
        addresses: where each process's server listens, in their order.
    """

    def __init__(self, index: int, server: Any, addresses: Sequence[str]) -> None:
        self.index, self._server, self._addresses = index, server, addresses
        self._connections: dict[int, Any] = {}

    def offer(self, name: str, process: int, arrays: Sequence[jax.Array]) -> None:
        """Offers single-device arrays to another process; they may still be computed. They are kept until it has fetched them."""
        self._server.await_pull(_number(name, self.index, process), list(arrays))

    def fetch(self, name: str, process: int, wanted: Sequence[tuple[jax.ShapeDtypeStruct, Any]]) -> list[jax.Array]:
        """Fetches what another process offers.

        Args:
            name: given to the offer.
            process: who offers.
            wanted: shape and device of each array, in the order of the offer.

        Returns:
            The arrays, which may still be on their way.
        """
        if process not in self._connections:
            self._connections[process] = self._server.connect(self._addresses[process])
        shapes = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=SingleDeviceSharding(device)) for shape, device in wanted]
        return self._connections[process].pull(_number(name, process, self.index), shapes)


def start_server(address: str) -> Any:
    """Starts the server of this process's transfers.

    Args:
        address: the interface's, without a port: free ports are chosen.
    """
    from jax.experimental import transfer  # here, because only runs of several processes need it

    return transfer.start_transfer_server(jax.local_devices()[0].client, f"{address}:0", [f"{address}:0"])


def _number(name: str, source: int, target: int) -> int:
    """63 bits of a hash: two transfers under way at a time would have to be 10**9 for a collision to become likely."""
    digest = hashlib.blake2b(f"{name} {source} {target}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
