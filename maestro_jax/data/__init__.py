"""Samples in: sources, batches, packing into buckets, routes between micro-batches."""

from __future__ import annotations

from .batches import Batches
from .corpus import Corpus
from .packing import Packed, pack
from .routes import Route, route
from .samples import ArraySpec, Item, Sample
from .sources import Dataset
from .text_folder import TextFolder

__all__ = ["ArraySpec", "Batches", "Corpus", "Dataset", "Item", "Packed", "Route", "Sample", "TextFolder", "pack", "route"]
