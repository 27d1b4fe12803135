"""A folder counts when its manifest is there, and every change of what it names is seen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from maestro_jax.manifest import MANIFEST, damage, read_manifest, write_manifest


def committed(path: Path) -> Path:
    """A folder of three files with a manifest."""
    (path / "inside" / "deep").mkdir(parents=True)
    (path / "one").write_bytes(b"1" * 100)
    (path / "inside" / "two").write_bytes(b"")
    (path / "inside" / "deep" / "three").write_bytes(bytes(range(256)))
    write_manifest(path, {"step": 3, "state": {"loss": 0.1, "nothing": None}})
    return path


def flip(path: Path, place: int = 7) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.quick
def test_what_is_written_is_read_and_whole(tmp_path: Path) -> None:
    content = read_manifest(committed(tmp_path))
    assert content is not None
    assert (content["step"], content["state"]) == (3, {"loss": 0.1, "nothing": None})
    assert {name: entry["bytes"] for name, entry in content["files"].items()} == {"one": 100, "inside/two": 0, "inside/deep/three": 256}
    assert damage(tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside", MANIFEST, "one"]


def test_a_folder_without_a_manifest_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    assert read_manifest(tmp_path) is None
    assert damage(tmp_path) == f"{tmp_path.name}/manifest.json is missing or damaged"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: flip(path / "one"), "one is not as it was written"),
        (lambda path: flip(path / "inside" / "deep" / "three"), "inside/deep/three is not as it was written"),
        (lambda path: os.truncate(path / "one", 99), "one is not as it was written"),
        (lambda path: (path / "inside" / "two").write_bytes(b"x"), "inside/two is not as it was written"),
        (lambda path: (path / "inside" / "two").unlink(), "inside/two is missing"),
        (lambda path: os.truncate(path / MANIFEST, 200), "manifest.json is missing or damaged"),
        (lambda path: (path / MANIFEST).write_bytes(b"\xff\0"), "manifest.json is missing or damaged"),
        (lambda path: (path / MANIFEST).write_text("[]"), "manifest.json is missing or damaged"),
        (lambda path: (path / MANIFEST).write_text('"content"'), "manifest.json is missing or damaged"),
    ],
)
def test_damage_is_named(tmp_path: Path, harm: Callable[[Path], None], says: str) -> None:
    harm(committed(tmp_path))
    assert says in str(damage(tmp_path))


def test_no_byte_of_a_manifest_can_change_unseen(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    write_manifest(tmp_path, {"step": 3})
    original = read_manifest(tmp_path)
    text = (tmp_path / MANIFEST).read_bytes()
    seen = 0
    for place in range(len(text)):
        (tmp_path / MANIFEST).write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        found = read_manifest(tmp_path)
        # White space between values says nothing, so it may change.
        assert found == original if chr(text[place]).isspace() and found is not None else found is None
        seen += found is None
    assert seen > len(text) // 2


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(tmp_path)
    whole = Path.open

    def failing(self: Path, *arguments: str, **more: str) -> object:
        if self.name == "three":
            raise OSError(5, "Input/output error")
        return whole(self, *arguments, **more)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(Path, "open", failing)
    assert str(damage(tmp_path)).endswith("inside/deep/three cannot be read (OSError: [Errno 5] Input/output error)")


def test_a_failed_write_leaves_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").write_text("1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(tmp_path, {})
    assert read_manifest(tmp_path) is None
    monkeypatch.undo()
    write_manifest(tmp_path, {"second": "try"})
    content = read_manifest(tmp_path)
    assert content is not None
    assert list(content["files"]) == ["one"]


def test_files_are_on_the_disk_before_the_manifest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may stop at any moment: what a manifest names must be there by then."""
    synchronised: list[str] = []
    sync, replace = os.fsync, os.replace

    def seen(descriptor: int) -> None:
        synchronised.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        sync(descriptor)

    def committing(source: Path, target: Path) -> None:
        synchronised.append("commit")
        replace(source, target)

    monkeypatch.setattr("os.fsync", seen)
    monkeypatch.setattr("os.replace", committing)
    committed(tmp_path)
    before, after = synchronised[: synchronised.index("commit")], synchronised[synchronised.index("commit") + 1 :]
    assert set(before) == {"one", "inside/two", "inside/deep/three", f".{MANIFEST}.tmp", "..", ".", "inside", "inside/deep"}
    assert after == ["."]


def test_a_state_of_any_json_values_comes_back(tmp_path: Path) -> None:
    state = {"floats": [0.1, 1e-300, -0.0, 1 / 3], "text": "ü\n\u2028", "deep": {"a": [{"b": True}]}, "large": 2**70}
    write_manifest(tmp_path, {"state": state})
    assert json.dumps(json.loads((tmp_path / MANIFEST).read_text())["content"]["state"], sort_keys=True) == json.dumps(
        state, sort_keys=True
    )
    content = read_manifest(tmp_path)
    assert content is not None
    assert content["state"] == state
