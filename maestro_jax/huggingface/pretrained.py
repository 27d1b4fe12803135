"""A model from a folder, as a section's module; and a folder's weights, loaded onto devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import check_fields, config_folder, configurable, find_file
from ..errors import ConfigError, did_you_mean, set_by
from ..models.weights import placed
from .folder import Folder


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """The model in a folder with `config.json` and safetensors files: sizes and initial weights come from there.

    The section that it is the module of (or the student of, or the decoder of) starts with the folder's weights, unless `Section.weights`
    names others, and its final weights are written as such a folder.

    Args:
        folder: path of the folder, from the current folder or from that of the config file.
        part: which model of it, where it holds several.
        choices: fields of the model that `config.json` does not decide, such as {'objective': 'none', 'dropout': 0.1} of a `Decoder`.

    Raises:
        ConfigError: no such folder, or a model in it that is not implemented.
    """

    folder: str
    part: str = ""
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        # Read now, so that what is wrong is said before anything else is made.
        model = self.opened.models.get(self.part)
        if model is None:
            raise self._refused("part", f"one of {list(self.opened.models)}", repr(self.part))
        wrong = [name for name in self.choices if name not in model.part.free]
        if wrong:
            wanted = f"some of {', '.join(model.part.free)}{did_you_mean(wrong[0], list(model.part.free))}"
            raise self._refused("choices", wanted, repr(wrong[0]))

    def __hash__(self) -> int:
        """Of what the mapping holds, as modules are compared by their configurations."""
        return hash((self.folder, self.part, tuple(self.choices.items())))

    @functools.cached_property
    def opened(self) -> Folder:
        """The folder."""
        origin = set_by(self, "folder")
        return Folder(find_file(self.folder, config_folder(self, "folder"), set_by=origin), origin)

    @functools.cached_property
    def config(self) -> Any:
        """The configuration of the model, such as a `Decoder`."""
        return dataclasses.replace(self.opened.models[self.part].config, **self.choices)

    @property
    def initial_weights(self) -> Mapping[str, tuple[str, str]]:
        """Path prefix -> where the initial values below it come from, as in `Section.weights`."""
        return {"": (str(self.opened.path), self.part)}

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding table, of which the tokenizer may use fewer."""
        return getattr(self.config, "vocab_size", None)

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        """Builds the module with new parameters."""
        return self.config(rngs)

    def _refused(self, field: str, wanted: str, have: str) -> ConfigError:
        return ConfigError(
            f"HuggingFace.{field} does not fit {self.opened.path}.",
            wanted=wanted,
            have=have,
            set_by=set_by(self, field),
            fix=f"correct {field}; what config.json decides is changed there",
            anchor="model-folder",
        )


def load(
    folder: Path | str,
    *,
    part: str = "",
    dtype: str = "float32",
    shardings: Mapping[str, jax.sharding.Sharding] | jax.sharding.Sharding | None = None,
) -> tuple[Any, dict[str, jax.Array]]:
    """Loads a model from a folder; of each parameter, a device is given the slice that it needs, and no more is read.

    Args:
        folder: with `config.json` and safetensors files.
        part: which model of it, where it holds several.
        dtype: of the parameters.
        shardings: path -> sharding, or one for all; None puts all on the first device.

    Returns:
        The configuration (such as a `Decoder`), and path -> parameter.

    Raises:
        MaestroError: no such model, a model that is not implemented, or tensors that do not fit.
    """
    opened = Folder(Path(folder), "the calling program: load(folder=...)")
    config, given = opened.models[part].config, opened.arrays(part)
    place = shardings if shardings is not None else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = {}
    for path in (tensor.path for tensor in opened.models[part].tensors):
        sharding = place[path] if isinstance(place, Mapping) else place
        found[path] = placed(given[path], jnp.dtype(dtype), sharding)
    return config, found
