"""The comparison on two pinned processes: layouts of one program, sums of what was measured, and the command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pinned.cases import case_of
from benchmarks.pinned.conductor import Measured
from benchmarks.pinned.layouts import Kind, Layout, balanced, batch_arrays
from benchmarks.pinned.report import BEGIN, END, inserted, largest_difference, padded_work, picture, rows_of, sentences, table

ROOT = Path(__file__).parent.parent
CASE = case_of("multimodal", quick=True)
MERGES = {"vision.hidden->llm.image": 4}
COST = {"fixed": 0, "per_unit": 1, "per_unit_squared": 0}
COSTS = {"sections": {name: {"forward": COST, "backward": COST} for name in ("vision", "llm")}}


def layout(kind: Kind) -> Layout:
    most = max(len(sample.items.get("image", ())) for sample in CASE.dataset.train)
    return Layout(kind=kind, most=most, row=64)


@pytest.mark.parametrize("kind", ["packed", "largest", "slots"])
def test_every_unit_of_an_image_lies_in_one_bin_once(kind: Kind) -> None:
    bins = balanced(CASE.dataset.train, layout(kind), ["image", "text"], 2)
    arrays = batch_arrays(CASE.graph(), CASE.dataset.specs, MERGES, layout(kind), bins)["vision"]
    lying = arrays["patches"][arrays["segment_ids"] > 0]
    wanted = np.concatenate([item.arrays["patches"] for sample in CASE.dataset.train for item in sample.items.get("image", ())])
    assert sorted(map(bytes, lying)) == sorted(map(bytes, wanted))


@pytest.mark.parametrize("kind", ["packed", "largest", "slots"])
def test_places_of_images_take_the_rows_of_their_own_images(kind: Kind) -> None:
    bins = balanced(CASE.dataset.train, layout(kind), ["image", "text"], 2)
    arrays = batch_arrays(CASE.graph(), CASE.dataset.specs, MERGES, layout(kind), bins)
    for number, samples in enumerate(bins):
        vision, llm = ({name: array[number] for name, array in arrays[section].items()} for section in ("vision", "llm"))
        # The first patch of each row that comes out, by its flat number.
        firsts = vision["patches"].reshape(-1, vision["patches"].shape[-1])[::4]
        taken = llm["vision.hidden->llm.image"].reshape(-1)
        ids = llm["sample_ids"].reshape(-1)
        for sample in samples:
            own = [item.arrays["patches"][::4] for item in sample.items.get("image", ())]
            places = taken[(ids == sample.number) & (taken < len(firsts))]
            assert len(places) == sum(map(len, own))
            if own:
                np.testing.assert_array_equal(firsts[places], np.concatenate(own))


def test_padding_to_more_takes_more_rows() -> None:
    rows = {}
    for kind in ("packed", "largest", "slots"):
        bins = balanced(CASE.dataset.train, layout(kind), ["image", "text"], 2)
        rows[kind] = batch_arrays(CASE.graph(), CASE.dataset.specs, MERGES, layout(kind), bins)["vision"]["segment_ids"].size
    assert CASE.units()["vision"] <= rows["packed"] < rows["largest"] < rows["slots"]


def test_bins_are_balanced_in_both_streams() -> None:
    full = case_of("multimodal")
    packed = Layout(kind="packed", row=256)
    bins = balanced(full.dataset.train, packed, ["image", "text"], 2)
    for stream in ("image", "text"):
        loads = [sum(packed.load(stream, sample) for sample in samples) for samples in bins]
        assert max(loads) / min(loads) < 1.02


def measured(seconds: float, vision: int, loss: float = 2.0, **facts: object) -> Measured:
    told = {"scheduled": {"vision": vision, "llm": CASE.units()["llm"]}, **facts}
    return Measured(seconds=seconds, busy=(seconds, seconds / 2), losses=(loss,), facts=told)


def small_rows(loss: float = 2.0) -> dict:
    vision = CASE.units()["vision"]
    found = {
        "wavefront": [measured(2.0, vision, costs=COSTS, predicted=1.9, bound=1.8) for _ in range(3)],
        "in_order": [measured(2.8, vision, costs=COSTS, predicted=2.7, bound=1.8) for _ in range(3)],
        "one_largest": [measured(seconds, 3 * vision, loss) for seconds in (5.0, 4.0, 4.5)],
    }
    return rows_of(CASE, found)


def test_padding_counts_units_by_what_they_cost() -> None:
    assert padded_work({"a": 3.0, "b": 1.0}, {"a": 20, "b": 10}, {"a": 10, "b": 10}) == pytest.approx(70 / 40)


def test_table_has_medians_ranges_and_ratios() -> None:
    rows = small_rows()
    tokens = CASE.units()["llm"]
    line = next(line for line in table("multimodal", rows, {}).splitlines() if "largest size |" in line)
    part = rows["one_largest"].padding
    assert f"{tokens / 4.5:.0f} ({tokens / 5:.0f} to {tokens / 4:.0f}) | 4.50 | 2.25 | {part:.2f} | 100% and 50%" in line
    assert f"1.90 (+{2.0 / 1.9 - 1:.1%})" in table("multimodal", rows, {})


def test_ways_that_did_not_run_are_named() -> None:
    assert "| google-tunix, a row for each sample | did not run: no network |" in table("distillation", {}, {"tunix": "no network"})


def test_sentences_say_what_part_of_the_gap_is_closed() -> None:
    words = " ".join(sentences("multimodal", small_rows()))
    assert "closes 80% of the gap" in words
    assert "2.25 times, of which" in words


def test_losses_that_differ_are_found() -> None:
    assert largest_difference(small_rows()) == 0
    assert largest_difference(small_rows(loss=2.1)) == pytest.approx(0.05)


def test_picture_shows_every_way() -> None:
    drawn = picture({"multimodal": small_rows()})
    assert all(title in drawn for title in ("wavefront", "in order", "padded to the largest size"))


def test_words_take_the_place_of_those_between_the_marks() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert inserted(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="no two lines"):
        inserted("nothing", "new")


def test_results_have_a_place_for_the_tables() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are compared")
def test_the_command_compares_ways_that_train_alike(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    command = [
        sys.executable,
        "-m",
        "benchmarks.pinned",
        "--quick",
        "--only=multimodal/wavefront,multimodal/shared,multimodal/one_largest",
        f"--results={page}",
    ]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "| time-shared on both cores |" in page.read_text()
    assert (tmp_path / "pinned.svg").read_text().startswith("<svg")
