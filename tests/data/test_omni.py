"""The source of text, images and sound: shares, the split before samples are made, and what users get wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maestro_jax.config import load
from maestro_jax.data import Batches, Dataset, Omni, Sample, TextFolder, omni
from maestro_jax.data.digits import Digits
from maestro_jax.data.questions import Questions
from maestro_jax.errors import ConfigError

# Each image is of a brightness of its own.
DIGITS = Digits(np.repeat(np.arange(100, dtype=np.float32) / 100, 64).reshape(100, 8, 8), np.arange(100) % 10)


@pytest.fixture(autouse=True)
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omni, "load_digits", lambda set_by: DIGITS)


@pytest.fixture
def text(tmp_path: Path) -> TextFolder:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"page {number}: " + "to be or not to be " * 5)
    return TextFolder(path=str(tmp_path), max_length=16)


def kind(sample: Sample) -> str:
    name = sample.id.split("/")[0]
    return name if name in ("images", "tones", "both") else "text"


def brightness(samples: Sequence[Sample]) -> set[int]:
    return {round(float(i.arrays["patches"].mean() + 1) * 50) for sample in samples for i in sample.items.get("image", ())}


def test_each_step_has_the_shares(text: TextFolder) -> None:
    data = Omni(text=text, shares={"text": 4, "images": 2, "both": 1, "tones": 1}).load()
    for step in range(3):
        assert [kind(sample) for sample in Batches(data, 8, seed=0)(step)] == ["text"] * 4 + ["images"] * 2 + ["tones", "both"]


def test_a_kind_without_a_share_does_not_occur(text: TextFolder) -> None:
    data = Omni(text=text, shares={"images": 1, "tones": 3}).load()
    assert {kind(sample) for sample in data.heldout} == {"images", "tones"}
    assert [(part.name, part.weight) for part in data.parts] == [("images", 1), ("tones", 3)]


def test_held_out_images_are_in_no_training_sample(text: TextFolder) -> None:
    data = Omni(text=text, image_noise=0.0, heldout_fraction=0.3, shares={"images": 1, "both": 1}, samples=150, heldout_samples=50).load()
    trained, held = brightness(data.train[:]), brightness(data.heldout)
    assert not trained & held
    assert (len(trained), len(held)) == (70, 30)


def test_held_out_images_have_no_noise(text: TextFolder) -> None:
    data = Omni(text=text, image_noise=0.5, shares={"images": 1}).load()
    spread = [np.mean([item.arrays["patches"].std() for s in side for item in s.items["image"]]) for side in (data.train[:9], data.heldout)]
    assert spread[0] > 0.5
    assert spread[1] == pytest.approx(0, abs=1e-6)


def test_text_is_that_of_its_source_with_the_same_held_out(text: TextFolder) -> None:
    own, data = text.load(), Omni(text=text, shares={"text": 1}).load()
    for side in ("train", "heldout"):
        have, want = getattr(data, side), getattr(own, side)
        assert [sample.id for sample in have] == [sample.id for sample in want] != []
        for name in ("tokens", "targets", "loss_mask"):
            assert have[0].items["text"][0].arrays[name].tolist() == want[0].items["text"][0].arrays[name].tolist()
    assert (data.vocab_size, data.tokenizer_fingerprint) == (own.vocab_size, own.tokenizer_fingerprint)


def test_the_beginning_of_the_held_out_samples_is_like_the_whole(text: TextFolder) -> None:
    data = Omni(text=text, heldout_samples=20).load()
    whole, beginning = ([kind(sample) for sample in samples] for samples in (data.heldout, data.heldout[: len(data.heldout) // 4]))
    for each in ("text", "images", "tones", "both"):
        assert beginning.count(each) == pytest.approx(whole.count(each) / 4, abs=1)


def test_arrays_are_those_of_the_specs(text: TextFolder) -> None:
    data = Omni(text=text, redraws=1.0, mels=20, patch_size=1).load()
    samples = [*Batches(data, 16, seed=0)(0), *data.heldout]
    assert {stream for sample in samples for stream in sample.items} == {"text", "image", "audio", "redraw"}
    for stream, item in ((stream, item) for sample in samples for stream, items in sample.items.items() for item in items):
        found = {name: (array.dtype.name, array.shape) for name, array in item.arrays.items()}
        assert found == {name: (spec.dtype, (item.units, *spec.shape)) for name, spec in data.specs[stream].items()}


def test_nothing_is_held_out_when_nothing_should_be(text: TextFolder) -> None:
    data = Omni(text=dataclasses.replace(text, heldout_fraction=0), heldout_fraction=0, image_noise=0.0).load()
    assert len(data.heldout) == 0
    (shown,) = (brightness(data.train[start : start + 200]) for start in [data.parts[0].samples])
    assert len(shown) > 90


def test_the_fingerprint_makes_no_sample_and_changes_with_what_is_made(text: TextFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(**fields: Any) -> Dataset:
        return Omni(text=text, heldout_samples=0, **fields).load()

    monkeypatch.setattr(Questions, "read", lambda self, number: pytest.fail("a sample was made"))
    prints = {loaded(**fields).fingerprint() for fields in ({}, {"seed": 1}, {"tail": 1.0}, {"samples": 10}, {"stride": 8})}
    assert len(prints) == 5
    assert loaded().fingerprint() in prints


def test_samples_are_named_once(text: TextFolder) -> None:
    data = Omni(text=text, samples=30).load()
    names = [sample.id for side in (data.train, data.heldout) for sample in side]
    assert len(names) == len(set(names))


def test_it_is_made_by_a_config_file(tmp_path: Path, text: TextFolder) -> None:
    (tmp_path / "run.gin").write_text(
        "Omni.text = @TextFolder()\n"
        f"TextFolder.path = '{text.path}'\n"
        "Omni.shares = {'text': 1, 'images': 1}\n"
        "Omni.image_sizes = [(8, 8), (16, 8)]\n"
        "Omni.most_images = 16\n"
        "Omni.tail = 1\n"
    )
    source = load(str(tmp_path / "run.gin"), root="Omni").build()
    assert source.image_sizes == ((8, 8), (16, 8))
    assert {part.name for part in source.load().parts} == {"text", "images"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"shares": {}}, "shares"),
        ({"shares": {"video": 1.0}}, "shares"),
        ({"shares": {"text": 0.0}}, "shares"),
        ({"image_sizes": ((8, 10),)}, "image_sizes"),
        ({"image_sizes": ((0, 8),)}, "image_sizes"),
        ({"image_sizes": ()}, "image_sizes"),
        ({"patch_size": 3}, "image_sizes"),
        ({"most_images": 0}, "most_images"),
        ({"most_images": 25}, "most_images"),
        ({"tail": -1.0}, "tail"),
        ({"redraws": -0.1}, "redraws"),
        ({"redraws": 1.1}, "redraws"),
        ({"tone_noise": float("nan")}, "tone_noise"),
        ({"samples": 0}, "samples"),
        ({"heldout_fraction": 1.0}, "heldout_fraction"),
        ({"seed": -1}, "seed"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"Omni\.{field} is out of range") as caught:
        Omni(**fields)
    assert caught.value.anchor == "data-value-out-of-range"


@pytest.mark.parametrize("fields", [{"answers": "some"}, {"text": "corpus"}, {"image_sizes": (8, 8)}])
def test_values_of_a_wrong_type_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Omni(**fields)
    assert caught.value.anchor == "wrong-type"
