"""Random graphs of sections that run for some samples only give the gradients of one monolithic program, whatever the layout and order.

PEER_CASES 1 to 9 and 22.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import bounded, build, worst_leaf
from hypothesis import given
from random_graphs import DEVICES, Case, Part, Taken, cases, graph_of, samples_of, specs_of

from maestro_jax.graph import Objective

TOLERANCE = 1e-5


def check(case: Case) -> None:
    setup = build(case.graph, specs=case.specs, policy=case.policy, devices=DEVICES)
    gradients, (_, want) = setup.gradients(case.samples), setup.reference([*case.samples, *case.absent])
    assert worst_leaf(gradients, want) < TOLERANCE
    for name, leaves in gradients.items():
        if not case.runs(name):
            assert all((g == 0).all() for g in leaves.values())
    last = case.graph.sections[-1]
    if last.trainable:
        # It always runs and has a loss: the test is not about zeros alone.
        assert all(np.abs(g).max() > 0 for g in gradients[last.name].values())


@bounded(3)
@given(cases())
def test_random_multimodal_graphs(case: Case) -> None:
    check(case)


@pytest.mark.slow
@bounded(48)
@given(cases())
def test_many_random_multimodal_graphs(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("pointers", [(True, False), (False, True)], ids=["the second is paired", "the first is paired"])
def test_two_edges_between_the_same_sections(pointers: tuple[bool, bool]) -> None:
    """One pairs items in order, one goes by pointers to any of the sample: a task waits for what either needs."""
    taken = tuple(Taken(producer="a", output=output, pointers=by) for output, by in zip(("hidden", "extra"), pointers, strict=True))
    made = (
        Part(name="a", stream="image", merge=1, taken=(), objectives={}),
        Part(name="b", stream="image", merge=1, taken=taken, objectives={"square": Objective(count="weights")}),
    )
    samples = samples_of(made, 0, set(), None, 30)
    # Sizes with which the images of a sample lie in several micro-batches of one end.
    sizes = (8, 24) if pointers[0] else (24, 8)
    layout = {name: {"microbatch": size} for name, size in zip("ab", sizes, strict=True)}
    setup = build(graph_of(made, layout), specs=specs_of(made))
    assert worst_leaf(setup.gradients(samples), setup.reference(samples)[1]) < TOLERANCE
