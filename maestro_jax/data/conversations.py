r"""A user's own conversations about images and sound: JSON Lines that name files, in the form that LLaVA and Qwen-VL data sets use.

    {"image": "cats/7.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}
    {"messages": [{"role": "user", "content": "<image><image><audio>Which?"}, {"role": "assistant", "content": "The second."}],
     "images": ["a.png", "b.png"], "audios": ["c.wav"]}

Lines are checked once, at the beginning; files are opened when their sample's turn comes, in whatever order, and nothing of them is kept.
How a conversation is written as text is in `maestro_jax.data.chat`; a placeholder becomes as many units as the encoder makes rows.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..config import check_fields, config_folder, configurable
from ..errors import DataError, set_by
from .conversation_lines import Index, Writing, parsed
from .conversation_samples import ConversationSamples, Reader, Reading
from .dataset import Dataset
from .extras import import_extra
from .interleaved import INTERLEAVED_SPECS
from .json_lines import BadLine, JsonLines
from .media import MOST_PIXELS
from .mel import audio_specs
from .patches import image_specs
from .sources import out_of_range

if TYPE_CHECKING:
    from .vision_language import VisionLanguage

_WANTED = """a JSON object in one line, in UTF-8, with "messages" (of "role" and "content") or "conversations" (of "from" and "value"),
of the roles system, user and assistant; paths in "image" or "images" and in "audio" or "audios", each a text or a list of texts,
and <image> or <audio> where each belongs, not in answers; a content may be a list of parts of type text, image and audio"""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversations(Reading):
    """Conversations about images and sound, one a line in files of JSON Lines; each is one sample, and its answers are trained on.

    A line has "messages" or "conversations" as for `Jsonl` (or "text", all of which is trained on), paths of images in "image" or
    "images", of PCM wave files in "audio" or "audios", and `<image>` or `<audio>` where each of them belongs, in the order of the
    paths. A content may be a list of parts as well (`{"type": "text", "text": ...}`, `{"type": "image"}` or "image_url" or "audio", with
    its path under that name, "path" or "url", or in the line's list). Images need Pillow (`pip install 'maestro_jax[examples]'`). Samples
    are named by file and line; lines with the same "id" are held out together. Streams are "text" (see `Interleaved`; an answer counts as
    one about what was shown last), "image" (see `image_item`) and "audio" (see `audio_item`).

    With `model`, lines are written and images are made into patches as transformers does it for that model, for which
    `pip install 'maestro_jax[huggingface]'` is needed. Its folder decides on tokenizer, patch_size and merge; max_patches scales images
    down that the folder would leave larger. Text has "rope_positions" as well (see `rope_positions`), there is no sound, and the fields
    about sound mean nothing.

    What is found out only when a sample is read (a file that is missing, damaged, empty, too large or outside of `root`, placeholders
    that do not match the paths, a text that is too long) is left to `train.on_bad_sample`. The fields that are not listed here are
    those of `Reading`.

    Args:
        path: a file, a folder (of which all `*.jsonl` are read), or a pattern such as `"chats/**/*.jsonl"`, from the
            current folder or from that of the config file that names it.
        root: the folder from which paths of images and sound count, and which none of them may leave; None is that of the lines.
        tokenizer: a `tokenizer.json` of Hugging Face tokenizers, from the current folder, beside the config file that
            names it, or among the shipped configs.
        model: folder of a vision-language model, from the current folder or from that of the config file that names it.
        heldout_fraction: expected share of lines that are held out, at least one when above 0; 0 holds out nothing.
        seed: another seed is another split.
        on_bad_line: what to do with a line that is no conversation: "raise", or "skip" (count it).
        name: what the ids of its samples begin with in a `Mixture`; in a config file the scope, as in `@chat/Conversations()`.

    Raises:
        ConfigError: a value is out of range.
    """

    path: str
    root: str | None = None
    tokenizer: str = "tokenizer_tiny.json"
    model: str | None = None
    heldout_fraction: float = 0.1
    seed: int = 0
    on_bad_line: Literal["raise", "skip"] = "raise"
    name: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("max_length", "patch_size", "merge", "mels", "stride"):
            if getattr(self, field) < 1:
                raise out_of_range(self, field, "a number of at least 1")
        if self.max_patches < self.merge**2:
            raise out_of_range(self, "max_patches", f"room for one block of {self.merge} x {self.merge} patches")
        if not 1 <= self.max_pixels <= MOST_PIXELS:
            raise out_of_range(self, "max_pixels", f"a number from 1 to {MOST_PIXELS}, the limit of Pillow")
        if not 0 <= self.band[0] < self.band[1] < math.inf:
            raise out_of_range(self, "band", "two frequencies of at least 0, the higher one last")
        if not 0 < self.max_seconds < math.inf:
            raise out_of_range(self, "max_seconds", "a number above 0")
        if not 0 <= self.heldout_fraction < 1:
            raise out_of_range(self, "heldout_fraction", "a fraction of at least 0 and below 1")
        if self.model is not None:
            for field in dataclasses.fields(self):
                if field.name in ("tokenizer", "patch_size", "merge") and getattr(self, field.name) != field.default:
                    raise out_of_range(self, field.name, f"{field.default!r}, its default: that of model={self.model!r} is used")

    def load(self) -> Dataset:
        """Checks every line; opens no image and no sound.

        Returns:
            The data set, in the order of the lines.

        Raises:
            DataError: there is no line to train on or to hold out, a line is bad and `on_bad_line` is "raise", `model` is no such model,
                or Pillow or transformers is missing.
            ConfigError: the tokenizer's file, or the folder of `model`, was not found.
        """
        from . import tokenizer as vocabulary  # here, because `python -m maestro_jax.data.tokenizer` imports this module

        model = self._model()
        writing = Writing() if model is None else model.writing
        if model is None:
            tokenizer = vocabulary.load(self.tokenizer, config_folder(self, "tokenizer"), set_by=set_by(self, "tokenizer"))
        else:
            tokenizer = model.tokenizer
        origin, skipped = set_by(self, "path"), collections.Counter[str]()
        lines = JsonLines(self.path, config_folder(self, "path"), skip=self.on_bad_line == "skip", wanted=_WANTED, set_by=origin)
        index = Index(self.seed)
        for line in lines:
            try:
                found = parsed(line.content, line.name, writing)
            except BadLine as error:
                lines.bad(line, skipped, error)
            else:
                index.add(line, found)
        if index.images:
            import_extra("PIL.Image", "pillow", f"the images of {self.path!r}", set_by=origin)
        train, heldout = index.split(self.heldout_fraction)
        if not len(train):
            raise self._too_few(len(index), skipped)
        fingerprint = vocabulary.fingerprint(tokenizer)
        reading = self._reading(model)
        reader = Reader(reading, self._root(lines), tokenizer, index, model)
        facts = f"{index.digest()} {reading} {fingerprint}" + ("" if model is None else f" {model.digest}")
        specs = {"text": INTERLEAVED_SPECS, "image": image_specs(self.patch_size, channels=3), "audio": audio_specs(self.mels)}
        merges = {"image": reading.merge**2, "audio": reading.stride}
        notes = {"corpus": self.path, "tokenizer": self.model or self.tokenizer, "lines": str(len(index)), "corpus_sha256": index.digest()}
        return Dataset(
            train=ConversationSamples(reader, train, facts),
            heldout=ConversationSamples(reader, heldout, facts),
            specs=specs if model is None else model.specs,
            vocab_size=vocabulary.vocabulary_size(tokenizer),
            merges=merges if model is None else {"image": merges["image"]},
            tokenizer_fingerprint=fingerprint,
            skipped=dict(skipped),
            notes=notes,
        )

    def _model(self) -> VisionLanguage | None:
        if self.model is None:
            return None
        from .vision_language import VisionLanguage  # here, because nothing else needs Jinja

        model = VisionLanguage.load(self.model, config_folder(self, "model"), set_by(self, "model"))
        if self.max_patches < model.least_patches:
            raise out_of_range(self, "max_patches", f"at least {model.least_patches}, which the smallest image of {self.model} has")
        return model

    def _reading(self, model: VisionLanguage | None) -> Reading:
        reading = Reading(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Reading)})
        return reading if model is None else dataclasses.replace(reading, patch_size=model.patch_size, merge=model.merge)

    def _too_few(self, lines: int, skipped: Mapping[str, int]) -> DataError:
        counts = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
        found = f"{lines} that can be used, all of one id" if lines else "no line that can be used"
        return DataError(
            f"there are too few conversations in {self.path!r}.",
            wanted="at least one to train on" + (", and one with another id to hold out" if self.heldout_fraction else ""),
            have=f"{found} (skipped: {counts or 'nothing'})",
            set_by=set_by(self, "path"),
            fix="add conversations, or set heldout_fraction to 0 to train without evaluation; the log names what was skipped",
            anchor="too-few-conversations",
        )

    def _root(self, lines: JsonLines) -> Path:
        if self.root is None:
            return lines.files()[0].resolve()
        given, config = Path(self.root).expanduser(), config_folder(self, "root")
        folder = given if config is None or given.exists() else config / given
        if not folder.is_dir():
            raise DataError(
                f"the folder {self.root!r} of images and sound is missing.",
                wanted="a folder, from which the paths in the lines count",
                have=f"no folder at {folder.absolute()}",
                set_by=set_by(self, "root"),
                fix="correct root",
                anchor="media-root-missing",
            )
        return folder.resolve()
