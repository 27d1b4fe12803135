"""Image and sound files of a user's samples: found below one folder and nowhere else, and read with a bound on their size.

Images are read with Pillow (extra `examples`), sound from PCM wave files with the standard library. An image is scaled to whole blocks
of patches, nearly in its own proportions, and to no more patches than wanted (as by P. Wang et al., "Qwen2-VL", arXiv 2409.12191).

Dimensions: H height and W width in pixels, T samples of sound.
"""

from __future__ import annotations

import math
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .extras import import_extra

RATES = (1_000, 768_000)
"""Lowest and highest sampling rate that is read, in samples a second."""


_SIZES = ((b"\x89PNG", ">II", 16), (b"GIF8", "<HH", 6), (b"BM", "<ii", 18))  # where headers have width and height

MOST_PIXELS = 89_478_485
"""Above this Pillow itself takes an image for an attack."""


class Unusable(Exception):
    """Why a sample cannot be used: the anchor of the kind of error, by which such samples are counted, and four parts of its text."""

    def __init__(self, anchor: str, what: str, *, wanted: str, have: str, fix: str = "mend or remove the file") -> None:
        self.anchor, self.what, self.wanted, self.have, self.fix = anchor, what, wanted, have, fix
        super().__init__(f"{what}: {have}")


def find_below(root: Path, name: str) -> Path:
    """Returns the file that a sample names.

    Args:
        root: the folder below which all files are, resolved.
        name: a path from there, or a full one.

    Raises:
        Unusable: it lies outside, also by `..` or through a link, or there is no such file.
    """
    try:
        path = (root / name).resolve()
        outside, found = not path.is_relative_to(root), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle; characters that no path has
        raise _missing(name, f"a path that cannot be followed: {error}") from error
    if outside:
        raise Unusable(
            "path-outside-root",
            f"file {name!r} lies outside of the data's folder",
            wanted=f"a file below {root}",
            have=f"a path that leads to {path}",
            fix="move the file there, or set root to a folder that holds all of the files",
        )
    # Neither a folder nor a device or pipe, which might never end.
    if not found:
        raise _missing(name, f"no file at {path}")
    return path


def _missing(name: str, have: str) -> Unusable:
    return Unusable("media-missing", f"file {name!r} is missing", wanted="a file", have=have, fix="correct the path or restore the file")


def read_image(path: Path, *, block: int, most_blocks: int, max_pixels: int) -> np.ndarray:
    """Reads an image, upright, in colour and on white where it is transparent; of several frames the first.

    Args:
        path: the file.
        block: pixels along a side of a block of patches.
        most_blocks: most blocks that it may have after scaling.
        max_pixels: most pixels that it may have before.

    Returns:
        float32 [H, W, 3], from 0 to 1; H and W are multiples of `block`.

    Raises:
        Unusable: it is too large, has no area, or is no complete image.
        DataError: Pillow is not installed.
    """
    return _pixels(path, max_pixels, lambda height, width: scaled_size(height, width, block, most_blocks)).astype(np.float32) / 255


def read_pixels(path: Path, *, max_pixels: int) -> np.ndarray:
    """Reads an image as `read_image` does, in its own size.

    Args:
        path: the file.
        max_pixels: most pixels that it may have.

    Returns:
        uint8 [H, W, 3].

    Raises:
        Unusable: it is too large, has no area, or is no complete image.
        DataError: Pillow is not installed.
    """
    return _pixels(path, max_pixels, lambda height, width: (height, width))


def scaled_size(height: int, width: int, block: int, most_blocks: int) -> tuple[int, int]:
    """Returns the height and width to which an image is scaled: whole blocks, at most so many, at least one.

    >>> scaled_size(480, 640, 28, 1000), scaled_size(480, 640, 28, 100), scaled_size(1, 9000, 28, 100)
    ((476, 644), (224, 308), (28, 2800))
    """
    rows, columns = max(1, round(height / block)), max(1, round(width / block))
    if rows * columns > most_blocks:
        shrink = math.sqrt(most_blocks * block**2 / (height * width))
        rows, columns = (max(1, math.floor(side * shrink / block)) for side in (height, width))
    return min(rows, most_blocks) * block, min(columns, most_blocks) * block


