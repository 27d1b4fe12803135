"""Multimodal graphs: sections that run only for the samples that need them give the gradients of one monolithic program.

PEER_CASES 1 to 9 and 22.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import optax
import pytest
from engines import Setup, bounded, build, worst_leaf
from hypothesis import given
from hypothesis import strategies as st
from multimodal_support import SPECS, omni, omni_samples

from maestro_jax.data import Sample
from maestro_jax.errors import DataError, EdgeError
from maestro_jax.runtime import feeds
from maestro_jax.schedules import InOrder, Sequential

SAMPLES = omni_samples(12)


def built(policy: Any = None, **layout: Any) -> Setup:
    return build(omni(**layout), specs=SPECS, policy=policy)


def assert_exact(setup: Setup, samples: list[Sample]) -> dict[str, dict[str, np.ndarray]]:
    gradients = setup.gradients(samples)
    assert worst_leaf(gradients, setup.reference(samples)[1]) < 1e-5
    return gradients


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], str, Any]:
    """Fields for every section, the kinds of items that samples have, and a policy."""
    ladders = {"vision": ((6, 12), (16,), (8, 24)), "audio": ((5,), (8, 16)), "llm": ((40,), (36, 80)), "generator": ((1,), (2, 4))}
    layout = {}
    for name, choices in ladders.items():
        layout[name] = {
            "replicas": draw(st.sampled_from((1, 2))),
            "microbatch": draw(st.sampled_from(choices)),
            "trainable": draw(st.booleans()),
            "submesh": draw(st.sampled_from((None, "shared"))),
            "remat": draw(st.sampled_from(("none", "inputs"))),
        }
    if not any(fields["trainable"] for fields in layout.values()):
        layout["vision"]["trainable"] = True
    return layout, draw(st.sampled_from(("tiar", "tia", "ti", "tr", "t"))), draw(st.sampled_from((InOrder(), Sequential())))


def check(found: tuple[dict[str, Any], str, Any]) -> None:
    layout, kinds, policy = found
    samples = omni_samples(10, seed=3, kinds=kinds)
    # The reference needs an item of each stream somewhere; one sample has all of them.
    assert_exact(built(policy, **layout), [*samples, everything()])


def everything() -> Sample:
    """A sample with items in every stream."""
    return next(dataclasses.replace(s, id="all") for s in omni_samples(50, seed=9) if len(s.items) == 4)


@bounded(5)
@given(layouts())
def test_random_multimodal_layouts(found: tuple[dict[str, Any], str, Any]) -> None:
    check(found)


@pytest.mark.slow
@bounded(40)
@given(layouts())
def test_many_random_multimodal_layouts(found: tuple[dict[str, Any], str, Any]) -> None:
    check(found)


@pytest.mark.quick
@pytest.mark.parametrize("replicas", [(1, 1), (4, 1), (1, 2), (2, 4)], ids=str)
def test_encoder_gradients_for_every_pair_of_replica_counts(replicas: tuple[int, int]) -> None:
    """PEER_CASES 1 and 2."""
    shared = {"submesh": "rest"}
    setup = built(vision={"replicas": replicas[0]}, llm={"replicas": replicas[1]}, audio=shared, generator=shared)
    assert_exact(setup, SAMPLES)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return built(vision={"replicas": 2}, audio={"submesh": "rest"}, generator={"submesh": "rest"}, llm={"replicas": 2})


def test_a_batch_without_a_modality_issues_no_task_and_has_zero_gradients(setup: Setup) -> None:
    """PEER_CASES 7."""
    samples = omni_samples(8, kinds="t")
    tasks = setup.preparer.prepare(samples, 0).schedule.tasks
    assert {t.section for t in tasks if t.kind != "update"} == {"llm"}
    gradients = setup.gradients(samples)
    for name in ("vision", "audio", "generator"):
        assert all((g == 0).all() for g in gradients[name].values())
    assert all(np.abs(g).max() > 0 for g in gradients["llm"].values())


def test_one_sample_with_all_images(setup: Setup) -> None:
    """PEER_CASES 8: fewer images than replicas."""
    assert_exact(setup, [*omni_samples(7, kinds="t"), everything()])


def test_a_modality_that_nothing_takes_trains_nothing() -> None:
    """Images that no token takes: the encoder runs, and its gradient is zero."""
    sample = everything()
    item = sample.items["text"][0]
    text = dataclasses.replace(item, arrays={**item.arrays, "image_rows": np.full(item.units, -1, np.int32)})
    setup = built()
    gradients = setup.gradients([dataclasses.replace(sample, items={**sample.items, "text": (text,)}), *SAMPLES[:0]])
    assert all((g == 0).all() for g in gradients["vision"].values())
    assert all(np.abs(g).max() > 0 for g in gradients["audio"].values())


@pytest.mark.parametrize("frozen", [("llm",), ("vision", "audio"), ("vision", "llm", "generator")], ids=str)
def test_gradients_pass_through_frozen_sections(frozen: tuple[str, ...]) -> None:
    setup = built(**{name: {"trainable": False} for name in frozen})
    gradients = assert_exact(setup, SAMPLES)
    assert gradients.keys() == {"vision", "audio", "llm", "generator"} - set(frozen)


def test_frozen_sections_keep_their_bits_and_have_no_optimizer_state() -> None:
    setup = build(omni(llm={"trainable": False}), specs=SPECS, optimizer=optax.adam(1e-2))
    before = setup.parameters()
    for step in range(3):
        setup.engine.step(setup.preparer.prepare(SAMPLES, step))
    after = setup.parameters()
    assert all(before["llm"][p].tobytes() == after["llm"][p].tobytes() for p in before["llm"])
    assert all(not np.array_equal(before["vision"][p], after["vision"][p]) for p in before["vision"])
    assert setup.engine.states["llm"].optimizer is None
    assert setup.engine.states["llm"].master == {}


@pytest.mark.quick
def test_a_shuffled_route_is_caught(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEER_CASES 5: images that went to the wrong places of the right micro-batch."""
    right = feeds.route

    def shuffled(*args: Any) -> Any:
        found = right(*args)
        if found is None or found.rows < 2:
            return found
        place = found.place.copy()
        place[: found.rows] = np.roll(place[: found.rows], 1)
        return dataclasses.replace(found, place=place)

    monkeypatch.setattr(feeds, "route", shuffled)
    with pytest.raises(EdgeError, match="met the wrong consumer"):
        setup.gradients(SAMPLES)


