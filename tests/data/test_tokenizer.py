"""The command that trains a tokenizer: on the built-in corpus, or on a user's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from maestro_jax.data import tokenizer as vocabulary

TEXT = "zyzzyva zyzzyva zyzzyva"  # a word that the built-in corpus does not have


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    (texts / "below").mkdir(parents=True)
    (texts / "a.txt").write_text(TEXT, encoding="utf-8-sig")
    (texts / "bad.txt").write_bytes(b"\xff\xfe")
    (texts / "below" / "b.md").write_text("quokka quokka quokka")
    return texts


def command(folder: Path, *flags: str) -> Path:
    out = folder.parent / "made" / "own.json"
    vocabulary.main(["--out", str(out), "--vocab_size", "300", *flags])
    return out


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        command(folder, *flags)
    assert not (folder.parent / "made").exists()
    return capsys.readouterr().err


def tokens(tokenizer: Path, word: str) -> int:
    return len(vocabulary.load(tokenizer).encode(word).ids)


def test_own_files_make_their_own_tokens_and_bad_ones_are_noted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = command(folder, "--text", str(folder))
    assert tokens(made, "zyzzyva") == 1
    assert tokens(made, "quokka") == len("quokka")
    assert [record.message for record in caplog.records] == [f"skipped {folder / 'bad.txt'}: not UTF-8 (byte 0xff at offset 0)"]


def test_the_pattern_chooses_files(folder: Path) -> None:
    made = command(folder, "--text", str(folder), "--pattern", "**/*.md")
    assert (tokens(made, "quokka"), tokens(made, "zyzzyva")) == (1, len("zyzzyva"))


def test_without_own_files_the_built_in_corpus_makes_the_shipped_tokenizer_s_first_tokens(folder: Path) -> None:
    made = vocabulary.load(command(folder))
    shipped = vocabulary.load("tokenizer_tiny.json")
    # The built-in text differs a little between Python versions, so only the most frequent merges are compared.
    assert [made.id_to_token(number) for number in range(270)] == [shipped.id_to_token(number) for number in range(270)]


def test_a_folder_without_one_good_file_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = refused(capsys, folder, "--text", str(folder), "--pattern", "bad.*")
    assert "there is no text to train a tokenizer on" in shown
    assert "have     1 skipped (not UTF-8)" in shown
    assert "docs/errors.md#empty-corpus" in shown


@pytest.mark.parametrize(("flags", "set_by"), [(["--text", "no"], "--text"), (["--text", ".", "--pattern", "*.no"], "--pattern")])
def test_mistakes_name_the_flag(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], set_by: str
) -> None:
    monkeypatch.chdir(folder)
    assert f"set by   command line  {set_by}\n" in refused(capsys, folder, *flags)


def test_a_pattern_without_a_folder_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--pattern chooses files of --text FOLDER" in refused(capsys, folder, "--pattern", "*.md")
