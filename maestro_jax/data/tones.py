"""The tones of telephone keys, made by formula.

A key sounds as one frequency of its row and one of its column together (dual-tone multi-frequency signalling, ITU-T Recommendation
Q.23, "Technical features of push-button telephone sets"). Each tone has a length, a loudness and a pitch of its own, within what
telephones do (Q.23 lets a frequency be off by 1.8 %), and there is noise over all of it.
"""

from __future__ import annotations

import numpy as np

from .mel import frames_of, samples_of

ROWS, COLUMNS = (697.0, 770.0, 852.0, 941.0), (1209.0, 1336.0, 1477.0, 1633.0)
"""Frequencies in hertz."""

KEYS = "123A456B789C*0#D"
"""The keys, row by row."""

RATE = 8000
"""Samples a second, as in telephony."""

BAND = (300.0, 3400.0)
"""What a telephone line carries, in hertz."""

_TONE, _PAUSE = (0.08, 0.14), (0.05, 0.10)  # seconds
_LOUDNESS = (0.1, 0.4)  # of each of the two frequencies
_OFF = 0.015  # share by which a frequency may be off


def frequencies(key: str) -> tuple[float, float]:
    """Returns the two frequencies of a key, in hertz.

    >>> frequencies("5")
    (770.0, 1336.0)
    """
    row, column = divmod(KEYS.index(key), len(COLUMNS))
    return ROWS[row], COLUMNS[column]


def call(keys: str, random: np.random.Generator, *, noise: float, stride: int) -> np.ndarray:
    """Returns the sound of keys that are pressed one after another, with a pause before, between and behind them.

    Args:
        keys: of `KEYS`.
        random: decides length, loudness, pitch and phase of each tone, and the noise.
        noise: standard deviation of the noise; the loudest possible tone is 0.8.
        stride: the sound fills a number of frames that this divides.

    Returns:
        float32 `[samples]`, at `RATE`.
    """
    parts = [np.zeros(_samples(random, _PAUSE))]
    for key in keys:
        seconds = np.arange(_samples(random, _TONE)) / RATE
        tone = np.zeros(len(seconds))
        for frequency in frequencies(key):
            turns = frequency * random.uniform(1 - _OFF, 1 + _OFF) * seconds + random.random()
            tone += random.uniform(*_LOUDNESS) * np.sin(2 * np.pi * turns)
        parts += [tone, np.zeros(_samples(random, _PAUSE))]
    clean = np.concatenate(parts)
    sound = noise * random.standard_normal(samples_of(frames_of(len(clean), RATE, stride), RATE))
    sound[: len(clean)] += clean
    return sound.astype(np.float32)


def _samples(random: np.random.Generator, seconds: tuple[float, float]) -> int:
    return round(random.uniform(*seconds) * RATE)
