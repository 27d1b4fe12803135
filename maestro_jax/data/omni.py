"""Text, images and sound made from what is at hand: a language model's corpus, questions about digits, and about telephone keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..config import check_fields, configurable
from ..errors import set_by
from .corpus import Corpus
from .dataset import Dataset, Part
from .digits import SIDE, Digits, load_digits, split_digits
from .interleaved import INTERLEAVED_SPECS, plain_text
from .lazy import Joined
from .mel import audio_specs
from .patches import image_specs
from .questions import LETTERS, Asked, Questions, Recipe
from .samples import ArraySpec, Sample
from .sources import TextSource, out_of_range

ASKED: tuple[Asked, ...] = ("images", "tones", "both")

_LEAST = {
    **dict.fromkeys(("most_images", "most_clips", "most_keys", "patch_size", "merge", "mels", "stride", "samples"), 1),
    **dict.fromkeys(("tail", "image_noise", "redraws", "tone_noise", "heldout_samples", "seed"), 0),
}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Omni(Recipe):
    """Plain text, questions about images, about sound, and about both: samples that run in some sections and not in others.

    The images are scikit-learn's digits (`pip install 'maestro_jax[examples]'`), split into those to train on and those that are
    held out before any sample is made; the sound is made by formula. Samples are in `maestro_jax.data.questions`. Streams are
    "text" (see `Interleaved`), "image" (`image_item`), "audio" (`audio_item`), and "redraw", an item of one unit: the image of the
    last digit ("target", 64 numbers from 0 to 1) and the text unit that is asked for it ("state_rows").

    Args:
        text: where plain text comes from; its tokenizer writes the questions too.
        shares: how often samples are "text", ask about "images", about "tones", or about "both", relative to each other; what is
            not named does not occur.
        samples: how many different questions of each kind are trained on; they are made when needed, so many cost nothing.
        heldout_fraction: share of the images that is held out.
        heldout_samples: held-out questions of each kind, about these images; held-out text is that of `text`.
        seed: another seed is another split and other questions.
        name: what the ids of its samples begin with in a `Mixture`.

    Raises:
        ConfigError: a value is out of range.
    """

    text: TextSource = dataclasses.field(default_factory=Corpus)
    shares: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"text": 4.0, "images": 2.0, "tones": 1.0, "both": 1.0})
    samples: int = 1_000_000
    heldout_fraction: float = 0.1
    heldout_samples: int = 100
    seed: int = 0
    name: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for field, least in _LEAST.items():
            if not least <= getattr(self, field) < math.inf:
                raise out_of_range(self, field, f"a number of at least {least}")
        block = self.patch_size * self.merge
        if not self.image_sizes or any(side < 1 or side % block for size in self.image_sizes for side in size):
            raise out_of_range(self, "image_sizes", f"(height, width) of one or more sizes, multiples of patch_size x merge = {block}")
        if self.most_images + self.most_clips > len(LETTERS):
            raise out_of_range(self, "most_images", f"a number of at most {len(LETTERS)} together with most_clips={self.most_clips}")
        if self.redraws > 1:
            raise out_of_range(self, "redraws", "a share from 0 to 1")
        if not 0 <= self.heldout_fraction < 1:
            raise out_of_range(self, "heldout_fraction", "a fraction of at least 0 and below 1")
        if not self.shares or not all(0 < share < math.inf for share in self.shares.values()) or {*self.shares} - {"text", *ASKED}:
            raise out_of_range(self, "shares", "numbers above 0 for one or more of 'text', 'images', 'tones' and 'both'")

    def load(self) -> Dataset:
        """Loads text and digits, and makes the held-out samples.

        Returns:
            The data set; each kind of sample is a part of its own. Held-out samples of all kinds are mixed evenly.

        Raises:
            DataError: scikit-learn is missing, or the text cannot be used.
            ConfigError: the tokenizer's file was not found.
        """
        text, tokenizer = self.text.load(), self.text.load_tokenizer()
        digits, held = self._digits()
        train: list[tuple[Part, Sequence[Sample]]] = []
        heldout: list[Sequence[Sample]] = []
        if "text" in self.shares:
            train.append((Part("text", len(text.train), self.shares["text"]), _plain(text.train)))
            heldout.append(_plain(text.heldout))
        recipe = Recipe(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Recipe)})
        # Noise in images only makes training images harder to learn by heart.
        clean = dataclasses.replace(recipe, image_noise=0.0)
        for asked in (asked for asked in ASKED if asked in self.shares):
            part = Part(asked, self.samples, self.shares[asked])
            made = {"asked": asked, "tokenizer": tokenizer, "seed": self.seed}
            train.append((part, Questions(f"{asked}/train", count=self.samples, recipe=recipe, digits=digits, **made)))
            if self.heldout_fraction:
                heldout.append(Questions(f"{asked}/heldout", count=self.heldout_samples, recipe=clean, digits=held, **made))
        return Dataset(
            train=Joined([("", samples) for _, samples in train]),
            heldout=_evenly(heldout),
            specs=self._specs(),
            vocab_size=text.vocab_size,
            merges={"image": self.merge**2, "audio": self.stride},
            tokenizer_fingerprint=text.tokenizer_fingerprint,
            skipped=text.skipped,
            notes={**text.notes, "images": f"digits of scikit-learn: {len(digits.labels)} trained on, {len(held.labels)} held out"},
            parts=tuple(part for part, _ in train),
        )

    def _digits(self) -> tuple[Digits, Digits]:
        """Images to train on and images that are held out."""
        none = Digits(np.zeros((0, SIDE, SIDE), np.float32), np.zeros(0, np.int64))
        if not {"images", "both"} & {*self.shares}:
            return none, none
        digits = load_digits(set_by=set_by(self, "shares"))
        return split_digits(digits, self.heldout_fraction, self.seed) if self.heldout_fraction else (digits, none)

    def _specs(self) -> dict[str, Mapping[str, ArraySpec]]:
        return {
            "text": INTERLEAVED_SPECS,
            "image": image_specs(self.patch_size, channels=1),
            "audio": audio_specs(self.mels),
            "redraw": {"target": ArraySpec(shape=(SIDE**2,), dtype="float32"), "state_rows": ArraySpec()},
        }


def _plain(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    return tuple(dataclasses.replace(sample, items={"text": tuple(map(plain_text, sample.items["text"]))}) for sample in samples)


def _evenly(sides: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """All samples in one sequence in which those of each side lie evenly, so that its beginning is like the whole."""
    order = sorted(((number + 0.5) / len(side), which, number) for which, side in enumerate(sides) for number in range(len(side)))
    return tuple(sides[which][number] for _, which, number in order)
