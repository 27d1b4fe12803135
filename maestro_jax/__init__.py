"""Trains compound models in JAX: sections on disjoint submeshes, kept busy by a host-side dispatcher.

Names are loaded when first used, so that `import maestro_jax.schedules` loads no JAX.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import Any

# Read when JAX starts its CPU devices: with the small thread pool that a machine of few cores would get, two-way transfers
# between CPU devices may hang. Has no effect on accelerators, nor on a process whose devices have been started.
os.environ.setdefault("PJRT_NPROC", "16")

_HOMES = {
    "Section": "graph",
    "SectionGraph": "graph",
    "Edge": "graph",
    "Objective": "graph",
    "Trainer": "trainer",
    "History": "history",
    "Sample": "data",
    "Item": "data",
    "ArraySpec": "data",
    "Dataset": "data",
    "Batches": "data",
    "Conversations": "data",
    "Corpus": "data",
    "Jsonl": "data",
    "Mixture": "data",
    "Omni": "data",
    "TextFolder": "data",
    "MaestroError": "errors",
    "HuggingFace": "huggingface",
    # Their modules are no namesakes: once loaded, a module `verify` would stand in the function's place.
    "generate": "generation",
    "verify": "verification",
    "Verification": "verification",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("maestro_jax")
    if name not in _HOMES:
        raise AttributeError(f"module 'maestro_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
