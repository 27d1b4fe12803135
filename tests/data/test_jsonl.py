"""JSON Lines: texts and conversations into samples, what is trained on, and lines that cannot be used."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from maestro_jax.config import load
from maestro_jax.data import Dataset, Jsonl, Sample
from maestro_jax.data import tokenizer as vocabulary
from maestro_jax.data.chat import conversation
from maestro_jax.errors import ConfigError, DataError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "  2\n"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4, naïvely 🙂"},
]


def written(path: Path, *records: Any) -> str:
    """Writes a file of JSON Lines; records that are bytes stand as they are."""
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def loaded(path: str | Path, **fields: Any) -> Dataset:
    return Jsonl(**{"path": str(path), "heldout_fraction": 0, **fields}).load()


def ids(data: Dataset) -> list[str]:
    return [sample.id for sample in data.train]


def arrays(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    item = sample.items["text"][0]
    return item.arrays["targets"], item.arrays["loss_mask"]


def trained_on(tokenizer: Tokenizer, samples: tuple[Sample, ...]) -> str:
    """The targets that the loss counts, as text."""
    return tokenizer.decode([int(target) for sample in samples for target, mask in zip(*arrays(sample), strict=True) if mask])


# --- what is trained on


def test_of_a_conversation_only_answers_and_their_end_marks_are_trained_on(tmp_path: Path) -> None:
    data = loaded(written(tmp_path / "chat.jsonl", {"messages": CHAT}))
    tokenizer = vocabulary.load("tokenizer_tiny.json")
    assert trained_on(tokenizer, tuple(data.train)) == "  2\n<|im_end|>4, naïvely 🙂<|im_end|>"


def test_a_conversation_is_written_whole_in_its_template(tmp_path: Path) -> None:
    data = loaded(written(tmp_path / "chat.jsonl", {"messages": CHAT}))
    ids = [int(token) for sample in data.train for token in sample.items["text"][0].arrays["tokens"]]
    text, _ = conversation(CHAT)
    assert text.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n  2\n<|im_end|>\n"
    )
    assert vocabulary.load("tokenizer_tiny.json").decode(ids) == text


def test_from_and_value_are_another_form_of_messages(tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[message["role"]], "value": message["content"]} for message in CHAT]
    plain = [{"from": message["role"], "value": message["content"]} for message in CHAT]
    data = loaded(written(tmp_path / "chat.jsonl", {"messages": CHAT}, {"conversations": turns}, {"conversations": plain}))
    one, *others = ([arrays(sample) for sample in data.train if sample.id.startswith(f"chat.jsonl:{n}:")] for n in (1, 2, 3))
    assert all(map(np.array_equal, *pair) for other in others for pair in zip(one, other, strict=True))


def test_an_answer_begins_with_a_token_of_its_own(tmp_path: Path) -> None:
    """An answer that begins with line breaks must not share a token with the line break before it."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\n\n    y"}]
    data = loaded(written(tmp_path / "chat.jsonl", {"messages": messages}))
    assert trained_on(vocabulary.load("tokenizer_tiny.json"), tuple(data.train)) == "\n\n    y<|im_end|>"


def test_text_is_trained_on_everywhere(tmp_path: Path) -> None:
    (sample,) = loaded(written(tmp_path / "a.jsonl", {"text": "to be or not to be"})).train
    targets, mask = arrays(sample)
    assert mask.tolist() == [1.0] * len(targets)
    assert targets[-1] == 0


def test_end_of_text_after_a_conversation_is_not_trained_on(tmp_path: Path) -> None:
    (sample,) = loaded(written(tmp_path / "a.jsonl", {"messages": CHAT})).train
    targets, mask = arrays(sample)
    assert (targets[-1], mask[-1]) == (0, 0)


def test_special_tokens_of_a_tokenizer_go_around_the_conversation_and_are_not_trained_on(tmp_path: Path) -> None:
    tokenizer = vocabulary.train(["to be"], vocab_size=257)
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", 257), ("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "own.json"))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (sample,) = loaded(written(tmp_path / "a.jsonl", {"messages": messages}), tokenizer=str(tmp_path / "own.json")).train
    targets, mask = arrays(sample)
    assert sample.items["text"][0].arrays["tokens"][0] == 257
    assert targets[mask == 1].tolist() == [tokenizer.token_to_id("a"), 259]
    assert targets.tolist().count(257) == 0
    assert targets.tolist().count(0) == 1


