"""What is trained: sections, edges, the graph that they form, and adapters for users' modules."""

from __future__ import annotations

from .adapters import Adapter, adapt
from .graph import SectionGraph
from .section import Edge, Objective, Section
from .shapes import GraphShapes, SectionShapes, graph_shapes

__all__ = ["Adapter", "Edge", "GraphShapes", "Objective", "Section", "SectionGraph", "SectionShapes", "adapt", "graph_shapes"]
