"""Distillation: objectives over a vocabulary, and the module of a section that learns from a teacher."""

from __future__ import annotations

from .objectives import distillation_sums
from .student import Distilled, DistilledModule, Student

__all__ = ["Distilled", "DistilledModule", "Student", "distillation_sums"]
