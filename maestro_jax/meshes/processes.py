"""The processes of a run, and what they tell one another on the host.

Arrays go from device to device. What the hosts must agree on is small (lengths of samples, digests, losses) and goes through the key-value
store of JAX's coordination service as JSON, so that nothing that was received is ever unpickled. Its client is a private name of JAX
(0.10.2 and 0.12 were tried), so it is kept in this file.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from ..errors import ClusterError, MaestroError, error_of
from .transport import Transport, start_server

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
ADDRESS = "MAESTRO_ADDRESS"
"""Environment variable: address of the interface on which a process listens; the loopback where it is not set."""

WAIT_SECONDS = 600.0
"""How long a process waits for what others have to say; a process that stopped is found earlier by the watchdog."""

_SHOWN = 8
"""Most differences, and values of each, that an error shows."""

_SLICE_MS = 1000  # waiting is cut into slices, so that a signal is seen


class ProcessGroup:
    """All processes of a run; every one of them makes the same calls on a channel, in the same order.

    A channel is used by one thread of each process; several channels are independent of each other.

    Args:
        index: number of this process.
        count: how many there are.
        client: of the coordination service; None where there is one process.
        address: of the interface on which this process listens for arrays.

    >>> ProcessGroup(0, 1).all_gather("lengths", [3, 4])
    [[3, 4]]
    """

    def __init__(self, index: int, count: int, client: Any = None, address: str = LOOPBACK) -> None:
        self.index, self.count, self._client, self._address = index, count, client, address
        self._calls: collections.Counter[str] = collections.Counter()
        self._waits: dict[str, tuple[int, float]] = {}

    @property
    def waiting(self) -> str:
        """For whom this process waits, on which channels and for how long; empty when it does not."""
        now, waits = time.monotonic(), sorted(self._waits.items())
        return " and for ".join(f"process {process} ({channel}, {now - since:.0f} s)" for channel, (process, since) in waits)

    @functools.cached_property
    def transport(self) -> Transport | None:
        """Moves arrays between the processes; None where there is one. All of them ask for it first at the same place."""
        if self.count == 1:
            return None
        server = start_server(self._address)
        return Transport(self.index, server, self.all_gather("transport", server.address()))

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes for all."""
        return self.index == 0

    def all_gather(self, channel: str, value: Any, seconds: float = WAIT_SECONDS) -> list[Any]:
        """Tells every process a value, and returns the values of all, in their order.

        The first process collects them, so the store serves a number of requests that grows with the processes, not with their square.

        Args:
            channel: names a sequence of calls.
            value: anything that JSON holds.
            seconds: how long to wait.

        Raises:
            ClusterError: a process said nothing in time.
        """
        if self.count == 1:
            return [value]
        number = self._calls[channel]
        self._calls[channel] += 1
        start, deadline = f"maestro_jax/{channel}/{number}", time.monotonic() + seconds
        mine = json.dumps(value).encode()
        if self.first:
            others = [self._get(f"{start}/{n}", n, channel, deadline) for n in range(1, self.count)]
            whole = b"[" + b",".join([mine, *others]) + b"]"
            self._client.key_value_set_bytes(f"{start}/all", whole)
        else:
            self._client.key_value_set_bytes(f"{start}/{self.index}", mine)
            whole = self._get(f"{start}/all", 0, channel, deadline)
        # Who takes part in this call has read what was said in the one before the last.
        if number >= 2:
            self._client.key_value_delete(f"maestro_jax/{channel}/{number - 2}/{'all' if self.first else self.index}")
        return json.loads(whole)

    def agreed(self, channel: str, value: Any, what: str) -> None:
        """Checks that all processes say the same.

        Args:
            channel: names a sequence of calls.
            value: anything that JSON holds.
            what: names it in the error text. Of mappings, the text has what differs alone.

        Raises:
            ClusterError: they do not, or one said nothing in time.
        """
        values = self.all_gather(channel, value)
        if any(other != values[0] for other in values):
            raise ClusterError(
                f"the processes do not agree on {what}.",
                wanted="the same in every process: equal code, packages, configs and data",
                have=_differences(values),
                set_by="the processes of this run",
                fix="start every process with the same command, environment and files",
                anchor="processes-disagree",
            )

    def lead(self, channel: str, action: Callable[[], T], seconds: float = WAIT_SECONDS) -> T | None:
        """Lets the first process do something for all, and raises in every process what it raises there.

        Args:
            channel: names a sequence of calls.
            action: called in the first process.
            seconds: how long the others wait for it.

        Returns:
            What it returned; None in the other processes.

        Raises:
            MaestroError: the first process raised it.
        """
        found, problem = None, None
        if self.first:
            try:
                found = action()
            except MaestroError as error:
                problem = error
        told = self.all_gather(channel, None if problem is None else problem.to_json(), seconds)[0]
        if told is not None:
            raise problem or error_of(told)
        return found

    def say(self, name: str, text: str) -> None:
        """Leaves a text where the others can read it, in the place of the one before; asks nobody to read it."""
        self._client.key_value_set(f"maestro_jax/said/{name}/{self.index}", text, allow_overwrite=True)

    def heard(self, name: str, process: int) -> str:
        """Returns what a process said last under a name; empty when it has said nothing."""
        try:
            return self._client.key_value_try_get(f"maestro_jax/said/{name}/{process}")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return ""

    def _get(self, key: str, process: int, channel: str, deadline: float) -> bytes:
        self._waits[channel] = process, time.monotonic()
        try:
            return self._got(key, process, channel, deadline)
        finally:
            del self._waits[channel]

    def _got(self, key: str, process: int, channel: str, deadline: float) -> bytes:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClusterError(
                    f"process {process} of {self.count} says nothing ({channel}).",
                    wanted="an answer in time",
                    have="none",
                    set_by="the processes of this run",
                    fix="look at that process's log; the same command goes on from the last checkpoint",
                    anchor="process-silent",
                )
            try:
                return self._client.blocking_key_value_get_bytes(key, min(_SLICE_MS, max(1, int(1000 * left))))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


