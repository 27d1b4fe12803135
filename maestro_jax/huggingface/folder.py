"""A folder as Hugging Face has them: `config.json`, weights in one safetensors file or in shards with an index, and a tokenizer.

What is there is compared with what `config.json` describes before anything is read; then only the slices that a device needs are.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..data.tokenizer import fingerprint
from ..data.tokenizer import load as load_tokenizer
from ..errors import CheckpointError, ConfigError
from .family import ConfigReader, Family, Part, family_of, listed
from .layout import Sizes, StackedArray, Tensor

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One model of a folder, and how its tensors lie.

    Args:
        part: of the family.
        config: of the model, such as a `Decoder`.
        sizes: letter -> size.
        tensors: all of them.
    """

    part: Part
    config: Any
    sizes: Sizes
    tensors: tuple[Tensor, ...]


class Folder:
    """A folder with a model; its numbers are read and checked when it is made, its weights when they are asked for.

    Args:
        path: of the folder.
        set_by: where it was named, for error texts.

    Attributes:
        path: of the folder.
        values: what `config.json` says.
        family: which models these are.
        models: part of the family -> model; where there is one alone, its part is "".

    Raises:
        ConfigError: there is no `config.json`, or it describes a model that is not implemented.
    """

    def __init__(self, path: Path, set_by: str = "the calling program") -> None:
        self.path, self._set_by = path, set_by
        self.values = _json_object(path / CONFIG, set_by)
        reader = ConfigReader(self.values, path / CONFIG, set_by)
        self.family: Family = family_of(reader)
        fields = {name: part.fields(reader) for name, part in self.family.parts.items()}
        reader.close(self.family.model_type)
        self.models: Mapping[str, Model] = {}
        for name, part in self.family.parts.items():
            config = part.kind(**fields[name])
            self.models[name] = Model(part=part, config=config, sizes=part.sizes(config), tensors=part.tensors(config))

    @functools.cached_property
    def tokenizer_fingerprint(self) -> str | None:
        """Of the folder's tokenizer, or None where there is none."""
        file = self.path / TOKENIZER
        return fingerprint(load_tokenizer(file, set_by=self._set_by)) if file.is_file() else None

    def arrays(self, prefix: str = "") -> dict[str, StackedArray]:
        """Returns path below `prefix` -> parameter; nothing is read yet.

        A head that is tied to the embedding is there under both names.

        Raises:
            CheckpointError: files or tensors are missing, or do not fit `config.json`.
        """
        self._check()
        found = {}
        for name, model in self.models.items():
            start = name + "/" if name else ""
            found |= {start + tensor.path: StackedArray(tensor, model.sizes, self._tensor) for tensor in model.tensors}
            if start + "head/weight" not in found and start + "embedding/weight" in found:
                found[start + "head/weight"] = found[start + "embedding/weight"]
        start = prefix + "/" if prefix else ""
        return {path[len(start) :]: array for path, array in found.items() if path.startswith(start)}

    @functools.cached_property
    def files(self) -> Mapping[str, Path]:
        """Name of every tensor -> its file.

        Raises:
            CheckpointError: there are no weights, or a shard is missing.
        """
        if (self.path / INDEX).is_file():
            index = _json_object(self.path / INDEX, self._set_by)
            found = {name: self.path / str(file) for name, file in dict(index.get("weight_map", {})).items()}
            missing = sorted({file.name for file in found.values() if not file.is_file()})
            if missing:
                raise self._refused("is not complete.", "every file that the index names", listed(missing), "download the missing files")
            return found
        if (self.path / SINGLE).is_file():
            return dict.fromkeys(self._open(self.path / SINGLE).keys(), self.path / SINGLE)
        have = ", ".join(sorted(file.name for file in self.path.iterdir())) or "an empty folder"
        fix = "download the safetensors files as well, or make them with transformers: model.save_pretrained(FOLDER)"
        raise self._refused("has no weights.", f"{SINGLE}, or {INDEX} with its shards", have, fix)

    def _check(self) -> None:
        """Compares the tensors that are there with those of the model."""
        wanted = {
            name: (tensor, model.sizes) for model in self.models.values() for tensor in model.tensors for name in tensor.names(model.sizes)
        }
        problems = [f"{name}: missing" for name in wanted if name not in self.files]
        for name in self.files:
            if name in wanted:
                tensor, sizes = wanted[name]
                have, want = tuple(self._tensor(name).get_shape()), tensor.tensor_shape(sizes)
                if have != want:
                    problems.append(f"{name}: {list(have)} in the file, {list(want)} by {CONFIG}")
            elif not name.endswith(self.family.ignored):
                problems.append(f"{name}: unknown to {self.family.model_type!r}")
        if problems:
            fix = f"download the folder anew, with the {CONFIG} that belongs to its weights"
            raise self._refused("has other tensors than its config.json describes.", "each tensor once", listed(problems), fix)

    def _tensor(self, name: str) -> Any:
        """Something that reads a part of a tensor."""
        return self._open(self.files[name]).get_slice(name)

    @functools.cache  # noqa: B019 - the folder lives as long as its parameters are read
    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            have = f"{file.name}: {type(error).__name__}: {error}"
            raise self._refused("cannot be read.", "safetensors files", have, "download the file anew (`git lfs pull`)") from error

    def _refused(self, what: str, wanted: str, have: str, fix: str) -> CheckpointError:
        what = f"the model in {self.path} {what}"
        return CheckpointError(what, wanted=wanted, have=have, fix=fix, anchor="model-folder", set_by=self._set_by)


def _json_object(path: Path, set_by: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        have = f"{path.name} holds {type(found).__name__}"
    except (OSError, ValueError) as error:
        have = f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"{path.parent} is no folder of a model.",
        wanted=f"a folder with {CONFIG}, {SINGLE} (or shards with {INDEX}) and {TOKENIZER}",
        have=have,
        fix="name the folder that was downloaded from Hugging Face, with all of its files",
        anchor="model-folder",
        set_by=set_by,
    )
