"""Configuration: gin syntax into frozen, validated objects, strictly and without global state."""

from __future__ import annotations

from .build import Config, config_folder, load
from .fields import check_fields
from .files import find_config, find_file, shipped_configs
from .registry import Field, config_name, configurable, describe, summaries

__all__ = [
    "Config",
    "Field",
    "check_fields",
    "config_folder",
    "config_name",
    "configurable",
    "describe",
    "find_config",
    "find_file",
    "load",
    "shipped_configs",
    "summaries",
]
