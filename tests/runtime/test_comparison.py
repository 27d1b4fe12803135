"""How gradients are compared, and how the result prints itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from maestro_jax.errors import GraphError
from maestro_jax.runtime.comparison import FLOOR, LeafComparison, Verification, compare

ONE = {"a": {"w": np.array([3.0, -4.0], np.float32), "bias": np.array([2e-8], np.float32)}}


def verification(*relative: float, limit: float = 1e-4) -> Verification:
    leaves = tuple(LeafComparison(section="a<b", path=f"w{n}", difference=r, scale=1.0, relative=r) for n, r in enumerate(relative))
    return Verification(leaves=leaves, limit=limit, samples=("s0", "s1"), notes=("more & more",), origins={"a<b": "x.gin:3"})


def only(have: np.ndarray | None, want: np.ndarray | None) -> LeafComparison:
    (found,) = compare({"a": {} if have is None else {"w": have}}, {"a": {} if want is None else {"w": want}})
    return found


@pytest.mark.quick
def test_a_difference_is_relative_to_the_largest_value_of_its_leaf() -> None:
    found = only(np.array([3.0, -4.5], np.float32), np.array([3.0, -4.0], np.float32))
    assert (found.difference, found.scale, found.relative) == (0.5, 4.0, 0.125)


def test_a_leaf_that_is_rounding_only_is_measured_by_its_section() -> None:
    """The computed gradient of such a leaf may have any sign; 1e-4 of the floor is 4e-6 here."""
    rounding = {"a": {**ONE["a"], "bias": np.array([-3e-8], np.float32)}}
    bias = compare(rounding, ONE)[1]
    assert bias.scale == pytest.approx(FLOOR * 4)
    assert bias.relative < 1e-5
    wrong = {"a": {**ONE["a"], "bias": np.array([1e-5], np.float32)}}
    assert compare(wrong, ONE)[1].relative > 1e-4


def test_sections_do_not_lend_each_other_their_scale() -> None:
    want = {"small": {"w": np.array([1e-9], np.float32)}, "large": {"w": np.array([1e9], np.float32)}}
    found = compare({**want, "small": {"w": np.array([2e-9], np.float32)}}, want)
    assert [leaf.relative for leaf in found] == pytest.approx([1.0, 0.0])


def test_where_there_is_no_gradient_nothing_but_zero_is_right() -> None:
    none = np.zeros(2, np.float32)
    assert only(none, none).relative == 0
    assert only(np.array([0, 1e-30], np.float32), none).relative == math.inf


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_values_that_are_not_finite_are_wrong_on_either_side(wrong: float) -> None:
    good, bad = np.ones(2, np.float32), np.array([1, wrong], np.float32)
    found = {leaf.remark: leaf.relative for leaf in (only(bad, good), only(good, bad), only(bad, bad))}
    assert found == {
        "not finite on the plan": math.inf,
        "not finite in one program": math.inf,
        "not finite on the plan and in one program": math.inf,
    }


def test_a_leaf_that_is_not_finite_leaves_the_scale_of_others() -> None:
    want = {"a": {"w": np.array([1.0, np.nan]), "v": np.array([1.0])}}
    assert compare(want, want)[1].scale == 1.0


def test_leaves_must_exist_with_one_shape_on_both_sides() -> None:
    one = np.ones(2, np.float32)
    assert only(None, one).remark == "missing on the plan"
    assert only(one, None).remark == "missing in one program"
    assert only(np.ones(3, np.float32), one).remark == "shape [3] on the plan, [2] in one program"
    assert only(None, one).relative == math.inf


def test_the_table_is_aligned_and_names_the_worst_leaf() -> None:
    assert str(verification(1e-7, 3e-6)) == (
        "gradients of the plan and of one program on 2 samples: equal (limit 0.0001 of max|g|)\n"
        "section  parameters  worst  max|difference|  of max|g|\n"
        "a<b               2  w1            3.00e-06   3.00e-06  ok\n"
        "note: more & more"
    )
    assert "NOT EQUAL" in str(verification(1e-3))
    assert str(verification(1e-3)).splitlines()[2].endswith("WRONG")


def test_the_limit_itself_is_right() -> None:
    assert verification(1e-4).ok
    assert not verification(1.01e-4).ok
    assert verification(1e-2, limit=0.1).ok


def test_a_notebook_gets_a_table_with_escaped_text() -> None:
    page = verification(1e-7)._repr_html_()
    assert "<td>a&lt;b</td><td>1</td><td>w0</td><td>1.00e-07</td>" in page
    assert "<p>note: more &amp; more</p>" in page


def test_a_refusal_names_the_worst_leaf_and_counts_the_others() -> None:
    verification(1e-5).require()
    with pytest.raises(GraphError) as caught:
        verification(0.5, 1e-5, 0.75).require()
    error = caught.value
    assert error.what == "the plan computes another gradient of section 'a<b' than one program does."
    assert error.have.startswith("w2: a difference of 0.75, 0.75 of max|g| = 1\n2 of 3 parameters are wrong\n")
    assert (error.set_by, error.anchor) == ("x.gin:3", "verify-step")