def test_a_template_that_writes_the_first_token_itself_does_not_make_it_two(tmp_path: Path) -> None:
    tokenizer = vocabulary.train(["to be"], vocab_size=257)
    tokenizer.add_special_tokens(["<s>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|im_end|>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    path = written(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
    (sample,) = loaded(path, tokenizer=str(tmp_path / "tokenizer.json"), chat_template=str(tmp_path)).train
    assert sample.items["text"][0].arrays["tokens"].tolist()[:2] == [257, tokenizer.token_to_id("q")]


def test_pieces_without_an_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "why? " * 40}, {"role": "assistant", "content": "because"}]
    path = written(tmp_path / "a.jsonl", {"messages": messages})
    data = loaded(path, max_length=16)
    assert all(arrays(sample)[1].any() for sample in data.train)
    numbers = [int(name.rsplit(":", 1)[1]) for name in ids(data)]
    assert data.skipped["nothing to learn in the piece"] >= min(numbers) > 3


def test_a_conversation_cut_in_pieces_loses_no_answer(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"messages": CHAT * 3})
    tokenizer = vocabulary.load("tokenizer_tiny.json")
    assert trained_on(tokenizer, tuple(loaded(path, max_length=7).train)) == trained_on(
        tokenizer, tuple(loaded(path, max_length=999).train)
    )


def test_messages_count_where_a_line_has_both_and_nulls_do_not(tmp_path: Path) -> None:
    both, null = {"text": "rendered", "messages": CHAT}, {"text": "plain text", "messages": None}
    data = loaded(written(tmp_path / "a.jsonl", both, null))
    assert [bool(arrays(sample)[1].all()) for sample in data.train] == [False, True]


# --- names, files and order


def test_lines_are_named_by_their_id_or_by_file_and_line(tmp_path: Path) -> None:
    records = [{"id": "first", "text": "one text"}, {"text": "another"}, {"id": 7, "text": "a third"}, {"id": None, "text": "a fourth"}]
    assert ids(loaded(written(tmp_path / "a.jsonl", *records))) == ["first:0", "a.jsonl:2:0", "7:0", "a.jsonl:4:0"]


def test_blank_lines_and_a_byte_order_mark_do_not_count(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "one text"}\r', b"", b"  \t", {"text": "another"}, b"")
    data = loaded(path)
    assert ids(data) == ["a.jsonl:1:0", "a.jsonl:4:0"]
    assert data.skipped == {}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("data/b.jsonl", ["b.jsonl:1:0"]),
        ("data", ["a.jsonl:1:0", "b.jsonl:1:0"]),
        ("data/**/*.jsonl", ["a.jsonl:1:0", "b.jsonl:1:0", "deep/a.jsonl:1:0"]),
        ("data/*/a.jsonl", ["deep/a.jsonl:1:0"]),
        ("data/[b].jsonl", ["b.jsonl:1:0"]),
    ],
)
def test_path_is_a_file_a_folder_or_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, names: list[str]) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "deep/a.jsonl", "c.json"):
        written(tmp_path / "data" / name, {"text": f"the text of {name}"})
    assert ids(loaded(tmp_path / path)) == names
    monkeypatch.chdir(tmp_path)
    assert ids(loaded(path)) == names


@pytest.mark.parametrize("path", ["a.jsonl", "*.jsonl"])
def test_path_counts_from_the_config_file_too(tmp_path: Path, path: str) -> None:
    written(tmp_path / "a.jsonl", {"text": "some text"})
    (tmp_path / "run.gin").write_text(f"Jsonl.path = '{path}'\nJsonl.heldout_fraction = 0\n")
    assert ids(load(str(tmp_path / "run.gin"), root="Jsonl").build().load()) == ["a.jsonl:1:0"]


def test_the_same_files_make_the_same_samples(tmp_path: Path) -> None:
    records = [{"id": f"page {n}", "text": f"text number {n}"} for n in range(40)] + [{"messages": CHAT}]
    path = written(tmp_path / "a.jsonl", *records)
    one, two = Jsonl(path=path).load(), Jsonl(path=path).load()
    assert [sample.id for sample in one.heldout] == [sample.id for sample in two.heldout] != []
    assert ids(one) == ids(two)
    assert one.fingerprint() == two.fingerprint()