@pytest.mark.parametrize(
    ("rows", "reason"), [([0, 0], "at most once"), ([0, 99], "at most once")], ids=["a row twice", "a row that is not there"]
)
def test_pointers_that_cannot_be_followed_are_refused_and_named(setup: Setup, rows: list[int], reason: str) -> None:
    sample = everything()
    item = sample.items["text"][0]
    pointers = np.full(item.units, -1, np.int32)
    pointers[: len(rows)] = rows
    text = dataclasses.replace(item, arrays={**item.arrays, "image_rows": pointers})
    wrong = dataclasses.replace(sample, items={**sample.items, "text": (text,)})
    with pytest.raises(DataError, match=r"sample 'all' cannot cross edge vision\.hidden->llm\.image") as caught:
        setup.preparer.prepare([wrong], 0)
    assert reason in caught.value.wanted
    assert caught.value.anchor == "route-rows"


def test_a_denominator_for_each_loss(setup: Setup) -> None:
    """Losses in two sections, each divided by what it counts in the whole batch."""
    report = setup.engine.step(setup.preparer.prepare(SAMPLES, 0))
    counts = report.prepared.counts
    assert counts["generator", "redraw"] == sum("redraw" in s.items for s in SAMPLES)
    assert counts["llm", "cross_entropy"] == sum(float(s.items["text"][0].arrays["loss_mask"].sum()) for s in SAMPLES)
    values = report.read(setup.objectives())
    assert np.isfinite([values["llm/cross_entropy"], values["generator/redraw"]]).all()
