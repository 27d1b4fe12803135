"""Log-mel frames: against the formula, at every sampling rate, and how many there are."""

from __future__ import annotations

import numpy as np
import pytest

from maestro_jax.data.mel import audio_item, audio_specs, frames_of, log_mel, mel_bands, samples_of

BAND = (300.0, 3400.0)


def sine(frequency: float, rate: int, seconds: float = 0.2) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


def test_a_frame_is_the_logarithm_of_the_power_in_each_band() -> None:
    sound = np.random.default_rng(0).standard_normal(1000)
    bands = mel_bands(8000, 10, BAND)
    points = 2 * (bands.shape[1] - 1)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200)
    turns = np.exp(-2j * np.pi * np.outer(np.arange(bands.shape[1]), np.arange(200)) / points)
    power = abs(turns @ (sound[240:440] * window / window.sum())) ** 2
    np.testing.assert_allclose(log_mel(sound, 8000, 10, BAND)[3], (np.log10(bands @ power + 1e-8) + 4) / 4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [11_025, 16_000, 44_100, 48_000])
@pytest.mark.parametrize("frequency", [697.0, 1477.0])
def test_frames_do_not_depend_on_the_sampling_rate(rate: int, frequency: float) -> None:
    want, have = (log_mel(sine(frequency, each), each, 40, BAND)[5] for each in (8000, rate))
    loud = want > 0
    assert loud.sum() >= 2
    np.testing.assert_allclose(have[loud], want[loud], atol=0.1)
    assert have.argmax() == want.argmax()


def test_silence_is_the_floor_and_a_loud_tone_is_near_one() -> None:
    np.testing.assert_array_equal(log_mel(np.zeros(400), 8000, 4, BAND), -1)
    assert 0.7 < log_mel(sine(1000, 8000), 8000, 4, BAND).max() < 1


@pytest.mark.parametrize(("rate", "mels", "band"), [(8000, 80, (0.0, 4000.0)), (16_000, 80, (0.0, 8000.0)), (44_100, 128, BAND)])
def test_no_band_is_empty(rate: int, mels: int, band: tuple[float, float]) -> None:
    assert (mel_bands(rate, mels, band).max(axis=1) > 0).all()


def test_frequencies_above_half_the_rate_are_silent() -> None:
    frames = log_mel(np.random.default_rng(0).standard_normal(8000), 8000, 20, (0.0, 16_000.0))
    assert (frames[:, -1] == -1).all()
    assert (frames[:, 0] > -1).all()


def test_a_long_clip_is_cut_at_no_frame() -> None:
    sound = np.random.default_rng(0).standard_normal(80 * 1100)
    whole = log_mel(sound, 8000, 4, BAND)
    np.testing.assert_array_equal(whole[1020:1030], log_mel(sound[1020 * 80 : 1029 * 80 + 200], 8000, 4, BAND))


@pytest.mark.parametrize("rate", [8000, 11_025, 44_100])
@pytest.mark.parametrize("samples", [1, 7, 199, 200, 201, 5000])
def test_every_sample_of_a_clip_is_in_a_frame(rate: int, samples: int) -> None:
    frames = frames_of(samples, rate, stride=4)
    assert frames % 4 == 0
    assert samples_of(frames, rate) >= samples
    assert frames == 4 or samples_of(frames - 4, rate) < samples
    sound = np.zeros(samples)
    sound[-1] = 1.0
    item = audio_item(sound, rate, mels=4, stride=4, band=BAND)
    assert item.units == frames
    assert item.arrays["frames"].shape == (frames, *audio_specs(4)["frames"].shape)
    assert item.arrays["frames"].dtype == audio_specs(4)["frames"].dtype


def test_a_clip_that_fills_its_frames_stays_as_it_is() -> None:
    sound = sine(1000, 8000, 0.205)[: samples_of(16, 8000)]
    np.testing.assert_allclose(
        audio_item(sound, 8000, mels=8, stride=8, band=BAND).arrays["frames"], log_mel(sound, 8000, 8, BAND), atol=1e-4
    )