def read_clip(path: Path, *, max_seconds: float) -> tuple[np.ndarray, int]:
    """Reads a wave file; several channels become their mean.

    Args:
        path: the file.
        max_seconds: longest sound that is read.

    Returns:
        float32 [T], from -1 to 1, and samples a second.

    Raises:
        Unusable: it is empty, too long, or no complete PCM wave file.
    """
    try:
        with wave.open(str(path), "rb") as clip:
            channels, width, rate, length = clip.getnchannels(), clip.getsampwidth(), clip.getframerate(), clip.getnframes()
            # Before its length, which is told in seconds.
            if not (1 <= width <= 4 and RATES[0] <= rate <= RATES[1]):
                raise _bad_clip(path, f"samples of {width} bytes, {rate} a second")
            if not length:
                raise Unusable("clip-empty", f"clip {str(path)!r} is empty", wanted="at least one sample of sound", have="0 samples")
            if length > max_seconds * rate:
                raise _too_large(path, f"at most {max_seconds:g} seconds", f"{length / rate:.1f} seconds")
            data = clip.readframes(length)
    except Unusable:
        raise
    except Exception as error:  # wave.Error, EOFError, struct.error, OSError
        raise _bad_clip(path, _cause(path, error)) from error
    if len(data) < length * channels * width:
        raise _bad_clip(path, f"{len(data)} bytes of sound, where its header says {length * channels * width}")
    return _loudness(data, width).reshape(length, channels).mean(axis=1, dtype=np.float32), rate


def _loudness(data: bytes, width: int) -> np.ndarray:
    """PCM of 1 to 4 bytes a sample -> float32 from -1 to 1."""
    if width == 1:  # the only one without a sign
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    # Shifted to the upper end of 32 bits, which keeps the sign.
    padded = np.zeros((len(data) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
    return padded.view("<i4")[:, 0].astype(np.float32) / 2**31


def _pixels(path: Path, max_pixels: int, size_of: Callable[[int, int], tuple[int, int]]) -> np.ndarray:
    """uint8 [H, W, 3]: an image, scaled to what `size_of` makes of its height and width."""
    images, operations = (import_extra(f"PIL.{name}", "pillow", "images") for name in ("Image", "ImageOps"))
    try:
        _check_area(path)
        with images.open(path) as image:
            _check_size(path, image.size, max_pixels)
            upright = operations.exif_transpose(image)
            height, width = size_of(upright.height, upright.width)
            return np.asarray(_in_colour(images, upright).resize((width, height), images.Resampling.BICUBIC))
    except Unusable:
        raise
    except (images.DecompressionBombError, images.DecompressionBombWarning) as error:
        raise _too_large(path, f"at most {max_pixels} pixels", str(error)) from error
    except Exception as error:  # Pillow's decoders raise what they like: OSError, SyntaxError, ValueError, struct.error, ...
        raise Unusable(
            "image-unreadable",
            f"image {str(path)!r} cannot be read",
            wanted="a complete image in a format that Pillow reads",
            have=_cause(path, error),
        ) from error


def _in_colour(images: Any, image: Any) -> Any:
    if image.mode.startswith("I;16"):  # Pillow would cut brightness above 255 off
        return images.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = images.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")


def _check_size(path: Path, size: tuple[int, int], max_pixels: int) -> None:
    """Refuses an image by what its header says, before anything is decoded."""
    width, height = size
    if width * height > max_pixels:
        raise _too_large(path, f"at most {max_pixels} pixels", f"{width} x {height} = {width * height} pixels")


def _check_area(path: Path) -> None:
    """Refuses an image of width or height 0, of which Pillow only says that it is no image."""
    with path.open("rb") as file:
        head = file.read(32)
    for magic, layout, offset in _SIZES:
        if head.startswith(magic) and len(head) >= offset + struct.calcsize(layout):
            width, height = struct.unpack_from(layout, head, offset)
            if not width or not height:
                have = f"{width} x {height} pixels"
                raise Unusable("image-without-area", f"image {str(path)!r} has no area", wanted="at least one pixel", have=have)


def _cause(path: Path, error: Exception) -> str:
    """What a decoder says; of a file without a byte in it, that."""
    return "an empty file: 0 bytes" if path.is_file() and not path.stat().st_size else f"{type(error).__name__}: {error}"


def _too_large(path: Path, wanted: str, have: str) -> Unusable:
    fix = "scale or cut the file, or raise max_pixels or max_seconds"
    return Unusable("media-too-large", f"file {str(path)!r} is too large", wanted=wanted, have=have, fix=fix)


def _bad_clip(path: Path, have: str) -> Unusable:
    wanted = f"a complete wave file of PCM samples of 1 to 4 bytes, {RATES[0]} to {RATES[1]} a second"
    return Unusable("clip-unreadable", f"clip {str(path)!r} cannot be read", wanted=wanted, have=have)
