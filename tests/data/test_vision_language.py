"""Conversations for the folder of a vision-language model: text, images, positions, and folders that are none.

The image processor of transformers is replaced by a small one here; `test_vision_language_parity.py` has the real one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vision_language_support import PROCESSOR, TEMPLATE, write_folder, write_image

from maestro_jax.config import load
from maestro_jax.data import Conversations, Dataset, Sample
from maestro_jax.data import tokenizer as vocabulary
from maestro_jax.data.patches import image_item
from maestro_jax.errors import ConfigError, DataError

MODELS = Path(__file__).parent.parent.parent / "docs" / "models.md"
ASKED = [{"role": "user", "content": "<image>\nWhat is it?"}, {"role": "assistant", "content": "A cat."}]
WRITTEN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>\nWhat is it?<|im_end|>\n"
    "<|im_start|>assistant\nA cat.<|im_end|>\n"
)


class Cropping:
    """An image processor that cuts images to whole blocks and to few pixels, as transformers' own scales them."""

    model_input_names = ("pixel_values", "image_grid_thw")

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.size = {"shortest_edge": settings["min_pixels"], "longest_edge": settings["max_pixels"]}
        self.patch_size, self.merge_size, self.temporal_patch_size = settings["patch_size"], settings["merge_size"], 2

    @classmethod
    def from_pretrained(cls, folder: str, **options: Any) -> Cropping:
        assert options == {"backend": "pil", "local_files_only": True, "trust_remote_code": False}
        return cls(json.loads((Path(folder) / "preprocessor_config.json").read_text()))

    def to_dict(self) -> dict[str, Any]:
        return self.settings

    def __call__(self, images: list[np.ndarray], size: dict[str, int], input_data_format: str, return_tensors: str) -> dict[str, Any]:
        [pixels], block = images, self.patch_size * self.merge_size
        height, width = (side // block * block for side in pixels.shape[:2])
        if not height:
            raise ValueError("not a block in height")
        while height * width > size["longest_edge"] and height > block:
            height -= block
        item = image_item(pixels[:height, :width] / 255, self.patch_size, self.merge_size)
        grid = np.array([[1, height // self.patch_size, width // self.patch_size]])
        return {"pixel_values": item.arrays["patches"].repeat(self.temporal_patch_size, axis=1), "image_grid_thw": grid}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data with three images, beside that of a model."""
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoImageProcessor=Cropping))
    write_folder(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for name, size in (("a.png", (56, 84)), ("b.png", (28, 56)), ("wide.png", (28, 560)), ("low.png", (9, 90))):
        write_image(tmp_path / "data" / name, *size)
    return tmp_path / "data"


def loaded(root: Path, *records: Any, **fields: Any) -> Dataset:
    (root / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"path": str(root / "a.jsonl"), "model": str(root.parent / "model"), "heldout_fraction": 0}
    return Conversations(**{**settings, **fields}).load()


def text(sample: Sample) -> dict[str, np.ndarray]:
    return dict(sample.items["text"][0].arrays)


def tokens_of(sample: Sample) -> list[int]:
    arrays = text(sample)
    return [*arrays["tokens"].tolist(), int(arrays["targets"][-1])]


def decoded(root: Path, ids: list[int]) -> str:
    return vocabulary.load(root.parent / "model").decode(ids, skip_special_tokens=False)


def test_text_is_that_of_the_folders_template_with_a_token_for_each_row(root: Path) -> None:
    (sample,) = loaded(root, {"messages": ASKED, "image": "a.png"}).train
    wanted = WRITTEN.replace("<|image_pad|>", "<|image_pad|>" * 6)
    assert decoded(root, tokens_of(sample)) == wanted + "<|endoftext|>"
    places = np.flatnonzero(text(sample)["image_rows"] >= 0)
    assert decoded(root, text(sample)["tokens"][places].tolist()) == "<|image_pad|>" * 6


def test_answers_alone_are_trained_on(root: Path) -> None:
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "A dog."}]
    (sample,) = loaded(root, {"messages": ASKED + more, "image": "a.png"}).train
    arrays = text(sample)
    counted = [int(t) for t, m in zip(arrays["targets"], arrays["image_mask"], strict=True) if m]
    assert decoded(root, counted) == "A cat.<|im_end|>A dog.<|im_end|>"
    np.testing.assert_array_equal(arrays["loss_mask"], arrays["image_mask"])


def test_patches_are_those_of_the_processor(root: Path) -> None:
    (sample,) = loaded(root, {"messages": ASKED, "image": "a.png"}).train
    [image] = sample.items["image"]
    assert image.units == 24
    assert image.arrays["coords"][:5].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]
    assert np.ptp(image.arrays["patches"]) > 1


def test_arrays_are_those_of_the_specs(root: Path) -> None:
    data = loaded(root, {"messages": ASKED, "image": "a.png"}, {"messages": [{**ASKED[0], "content": "Hi"}, ASKED[1]]}, {"text": "plain"})
    assert data.merges == {"image": 4}
    assert data.specs.keys() == {"text", "image"}
    for sample in data.train:
        for stream, item in ((stream, item) for stream, items in sample.items.items() for item in items):
            found = {name: (array.dtype.name, array.shape) for name, array in item.arrays.items()}
            assert found == {name: (spec.dtype, (item.units, *spec.shape)) for name, spec in data.specs[stream].items()}


def test_positions_of_an_image_are_those_of_its_rows_and_the_text_goes_on_behind_them(root: Path) -> None:
    """Text counts on, b.png is 1 x 2 rows, a.png 2 x 3."""
    record = {"messages": [{"role": "user", "content": "<image>x<image>"}, ASKED[1]], "images": ["b.png", "a.png"]}
    arrays = text(loaded(root, record).train[0])
    positions, rows = arrays["rope_positions"], arrays["image_rows"]
    first = int(np.flatnonzero(rows == 0)[0])
    np.testing.assert_array_equal(positions[:first], np.arange(first)[:, None].repeat(3, axis=1))
    assert (positions[first : first + 2] - first).tolist() == [[0, 0, 0], [0, 0, 1]]
    second = int(np.flatnonzero(rows == 2)[0])
    start = int(positions[second, 0])
    assert start == first + 2 + (second - first - 2)
    assert (positions[second : second + 6] - start)[:, 1:].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    np.testing.assert_array_equal(positions[second + 6], [start + 3] * 3)
    np.testing.assert_array_equal(np.diff(positions[second + 6 :], axis=0), 1)


def test_text_without_images_counts_on(root: Path) -> None:
    (sample,) = loaded(root, {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}).train
    assert set(sample.items) == {"text"}
    arrays = text(sample)
    np.testing.assert_array_equal(arrays["rope_positions"], np.arange(len(arrays["tokens"]))[:, None].repeat(3, axis=1))
    assert (arrays["image_rows"] == -1).all()


def test_plain_text_has_images_as_the_template_writes_them(root: Path) -> None:
    (sample,) = loaded(root, {"text": "Before.<image>Behind.", "image": "b.png"}).train
    assert decoded(root, tokens_of(sample)) == "Before.<|vision_start|><|image_pad|><|image_pad|><|vision_end|>Behind.<|endoftext|>"


def test_contents_that_are_lists_are_the_same_sample(root: Path) -> None:
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "\nWhat is it?"}]
    one, two = loaded(root, {"messages": ASKED, "image": "a.png"}, {"messages": [{"role": "user", "content": parts}, ASKED[1]]}).train
    for name, array in text(one).items():
        np.testing.assert_array_equal(array, text(two)[name])


def test_more_patches_than_wanted_are_too_many(root: Path) -> None:
    data = loaded(root, *[{"messages": ASKED, "image": image} for image in ("a.png", "wide.png", "low.png")], max_patches=16)
    assert data.train[0].items["image"][0].units == 12
    for number, have in ((1, "2 x 40 patches"), (2, "not a block in height")):
        with pytest.raises(DataError, match="pixels has no room") as caught:
            data.train[number]
        assert (caught.value.anchor, caught.value.have) == ("image-proportions", have)


def test_fewer_patches_than_the_smallest_image_has_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"Conversations\.max_patches is out of range"):
        loaded(root, {"text": "one"}, max_patches=15)


@pytest.mark.parametrize(("field", "value"), [("tokenizer", "other.json"), ("patch_size", 16), ("merge", 1)])
def test_what_the_folder_decides_is_not_set_twice(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Conversations\.{field} is out of range"):
        Conversations(path="a.jsonl", model="folder", **{field: value})


def test_the_settings_of_the_documentation_are_read(root: Path) -> None:
    blocks = re.findall(r"```gin\n(.*?)```", MODELS.read_text(), flags=re.DOTALL)
    [text] = [block for block in blocks if "Conversations.model" in block]
    lines = [line for line in text.splitlines() if line.startswith("Conversations.")]
    (root / "run.gin").write_text("\n".join([*lines, "Conversations.heldout_fraction = 0"]) + "\n")
    write_folder(root / "qwen-folder")
    (root / "chats").mkdir()
    (root / "a.png").rename(root / "chats" / "a.png")
    (root / "chats" / "mine.jsonl").write_text(json.dumps({"messages": ASKED, "image": "a.png"}) + "\n")
    made = load(str(root / "run.gin"), root="Conversations").build()
    assert set(made.load().train[0].items) == {"text", "image"}


def test_the_fingerprint_is_also_that_of_the_folder(root: Path) -> None:
    def fingerprint() -> str:
        return loaded(root, {"messages": ASKED, "image": "a.png"}).fingerprint()

    found = [fingerprint(), fingerprint()]
    assert found[0] == found[1]
    write_folder(root.parent / "model", processor={**PROCESSOR, "min_pixels": 4000})
    found.append(fingerprint())
    write_folder(root.parent / "model", template=TEMPLATE.replace("helpful", "kind"))
    found.append(fingerprint())
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": [ASKED[0], {"role": "assistant", "content": "See <image>"}], "image": "a.png"}, "placeholder in an answer"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}, ASKED[1]]}, "a text that means something else"),
        ({"text": "<image> and <|image_pad|>", "image": "a.png"}, "a text that means something else"),
        ({"messages": [{"role": "user", "content": "<audio>"}, ASKED[1]], "audio": "a.wav"}, "a text that means something else"),
        ({"messages": ASKED, "image": "a.png", "audio": "a.wav"}, "audio, which the model has no place for"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}]}, ASKED[1]]}, "video"),
    ],
)
def test_a_bad_line_is_counted_by_reason(root: Path, record: Any, reason: str) -> None:
    assert loaded(root, record, {"text": "a good line"}, on_bad_line="skip").skipped == {reason: 1}


def test_a_template_that_leaves_images_out_of_a_turn_refuses_the_line(root: Path) -> None:
    """Images are written for users alone."""
    users = TEMPLATE.replace("content['type'] == 'image' or 'image' in content", "content['type'] == 'image' and message.role == 'user'")
    write_folder(root.parent / "model", template=users)
    record = {"messages": [{"role": "system", "content": "<image>"}, *ASKED], "images": ["a.png", "b.png"]}
    assert loaded(root, record, {"text": "good"}, on_bad_line="skip").skipped == {"refused by the chat template": 1}


def test_placeholders_are_counted_as_they_stand_in_the_line(root: Path) -> None:
    with pytest.raises(DataError, match="placeholders <image> do not match") as caught:
        loaded(root, {"messages": ASKED, "images": ["a.png", "b.png"]}).train[0]
    assert caught.value.have.startswith("1 <image>, and 2 paths")


TEXT_ONLY = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("folder", "have"),
    [
        ({"template": TEXT_ONLY}, "TypeError"),
        ({"template": "{% for m in messages %}{{ m.content }}{% endfor %}"}, "for an image"),
        ({"image_token_id": None}, "image_token_id = None"),
        ({"image_token_id": 9999}, "image_token_id = 9999"),
        ({"processor": {"image_processor_type": "ViTImageProcessor"}}, "KeyError"),
    ],
)
def test_a_folder_of_another_kind_is_refused(root: Path, folder: dict[str, Any], have: str) -> None:
    write_folder(root.parent / "model", **folder)
    with pytest.raises(DataError, match="no vision-language model") as caught:
        loaded(root, {"text": "one"})
    assert caught.value.anchor == "vision-language-folder"
    assert have in caught.value.have


def test_an_image_processor_of_one_size_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cropping, "model_input_names", ("pixel_values",))
    with pytest.raises(DataError, match="no vision-language model"):
        loaded(root, {"text": "one"})


def test_without_transformers_it_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"maestro_jax\[huggingface\]") as caught:
        loaded(root, {"text": "one"})
    assert caught.value.anchor == "extra-missing"
