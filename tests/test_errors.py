"""The five parts of an error, and what it knows of where values were set."""

from __future__ import annotations

import pickle

import pytest

from maestro_jax import errors

PARTS = {
    "wanted": "8 devices",
    "have": "6 devices\nof 8",
    "fix": "lower tensor",
    "anchor": "mesh-too-small",
    "set_by": "a.gin:14  x/Section.axes",
}


@pytest.mark.quick
def test_the_text_has_five_parts_and_a_link() -> None:
    assert str(errors.MeshError("section 'x' cannot be placed.", **PARTS)) == (
        "section 'x' cannot be placed.\n"
        "  wanted   8 devices\n"
        "  have     6 devices\n"
        "           of 8\n"
        "  set by   a.gin:14  x/Section.axes\n"
        "  fix      lower tensor\n"
        "  help     docs/errors.md#mesh-too-small"
    )


def test_errors_survive_pickling() -> None:
    error = errors.DataError("a sample is bad.", **PARTS)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.DataError
    assert str(copy) == str(error)
    assert copy.anchor == "mesh-too-small"


def test_every_kind_is_a_maestro_error() -> None:
    kinds = (
        errors.ConfigError,
        errors.GraphError,
        errors.EdgeError,
        errors.MeshError,
        errors.ScheduleError,
        errors.DataError,
        errors.CheckpointError,
        errors.TrainingError,
    )
    assert all(issubclass(kind, errors.MaestroError) for kind in kinds)


def test_origin_of_a_value() -> None:
    class Thing:
        name = "student"

    thing = Thing()
    assert errors.set_by(thing, "axes") == "the calling program: Thing('student').axes"
    thing._provenance = {"axes": "a.gin:3  student/Thing.axes"}  # pyright: ignore[reportAttributeAccessIssue]
    assert errors.set_by(thing, "axes") == "a.gin:3  student/Thing.axes"
    assert errors.set_by(thing, "rules") == "the calling program: Thing('student').rules"


def test_suggestions_only_for_close_names() -> None:
    assert errors.did_you_mean("studnet", ["teacher", "student"]) == " (did you mean 'student'?)"
    assert errors.did_you_mean("vision", ["teacher", "student"]) == ""
