"""Conversations about images and sound: forms of lines, what is trained on, and samples that cannot be used, one kind each."""

from __future__ import annotations

import dataclasses
import json
import sys
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

from maestro_jax.config import load
from maestro_jax.data import Conversations, Dataset, Sample
from maestro_jax.data import tokenizer as vocabulary
from maestro_jax.errors import ConfigError, DataError

images: Any = pytest.importorskip("PIL.Image", reason="the extra examples is not installed")

TOKENIZER = vocabulary.load("tokenizer_tiny.json")
ANSWER = {"from": "gpt", "value": "A cat."}
ASKED = [{"role": "user", "content": "<image>\nWhat is it?"}, {"role": "assistant", "content": "A cat."}]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with images of three sizes and two clips."""
    (tmp_path / "data" / "sound").mkdir(parents=True)
    for name, size in (("a.png", (16, 16)), ("b.jpg", (16, 32)), ("c.png", (40, 24))):
        images.fromarray(np.full((*size, 3), 100, np.uint8)).save(tmp_path / "data" / name)
    for name, count in (("one.wav", 1000), ("two.wav", 4000)):
        write_clip(tmp_path / "data" / "sound" / name, count)
    return tmp_path / "data"


def write_clip(path: Path, count: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.zeros(count, "<i2").tobytes())


def source(root: Path, *records: Any, **fields: Any) -> Conversations:
    """A source of lines in the folder; records that are bytes stand as they are."""
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    (root / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    settings = {"path": str(root / "a.jsonl"), "patch_size": 4, "merge": 2, "mels": 20, "heldout_fraction": 0}
    return Conversations(**{**settings, **fields})


def loaded(root: Path, *records: Any, **fields: Any) -> Dataset:
    return source(root, *records, **fields).load()


def text(sample: Sample) -> dict[str, np.ndarray]:
    return dict(sample.items["text"][0].arrays)


def counted(sample: Sample, mask: str) -> str:
    """The targets that a mask counts, as text."""
    arrays = text(sample)
    return TOKENIZER.decode([int(t) for t, m in zip(arrays["targets"], arrays[mask], strict=True) if m])


def refused(data: Sequence[Sample], number: int = 0) -> DataError:
    with pytest.raises(DataError) as caught:
        data[number]
    return caught.value


# --- forms of lines


def test_llava_and_qwen_lines_are_the_same_sample(root: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    llava, qwen, user = loaded(
        root,
        {"id": "7", "image": "a.png", "conversations": turns},
        {"messages": ASKED, "images": ["a.png"]},
        {"image": ["a.png"], "conversations": [{"from": "user", "value": turns[0]["value"]}, {"from": "assistant", "value": "A cat."}]},
    ).train
    for other in (qwen, user):
        for stream in ("text", "image"):
            for name, array in llava.items[stream][0].arrays.items():
                np.testing.assert_array_equal(array, other.items[stream][0].arrays[name])
    assert [llava.id, qwen.id] == ["a.jsonl:1", "a.jsonl:2"]


def test_text_around_placeholders_is_kept(root: Path) -> None:
    messages = [
        {"role": "user", "content": "One<image>two <audio>\nthree<image>"},
        {"role": "assistant", "content": "Yes."},
    ]
    (sample,) = loaded(root, {"messages": messages, "images": ["a.png", "b.jpg"], "audio": "sound/one.wav"}).train
    arrays = text(sample)
    places = (arrays["image_rows"] >= 0) | (arrays["audio_rows"] >= 0)
    whole = TOKENIZER.decode([int(token) for token in arrays["tokens"][~places]])
    assert whole == "<|im_start|>user\nOnetwo \nthree<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    before = [
        TOKENIZER.decode(arrays["tokens"][:unit][~places[:unit]].tolist())[-3:] for unit in np.flatnonzero(np.diff(places * 1) > 0) + 1
    ]
    assert before == ["One", "wo ", "ree"]


def test_items_are_in_the_order_of_the_paths_at_their_own_sizes(root: Path) -> None:
    messages = [{"role": "user", "content": "<image><image><image><audio><audio>?"}, {"role": "assistant", "content": "Yes."}]
    record = {"messages": messages, "images": ["c.png", "a.png", "b.jpg"], "audios": ["sound/two.wav", "sound/one.wav"]}
    (sample,) = loaded(root, record).train
    assert [item.units for item in sample.items["image"]] == [60, 16, 32]
    assert [item.units for item in sample.items["audio"]] == [52, 12]
    arrays = text(sample)
    assert arrays["image_rows"][arrays["image_rows"] >= 0].tolist() == list(range(27))
    assert arrays["audio_rows"][arrays["audio_rows"] >= 0].tolist() == list(range(16))
    assert sample.items["image"][0].arrays["patches"][0, 0] == pytest.approx(2 * 100 / 255 - 1, abs=1e-3)


def test_arrays_are_those_of_the_specs(root: Path) -> None:
    messages = [{"role": "user", "content": "<image><audio>?"}, {"role": "assistant", "content": "Yes."}]
    data = loaded(root, {"messages": messages, "images": ["c.png"], "audios": ["sound/two.wav"]}, {"text": "plain text"})
    for sample in data.train:
        for stream, item in ((stream, item) for stream, items in sample.items.items() for item in items):
            found = {name: (array.dtype.name, array.shape) for name, array in item.arrays.items()}
            assert found == {name: (spec.dtype, (item.units, *spec.shape)) for name, spec in data.specs[stream].items()}


def test_a_conversation_without_images_has_text_alone(root: Path) -> None:
    (sample,) = loaded(root, {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}).train
    assert set(sample.items) == {"text"}
    assert counted(sample, "text_mask") == "2<|im_end|>"


# --- what is trained on


def test_an_answer_counts_for_what_was_shown_last(root: Path) -> None:
    turns = ["Hello", "Good day.", "<image><image>Which?", "The first.", "Sure?", "Yes.", "<audio>Who?", "A dog."]
    messages = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(turns)]
    (sample,) = loaded(root, {"messages": messages, "images": ["a.png", "a.png"], "audio": "sound/one.wav"}).train
    assert counted(sample, "text_mask") == "Good day.<|im_end|>"
    assert counted(sample, "image_mask") == "The first.<|im_end|>Yes.<|im_end|>"
    assert counted(sample, "audio_mask") == "A dog.<|im_end|>"
    assert counted(sample, "loss_mask") == "Good day.<|im_end|>The first.<|im_end|>Yes.<|im_end|>A dog.<|im_end|>"


def test_plain_text_is_trained_on_but_for_its_placeholders(root: Path) -> None:
    (sample,) = loaded(root, {"text": "Before.<image>Behind.", "image": "a.png"}).train
    assert counted(sample, "text_mask") == TOKENIZER.decode(TOKENIZER.encode("Before.").ids[1:])
    assert counted(sample, "image_mask").removesuffix("<|endoftext|>") == "Behind."
    assert not text(sample)["loss_mask"][:-1][text(sample)["image_rows"][1:] >= 0].any()


def test_special_tokens_of_a_tokenizer_go_around_the_conversation(root: Path) -> None:
    own = vocabulary.train(["to be"], vocab_size=257)
    own.add_special_tokens(["<s>"])
    own.post_processor = processors.TemplateProcessing(single="<s> $A <|endoftext|>", special_tokens=[("<s>", 257), ("<|endoftext|>", 0)])
    own.save(str(root / "own.json"))
    (sample,) = loaded(root, {"messages": ASKED, "image": "a.png"}, tokenizer=str(root / "own.json")).train
    arrays = text(sample)
    assert (arrays["tokens"][0], arrays["targets"][-1], arrays["loss_mask"][-1]) == (257, 0, 0)
    assert arrays["tokens"].tolist().count(257) == 1
    answer = [int(t) for t, m in zip(arrays["targets"], arrays["image_mask"], strict=True) if m]
    assert own.decode(answer) == "A cat.<|im_end|>"


# --- held out, lazily, always the same


def test_lines_of_one_id_are_held_out_together(root: Path) -> None:
    records = [{"id": f"photo {n // 3}", "text": f"text {n}"} for n in range(90)]
    data = loaded(root, *records, heldout_fraction=0.3)
    groups = [{(int(sample.id.split(":")[1]) - 1) // 3 for sample in side} for side in (data.train, data.heldout)]
    assert not groups[0] & groups[1]
    assert len(groups[0] | groups[1]) == 30
    assert 3 <= len(groups[1]) <= 18
    assert len(data.train) + len(data.heldout) == 90


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_both_sides_have_a_line(root: Path, fraction: float) -> None:
    data = loaded(root, *[{"text": f"text {n}"} for n in range(5)], heldout_fraction=fraction)
    assert len(data.train) >= 1 <= len(data.heldout)


def test_files_are_opened_when_their_sample_is_read(root: Path) -> None:
    records = [{"messages": ASKED, "image": f"{n}.png"} for n in range(3)]
    data = loaded(root, *records)
    data.fingerprint()
    images.new("RGB", (8, 8)).save(root / "1.png")
    assert data.train[1].items["image"][0].units == 4
    assert refused(data.train, 0).anchor == "media-missing"


def test_a_sample_is_the_same_in_any_order(root: Path) -> None:
    data = loaded(root, {"text": "one"}, b"", {"messages": ASKED, "image": "a.png"}, {"text": "three"})
    forwards, backwards = list(data.train), [data.train[n] for n in (2, 1, 0)][::-1]
    assert [sample.id for sample in forwards] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4"]
    for one, two in zip(forwards, backwards, strict=True):
        assert text(one)["tokens"].tolist() == text(two)["tokens"].tolist()


def test_the_fingerprint_is_that_of_lines_and_settings(root: Path) -> None:
    records = [{"text": f"text {n}"} for n in range(5)]
    one = loaded(root, *records, heldout_fraction=0.5)
    assert one.fingerprint() == loaded(root, *records, heldout_fraction=0.5, name="other", max_length=2048).fingerprint()
    others = [
        loaded(root, *records[::-1], heldout_fraction=0.5),
        loaded(root, *records, heldout_fraction=0.5, seed=1),
        loaded(root, *records, heldout_fraction=0.5, patch_size=2),
        loaded(root, *records, heldout_fraction=0.5, max_length=100),
        loaded(root, *records),
    ]
    assert len({one.fingerprint(), *(other.fingerprint() for other in others)}) == 6


def test_it_is_made_by_a_config_file_beside_its_data(root: Path) -> None:
    source(root, {"messages": ASKED, "image": "a.png"})
    (root / "pictures").mkdir()
    (root / "a.png").rename(root / "pictures" / "a.png")
    (root / "run.gin").write_text(
        "Conversations.path = 'a.jsonl'\nConversations.root = 'pictures'\n"
        "Conversations.heldout_fraction = 0\nConversations.band = (0, 4000)\n"
    )
    made = load(str(root / "run.gin"), root="Conversations").build()
    assert set(made.load().train[0].items) == {"text", "image"}


# --- samples that cannot be used


def spoiled(root: Path) -> None:
    whole = (root / "a.png").read_bytes()
    (root / "cut.png").write_bytes(whole[:60])
    images.new("RGB", (300, 200)).save(root / "large.png")
    (root / "flat.png").write_bytes(whole[:16] + bytes(8) + whole[24:])
    write_clip(root / "silent.wav", 0)
    write_clip(root / "long.wav", 8001)
    (root / "cut.wav").write_bytes((root / "sound" / "one.wav").read_bytes()[:100])
    (root.parent / "secret.png").write_bytes(whole)
    (root / "link.png").symlink_to(root.parent / "secret.png")


BAD = [
    ({"image": "cut.png"}, "image-unreadable"),
    ({"image": "flat.png"}, "image-without-area"),
    ({"image": "large.png"}, "media-too-large"),
    ({"image": "missing.png"}, "media-missing"),
    ({"image": "../secret.png"}, "path-outside-root"),
    ({"image": "link.png"}, "path-outside-root"),
    ({"image": "/etc/hostname"}, "path-outside-root"),
    ({"audio": "silent.wav"}, "clip-empty"),
    ({"audio": "long.wav"}, "media-too-large"),
    ({"audio": "cut.wav"}, "clip-unreadable"),
    ({"image": "c.png", "max_length": 20}, "sample-too-long"),
    ({"images": ["a.png", "a.png"]}, "placeholders-unmatched"),
    ({"images": []}, "placeholders-unmatched"),
    ({"image": "a.png", "audio": "sound/one.wav"}, "placeholders-unmatched"),
]


@pytest.mark.parametrize(("record", "anchor"), BAD)
def test_a_bad_sample_is_refused_by_kind_and_the_next_one_is_read(root: Path, record: dict[str, Any], anchor: str) -> None:
    spoiled(root)
    record = dict(record)
    limits = {"max_pixels": 50_000, "max_seconds": 1.0, "max_length": record.pop("max_length", 100)}
    asked = [{"role": "user", "content": "<audio>?" if [*record] == ["audio"] else "<image>?"}, ASKED[1]]
    data = loaded(root, {"messages": asked, **record}, {"text": "a good line"}, **limits)
    error = refused(data.train)
    assert error.anchor == anchor
    assert str(error).startswith("sample 'a.jsonl:1': ")
    assert error.set_by == f"{root / 'a.jsonl'}:1"
    assert "train.on_bad_sample" in error.fix
    assert data.train[1].id == "a.jsonl:2"


def test_an_answer_without_tokens_is_nothing_to_learn(root: Path) -> None:
    """The tokenizer knows no character of the answer, and has no token for what it does not know."""
    Tokenizer(models.BPE({"q": 0, "u": 1}, [])).save(str(root / "own.json"))
    messages = [{"role": "user", "content": "quququ"}, {"role": "assistant", "content": "answer"}]
    assert refused(loaded(root, {"messages": messages}, tokenizer=str(root / "own.json")).train).anchor == "nothing-to-learn"


def test_a_line_that_has_changed_is_refused(root: Path) -> None:
    data = loaded(root, {"text": "one"}, {"text": "another"})
    (root / "a.jsonl").write_text("something else\n")
    assert refused(data.train, 1).anchor == "bad-line"
    (root / "a.jsonl").unlink()
    assert refused(data.train, 0).anchor == "bad-line"


def listed(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]


TYPED = {"type": "text", "text": "\nWhat is it?"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": listed({"type": "image"}, TYPED), "images": ["a.png"]},
        {"messages": listed({"type": "image", "image": "a.png"}, TYPED)},
        {"messages": listed({"type": "image", "path": "a.png"}, TYPED)},
        {"messages": listed({"type": "image", "url": "a.png"}, TYPED)},
        {"messages": listed({"type": "image_url", "image_url": {"url": "a.png"}}, TYPED)},
        {"messages": listed({"type": "image_url", "image_url": "a.png"}, {"type": "text", "text": "\n"}, {**TYPED, "text": "What is it?"})},
        {"messages": [*listed({"type": "image", "image": "FILE"}, TYPED)[:1], ASKED[1]]},
        {"conversations": [{"from": "human", "value": listed({"type": "image", "path": "a.png"}, TYPED)[0]["content"]}, ANSWER]},
    ],
)
def test_contents_that_are_lists_are_the_same_sample(root: Path, record: dict[str, Any]) -> None:
    record = json.loads(json.dumps(record).replace("FILE", f"file://{root}/a.png"))
    found, wanted = loaded(root, record, {"messages": ASKED, "image": "a.png"}).train
    assert counted(found, "loss_mask") == counted(wanted, "loss_mask") != ""
    for stream, [item] in wanted.items.items():
        for name, array in item.arrays.items():
            np.testing.assert_array_equal(found.items[stream][0].arrays[name], array)


def test_images_and_sound_in_lists_stand_in_order(root: Path) -> None:
    parts = [{"type": "audio", "audio": "sound/one.wav"}, {"type": "image", "path": "c.png"}, {"type": "image", "path": "a.png"}, TYPED]
    found, wanted = loaded(
        root,
        {"messages": listed(*parts)},
        {"messages": [{"role": "user", "content": "<audio><image><image>\nWhat is it?"}, ASKED[1]], "images": ["c.png", "a.png"],
         "audio": "sound/one.wav"},
    ).train  # fmt: skip
    assert {s: [item.units for item in items] for s, items in found.items.items()} == {
        s: [item.units for item in items] for s, items in wanted.items.items()
    }
    np.testing.assert_array_equal(text(found)["image_rows"], text(wanted)["image_rows"])


# --- lines and settings that cannot be used


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"[", "not JSON"),
        ({"messages": [{"role": "assistant", "content": "See <image>"}], "image": "a.png"}, "placeholder in an answer"),
        ({"messages": ASKED, "image": 3}, "unusable path"),
        ({"messages": ASKED, "images": [""]}, "unusable path"),
        ({"messages": ASKED, "images": [{"path": "a.png"}]}, "unusable path"),
        ({"messages": ASKED, "image": "https://cats.org/7.jpg"}, "unusable path"),
        ({"messages": listed({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}, TYPED)}, "unusable path"),
        ({"messages": listed({"type": "image", "path": 3}, TYPED)}, "unusable path"),
        ({"messages": listed({"type": "image", "path": "a.png"}, TYPED), "images": ["a.png"]}, "paths in two places"),
        ({"messages": listed({"type": "video", "path": "a.mp4"}, TYPED)}, "video"),
        ({"messages": ASKED, "image": "a.png", "videos": ["a.mp4"]}, "video"),
        ({"messages": listed("What?")}, "no text"),
        ({"messages": ASKED, "image": "half \ud83d.png"}, "not UTF-8"),
        ({"messages": ASKED[:1], "image": "a.png"}, "no answer"),
        ({"image": "a.png"}, "no text"),
    ],
)
def test_a_bad_line_is_counted_by_reason_or_raises(root: Path, record: Any, reason: str) -> None:
    assert loaded(root, record, {"text": "a good line"}, on_bad_line="skip").skipped == {reason: 1}
    with pytest.raises(DataError, match=f"cannot be used: {reason}") as caught:
        loaded(root, record)
    assert caught.value.anchor == "bad-line"


def test_a_json_array_says_how_to_make_lines(root: Path) -> None:
    with pytest.raises(DataError, match=r"jq -c '\.\[\]' FILE"):
        loaded(root, b"[", b'{"image": "a.png"}', b"]")


@pytest.mark.parametrize(
    ("records", "fraction", "have"),
    [
        ([], 0, "no line that can be used (skipped: nothing)"),
        ([], 0.1, "no line that can be used (skipped: nothing)"),
        ([{"text": ""}], 0, "no line that can be used (skipped: empty: 1)"),
        ([{"text": "one"}], 0.1, "1 that can be used, all of one id (skipped: nothing)"),
        ([{"id": 1, "text": "one"}] * 3, 0.1, "3 that can be used, all of one id (skipped: nothing)"),
    ],
)
def test_too_few_lines_are_an_error(root: Path, records: list[Any], fraction: float, have: str) -> None:
    with pytest.raises(DataError, match="too few conversations") as caught:
        loaded(root, *records, heldout_fraction=fraction, on_bad_line="skip")
    assert caught.value.anchor == "too-few-conversations"
    assert caught.value.have == have


def test_a_root_that_is_no_folder_is_an_error(root: Path) -> None:
    made = dataclasses.replace(source(root, {"text": "one"}), root=str(root / "a.png"))
    with pytest.raises(DataError) as caught:
        made.load()
    assert caught.value.anchor == "media-root-missing"


def test_without_pillow_lines_with_images_are_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert len(loaded(root, {"text": "one"}).train) == 1
    with pytest.raises(DataError) as caught:
        loaded(root, {"messages": ASKED, "image": "a.png"})
    assert caught.value.anchor == "extra-missing"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_length": 0}, "max_length"),
        ({"max_patches": 3}, "max_patches"),
        ({"max_pixels": 10**9}, "max_pixels"),
        ({"band": (4000.0, 400.0)}, "band"),
        ({"max_seconds": 0.0}, "max_seconds"),
        ({"heldout_fraction": 1.0}, "heldout_fraction"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"Conversations\.{field} is out of range") as caught:
        Conversations(path="a.jsonl", **fields)
    assert caught.value.anchor == "data-value-out-of-range"
