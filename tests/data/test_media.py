"""Image and sound files: found below one folder only, read right, and refused by kind."""

from __future__ import annotations

import os
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maestro_jax.data.media import Unusable, find_below, read_clip, read_image, scaled_size

images: Any = pytest.importorskip("PIL.Image", reason="the extra examples is not installed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file, beside another folder with one."""
    for name in ("data", "data-old", "elsewhere"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "a.png").write_bytes(b"a")
    return (tmp_path / "data").resolve()


def kind(action: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(Unusable) as caught:
        action(*arguments, **named)
    return caught.value.anchor


# --- paths


@pytest.mark.parametrize("name", ["a.png", "./a.png", "deep/../a.png", "../data/a.png"])
def test_a_file_below_the_folder_is_found(root: Path, name: str) -> None:
    assert find_below(root, name) == root / "a.png"


def test_a_full_path_below_the_folder_is_found(root: Path) -> None:
    assert find_below(root, str(root / "a.png")) == root / "a.png"


@pytest.mark.parametrize("name", ["../elsewhere/a.png", "../data-old/a.png", "deep/../../elsewhere/a.png", "/etc/passwd", ".."])
def test_a_path_that_leaves_the_folder_is_refused(root: Path, name: str) -> None:
    assert kind(find_below, root, name) == "path-outside-root"


def test_a_link_that_leaves_the_folder_is_refused(root: Path) -> None:
    (root / "link.png").symlink_to(root.parent / "elsewhere" / "a.png")
    (root / "folder").symlink_to(root.parent / "elsewhere")
    (root / "inside.png").symlink_to(root / "a.png")
    assert kind(find_below, root, "link.png") == "path-outside-root"
    assert kind(find_below, root, "folder/a.png") == "path-outside-root"
    assert kind(find_below, root, "folder/missing.png") == "path-outside-root"
    assert find_below(root, "inside.png") == root / "a.png"


@pytest.mark.parametrize("name", ["b.png", "deep", "a.png/b.png", "a\0b.png", "x" * 300, "http://example.org/a.png"])
def test_what_is_no_file_is_missing(root: Path, name: str) -> None:
    assert kind(find_below, root, name) == "media-missing"


def test_links_in_a_circle_are_missing(root: Path) -> None:
    (root / "one.png").symlink_to(root / "two.png")
    (root / "two.png").symlink_to(root / "one.png")
    assert kind(find_below, root, "one.png") == "media-missing"


def test_a_pipe_is_not_opened(root: Path) -> None:
    os.mkfifo(root / "pipe.png")
    assert kind(find_below, root, "pipe.png") == "media-missing"


# --- images


def saved(path: Path, pixels: np.ndarray, mode: str | None = None, **options: Any) -> Path:
    image = images.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def read(path: Path, **options: Any) -> np.ndarray:
    return read_image(path, **{"block": 4, "most_blocks": 100, "max_pixels": 10_000, **options})


COLOURS = np.repeat(np.repeat(np.arange(12, dtype=np.uint8).reshape(2, 2, 3) * 20, 8, axis=0), 12, axis=1)
"""16 high and 24 wide: four areas of one colour each."""


def test_an_image_of_whole_blocks_stays_as_it_is(tmp_path: Path) -> None:
    found = read(saved(tmp_path / "a.png", COLOURS))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, COLOURS / 255, atol=1e-6)


def test_others_are_scaled_to_whole_blocks(tmp_path: Path) -> None:
    found = read(saved(tmp_path / "a.png", COLOURS[:15, :22]), block=8, most_blocks=100)
    assert found.shape == (16, 24, 3)
    np.testing.assert_allclose(found[4, 4], COLOURS[0, 0] / 255, atol=0.01)
    np.testing.assert_allclose(found[-2, -2], COLOURS[-1, -1] / 255, atol=0.01)


@pytest.mark.parametrize("size", [(16, 24), (1000, 1000), (3, 10_000), (10_000, 3), (1, 1), (577, 431)])
@pytest.mark.parametrize("most", [1, 7, 100])
def test_scaled_sizes_are_whole_blocks_and_not_too_many(size: tuple[int, int], most: int) -> None:
    height, width = scaled_size(*size, 14, most)
    rows, columns = height / 14, width / 14
    assert rows.is_integer()
    assert columns.is_integer()
    assert 1 <= rows * columns <= most
    if rows > 1 and columns > 1 and size[0] * size[1] > most * 14**2:
        assert rows * columns > most / 3


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_every_mode_becomes_colour(tmp_path: Path, mode: str) -> None:
    name = "a.tiff" if mode == "CMYK" else "a.png"
    grey = np.full((8, 8, 3), 255, np.uint8)
    grey[:, 4:] = 0
    np.testing.assert_allclose(read(saved(tmp_path / name, grey, mode))[:, [0, -1]], grey[:, [0, -1]] / 255, atol=0.01)


def test_transparency_is_white(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:, :4, 3] = 255
    found = read(saved(tmp_path / "a.png", pixels))
    assert found[0, 0].tolist() == [0, 0, 0]
    assert found[0, -1].tolist() == [1, 1, 1]


def test_sixteen_bits_keep_their_brightness(tmp_path: Path) -> None:
    found = read(saved(tmp_path / "a.png", np.full((8, 8), 30_000, np.uint16)))
    np.testing.assert_allclose(found, 30_000 / 65_535, atol=0.01)


def test_an_image_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    exif = images.Exif()
    exif[0x0112] = 6  # the top of what was seen is on the right of the file
    found = read(saved(tmp_path / "a.png", COLOURS, exif=exif))
    assert found.shape == (24, 16, 3)
    np.testing.assert_allclose(found[0, -1], COLOURS[0, 0] / 255, atol=0.01)


def test_of_several_frames_the_first_is_read(tmp_path: Path) -> None:
    first, second = (images.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (0, 255))
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    assert read(tmp_path / "a.gif").max() == 0


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.gif", "a.bmp", "a.webp"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9])
def test_a_truncated_image_is_unreadable(tmp_path: Path, name: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)
    whole = saved(tmp_path / name, noise).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    assert kind(read, tmp_path / name) == "image-unreadable"


def test_text_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("<html>not found</html>")
    assert kind(read, tmp_path / "a.png") == "image-unreadable"


def png(width: int, height: int) -> bytes:
    """The beginning of a PNG of that size, without any pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [header, b"IDAT" + zlib.compress(b""), b"IEND"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(p) - 4) + p + struct.pack(">I", zlib.crc32(p)) for p in parts)


GIF = b"GIF89a" + struct.pack("<HHBBB", 0, 4, 0, 0, 0) + b"\x2c" + struct.pack("<HHHHB", 0, 0, 0, 4, 0) + b"\x02\x00\x3b"
BMP = b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 4, 0, 1, 24, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("content", [png(0, 8), png(8, 0), GIF, BMP])
def test_an_image_without_area_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    assert kind(read, tmp_path / "a.png") == "image-without-area"


@pytest.mark.parametrize("size", [(101, 100), (10_000, 10_000), (100_000, 100_000)])
def test_a_large_image_is_refused_before_it_is_decoded(tmp_path: Path, size: tuple[int, int]) -> None:
    """Decoding would find that there is nothing in it."""
    (tmp_path / "a.png").write_bytes(png(*size))
    assert kind(read, tmp_path / "a.png") == "media-too-large"


# --- sound


def clip(path: Path, samples: np.ndarray, *, rate: int = 8000, width: int = 2) -> Path:
    """Writes sound from -1 to 1, `[samples]` or `[samples, channels]`."""
    whole = np.rint(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    data = (whole + 128).astype(np.uint8).tobytes() if width == 1 else whole.astype("<i8")[..., None].view(np.uint8)[..., :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


SOUND = np.sin(np.arange(100.0))


@pytest.mark.parametrize(("width", "error"), [(1, 0.02), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
def test_a_clip_of_any_width_is_read(tmp_path: Path, width: int, error: float) -> None:
    found, rate = read_clip(clip(tmp_path / "a.wav", SOUND, rate=11_025, width=width), max_seconds=1)
    assert (rate, found.dtype) == (11_025, np.float32)
    np.testing.assert_allclose(found, SOUND, atol=error)


def test_channels_become_their_mean(tmp_path: Path) -> None:
    found, _ = read_clip(clip(tmp_path / "a.wav", np.stack([SOUND, 0 * SOUND], axis=1)), max_seconds=1)
    np.testing.assert_allclose(found, SOUND / 2, atol=1e-4)


def test_a_clip_without_sound_is_empty(tmp_path: Path) -> None:
    assert kind(read_clip, clip(tmp_path / "a.wav", SOUND[:0]), max_seconds=1) == "clip-empty"


def test_a_long_clip_is_too_large(tmp_path: Path) -> None:
    path = clip(tmp_path / "a.wav", SOUND, rate=1000)
    assert len(read_clip(path, max_seconds=0.1)[0]) == 100
    assert kind(read_clip, path, max_seconds=0.099) == "media-too-large"


@pytest.mark.parametrize("length", [0, 10, 43, 60, 143])
def test_a_truncated_clip_is_unreadable(tmp_path: Path, length: int) -> None:
    path = clip(tmp_path / "a.wav", SOUND)
    path.write_bytes(path.read_bytes()[:length])
    assert kind(read_clip, path, max_seconds=1) == "clip-unreadable"


def test_other_sound_than_pcm_is_unreadable(tmp_path: Path) -> None:
    path = clip(tmp_path / "a.wav", SOUND, width=4)
    content = bytearray(path.read_bytes())
    content[20:22] = struct.pack("<H", 3)  # numbers with a floating point
    path.write_bytes(content)
    assert kind(read_clip, path, max_seconds=1) == "clip-unreadable"


@pytest.mark.parametrize("rate", [0, 2**30])
def test_a_rate_that_nothing_has_is_unreadable(tmp_path: Path, rate: int) -> None:
    path = clip(tmp_path / "a.wav", SOUND)
    content = bytearray(path.read_bytes())
    content[24:28] = struct.pack("<I", rate)
    path.write_bytes(content)
    with pytest.raises(Unusable) as caught:
        read_clip(path, max_seconds=1)
    assert (caught.value.anchor, caught.value.have) == ("clip-unreadable", f"samples of 2 bytes, {rate} a second")


def test_a_file_without_a_byte_is_told_as_empty(tmp_path: Path) -> None:
    for name, read, limits in (
        ("a.wav", read_clip, {"max_seconds": 1}),
        ("a.png", read_image, {"block": 4, "most_blocks": 9, "max_pixels": 100}),
    ):
        (tmp_path / name).touch()
        with pytest.raises(Unusable) as caught:
            read(tmp_path / name, **limits)
        assert caught.value.have == "an empty file: 0 bytes"
