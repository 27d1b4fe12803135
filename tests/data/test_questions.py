"""Questions about digits and keys: what is asked is what is shown, and a number is always the same sample."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from maestro_jax.data import Sample, questions
from maestro_jax.data import tokenizer as vocabulary
from maestro_jax.data.digits import Digits
from maestro_jax.data.questions import LETTERS, Asked, Questions, Recipe
from maestro_jax.data.tones import KEYS

TOKENIZER = vocabulary.load("tokenizer_tiny.json")
# Each image is of one brightness, so that what is shown can be read off: 0.0 for a zero to 0.9 for a nine.
PLAIN = Digits(np.repeat(np.arange(10, dtype=np.float32) / 10, 64).reshape(10, 8, 8), np.arange(10))
RECIPE = Recipe(image_noise=0.0, tone_noise=0.0, most_clips=3, most_keys=4)


def made(asked: Asked = "both", name: str = "a", seed: int = 0, digits: Digits = PLAIN, **fields: Any) -> Questions:
    recipe = dataclasses.replace(RECIPE, **fields)
    return Questions(name, asked, 40, recipe=recipe, digits=digits, tokenizer=TOKENIZER, seed=seed)


def text(sample: Sample) -> dict[str, np.ndarray]:
    return dict(sample.items["text"][0].arrays)


def answered(sample: Sample, kind: str) -> str:
    """The targets that count for a kind, as text."""
    return TOKENIZER.decode([int(t) for t, m in zip(text(sample)["targets"], text(sample)[f"{kind}_mask"], strict=True) if m])


def shown(sample: Sample) -> str:
    """The digits of the images, read off their brightness."""
    return "".join(str(round(float(item.arrays["patches"].mean() + 1) * 5)) for item in sample.items.get("image", ()))


def same(one: Sample, two: Sample) -> bool:
    arrays = [[a for s in sorted(x.items) for item in x.items[s] for _, a in sorted(item.arrays.items())] for x in (one, two)]
    return one.id == two.id and len(arrays[0]) == len(arrays[1]) and all(map(np.array_equal, *arrays))


def digest(samples: Questions) -> str:
    found = hashlib.sha256()
    samples.hash_into(found)
    return found.hexdigest()


@pytest.mark.parametrize("answers", ["each", "all"])
@pytest.mark.parametrize("asked", ["images", "both"])
def test_the_answer_is_what_the_images_show_in_order(asked: Asked, answers: str) -> None:
    for sample in made(asked, answers=answers):
        assert answered(sample, "image") == shown(sample) != ""


@pytest.mark.parametrize("answers", ["each", "all"])
@pytest.mark.parametrize("asked", ["tones", "both"])
def test_the_answer_is_what_was_pressed_in_order(monkeypatch: pytest.MonkeyPatch, asked: Asked, answers: str) -> None:
    pressed: list[str] = []
    call = questions.call
    monkeypatch.setattr(questions, "call", lambda keys, *rest, **named: (pressed.append(keys), call(keys, *rest, **named))[1])
    for sample in made(asked, answers=answers):
        assert answered(sample, "audio") == "".join(pressed)
        assert len(sample.items["audio"]) == len(pressed)
        pressed.clear()


def test_every_digit_and_every_key_is_one_token() -> None:
    assert {len(TOKENIZER.encode(symbol).ids) for symbol in KEYS} == {1}
    for sample in made("both")[:10]:
        assert text(sample)["image_mask"].sum() == len(sample.items["image"])


def test_an_answer_stands_behind_its_image() -> None:
    for sample in made("images"):
        arrays = text(sample)
        before_answers = arrays["image_rows"][arrays["image_mask"] > 0]
        rows = np.cumsum([item.units // 4 for item in sample.items["image"]])
        assert before_answers.tolist() == (rows - 1).tolist()


def test_all_answers_stand_behind_the_question_under_their_letters() -> None:
    for sample in made("both", answers="all"):
        arrays = text(sample)
        count = len(sample.items["image"]) + len(sample.items["audio"])
        tokens = TOKENIZER.decode(arrays["tokens"].tolist())
        media, answers = tokens.split("\n")
        assert media == LETTERS[:count]
        keys = answers.removeprefix("read the digits and the keys: ")
        assert [each for each in keys if each in LETTERS] == list(LETTERS[:count])


@pytest.mark.parametrize("answers", ["each", "all"])
def test_placeholders_take_every_row_once_in_order_and_without_loss(answers: str) -> None:
    for sample in made("both", answers=answers, stride=2):
        arrays = text(sample)
        units = {"image": 4, "audio": 2}
        for stream, merge in units.items():
            taken = arrays[f"{stream}_rows"][arrays[f"{stream}_rows"] >= 0]
            assert taken.tolist() == list(range(sum(item.units // merge for item in sample.items[stream])))
            assert all(item.units % merge == 0 for item in sample.items[stream])
        placeholder = np.maximum(arrays["image_rows"], arrays["audio_rows"]) >= 0
        assert not arrays["loss_mask"][:-1][placeholder[1:]].any()
        assert not ((arrays["image_rows"] >= 0) & (arrays["audio_rows"] >= 0)).any()


def test_a_sample_has_only_the_streams_that_it_is_about() -> None:
    streams = {asked: {stream for sample in made(asked, redraws=0.0) for stream in sample.items} for asked in ("images", "tones", "both")}
    assert streams == {"images": {"text", "image"}, "tones": {"text", "audio"}, "both": {"text", "image", "audio"}}


def test_numbers_of_images_are_even_or_have_a_long_tail() -> None:
    even, tailed = (
        np.bincount([len(sample.items["image"]) for sample in made("images", most_images=16, tail=tail, image_sizes=((4, 4),))])
        for tail in (0.0, 1.0)
    )
    assert even[:9].sum() < 30 < tailed[:9].sum()
    assert 9 <= len(tailed) <= 17


def test_images_have_all_the_sizes() -> None:
    sizes = {tuple(item.arrays["coords"].max(axis=0) * 2 + 2) for sample in made("images") for item in sample.items["image"]}
    assert sizes == set(RECIPE.image_sizes)


@pytest.mark.parametrize("answers", ["each", "all"])
def test_a_redraw_is_the_last_digit_and_comes_from_the_unit_that_is_asked_for_it(answers: str) -> None:
    for sample in made("both", redraws=1.0, answers=answers):
        (item,) = sample.items["redraw"]
        assert item.units == 1
        assert round(float(item.arrays["target"].mean()) * 10) == int(shown(sample)[-1])
        (unit,) = item.arrays["state_rows"]
        assert unit == np.flatnonzero(text(sample)["image_mask"])[-1]


def test_some_samples_with_images_are_redrawn() -> None:
    drawn = sum("redraw" in sample.items for sample in made("images", redraws=0.5))
    assert 10 < drawn < 30
    assert not any("redraw" in sample.items for sample in made("tones", redraws=1.0))


def test_noise_is_in_images_and_not_in_what_is_redrawn() -> None:
    (clean, noisy) = (made("images", redraws=1.0, image_noise=noise)[0] for noise in (0.0, 0.2))
    images = [np.concatenate([item.arrays["patches"] for item in sample.items["image"]]) for sample in (clean, noisy)]
    assert (images[1] - images[0]).std() == pytest.approx(0.4, rel=0.2)
    assert set(np.unique(noisy.items["redraw"][0].arrays["target"])) <= set(PLAIN.images[:, 0, 0])


def test_a_sample_depends_on_its_number_alone() -> None:
    one, two = made(tone_noise=0.1, image_noise=0.1), made(tone_noise=0.1, image_noise=0.1)
    later = two[20:]
    assert all(map(same, one[20:], later))
    assert one[3].id == "a/3"


@pytest.mark.parametrize("other", [{"name": "b"}, {"seed": 1}])
def test_other_names_and_seeds_are_other_samples(other: dict[str, Any]) -> None:
    def what(samples: Questions) -> list[str]:
        return [answered(sample, "image") + answered(sample, "audio") for sample in samples[:10]]

    assert not set(what(made())) & set(what(made(**other)))


@pytest.mark.parametrize(
    "other",
    [
        {"name": "b"},
        {"seed": 1},
        {"asked": "images"},
        {"tail": 1.0},
        {"answers": "all"},
        {"digits": Digits(PLAIN.images / 2, PLAIN.labels)},
    ],
)
def test_what_samples_are_made_of_decides_their_hash(other: dict[str, Any]) -> None:
    assert digest(made()) == digest(made()) != digest(made(**other))
