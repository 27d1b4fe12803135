"""Executes notebooks with this interpreter; as a command, it writes the outputs into the files.

    python tests/notebook_support.py notebooks/*.ipynb

What is stored has no times and no names of this machine, so that it changes only where results do.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Read when jupyter_core is imported, which otherwise warns that its folders will move.
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
SECONDS = 300
"""Most that a cell may take."""

PLAIN = 200
"""Signs of a plain text beside HTML that are kept."""


def execute(path: Path, folder: Path, parameters: Mapping[str, Any] | None = None) -> nbformat.NotebookNode:
    """Executes a notebook from the beginning, with this interpreter and this package.

    Args:
        path: the notebook; the file stays as it is.
        folder: current folder of its kernel.
        parameters: values that are set after the cell that is tagged `parameters`.

    Returns:
        The notebook with its outputs.

    Raises:
        CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        [place] = [n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
        source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(source, id="injected"))
    with tempfile.TemporaryDirectory() as private:

        class Manager(AsyncKernelManager):
            """Of kernels that this process talks to through files in a folder of its own: they open no port."""

            def __init__(self, **settings: Any) -> None:
                # Without folders of kernels, the one kernel is that of this interpreter.
                specs = KernelSpecManager(kernel_dirs=[])
                super().__init__(kernel_spec_manager=specs, transport="ipc", connection_file=f"{private}/kernel.json", **settings)

        client = NotebookClient(notebook, kernel_name="python3", kernel_manager_class=Manager, timeout=SECONDS, record_timing=False)
        client.execute(cwd=str(folder), env=_environment(private))
    return notebook


def store(path: Path) -> None:
    """Executes a notebook where it lies, and writes it without what differs from machine to machine."""
    notebook = execute(path, path.parent)
    notebook.metadata["language_info"] = {"name": "python"}
    for data in (output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())):
        if "text/html" in data and len(data.get("text/plain", "")) > PLAIN:
            data["text/plain"] = data["text/plain"][:PLAIN] + "…"
    nbformat.write(notebook, path)


def output(notebook: nbformat.NotebookNode, cell_id: str, kind: str) -> str:
    """The one output of a cell, as "text/html", "text/markdown" or "text/plain"; "stream" for what it printed."""
    [cell] = [cell for cell in notebook.cells if cell.id == cell_id]
    [found] = cell.outputs
    return found["text"] if kind == "stream" else found["data"][kind]


def troubles(notebook: nbformat.NotebookNode) -> list[str]:
    """Names cells that did not run in their order, and those with a word on stderr."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    disordered = [cell.id for number, cell in enumerate(cells, 1) if cell.execution_count != number]
    return disordered + [f"{cell.id}: {each.text}" for cell in cells for each in cell.outputs if each.get("name") == "stderr"]


def _environment(private: str) -> dict[str, str]:
    """Finds this package before an installed one, and no settings of the user's IPython."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "IPYTHONDIR": f"{private}/ipython"}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        store(Path(name))
