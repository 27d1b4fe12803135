"""Everything that a config file can name, registered by being imported here."""

from __future__ import annotations

from . import data, distill, graph, models, optimizers, trainer
from .config import configurable
from .schedules import InOrder, Sequential

# The schedules know nothing of configuration (they import neither JAX nor the rest), so their policies are registered here.
configurable("InOrder")(InOrder)
configurable("Sequential")(Sequential)

__all__ = ["InOrder", "Sequential", "data", "distill", "graph", "models", "optimizers", "trainer"]
