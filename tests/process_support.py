"""Runs functions of `process_program.py` and the like in several processes, which the launcher of the package starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS), "JAX_DEFAULT_MATMUL_PRECISION": "highest", "JAX_PLATFORMS": "cpu"}
SECONDS = 240


def launched(processes: int, devices: int, *arguments: str, module: str = "process_program") -> list[str]:
    """The command that starts processes."""
    flags = [f"--processes={processes}", f"--devices_per_process={devices}", f"--module={module}"]
    return [sys.executable, "-m", "maestro_jax.launch", *flags, "--", *arguments]


def run_processes(folder: Path, processes: int, devices: int, function: str, *arguments: str, module: str = "process_program") -> list[Any]:
    """Runs a function in every process and returns what each returned.

    Args:
        folder: for results and logs.
        processes: how many.
        devices: CPU devices of each.
        function: its name in the module.
        arguments: passed to it as texts.
        module: what `python -m` starts in each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = launched(processes, devices, str(folder), function, *arguments, module=module)
    command[3:3] = [f"--log_dir={folder}"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("process-*.log")))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    return [json.loads((folder / f"{function}-{n}.json").read_text()) for n in range(processes)]
