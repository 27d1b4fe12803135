"""What tests run in each of several processes.

`python -m process_program FOLDER code CODE` runs a few lines, with the number of the process as `index`.
`python -m process_program FOLDER MODULE.FUNCTION ARGUMENTS...` connects the processes and calls a function with their group.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def listening() -> set[str]:
    """The addresses on which this process listens, as the system has them."""
    mine = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # the one of the listing
            continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            address, state, inode = (line.split()[n] for n in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in mine:
                word = address.partition(":")[0][-8:]  # IPv4, also where it is written inside an IPv6 address
                found.add(".".join(str(byte) for byte in reversed(bytes.fromhex(word))))
    return found


def say(folder: str, name: str, text: str = "") -> None:
    """Leaves a file that is whole as soon as it is there."""
    path = Path(folder) / f"{name}.part"
    path.write_text(text)
    path.rename(Path(folder) / name)


def run_code(folder: str, code: str) -> None:
    names = {"os": os, "sys": sys, "time": time, "signal": signal, "listening": listening, "say": say}
    exec(code, {**names, "index": int(os.environ.get("MAESTRO_PROCESS", "0")), "folder": folder})


def call(folder: str, name: str, *arguments: str) -> None:
    """Calls a function, and leaves what it returns."""
    # Here, because most of what `run_code` runs has no need of JAX.
    import jax

    from maestro_jax.cluster import connect
    from maestro_jax.errors import ClusterError

    group = connect()
    # JAX is started before the first exchange.
    jax.devices()
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(module), function)(group, *arguments)
    say(folder, f"returned-{group.index}", json.dumps(found))
    # What was offered is kept here until the others have fetched it.
    with contextlib.suppress(ClusterError):
        group.all_gather("end", None, seconds=60)


def main(folder: str, name: str, *arguments: str) -> None:
    if name == "code":
        run_code(folder, *arguments)
    else:
        call(folder, name, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
