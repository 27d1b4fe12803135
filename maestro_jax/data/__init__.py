"""Samples in: sources, batches, packing into buckets, routes between micro-batches."""

from __future__ import annotations

from .batches import Batches
from .conversations import Conversations
from .corpus import Corpus
from .dataset import Dataset, Part
from .digits import load_digits
from .interleaved import INTERLEAVED_SPECS, Interleaved
from .jsonl import Jsonl
from .lazy import LazySamples
from .long_tail import LongTail
from .mixture import Mixture
from .omni import Omni
from .packing import Packed, pack
from .patches import image_item, image_specs
from .positions import rope_positions
from .routes import Route, route
from .samples import ArraySpec, Item, Sample
from .text_folder import TextFolder

__all__ = [
    "INTERLEAVED_SPECS",
    "ArraySpec",
    "Batches",
    "Conversations",
    "Corpus",
    "Dataset",
    "Interleaved",
    "Item",
    "Jsonl",
    "LazySamples",
    "LongTail",
    "Mixture",
    "Omni",
    "Packed",
    "Part",
    "Route",
    "Sample",
    "TextFolder",
    "image_item",
    "image_specs",
    "load_digits",
    "pack",
    "rope_positions",
    "route",
]
