"""Telephone tones: the frequencies of the standard, in order, among noise, and always the same ones."""

from __future__ import annotations

import numpy as np
import pytest

from maestro_jax.data.mel import frames_of
from maestro_jax.data.tones import COLUMNS, KEYS, RATE, ROWS, call, frequencies

STANDARD = {"1": (697, 1209), "3": (697, 1477), "5": (770, 1336), "9": (852, 1477), "*": (941, 1209), "0": (941, 1336), "#": (941, 1477)}


def heard(sound: np.ndarray) -> str:
    """The keys in a sound without noise: the strongest frequency near each of the two groups, stretch by stretch."""
    loud = np.convolve(abs(sound), np.ones(80) / 80, "same") > 1e-3
    edges = np.flatnonzero(np.diff(loud.astype(int), prepend=0, append=0))
    keys = ""
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        power = abs(np.fft.rfft(sound[start:stop], RATE)) ** 2
        row, column = (
            min(group, key=lambda f: abs(f - low - power[low:high].argmax()))
            for group, low, high in ((ROWS, 600, 1050), (COLUMNS, 1150, 1750))
        )
        keys += next(key for key in KEYS if frequencies(key) == (row, column))
    return keys


def test_frequencies_are_those_of_the_standard() -> None:
    assert {key: frequencies(key) for key in STANDARD} == STANDARD
    assert {key: frequencies(key)[1] for key in "ABCD"} == dict.fromkeys("ABCD", 1633)
    assert len({frequencies(key) for key in KEYS}) == 16


@pytest.mark.parametrize("keys", [KEYS, "1111", "5"])
def test_keys_are_heard_in_order(keys: str) -> None:
    for seed in range(5):
        assert heard(call(keys, np.random.default_rng(seed), noise=0.0, stride=4)) == keys


def test_noise_is_over_the_whole_clip() -> None:
    clean, noisy = (call("12", np.random.default_rng(0), noise=noise, stride=4) for noise in (0.0, 0.1))
    assert (noisy - clean).std() == pytest.approx(0.1, rel=0.1)
    assert (noisy - clean)[-200:].std() == pytest.approx(0.1, rel=0.3)


def test_a_clip_fills_whole_frames() -> None:
    for seed in range(9):
        sound = call("123"[: seed % 3 + 1], np.random.default_rng(seed), noise=0.0, stride=8)
        assert sound.dtype == np.float32
        assert frames_of(len(sound), RATE, 1) == frames_of(len(sound), RATE, 8)


def test_a_clip_depends_on_its_random_numbers_alone() -> None:
    one, two, other = (call("12", np.random.default_rng(seed), noise=0.1, stride=4) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, two)
    assert len(one) != len(other) or (one != other).any()
