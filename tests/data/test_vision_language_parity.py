"""Conversations for a vision-language folder are what transformers' own processor and models make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_support import torch, transformers
from vision_language_support import tokenizer, write_folder, write_image

from maestro_jax.data import Conversations, Sample

images: Any = pytest.importorskip("PIL.Image", reason="the extra examples is not installed")

pytestmark = pytest.mark.parity

SIZES = {"a.png": (57, 90), "b.png": (301, 77), "c.png": (14, 15)}
END = tokenizer().token_to_id("<|endoftext|>")  # the last target of ours; the processor does not write it

NONE = [("user", ["Hi, what is 1+1?"]), ("assistant", ["2\n"]), ("user", [" And  now?"]), ("assistant", ["3, too."])]
ONE = [("system", ["Be brief."]), ("user", ["a.png", "\nWhat is it? Éé\u0301"]), ("assistant", ["A cat."])]
TWO = [
    ("user", ["Which is larger:", "b.png", " or ", "a.png"]),
    ("assistant", ["The first."]),
    ("user", ["c.png", "And this?"]),
    ("assistant", ["No.", ""]),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, (name, size) in enumerate(SIZES.items()):
        write_image(tmp_path / name, *size, seed=seed)
    return write_folder(tmp_path / "model")


def ours(folder: Path, turns: list[tuple[str, list[str]]], **fields: Any) -> Sample:
    contents = [[{"type": "image", "path": p} if p in SIZES else {"type": "text", "text": p} for p in parts] for _, parts in turns]
    messages = [{"role": role, "content": content} for (role, _), content in zip(turns, contents, strict=True)]
    (folder.parent / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    settings = {"path": str(folder.parent / "a.jsonl"), "model": str(folder), "heldout_fraction": 0, "max_patches": 65536, **fields}
    return Conversations(**settings).load().train[0]


def theirs(folder: Path, monkeypatch: pytest.MonkeyPatch, turns: list[tuple[str, list[str]]], **size: int) -> dict[str, Any]:
    """What the processor makes of the turns. Its part for videos needs torchvision; without it, it would refuse to be made."""
    monkeypatch.setattr(transformers.Qwen2_5_VLProcessor, "check_argument_for_proper_class", lambda *_: None)
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        chat_template=(folder / "chat_template.jinja").read_text(),
    )

    def part(text: str) -> dict[str, Any]:
        return {"type": "image", "image": images.open(folder.parent / text)} if text in SIZES else {"type": "text", "text": text}

    messages = [{"role": role, "content": [part(text) for text in parts]} for role, parts in turns]
    options = {"images_kwargs": {"size": size}} if size else {}
    return processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=options)


def rope_index(found: dict[str, Any]) -> np.ndarray:
    """[units, 3], by the model's own function."""
    config = transformers.Qwen2_5_VLConfig()
    whole = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel
    part = type("Part", (), {"config": config, "get_vision_position_ids": whole.get_vision_position_ids})()
    positions, _ = whole.get_rope_index(part, found["input_ids"], found["mm_token_type_ids"], found.get("image_grid_thw"))
    return positions[:, 0].T.numpy()


@pytest.mark.parametrize("turns", [NONE, ONE, TWO])
def test_tokens_positions_and_pixels_are_those_of_the_processor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, turns: list[tuple[str, list[str]]]
) -> None:
    sample, found = ours(folder, turns), theirs(folder, monkeypatch, turns)
    arrays = sample.items["text"][0].arrays
    assert arrays["tokens"].tolist() == found["input_ids"][0].tolist()
    assert arrays["targets"].tolist() == [*found["input_ids"][0, 1:].tolist(), END]
    np.testing.assert_array_equal(arrays["rope_positions"], rope_index(found))
    pictures = sample.items.get("image", ())
    assert len(pictures) == sum(part in SIZES for _, parts in turns for part in parts)
    if pictures:
        pixels = np.concatenate([image.arrays["patches"] for image in pictures])
        np.testing.assert_array_equal(pixels, found["pixel_values"].numpy())
        assert [image.units for image in pictures] == found["image_grid_thw"].prod(axis=1).tolist()
        np.testing.assert_array_equal(arrays["image_rows"] >= 0, found["mm_token_type_ids"][0].numpy() == 1)


def test_a_lower_maximum_is_that_of_the_processor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = ours(folder, ONE, max_patches=16)
    found = theirs(folder, monkeypatch, ONE, shortest_edge=3136, longest_edge=16 * 14 * 14)
    assert sample.items["image"][0].units == 8
    np.testing.assert_array_equal(sample.items["image"][0].arrays["patches"], found["pixel_values"].numpy())


def test_patches_lie_as_the_vision_tower_reads_them(folder: Path) -> None:
    """Row and column of each patch, as the tower of transformers counts them for its rotary embedding."""
    coords = ours(folder, ONE).items["image"][0].arrays["coords"]
    rows, columns = (coords[-1] + 1).tolist()
    found = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.get_vision_position_ids(torch.tensor([[1, rows, columns]]), 2)
    np.testing.assert_array_equal(coords, found.numpy())


def test_a_folder_that_a_processor_saved_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer versions of transformers write all settings into one file."""
    wanted = ours(folder, ONE)
    image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": image_processor.to_dict()}))
    np.testing.assert_array_equal(ours(folder, ONE).items["image"][0].arrays["patches"], wanted.items["image"][0].arrays["patches"])
