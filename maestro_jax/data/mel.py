"""Sound into log-mel frames, the units of an audio encoder.

Every 10 ms a frame is what lies in a window of 25 ms: its power spectrum in bands that are evenly spaced on the mel scale, as a
logarithm. Windows and bands are given in seconds and hertz, so sound of any sampling rate becomes the same frames and is never
resampled.

The mel scale is mel = 2595 log10(1 + f / 700) with triangular bands of height 1 (S. Young et al., "The HTK Book", 2006, section 5.4);
logarithm and scaling, (log10 power + 4) / 4, are those of Whisper (A. Radford et al., arXiv 2212.04356), but for its floor, which
here is a fixed power of 1e-8, so that no frame depends on others of its clip. A power of 1 is that of the loudest constant.

Dimensions: T samples of sound, F frames, S samples of a window, K frequencies of a spectrum, M bands.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from .samples import ArraySpec, Item

WINDOW, HOP = 0.025, 0.010
"""Length of a window, and from the beginning of one to that of the next, in seconds."""

FLOOR = 1e-8
_FRAMES_AT_ONCE = 1024  # bounds the memory of windows and spectra, which are far larger than the frames


def audio_specs(mels: int) -> dict[str, ArraySpec]:
    """Returns the arrays of an item that `audio_item` makes: "frames" float32 [F, M]."""
    return {"frames": ArraySpec(shape=(mels,), dtype="float32")}


def audio_item(sound_T: np.ndarray, rate: int, *, mels: int, stride: int, band: tuple[float, float]) -> Item:
    """Makes the frames of a clip; silence is put behind its end, until the number of frames is a multiple of `stride`.

    Args:
        sound_T: loudness from -1 to 1, float; at least one sample.
        rate: samples a second.
        mels: M.
        stride: how many frames become one row of the encoder's output.
        band: lowest and highest frequency, in hertz; what lies above half the rate is silent.
    """
    frames = frames_of(len(sound_T), rate, stride)
    padded_T = np.zeros(samples_of(frames, rate), np.float32)
    padded_T[: min(len(sound_T), len(padded_T))] = sound_T[: len(padded_T)]
    return Item(units=frames, arrays={"frames": log_mel(padded_T, rate, mels, band)})


def frames_of(samples: int, rate: int, stride: int) -> int:
    """Returns how many frames hold that many samples of sound: the least multiple of `stride`.

    >>> [frames_of(n, 8000, 4) for n in (1, 200, 440, 441)]
    [4, 4, 4, 8]
    """
    least = 1 + max(0, math.ceil((samples - _window(rate)) / _hop(rate)))
    return -(-least // stride) * stride


def samples_of(frames: int, rate: int) -> int:
    """Returns how many samples of sound that many frames hold."""
    return _window(rate) + (frames - 1) * _hop(rate)


def log_mel(sound_T: np.ndarray, rate: int, mels: int, band: tuple[float, float]) -> np.ndarray:
    """Returns float32 [F, M] of all windows that lie in the sound, about -1 (silence) to 1.

    >>> second = np.arange(8000) / 8000
    >>> frames_FM = log_mel(np.sin(2 * np.pi * 1000 * second), 8000, mels=8, band=(0, 4000))
    >>> frames_FM.shape, int(frames_FM[50].argmax()), int(mel_bands(8000, 8, (0, 4000))[:, 32].argmax())
    ((98, 8), 3, 3)
    """
    window_S = np.hanning(_window(rate) + 1)[:-1]
    bands_MK = mel_bands(rate, mels, band)
    points = 2 * (bands_MK.shape[1] - 1)
    windows_FS = np.lib.stride_tricks.sliding_window_view(sound_T, len(window_S))[:: _hop(rate)]
    found = []
    for start in range(0, len(windows_FS), _FRAMES_AT_ONCE):
        spectrum_FK = np.fft.rfft(windows_FS[start : start + _FRAMES_AT_ONCE] * (window_S / window_S.sum()), points)
        power_FM = (spectrum_FK.real**2 + spectrum_FK.imag**2) @ bands_MK.T
        found.append(((np.log10(power_FM + FLOOR) + 4) / 4).astype(np.float32))
    return np.concatenate(found)


@functools.lru_cache
def mel_bands(rate: int, mels: int, band: tuple[float, float]) -> np.ndarray:
    """Returns the bands [M, K]: how much of each frequency's power they take, at so many frequencies that none of them is between two."""
    low, high = (2595 * math.log10(1 + frequency / 700) for frequency in band)
    edges = 700 * (10 ** (np.linspace(low, high, mels + 2) / 2595) - 1)
    points = 1
    while points < _window(rate) or rate / points > np.diff(edges).min():
        points *= 2
    frequencies_K = np.arange(points // 2 + 1) * rate / points
    rising_MK = (frequencies_K - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling_MK = (edges[2:, None] - frequencies_K) / np.diff(edges)[1:, None]
    return np.clip(np.minimum(rising_MK, falling_MK), 0, None)


def _window(rate: int) -> int:
    return max(1, round(WINDOW * rate))


def _hop(rate: int) -> int:
    return max(1, round(HOP * rate))
