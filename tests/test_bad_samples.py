"""When a run ends because one sample after the other is bad, and what is said of samples that are left out."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from maestro_jax.bad_samples import BadSampleLimit, cause_of
from maestro_jax.errors import DataError, TrainingError
from maestro_jax.runtime.global_batch import BadSample

TEXT, IMAGE = ("text",), ("text", "image")

Steps = Sequence[tuple[Sequence[Sequence[str]], Sequence[BadSample]]]
"""Streams of good samples, and bad ones, of consecutive steps."""


def bad(streams: Sequence[str] = (), kind: str = "media-missing", name: str = "a") -> BadSample:
    error = DataError(f"sample {name!r} is bad.", wanted="a file", have="none", fix="restore it", anchor=kind, set_by="a.jsonl:3")
    return BadSample(error, tuple(streams))


def ends(limit: BadSampleLimit, steps: Steps, first: int = 1) -> TrainingError | None:
    try:
        for step, (good, left_out) in enumerate(steps, start=first):
            limit.add(step, good, left_out)
    except TrainingError as error:
        return error
    return None


def made(limit: int = 2, batch: int = 2, steps: int = 1000) -> BadSampleLimit:
    return BadSampleLimit(limit, batch=batch, steps=steps, set_by="a.gin:9  train.skip_limit")


def test_more_steps_without_a_good_sample_than_the_limit_end_a_run() -> None:
    assert ends(made(), [([TEXT], [])] + [([], [bad(), bad()])] * 2) is None
    error = ends(made(), [([TEXT], [])] + [([], [bad(), bad()])] * 3)
    assert error is not None
    assert error.what == "training ends at step 4: no sample can be used."
    assert error.wanted == "a good sample among any 6, which is what skip_limit + 1 steps take"


@pytest.mark.parametrize(("limit", "batch", "last"), [(2, 8, 1), (10, 8, 2), (0, 1, 1), (10, 1, 11)])
def test_a_run_that_begins_without_a_good_sample_ends_sooner(limit: int, batch: int, last: int) -> None:
    steps = [([], [bad() for _ in range(batch)])] * 20
    error = ends(made(limit, batch), steps)
    assert error is not None
    assert error.what == f"training ends at step {last}: no sample can be used."
    assert error.wanted == f"a good sample among the first {max(limit + 1, batch)}"


def test_a_limit_of_0_ends_a_run_at_the_first_such_step() -> None:
    error = ends(made(0), [([TEXT], [bad()]), ([], [bad()]), ([], [bad()])])
    assert error is not None
    assert "step 3" in error.what


def test_one_good_sample_interrupts_the_row() -> None:
    assert ends(made(), ([([TEXT], [bad()])] + [([], [bad(), bad()])] * 2) * 50) is None


def test_samples_of_a_stream_that_are_all_bad_end_a_run_in_which_others_are_good() -> None:
    """Inputs of two encoders exchanged: what has images is bad, and text goes on."""
    steps = [([TEXT], [bad(IMAGE, "route-rows", str(n))]) for n in range(10)]
    error = ends(made(), steps)
    assert error is not None
    assert error.what == "training ends at step 3: no sample with items of stream 'image' can be used."
    assert error.wanted == "a good sample with items of stream 'image' among the first 3"
    assert ends(made(), [*steps[:2], ([IMAGE], []), *steps[:5]]) is None
    error = ends(made(), [*steps[:2], ([IMAGE], []), *steps[:6]])
    assert error is not None
    assert "step 9" in error.what


def test_many_bad_samples_of_a_stream_with_good_ones_between_them_end_no_run() -> None:
    assert ends(made(), [([TEXT, IMAGE], [bad(IMAGE)] * 9)] * 50) is None


def test_a_sample_that_could_not_be_read_counts_for_no_stream() -> None:
    assert ends(made(), [([TEXT], [bad()])] * 50) is None


def test_a_short_run_without_a_good_sample_ends_with_the_cause() -> None:
    error = ends(made(10, steps=2), [([], [bad(), bad()])] * 2)
    assert error is not None
    assert "step 2" in error.what
    assert ends(made(10, steps=2), [([TEXT], [bad()]), ([], [bad(), bad()])]) is None


def test_steps_without_any_sample_end_no_run() -> None:
    assert ends(made(0, steps=3), [([], [])] * 3) is None


def test_the_error_names_the_most_frequent_kind_and_its_first_sample() -> None:
    with pytest.raises(TrainingError) as caught:
        made(limit=1).add(7, [], [bad((), "clip-empty", "first"), bad((), "media-missing", "second"), bad(name="third"), bad()])
    assert str(caught.value) == (
        "training ends at step 7: no sample can be used.\n"
        "  wanted   a good sample among the first 2\n"
        "  have     4 bad ones in a row: media-missing 3, clip-empty 1\n"
        "           the first of kind media-missing:\n"
        "           sample 'second' is bad.\n"
        "             wanted   a file\n"
        "             have     none\n"
        "             set by   a.jsonl:3\n"
        "             fix      restore it\n"
        "             help     docs/errors.md#media-missing\n"
        "  set by   a.gin:9  train.skip_limit\n"
        "  fix      where all are bad alike, mend the configuration (inputs, reads and microbatch of sections; root and limits of the "
        "data); otherwise mend the data, or raise skip_limit\n"
        "  help     docs/errors.md#no-good-sample"
    )


@pytest.mark.parametrize("cut", [1, 4])
def test_a_restored_limit_ends_as_if_never_interrupted(cut: int) -> None:
    steps = [([IMAGE], [bad()]), *[([TEXT], [bad(IMAGE, name=str(n))]) for n in range(9)]]
    whole, first, second = made(), made(), made()
    wanted = ends(whole, steps)
    assert wanted is not None
    ends(first, steps[:cut])
    second.restore(json.loads(json.dumps(first.state())))
    assert str(ends(second, steps[cut:], first=cut + 1)) == str(wanted)


def test_a_restored_limit_knows_that_there_was_a_good_sample() -> None:
    first, second = made(steps=2), made(steps=2)
    first.add(1, [TEXT], [])
    second.restore(first.state())
    second.add(2, [], [bad()])
    with pytest.raises(TrainingError):
        made(steps=2).add(2, [], [bad()])


def test_a_cause_is_one_line_with_place_and_what_was_found() -> None:
    assert cause_of(bad().error) == "sample 'a' is bad. Have: none; wanted: a file; set by a.jsonl:3."
