"""Everything that a config file can name, registered by being imported here."""

from __future__ import annotations

from . import data, distill, graph, huggingface, models, optimizers, trainer
from .config import configurable
from .schedules import InOrder, Lockstep, Sequential, Wavefront

# The schedules know nothing of configuration (they import neither JAX nor the rest), so their policies are registered here.
for _policy in (Wavefront, InOrder, Lockstep, Sequential):
    configurable(_policy.__name__)(_policy)

__all__ = ["data", "distill", "graph", "huggingface", "models", "optimizers", "trainer"]
