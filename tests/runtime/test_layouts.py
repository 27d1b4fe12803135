"""Gradients do not depend on the layout: random graphs, devices, micro-batches and orders against one monolithic program.

PEER_CASES 1 and 22. Sections are small, because nearly all the time of an example is compilation.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from engines import bounded, build, worst_leaf
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import DEVICES, Layout, layouts
from support import WIRINGS, text_samples, wired

from maestro_jax.schedules import InOrder, Policy, Sequential

TOLERANCE = 1e-5
SAMPLES = text_samples(16, longest=8)
"""As long as the random ladders hold."""


@st.composite
def wirings(draw: st.DrawFn) -> tuple[str, Layout, Policy]:
    """A wiring, fields for each of its sections, and a policy."""
    wiring = draw(st.sampled_from(sorted(WIRINGS)))
    return wiring, draw(layouts(list(WIRINGS[wiring]), functools.partial(wired, wiring))), draw(st.sampled_from((InOrder(), Sequential())))


def assert_exact(wiring: str, layout: Layout, policy: Policy | None = None) -> None:
    setup = build(wired(wiring, layout), policy=policy, devices=DEVICES)
    gradients, (_, want) = setup.gradients(SAMPLES), setup.reference(SAMPLES)
    assert worst_leaf(gradients, want) < TOLERANCE
    assert all(np.abs(g).max() > 0 for leaves in gradients.values() for g in leaves.values())


@bounded(6)
@given(wirings())
def test_random_layouts(found: tuple[str, Layout, Policy]) -> None:
    assert_exact(*found)


@pytest.mark.slow
@bounded(40)
@given(wirings())
def test_many_random_layouts(found: tuple[str, Layout, Policy]) -> None:
    assert_exact(*found)


TENSOR = {"axes": {"tensor": 2}}
SHARED = {"submesh": "shared"}
CASES: dict[str, tuple[str, Layout]] = {
    "replicas 4 to 2": ("pair", {"a": {"replicas": 4}, "b": {"replicas": 2}}),
    "replicas 1 to 8": ("pair", {"a": SHARED, "b": {**SHARED, "replicas": 8}}),
    "replicas 8 to 1": ("pair", {"a": {**SHARED, "replicas": 8}, "b": SHARED}),
    "replicas 3 to 4": ("pair", {"a": {"replicas": 3}, "b": {"replicas": 4}}),
    "tensor to replicated and back": ("chain", {"a": TENSOR, "b": {"replicas": 2}, "c": TENSOR}),
    "4 replicas to 2 replicas x tensor 2": ("pair", {"a": {"replicas": 4}, "b": {"replicas": 2, **TENSOR}}),
    "an axis of another name": ("pair", {"a": {"axes": {"model": 2}, "rules": {"mlp": "model", "vocab": "model"}}, "b": {"replicas": 2}}),
    "row counts that do not divide": (
        "chain",
        {"a": {"row_length": 15, "microbatch": 45}, "b": {"row_length": 16}, "c": {"microbatch": 37}},
    ),
    "3 devices to 4, sizes that do not divide": (
        "pair",
        {"a": {"axes": {"model": 3}, "rules": {"mlp": "model"}, "microbatch": 23}, "b": {"axes": {"tensor": 4}, "microbatch": (17, 31)}},
    ),
    "fsdp with split parameters": (
        "pair",
        {"a": {"axes": {"fsdp": 2, "tensor": 2}, "row_length": 16, "rules": {"embed": "fsdp"}}, "b": {"replicas": 2, **TENSOR}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_named_layouts(case: str) -> None:
    assert_exact(*CASES[case])