def _differences(values: Sequence[Any]) -> str:
    """What differs between processes; of mappings, by name."""
    if not all(isinstance(value, dict) for value in values):
        return "; ".join(f"process {n}: {value}" for n, value in enumerate(values[:_SHOWN]))
    lines = []
    for name in dict.fromkeys(name for value in values for name in value):
        told: dict[str, list[int]] = {}
        for process, value in enumerate(values):
            told.setdefault(str(value.get(name, "(nothing)")), []).append(process)
        if len(told) > 1:
            # Those who are few are what is looked for.
            rare = sorted(told.items(), key=lambda each: (len(each[1]), each[1]))[:_SHOWN]
            lines.append(f"{name}: " + ", ".join(f"{text} in {_named(processes)}" for text, processes in rare))
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([*lines[:_SHOWN], *more])


def _named(processes: Sequence[int]) -> str:
    first = ", ".join(map(str, processes[:4]))
    return f"process {first}" if len(processes) == 1 else f"processes {first}{' and more' if len(processes) > 4 else ''}"


@functools.cache
def process_group() -> ProcessGroup:
    """Returns the processes that `jax.distributed` has connected, or this one alone."""
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None or not state.num_processes:
        return ProcessGroup(0, 1)
    return ProcessGroup(state.process_id, state.num_processes, state.client, os.environ.get(ADDRESS, LOOPBACK))


def local(mesh: Any) -> bool:
    """Whether this process has devices of a mesh."""
    return any(device.process_index == device.client.process_index() for device in mesh.devices.flat)


def processes_of(mesh: Any) -> tuple[int, ...]:
    """The processes that have devices of a mesh, in order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))