@pytest.mark.parametrize("second", ["a.jsonl", "b.jsonl"])
def test_an_id_that_comes_twice_is_an_error_that_names_both_lines(tmp_path: Path, second: str) -> None:
    files: dict[str, list[Any]] = {"a.jsonl": [{"id": "x", "text": "one text"}], "b.jsonl": [{"text": "no id"}]}
    files[second].append({"id": "x", "text": "another"})
    for name, records in files.items():
        written(tmp_path / name, *records)
    with pytest.raises(DataError, match="two lines have the id 'x'") as caught:
        loaded(tmp_path, on_bad_line="skip")
    assert caught.value.have == f"{tmp_path / 'a.jsonl'}:1 and {tmp_path / second}:2"
    assert caught.value.anchor == "repeated-sample-id"


# --- mistakes


@pytest.mark.parametrize("path", ["nothing.jsonl", "*.jsonl", "empty", "empty/**.jsonl"])
def test_no_file_is_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no JSON Lines file") as caught:
        loaded(tmp_path / path)
    assert str(tmp_path) in caught.value.have
    assert caught.value.anchor == "jsonl-missing"


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path / "a.jsonl", {"text": "some text"})
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="PermissionError: Permission denied") as caught:
        loaded(path)
    assert caught.value.anchor == "jsonl-missing"


BAD_LINES = [
    (b"{", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[1]", "not an object"),
    (b'{"text": "na\xefve"}', "not UTF-8"),
    ({"text": "half \ud83d a character"}, "not UTF-8"),
    ({}, "no text"),
    ({"text": 3}, "no text"),
    ({"conversations": [{"from": "human", "value": "1+1?"}]}, "no answer"),
    ({"conversations": "1+1?"}, "no text"),
    ({"conversations": [{"from": "judge", "value": "2"}]}, "unknown role"),
    ({"conversations": [{"from": ["gpt"], "value": "2"}]}, "unknown role"),
    ({"conversations": [{"from": "gpt"}]}, "no text"),
    (b"[", "not JSON"),
    ({"messages": "1+1?"}, "no text"),
    ({"messages": [{"role": "assistant", "content": ["2"]}]}, "no text"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "no text"),
    ({"messages": [{"role": "judge", "content": "2"}]}, "unknown role"),
    ({"messages": [{"from": "human", "value": "2"}]}, "unknown role"),
    ({"messages": ["2"]}, "unknown role"),
    ({"messages": [{"role": "half \ud83d a role", "content": "2"}]}, "unknown role"),
    ({"messages": []}, "no answer"),
    ({"messages": CHAT[:2]}, "no answer"),
    ({"text": " \n"}, "empty"),
    ({"messages": [{"role": "assistant", "content": " "}]}, "empty"),
    ({"id": "", "text": "a text"}, "unusable id"),
    ({"id": [1], "text": "a text"}, "unusable id"),
    ({"id": True, "text": "a text"}, "unusable id"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_counted_by_reason_or_raises(tmp_path: Path, line: Any, reason: str) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "a good line"}, line)
    data = loaded(path, on_bad_line="skip")
    assert data.skipped == {reason: 1}
    assert ids(data) == ["a.jsonl:1:0"]
    with pytest.raises(DataError, match=f"cannot be used: {reason}") as caught:
        loaded(path)
    assert caught.value.set_by == f"{path}:2"
    assert caught.value.anchor == "bad-line"
    str(caught.value).encode()


def test_the_log_names_the_first_bad_lines_of_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "a good line"}, *[{"text": ""}] * 9, b"{")
    with caplog.at_level(logging.WARNING):
        data = loaded(path, on_bad_line="skip")
    assert data.skipped == {"empty": 9, "not JSON": 1}
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" (")[0] for line in lines] == [f"skipped {path}:{n}: empty" for n in (2, 3, 4)] + [f"skipped {path}:11: not JSON"]
    assert lines[2].endswith("further ones are only counted")


def test_nothing_but_bad_lines_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty: 2") as caught:
        loaded(written(tmp_path / "a.jsonl", *[{"text": ""}] * 2), on_bad_line="skip")
    assert caught.value.anchor == "empty-corpus"


def test_another_choice_for_bad_lines_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Jsonl\.on_bad_line") as caught:
        Jsonl(path="a.jsonl", on_bad_line="ignore")  # pyright: ignore[reportArgumentType]
    assert caught.value.anchor == "data-value-out-of-range"


def test_a_scope_in_a_config_file_names_the_source(tmp_path: Path) -> None:
    (tmp_path / "run.gin").write_text("chat/Jsonl.path = 'a.jsonl'\n")
    assert load(str(tmp_path / "run.gin"), root="chat/Jsonl").build().name == "chat"
