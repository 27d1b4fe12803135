"""Gradients do not depend on the layout: random graphs, devices, micro-batches and orders against one monolithic program.

PEER_CASES 1 and 22. Sections are small, because nearly all the time of an example is compilation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import bounded, build, worst_leaf
from hypothesis import given
from hypothesis import strategies as st
from support import WIRINGS, text_samples, wired

from maestro_jax.graph.section import POLICIES
from maestro_jax.meshes.submeshes import devices_wanted
from maestro_jax.runtime.plan import requests_of
from maestro_jax.schedules import InOrder, Policy, Sequential

DEVICES = 8
TOLERANCE = 1e-5
SAMPLES = text_samples(12, longest=14)

ROW = 16
LADDERS = ((14,), (40,), (20, 36))
"""Ladders of one row; each holds the longest sample."""
LADDERS_IN_ROWS = ((48,), (16, 48))
LADDERS_IN_EVEN_ROWS = ((32,), (32, 64))
"""Ladders in rows of 16 units; fsdp splits only even numbers of rows."""

Layout = dict[str, dict[str, Any]]


@st.composite
def section_layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of one section."""
    fsdp, tensor = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2)))
    fields: dict[str, Any] = {
        "replicas": draw(st.sampled_from((1, 2, 4))),
        "axes": {axis: size for axis, size in (("fsdp", fsdp), ("tensor", tensor)) if size > 1},
        "trainable": draw(st.booleans()),
        "submesh": draw(st.sampled_from((None, None, "shared"))),
        "remat": draw(st.sampled_from(("none", "inputs", *POLICIES))),
        "scatter_gradients": draw(st.booleans()),
    }
    if fsdp > 1:
        # Parameters are split over fsdp too, unless a rule says otherwise.
        fields |= {"row_length": ROW, "microbatch": draw(st.sampled_from(LADDERS_IN_EVEN_ROWS))}
        fields["rules"] = draw(st.sampled_from(({}, {"embed": None})))
    elif draw(st.booleans()):
        fields |= {"row_length": ROW, "microbatch": draw(st.sampled_from(LADDERS_IN_ROWS))}
    else:
        fields["microbatch"] = draw(st.sampled_from(LADDERS))
    return fields


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, Layout, Policy]:
    """A wiring, fields for each of its sections that fit on eight devices, and a policy."""
    wiring = draw(st.sampled_from(sorted(WIRINGS)))
    layout = {name: draw(section_layouts()) for name in WIRINGS[wiring]}
    names = list(layout)
    if not any(fields["trainable"] for fields in layout.values()):
        layout[names[draw(st.integers(0, len(names) - 1))]]["trainable"] = True
    for fields in layout.values():
        if fields["replicas"] * 2 ** len(fields["axes"]) > DEVICES:
            fields["replicas"] = 2
    # Too many devices: more sections share a submesh, until all do.
    for name in names:
        if devices_wanted(requests_of(wired(wiring, layout))) > DEVICES:
            layout[name]["submesh"] = "shared"
    return wiring, layout, draw(st.sampled_from((InOrder(), Sequential())))


def assert_exact(wiring: str, layout: Layout, policy: Policy | None = None) -> None:
    setup = build(wired(wiring, layout), policy=policy, devices=DEVICES)
    gradients, (_, want) = setup.gradients(SAMPLES), setup.reference(SAMPLES)
    assert worst_leaf(gradients, want) < TOLERANCE
    assert all(np.abs(g).max() > 0 for leaves in gradients.values() for g in leaves.values())


@bounded(6)
@given(layouts())
def test_random_layouts(found: tuple[str, Layout, Policy]) -> None:
    assert_exact(*found)


@pytest.mark.slow
@bounded(40)
@given(layouts())
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
