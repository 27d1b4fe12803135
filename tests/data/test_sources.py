"""Text sources: documents into samples, the split, and what users get wrong."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maestro_jax.config import load
from maestro_jax.data import tokenizer as vocabulary
from maestro_jax.data.corpus import Corpus, corpus_documents
from maestro_jax.data.dataset import Dataset
from maestro_jax.data.documents import Document
from maestro_jax.data.samples import Sample
from maestro_jax.data.sources import TEXT_SPECS, check_vocabulary, cut_pieces, heldout_names
from maestro_jax.data.text_folder import TextFolder
from maestro_jax.errors import ConfigError, DataError, MaestroError


@pytest.fixture(scope="module")
def corpus() -> Dataset:
    return Corpus().load()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        (tmp_path / f"page{number:02}.txt").write_text(f"Page {number}: " + "the quick brown fox jumps over the lazy dog. " * (number + 2))
    return tmp_path


def documents_of(samples: Iterable[Sample]) -> set[str]:
    return {sample.id.rsplit(":", 1)[0] for sample in samples}


def text(sample: Sample, name: str) -> np.ndarray:
    return sample.items["text"][0].arrays[name]


def joined(samples: list[Sample], name: str) -> list[int]:
    return [int(token) for sample in samples for token in text(sample, name)]


def assert_five_parts(error: MaestroError, anchor: str) -> None:
    assert re.search(r"\n  wanted .+\n  have .+\n  set by .+\n  fix .+\n  help ", str(error), re.DOTALL)
    assert error.anchor == anchor


# --- the built-in corpus


def test_corpus_sides_share_no_document(corpus: Dataset) -> None:
    train, heldout = documents_of(corpus.train), documents_of(corpus.heldout)
    assert train
    assert heldout
    assert not train & heldout
    assert train | heldout == {document.name for document in corpus_documents()}


def test_corpus_holds_out_about_the_fraction_of_its_tokens(corpus: Dataset) -> None:
    units = [sum(sample.items["text"][0].units for sample in side) for side in (corpus.train, corpus.heldout)]
    assert 0.05 < units[1] / sum(units) < 0.15


def test_corpus_loads_the_same_twice(corpus: Dataset) -> None:
    again = Corpus().load()
    assert [sample.id for sample in again.heldout] == [sample.id for sample in corpus.heldout]
    assert again.notes == corpus.notes


def test_corpus_documents_come_in_the_same_order_in_every_process() -> None:
    names = [document.name for document in corpus_documents()]
    assert names == sorted(names)


def test_corpus_loads_in_three_seconds() -> None:
    start = time.perf_counter()
    Corpus().load()
    assert time.perf_counter() - start < 3


def test_sample_ids_are_unique(corpus: Dataset) -> None:
    ids = [sample.id for sample in [*corpus.train, *corpus.heldout]]
    assert len(set(ids)) == len(ids)


def test_sample_ids_and_numbers_do_not_collide_on_devices(corpus: Dataset) -> None:
    numbers = [sample.number for sample in [*corpus.train, *corpus.heldout]]
    assert len(set(numbers)) == len(numbers)


def test_samples_fit_their_specs(corpus: Dataset) -> None:
    for sample in corpus.train:
        (item,) = sample.items["text"]
        assert 2 <= item.units <= 256
        assert item.arrays.keys() == TEXT_SPECS["text"].keys() == corpus.specs["text"].keys()
        for name, spec in corpus.specs["text"].items():
            assert item.arrays[name].shape == (item.units, *spec.shape)
            assert item.arrays[name].dtype == spec.dtype


def test_token_ids_stay_below_the_vocabulary_size(corpus: Dataset) -> None:
    assert corpus.vocab_size == 1024
    assert max(int(text(sample, "targets").max()) for sample in corpus.train) < 1024


def test_notes_record_the_text_and_where_it_came_from(corpus: Dataset) -> None:
    assert re.fullmatch("[0-9a-f]{64}", corpus.notes["corpus_sha256"])
    assert corpus.notes["split"] == "by document"
    assert corpus.notes["python"] == ".".join(map(str, sys.version_info[:3]))


def test_corpus_missing_from_this_python_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="TextFolder") as caught:
        Corpus().load()
    assert_five_parts(caught.value, "built-in-corpus-missing")


# --- documents into samples


def test_targets_are_the_tokens_shifted_by_one() -> None:
    ids = np.arange(100, 123, dtype=np.int32)
    samples = cut_pieces("a", ids, max_length=5)
    assert [sample.id for sample in samples] == [f"a:{n}" for n in range(5)]
    assert joined(samples, "tokens") == list(range(100, 122))
    assert joined(samples, "targets") == list(range(101, 123))
    assert all(text(sample, "loss_mask").tolist() == [1.0] * sample.items["text"][0].units for sample in samples)


def test_document_of_a_full_piece_is_one_sample() -> None:
    assert [sample.items["text"][0].units for sample in cut_pieces("a", np.arange(6, dtype=np.int32), max_length=5)] == [5]


def test_samples_share_memory_and_refuse_writes() -> None:
    ids = np.arange(9, dtype=np.int32)
    sample = cut_pieces("a", ids, max_length=4)[0]
    assert np.shares_memory(text(sample, "tokens"), ids)
    for name in TEXT_SPECS["text"]:
        with pytest.raises(ValueError, match="read-only"):
            text(sample, name)[0] = 1


def test_a_document_ends_with_end_of_text(folder: Path) -> None:
    data = TextFolder(path=str(folder), heldout_fraction=0).load()
    last = [sample for sample in data.train if sample.id.startswith("page03.txt:")][-1]
    assert text(last, "targets")[-1] == 0
    assert 0 not in text(last, "tokens")


def test_pieces_below_min_length_are_dropped_and_counted() -> None:
    source = Corpus(max_length=64, heldout_fraction=0)
    every, long_enough = source.load(), dataclasses.replace(source, min_length=40).load()
    assert min(sample.items["text"][0].units for sample in long_enough.train) >= 40
    assert long_enough.skipped == {"too short": len(every.train) + every.skipped.get("too short", 0) - len(long_enough.train)}


class Twice(Corpus):
    """A source whose `read` gives one name to two documents."""

    def read(self, skipped: collections.Counter[str]) -> Iterator[Document]:
        yield from [Document("a", "to be"), Document("b", "or not"), Document("a", "to be")]


def test_two_documents_of_one_name_are_an_error() -> None:
    with pytest.raises(DataError, match="two documents are called 'a'") as caught:
        Twice(heldout_fraction=0).load()
    assert_five_parts(caught.value, "repeated-sample-id")


# --- the split


def test_side_of_a_document_does_not_depend_on_the_others() -> None:
    names = [f"page {n}" for n in range(200)]
    chosen = heldout_names(names, 0.2, seed=3)
    assert heldout_names(reversed(names), 0.2, seed=3) == chosen
    assert heldout_names(names[:90], 0.2, seed=3) == chosen & set(names[:90])


def test_seed_changes_the_split() -> None:
    names = [f"page {n}" for n in range(200)]
    assert heldout_names(names, 0.2, seed=0) != heldout_names(names, 0.2, seed=1)


def test_larger_fraction_holds_out_a_superset() -> None:
    names = [f"page {n}" for n in range(200)]
    assert heldout_names(names, 0.1, seed=0) < heldout_names(names, 0.3, seed=0)


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_both_sides_of_two_documents_get_one(fraction: float) -> None:
    assert len(heldout_names(["a", "b"], fraction, seed=0)) == 1


def test_fraction_zero_holds_out_nothing(folder: Path) -> None:
    data = TextFolder(path=str(folder), heldout_fraction=0).load()
    assert len(documents_of(data.train)) == 12
    assert data.heldout == ()


def test_only_document_is_split_by_pieces(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("to be or not to be, that is the question. " * 60)
    data = TextFolder(path=str(tmp_path), max_length=32).load()
    ids = [sample.id for sample in [*data.train, *data.heldout]]
    assert ids == [f"input.txt:{n}" for n in range(len(ids))]
    assert len(data.heldout) == round(len(ids) / 10)
    assert data.notes["split"] == "by piece of the only document"


def test_only_document_in_one_piece_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("to be or not to be")
    with pytest.raises(DataError, match="too short to hold any of it out") as caught:
        TextFolder(path=str(tmp_path)).load()
    assert_five_parts(caught.value, "too-little-text")
    assert len(TextFolder(path=str(tmp_path), heldout_fraction=0).load().train) == 1


# --- a user's files


def test_files_become_documents_named_by_their_path(folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / "below" / "deep.txt").write_text("text in a folder below")
    flat = TextFolder(path=str(folder)).load()
    deep = TextFolder(path=str(folder), pattern="**/*.txt").load()
    names = {f"page{number:02}.txt" for number in range(12)}
    assert documents_of([*flat.train, *flat.heldout]) == names
    assert documents_of([*deep.train, *deep.heldout]) == names | {"below/deep.txt"}


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing") as caught:
        TextFolder(path=str(tmp_path / "nowhere")).load()
    assert_five_parts(caught.value, "text-folder-missing")


def test_folder_and_tokenizer_are_found_beside_the_config_file(folder: Path) -> None:
    run = folder.parent / f"{folder.name}_run"
    run.mkdir()
    folder.rename(run / "texts")
    vocabulary.train(["to be"], vocab_size=258).save(str(run / "own.json"))
    (run / "run.gin").write_text("TextFolder.path = 'texts'\nTextFolder.tokenizer = 'own.json'\n")
    data = load(str(run / "run.gin"), root="TextFolder").build().load()
    assert data.vocab_size == 258
    assert data.notes["documents"] == "12"


def test_error_names_the_line_of_the_config_file(tmp_path: Path) -> None:
    (tmp_path / "run.gin").write_text("TextFolder.path = 'nowhere'\nTextFolder.max_length = 0\n")
    with pytest.raises(ConfigError, match="max_length") as caught:
        load(str(tmp_path / "run.gin"), root="TextFolder").build()
    assert "run.gin:2" in caught.value.set_by


def test_file_given_as_folder_is_an_error_that_says_how(folder: Path) -> None:
    with pytest.raises(DataError, match=r"pattern to 'page00\.txt'") as caught:
        TextFolder(path=str(folder / "page00.txt")).load()
    assert_five_parts(caught.value, "text-folder-missing")


@pytest.mark.parametrize("pattern", ["*.md", "", "/*.txt"])
def test_pattern_without_a_file_is_an_error(folder: Path, pattern: str) -> None:
    with pytest.raises(DataError, match="matches") as caught:
        TextFolder(path=str(folder), pattern=pattern).load()
    assert_five_parts(caught.value, "no-file-matches")


def test_empty_corpus_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("")
    (tmp_path / "two.txt").write_text(" \n\n")
    with pytest.raises(DataError, match="empty: 2") as caught:
        TextFolder(path=str(tmp_path)).load()
    assert_five_parts(caught.value, "empty-corpus")


def test_file_that_is_not_utf8_is_skipped_counted_and_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "latin.txt").write_bytes("naïve café".encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        data = TextFolder(path=str(folder)).load()
    assert data.skipped["not UTF-8"] == 1
    assert f"skipped {folder / 'latin.txt'}: not UTF-8 (byte 0xef at offset 2)" in caplog.text
    assert "latin.txt" not in documents_of([*data.train, *data.heldout])


@pytest.mark.parametrize(("content", "reason"), [(b"na\xefve", "is not UTF-8"), (b"", "is empty")])
def test_bad_file_raises_on_request(folder: Path, content: bytes, reason: str) -> None:
    (folder / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.txt' {reason}") as caught:
        TextFolder(path=str(folder), on_bad_sample="raise").load()
    assert_five_parts(caught.value, "bad-text-file")


def test_file_without_permission_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readable = Path.read_text

    def read_text(file: Path, **options: str) -> str:
        if file.name == "page00.txt":
            raise PermissionError(13, "Permission denied")
        return readable(file, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    data = TextFolder(path=str(folder)).load()
    assert data.skipped["unreadable"] == 1
    assert "page00.txt" not in documents_of([*data.train, *data.heldout])


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, mark in (("plain.txt", b""), ("marked.txt", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(mark + b"the same text")
    marked, plain = TextFolder(path=str(tmp_path), heldout_fraction=0).load().train
    assert text(marked, "tokens").tolist() == text(plain, "tokens").tolist()


def test_file_name_that_is_not_utf8_makes_a_usable_id(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xefve.txt")).write_text("some text")
    except OSError:
        pytest.skip("this file system refuses such names")
    (sample,) = TextFolder(path=str(tmp_path), heldout_fraction=0).load().train
    assert sample.id == r"na\udcefve.txt:0"
    assert sample.number > 0


@pytest.mark.parametrize(
    "field",
    [
        {"max_length": 0},
        {"min_length": 0},
        {"min_length": 257},
        {"heldout_fraction": 1.0},
        {"heldout_fraction": -0.1},
        {"on_bad_sample": "ignore"},
    ],
)
def test_value_out_of_range_is_an_error(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="out of range") as caught:
        TextFolder(**{"path": ".", **field})
    assert_five_parts(caught.value, "data-value-out-of-range")


# --- tokenizers


def test_tokenizer_command_is_reproducible(tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        subprocess.run(
            [sys.executable, "-W", "error", "-m", "maestro_jax.data.tokenizer", "--out", str(file), "--vocab_size", "300"], check=True
        )
    assert files[0].read_bytes() == files[1].read_bytes()
    assert vocabulary.vocabulary_size(vocabulary.load(files[0])) == 300


def test_tokenizer_command_refuses_a_size_without_room_for_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        vocabulary.main(["--out", str(tmp_path / "one.json"), "--vocab_size", "256"])
    assert "docs/errors.md#tokenizer-too-small" in capsys.readouterr().err


def test_shipped_tokenizer_writes_any_text() -> None:
    tokenizer = vocabulary.load("tokenizer_tiny.json")
    words = "naïve café, 日本語, 🙂\ttabs\n"
    assert tokenizer.decode(tokenizer.encode(words).ids) == words


def test_fingerprint_does_not_depend_on_the_order_in_a_file(tmp_path: Path) -> None:
    tokenizer = vocabulary.train(["to be or not to be"], vocab_size=270)
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    (tmp_path / "reordered.json").write_text(json.dumps(content, indent=3))
    assert vocabulary.fingerprint(vocabulary.load(tmp_path / "reordered.json")) == vocabulary.fingerprint(tokenizer)


def test_fingerprint_tells_equal_sizes_apart() -> None:
    one, two = (vocabulary.train([words], vocab_size=262) for words in ("to be or not to be", "all the world is a stage"))
    assert vocabulary.vocabulary_size(one) == vocabulary.vocabulary_size(two)
    assert vocabulary.fingerprint(one) != vocabulary.fingerprint(two)


def test_added_tokens_count() -> None:
    tokenizer = vocabulary.train(["to be"], vocab_size=258)
    tokenizer.add_special_tokens(["<image>"])
    assert tokenizer.token_to_id("<image>") == 258
    assert vocabulary.vocabulary_size(tokenizer) == 259


def test_truncation_and_padding_of_a_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = vocabulary.train(["to be or not to be"], vocab_size=260)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "sentences.json"))
    (ids,) = vocabulary.encode(vocabulary.load(tmp_path / "sentences.json"), ["x" * 50])
    assert len(ids) == 51


def test_end_of_text_is_neither_doubled_nor_invented() -> None:
    tokenizer = vocabulary.train(["to be"], vocab_size=257)
    (ids,) = vocabulary.encode(tokenizer, ["be<|endoftext|>"])
    assert ids.tolist().count(0) == 1
    content = json.loads(tokenizer.to_str().replace("<|endoftext|>", "<|other|>"))
    without = type(tokenizer).from_str(json.dumps(content))
    (ids,) = vocabulary.encode(without, ["be"])
    assert len(ids) == 2


def test_file_that_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read") as caught:
        Corpus(tokenizer=str(tmp_path / "tokenizer.json")).load()
    assert_five_parts(caught.value, "tokenizer-unreadable")
    assert "Corpus.tokenizer" in caught.value.set_by


def test_missing_tokenizer_is_an_error() -> None:
    with pytest.raises(MaestroError, match=r"nowhere\.json") as caught:
        Corpus(tokenizer="nowhere.json").load()
    assert_five_parts(caught.value, "missing-file")
    assert "Corpus.tokenizer" in caught.value.set_by


def test_foreign_vocabulary_is_refused(corpus: Dataset) -> None:
    with pytest.raises(DataError, match="section 'student'") as caught:
        check_vocabulary(corpus, 1000, "student", set_by="kd.gin:7  student/Decoder.vocab_size")
    assert_five_parts(caught.value, "foreign-vocabulary")
    assert caught.value.set_by.startswith("kd.gin:7")


def test_larger_or_absent_vocabulary_is_accepted(corpus: Dataset) -> None:
    check_vocabulary(corpus, 1024, "student")
    check_vocabulary(dataclasses.replace(corpus, vocab_size=None), 8, "student")


# --- imports


def test_sources_load_neither_jax_nor_grain() -> None:
    program = (
        "import sys; from maestro_jax.data import corpus, text_folder, jsonl, mixture, batches; corpus.Corpus().load(); "
        "print([name for name in ('jax', 'grain', 'flax') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_reading_counts_and_yields_lazily(folder: Path) -> None:
    skipped: collections.Counter[str] = collections.Counter()
    (folder / "page00.txt").write_text("")
    first = next(TextFolder(path=str(folder)).read(skipped))
    assert (first.name, skipped["empty"]) == ("page01.txt", 1)
