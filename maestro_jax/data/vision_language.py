"""The folder of a vision-language model as Hugging Face has them, as far as conversations go: how text is written, what images become.

Text is written by the folder's chat template, from contents that are lists of parts; each image token in it stands for all rows of an
image. Images are made into patches by the image processor of transformers that the folder names (extra `huggingface`), the one that
works with Pillow and numpy alone, so that no torch is needed. All that is there is checked when the folder is read.

Dimensions: N patches of an image, P numbers of a patch, as the processor puts them (channels, frames, height, width).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..config import find_file
from ..errors import DataError
from .chat import turns_of
from .chat_template import ChatTemplate
from .conversation_lines import IMAGE, PLACEHOLDERS, Writing
from .extras import import_extra
from .interleaved import INTERLEAVED_SPECS
from .json_lines import BadLine, short
from .media import Unusable, read_pixels
from .patches import patch_places
from .samples import ArraySpec, Item

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"

_BEFORE, _AFTER = "\ue012", "\ue013"  # from a private use area: no text has them


class VisionLanguage:
    """What a folder says about conversations with images.

    Args:
        tokenizer: of the folder.
        template: of the folder.
        processor: an image processor of transformers, of the kind that makes patches of images in their own proportions.
        image_token_id: the token that stands for an image in a text.
        place: of the folder, for error texts.
        set_by: what names it.

    Attributes:
        tokenizer: as given.
        image_token_id: as given.
        patch_size: pixels along a side of a patch.
        merge: patches along a side of the block that becomes one row in the text.
        least_patches: of the smallest image.
        writing: how lines become text.
        specs: stream -> arrays of its items.
        digest: hash of all that decides what a line becomes, but for the tokenizer.

    Raises:
        DataError: these make no vision-language model, or the template does not write images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        processor: Any,
        image_token_id: int,
        place: str,
        set_by: str = "the calling program",
    ) -> None:
        self.tokenizer, self.image_token_id = tokenizer, image_token_id
        self._template, self._processor, self._place, self._set_by = template, processor, place, set_by
        token = tokenizer.id_to_token(image_token_id)
        if token is None:
            raise self._refused("an image_token_id that the tokenizer has", f"image_token_id = {image_token_id}")
        if tokenizer.encode(token, add_special_tokens=False).ids != [image_token_id]:
            raise self._refused("an image token that stays whole in a text", f"image_token_id = {image_token_id}, of {token!r}")
        self._token = token
        size = getattr(processor, "size", None) or {}
        least, most = size.get("shortest_edge"), size.get("longest_edge")
        if "image_grid_thw" not in getattr(processor, "model_input_names", ()) or least is None or most is None:
            have = f"{type(processor).__name__} with the size {dict(size)}"
            raise self._refused("an image processor such as Qwen2VLImageProcessor, with the least and the most pixels of an image", have)
        self.patch_size, self.merge, self._bounds = int(processor.patch_size), int(processor.merge_size), (int(least), int(most))
        self.least_patches = math.ceil(least / self.patch_size**2)
        self._image = self._image_text()
        self.writing = Writing(messages=self._messages, text=self._text, placeholders={token: "image"})
        facts = [processor.to_dict(), template.source, template.tokens, image_token_id]
        self.digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    @classmethod
    def load(cls, name: str | Path, near: Path | None = None, set_by: str = "the calling program") -> VisionLanguage:
        """Reads a folder with `config.json`, `tokenizer.json`, a chat template and `preprocessor_config.json`.

        Args:
            name: the folder.
            near: a config file or its folder, where it is looked for as well.
            set_by: where the name was set, for error texts.

        Raises:
            ConfigError: there is no such folder.
            DataError: something in it is missing, or of another kind of model; or transformers is not installed.
        """
        from . import tokenizer as vocabulary  # here, because `python -m maestro_jax.data.tokenizer` must not import itself

        folder = find_file(name, near, set_by=set_by)
        image_token_id = _config(folder, set_by).get("image_token_id")
        if type(image_token_id) is not int:
            raise _refused(str(folder), f"{CONFIG} with image_token_id", f"image_token_id = {image_token_id!r}", set_by)
        tokenizer, template = vocabulary.load(folder, set_by=set_by), ChatTemplate.load(folder, set_by=set_by)
        return cls(tokenizer, template, _processor(folder, set_by), image_token_id, str(folder), set_by)

    @property
    def specs(self) -> dict[str, Mapping[str, ArraySpec]]:
        """Text as of `Interleaved` with "rope_positions" int32 [units, 3]; "patches" float32 [N, P] and "coords" int32 [N, 2]."""
        numbers = 3 * int(getattr(self._processor, "temporal_patch_size", 1)) * self.patch_size**2
        image = {"patches": ArraySpec(shape=(numbers,), dtype="float32"), "coords": ArraySpec(shape=(2,))}
        return {"text": {**INTERLEAVED_SPECS, "rope_positions": ArraySpec(shape=(3,))}, "image": image}

    def image_item(self, path: Path, *, max_patches: int, max_pixels: int) -> Item:
        """Makes an image into patches.

        Args:
            path: the file.
            max_patches: most of them, where the folder does not say fewer; a larger image is scaled down.
            max_pixels: most pixels that it may have in its file.

        Returns:
            "patches" float32 [N, P], as the processor makes them; "coords" int32 [N, 2]: row and column of each patch, block by block.

        Raises:
            Unusable: it cannot be read, or the processor refuses its proportions.
        """
        pixels_HWC = read_pixels(path, max_pixels=max_pixels)
        size = {"shortest_edge": self._bounds[0], "longest_edge": min(self._bounds[1], max_patches * self.patch_size**2)}
        try:
            made = self._processor([pixels_HWC], size=size, input_data_format="channels_last", return_tensors="np")
        except ValueError as error:
            raise _unfit(path, pixels_HWC, "an image that the model's image processor takes", str(error)) from error
        rows, columns = (int(number) for number in made["image_grid_thw"][0, 1:])
        if rows * columns > max_patches:  # one block in height, say, which it does not scale down any more
            raise _unfit(path, pixels_HWC, f"proportions that fit into max_patches={max_patches}", f"{rows} x {columns} patches")
        patches_NP = np.asarray(made["pixel_values"], np.float32)
        return Item(units=rows * columns, arrays={"patches": patches_NP, "coords": patch_places(rows, columns, self.merge)})

    def _messages(self, messages: Any) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Writes messages; see `Writing`."""
        images = 0
        for role, content in turns_of(messages):
            self._check(content)
            if role == "assistant" and IMAGE in content:
                raise BadLine("placeholder in an answer", short(content))
            images += content.count(IMAGE)
        text, spans = self._template.conversation(messages, _parts)
        if text.count(self._token) != images:
            raise BadLine("refused by the chat template", f"{images} images, of which it writes {text.count(self._token)}")
        return text, spans

    def _text(self, text: str) -> str:
        """Writes a text that is no conversation."""
        self._check(text)
        return text.replace(IMAGE, self._image)

    def _check(self, text: str) -> None:
        """Refuses what would be taken for an image, and what stands for something else."""
        for sign in (self._token, *(sign for sign, stream in PLACEHOLDERS.items() if stream != "image")):
            if sign in text:
                raise BadLine("a text that means something else", f"{sign} in {short(text)}; images alone are read, as {IMAGE}")

    def _image_text(self) -> str:
        """What the template writes for an image."""
        try:
            written = self._template.write([{"role": "user", "content": _parts(_BEFORE + IMAGE + _AFTER)}])
        except BadLine as error:
            raise self._refused("a chat template that writes images", str(error)) from error
        image = written.partition(_BEFORE)[2].partition(_AFTER)[0]
        if image.count(self._token) != 1:
            raise self._refused(f"a chat template that writes {self._token} for an image", f"{image!r} for an image")
        return image

    def _refused(self, wanted: str, have: str) -> DataError:
        return _refused(self._place, wanted, have, self._set_by)


def _parts(text: str) -> list[dict[str, str]]:
    """A content as processors of transformers take it."""
    pieces = [piece for piece in re.split(f"({re.escape(IMAGE)})", text) if piece]
    return [{"type": "image"} if piece == IMAGE else {"type": "text", "text": piece} for piece in pieces]


def _config(folder: Path, set_by: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(str(folder), f"a {CONFIG}", f"{type(error).__name__}: {error}", set_by) from error
    return found if isinstance(found, dict) else {}


def _processor(folder: Path, set_by: str) -> Any:
    """The image processor that the folder names, in its form that needs Pillow and numpy alone."""
    # It would warn that there is no torch, which is not needed here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    library = import_extra("transformers", "transformers", f"the images of {folder}", extra="huggingface", set_by=set_by)
    import_extra("PIL.Image", "pillow", f"the images of {folder}", extra="huggingface", set_by=set_by)
    try:
        return library.AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the library raises for what it does not find or know
        raise _refused(str(folder), f"a {PROCESSOR} that transformers knows", f"{type(error).__name__}: {error}", set_by) from error


def _unfit(path: Path, pixels_HWC: np.ndarray, wanted: str, have: str) -> Unusable:
    height, width, _ = pixels_HWC.shape
    fix = "crop the image, or raise max_patches"
    return Unusable("image-proportions", f"image {str(path)!r} of {height} x {width} pixels has no room", wanted=wanted, have=have, fix=fix)


def _refused(place: str, wanted: str, have: str, set_by: str) -> DataError:
    return DataError(
        f"{place} is no vision-language model that conversations can be written for.",
        wanted=wanted,
        have=have,
        set_by=set_by,
        fix="name the folder of a model such as Qwen2.5-VL, with all of its files, or leave model out",
        anchor="vision-language-folder",
    )
