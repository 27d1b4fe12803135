"""Families of models: which `config.json` is which of our models, and which tensor is which parameter.

A family is one file: it reads the numbers of `config.json` into the configuration of a model, and lists the model's tensors. What it does
not read must be on the list of keys that change nothing, or have the one value with which our model computes the same; anything else is
refused by name, so that no model runs that is not the one of the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import ConfigError, did_you_mean
from .layout import Sizes, Tensor

HARMLESS = frozenset(
    (
        *("model_type", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "tokenizer_class", "finetuned_from"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "id2label", "label2id"),
        *("initializer_range", "max_position_embeddings", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    )
)
"""Keys of `config.json` that change nothing of what a model computes from its weights."""


class ConfigReader:
    """Reads the keys of a `config.json`, and remembers which ones, so that `close` can name the others.

    Args:
        values: the file's object.
        path: of the file, for error texts.
        set_by: what names the folder.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, set_by: str) -> None:
        self.values, self.path, self.set_by = values, path, set_by
        self.read: set[str] = set()
        self.problems: list[str] = []
        self._inside: dict[str, ConfigReader] = {}

    def inside(self, key: str) -> ConfigReader:
        """Returns what reads the object of a key, such as that of one of several models; `close` closes it as well."""
        if key not in self._inside:
            self._inside[key] = ConfigReader(self.take(key, dict, {}), self.path, self.set_by)
        return self._inside[key]

    def take(self, key: str, kind: type, default: Any = ...) -> Any:
        """Returns the value of a key.

        Args:
            key: its name.
            kind: what the value must be; a whole number is a float too.
            default: what stands for a missing key, or null; without one, that is a problem.
        """
        self.read.add(key)
        value = self.values.get(key)
        if value is None and default is not ...:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            # The reader goes on with something of the right type, so that all problems are told at once.
            self.refuse(f"{key} = {value!r}: a value of type {kind.__name__} is needed")
            return kind(1) if kind in (int, float) else kind()
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses every value of a key but the allowed ones; where the key is missing, or null, nothing is wrong."""
        self.read.add(key)
        value = self.values.get(key)
        if value is not None and value not in allowed:
            self.refuse(f"{key} = {value!r}: only {' or '.join(repr(each) for each in allowed) or 'null'} is implemented")

    def ignore(self, *keys: str) -> None:
        """Takes keys as read that change nothing, given what else was read."""
        self.read.update(keys)

    def refuse(self, problem: str) -> None:
        """Remembers something that is not implemented; `close` raises."""
        self.problems.append(problem)

    def close(self, known: str) -> None:
        """Refuses what is not implemented, and keys that nobody knows.

        Args:
            known: the model type.

        Raises:
            ConfigError: lists all of them.
        """
        problems = self._found(known)
        if problems:
            raise ConfigError(
                f"{self.path} describes a model that is not implemented.",
                wanted=f"a {known!r} model with the features that are implemented",
                have="\n".join(problems),
                set_by=self.set_by,
                fix="use a checkpoint without these; a key that changes nothing belongs into HARMLESS of huggingface/family.py",
                anchor="model-not-implemented",
            )

    def _found(self, known: str) -> list[str]:
        """All problems, those of objects inside with the key of the object."""
        unknown = sorted(set(self.values) - self.read - HARMLESS)
        found = [*self.problems, *(f"{key} = {_short(self.values[key])}: not known of {known!r}" for key in unknown)]
        return found + [f"{key}: {problem}" for key, reader in self._inside.items() for problem in reader._found(known)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A model in a checkpoint: the whole of it, or (in one of vision and language) what one section holds.

    Args:
        kind: class of the model's configuration, such as `Decoder`.
        fields: reads the fields of the configuration from `config.json`.
        sizes: letter -> size, of the configuration (see `layout.Tensor`).
        tensors: its tensors, of the configuration.
        free: fields of the configuration that `config.json` does not decide.
    """

    kind: Callable[..., Any]
    fields: Callable[[ConfigReader], Mapping[str, Any]]
    sizes: Callable[[Any], Sizes]
    tensors: Callable[[Any], tuple[Tensor, ...]]
    free: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of `config.json`.

    Args:
        model_type: as `config.json` names it.
        architecture: the class of transformers whose checkpoints these are.
        parts: name of a part -> the part; where there is one alone, its name is "".
        ignored: ends of names of tensors that are computed from others, or equal to them.
    """

    model_type: str
    architecture: str
    parts: Mapping[str, Part]
    ignored: tuple[str, ...] = ()


_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Makes a family known by its model type; an existing one of that name is replaced. Returns it."""
    _FAMILIES[family.model_type] = family
    return family


def family_of(reader: ConfigReader) -> Family:
    """Finds the family of a `config.json`.

    Raises:
        ConfigError: there is none of this model type, or the file is of another class.
    """
    kind = reader.values.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        close = did_you_mean(kind, list(_FAMILIES)) if isinstance(kind, str) else ""
        raise ConfigError(
            f"{reader.path} is of a kind of model that is not implemented.",
            wanted=f"a model_type among {', '.join(sorted(_FAMILIES))}{close}",
            have=f"model_type = {kind!r}",
            set_by=reader.set_by,
            fix="use such a model, or register a family of your own (see docs/models.md)",
            anchor="model-not-implemented",
        )
    reader.only("architectures", [family.architecture], [])
    # Weights that are stored in fewer bits need code of their own.
    reader.only("quantization_config")
    reader.only("is_encoder_decoder", False)
    reader.only("chunk_size_feed_forward", 0)
    reader.only("problem_type")
    return family


def families() -> Mapping[str, Family]:
    """Model type -> family, of all that are registered."""
    return MappingProxyType(_FAMILIES)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def listed(problems: Iterable[str], most: int = 12) -> str:
    """Problems as lines, the first ones of many."""
    lines = list(problems)
    return "\n".join(lines[:most]) + (f"\nand {len(lines) - most} more" if len(lines) > most else "")
