"""Models as Hugging Face has them: their folders become sections, and sections become such folders."""

from __future__ import annotations

from . import llama, qwen2, qwen2_5_vl, qwen3
from .family import ConfigReader, Family, Part, families, register_family
from .folder import Folder
from .layout import Tensor
from .pretrained import HuggingFace, load
from .saving import save

__all__ = [
    "ConfigReader",
    "Family",
    "Folder",
    "HuggingFace",
    "Part",
    "Tensor",
    "families",
    "llama",
    "load",
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "register_family",
    "save",
]
