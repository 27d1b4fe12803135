"""Questions about digits and telephone keys, each made from its number.

A sample shows images of digits, clips of telephone keys, or both, and asks what they are; the answer stands behind each of them, as
in a conversation, or behind all of them, under the letter by which each was shown:

    read the digits and the keys: ▢▢▢▢3▢▢▢▢▢▢▢▢▢7▢▢▢▢▢▢▢*0
    a▢▢▢▢b▢▢▢▢▢▢▢▢▢c▢▢▢▢▢▢▢
    read the digits and the keys: a3b7c*0

Here every ▢ takes a row of an encoder (see `Interleaved`). The loss counts the digits and keys alone, a token each. The first is easily
learned, since what is asked for lies right before the answer; the second asks for an induction over letters, which takes a small model
many times as long.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from .digits import SIDE, Digits
from .interleaved import Interleaved, Stream
from .lazy import Digest, LazySamples
from .mel import audio_item
from .patches import image_item, resized
from .samples import Item, Sample
from .tones import BAND, KEYS, RATE, call

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""Under which images and clips are shown: a sample has at most as many of them together."""

Asked = Literal["images", "tones", "both"]
"""What a sample asks about."""

_QUESTIONS = {
    "images": "read the digits: ",
    "tones": "read the keys: ",
    "both": "read the digits and the keys: ",
}
_VERSION = 1  # changes whenever the samples of the same numbers do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What questions are made of.

    Args:
        answers: where an answer stands: behind "each" image and clip, or behind "all" of them, which is far harder to learn.
        most_images: most images in a sample that has some.
        tail: n images come in proportion to 1 / n ** tail; 0 makes all numbers equally frequent, 1 is a long tail.
        image_sizes: (height, width) of images, in pixels; each image has one of them.
        patch_size: pixels along a side of a patch.
        merge: patches along a side of the block that becomes one row in the text.
        image_noise: standard deviation of the noise in images that are trained on; ink is 1.
        redraws: share of the samples with images in which the last digit is also to be drawn again.
        most_clips: most clips in a sample that has some.
        most_keys: most keys that are pressed in a clip.
        mels: frequency bands of a frame.
        stride: frames, of 10 ms each, that become one row in the text.
        tone_noise: standard deviation of the noise in clips; the loudest possible tone is 0.8.
    """

    answers: Literal["each", "all"] = "each"
    most_images: int = 6
    tail: float = 0.0
    image_sizes: tuple[tuple[int, int], ...] = ((8, 8), (8, 12), (12, 8), (12, 12))
    patch_size: int = 2
    merge: int = 2
    image_noise: float = 0.1
    redraws: float = 0.5
    most_clips: int = 2
    most_keys: int = 2
    mels: int = 40
    stride: int = 4
    tone_noise: float = 0.05


class Questions(LazySamples):
    """Samples that ask about one thing, with ids "NAME/NUMBER"; other names and other seeds are other samples.

    Args:
        name: such as "images/train".
        asked: what they ask about.
        count: how many there are.
        recipe: what they are made of.
        digits: the images that are shown.
        tokenizer: writes the text.
        seed: at least 0.
    """

    def __init__(self, name: str, asked: Asked, count: int, *, recipe: Recipe, digits: Digits, tokenizer: Tokenizer, seed: int) -> None:
        self._name, self._asked, self._count, self._recipe, self._digits, self._seed = name, asked, count, recipe, digits, seed
        texts = [_QUESTIONS[asked], "\n", *sorted({*LETTERS, *KEYS})]
        self._ids = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in texts}

    def __len__(self) -> int:
        return self._count

    def hash_into(self, digest: Digest) -> None:
        """Gives a hash all that the samples are made from."""
        digest.update(repr((_VERSION, self._name, self._asked, self._count, self._recipe, self._seed, self._ids)).encode())
        for array in self._digits:
            digest.update(array.tobytes())

    def read(self, number: int) -> Sample:
        """Makes a sample."""
        recipe, random = self._recipe, np.random.default_rng([self._seed, zlib.crc32(self._name.encode()), number])
        images = _tailed(random, recipe.most_images, recipe.tail) if self._asked != "tones" else 0
        clips = int(random.integers(1, recipe.most_clips + 1)) if self._asked != "images" else 0
        shown = [int(random.integers(len(self._digits.labels))) for _ in range(images)]
        pressed = [_some_keys(random, recipe.most_keys) for _ in range(clips)]
        pictures = tuple(self._picture(self._digits.images[n], random) for n in shown)
        sounds = tuple(self._sound(keys, random) for keys in pressed)
        answers = [*(str(self._digits.labels[n]) for n in shown), *pressed]
        text, state = self._text(answers, pictures, sounds)
        items = {"text": (text,), **({"image": pictures} if images else {}), **({"audio": sounds} if clips else {})}
        if images and random.random() < recipe.redraws:
            items["redraw"] = (_redraw(self._digits.images[shown[-1]], state),)
        return Sample(id=f"{self._name}/{number}", items=items)

    def _text(self, answers: Sequence[str], pictures: Sequence[Item], sounds: Sequence[Item]) -> tuple[Item, int]:
        """The text, and the number of the unit that is asked for the last digit."""
        media: list[tuple[Stream, int]] = []
        media.extend(("image", item.units // self._recipe.merge**2) for item in pictures)
        media.extend(("audio", item.units // self._recipe.stride) for item in sounds)
        text, state, behind_all = Interleaved(), 0, self._recipe.answers == "all"
        if behind_all:
            for letter, (stream, rows) in zip(LETTERS, media, strict=False):
                text.write(self._ids[letter])
                text.place(stream, rows)
            text.write(self._ids["\n"])
        text.write(self._ids[_QUESTIONS[self._asked]])
        for letter, (stream, rows), answer in zip(LETTERS, media, answers, strict=False):
            if behind_all:
                text.write(self._ids[letter])
            else:
                text.place(stream, rows)
            if stream == "image":
                state = text.units
            for symbol in answer:
                text.write(self._ids[symbol], stream)
        text.write(self._ids["\n"])
        return text.item(), state

    def _picture(self, image: np.ndarray, random: np.random.Generator) -> Item:
        recipe = self._recipe
        scaled = resized(image, *recipe.image_sizes[random.integers(len(recipe.image_sizes))])
        noisy = scaled + recipe.image_noise * random.standard_normal(scaled.shape)
        return image_item(noisy[:, :, None], recipe.patch_size, recipe.merge)

    def _sound(self, keys: str, random: np.random.Generator) -> Item:
        recipe = self._recipe
        sound = call(keys, random, noise=recipe.tone_noise, stride=recipe.stride)
        return audio_item(sound, RATE, mels=recipe.mels, stride=recipe.stride, band=BAND)


def _some_keys(random: np.random.Generator, most: int) -> str:
    return "".join(KEYS[n] for n in random.integers(len(KEYS), size=random.integers(1, most + 1)))


def _tailed(random: np.random.Generator, most: int, tail: float) -> int:
    """A number from 1 to `most`, n in proportion to n ** -tail."""
    weights = np.cumsum(np.arange(1, most + 1) ** -float(tail))
    return int(np.searchsorted(weights, random.random() * weights[-1], side="right")) + 1


def _redraw(image: np.ndarray, state: int) -> Item:
    return Item(units=1, arrays={"target": image.reshape(1, SIDE**2), "state_rows": np.array([state], np.int32)})
