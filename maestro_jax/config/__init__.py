"""Configuration: gin syntax into frozen, validated objects, strictly and without global state."""

from __future__ import annotations

from .build import Config, config_folder, load
from .files import find_config, find_file
from .registry import Field, configurable, describe, summaries

__all__ = ["Config", "Field", "config_folder", "configurable", "describe", "find_config", "find_file", "load", "summaries"]
