"""What a checkpoint holds of an engine: named alike on every plan, and enough to bring any optimizer's state back."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest
from engines import build
from support import TEXT_SPECS, chain, wired

from maestro_jax.graph import SectionGraph
from maestro_jax.optimizers import AdamW
from maestro_jax.runtime import make_plan
from maestro_jax.runtime.snapshot import Snapshot, flat, nested, optimizer_of, snapshot_shapes, take_snapshot

PARAMETERS = {"layers/norm/scale": np.ones(3, np.float32), "layers/weight": np.ones((2, 3), np.float32), "head": np.ones(4, np.float32)}

OPTIMIZERS: Mapping[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "masked": AdamW(weight_decay=0.5).build(),
    "schedule": optax.adam(optax.linear_schedule(0.1, 0.0, 10)),
    "chain": optax.chain(optax.scale_by_adam(), optax.chain(optax.trace(0.9), optax.trace(0.5))),
    "factored": optax.adafactor(0.1),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "partitioned": optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, lambda p: {n: "ab"[n == "head"] for n in p}),
    "averaged": optax.contrib.schedule_free_sgd(0.1),
}

OTHERS: Mapping[str, Callable[[], tuple[Any, ...]]] = {
    "width": lambda: (chain(width=9),),
    "another optimizer": lambda: (chain(), optax.sgd(0.1)),
    "momentum": lambda: (chain(), optax.sgd(0.1, momentum=0.9)),
    "more is trained": lambda: (chain(middle={"trainable": True}),),
    "less is trained": lambda: (chain(student={"frozen": ("embed",)}),),
    "another graph": lambda: (wired("pair", {}),),
}
"""Graphs, or graphs and optimizers, other than `chain()` with Adam."""


def shapes(graph: SectionGraph, optimizer: optax.GradientTransformation | None = None) -> Snapshot:
    """The snapshot of a graph as shapes; nothing is compiled."""
    plan = make_plan(graph, TEXT_SPECS, jax.devices())
    return snapshot_shapes(plan, {s.name: optimizer or optax.adam(0.1) for s in graph.sections if s.trainable})


def section(optimizer: Any) -> Any:
    """What a snapshot reads of a section's state."""
    return types.SimpleNamespace(master=PARAMETERS, optimizer=optimizer, frozen={})


@pytest.mark.quick
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_any_optimizer_comes_back(name: str) -> None:
    # Every leaf has a value of its own, so that none can take another's place.
    state = OPTIMIZERS[name].init(PARAMETERS)
    leaves, structure = jax.tree.flatten(state)
    state = jax.tree.unflatten(structure, [np.full_like(leaf, number) for number, leaf in enumerate(leaves)])
    tree = take_snapshot({"a": section(state)}, ("a",)).trained["a"]
    assert len(flat(tree["optimizer"])) == len(leaves)
    found = optimizer_of(tree, OPTIMIZERS[name].init(PARAMETERS))
    assert jax.tree.structure(found) == structure
    assert all(have is want for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True))


@pytest.mark.quick
def test_paths_become_nested_dicts_and_paths_again() -> None:
    assert nested(PARAMETERS) == {
        "layers": {"norm": {"scale": PARAMETERS["layers/norm/scale"]}, "weight": PARAMETERS["layers/weight"]},
        "head": PARAMETERS["head"],
    }
    assert flat(nested(PARAMETERS)) == PARAMETERS


@pytest.mark.quick
def test_the_signature_does_not_depend_on_the_plan() -> None:
    layouts: list[dict[str, dict[str, Any]]] = [
        {},
        {"a": {"replicas": 4}, "b": {"replicas": 2, "microbatch": 64}},
        {"a": {"axes": {"tensor": 4}}, "b": {"axes": {"tensor": 2}, "replicas": 2}},
        {"b": {"dtype": "bfloat16"}},
    ]
    signatures = [shapes(wired("pair", layout)).signature() for layout in layouts]
    assert all(each == signatures[0] for each in signatures)


def test_the_signature_says_what_must_agree() -> None:
    found = shapes(chain(width=8), optax.adam(0.1)).signature()
    assert found["middle"] == {"frozen/inner": "[8, 8]"}
    assert found["teacher"] == {
        "parameters/embed": "float32[16, 8]",
        "parameters/inner": "float32[8, 8]",
        "optimizer/0/count": "int32[]",
        "optimizer/0/mu/embed": "float32[16, 8]",
        "optimizer/0/mu/inner": "float32[8, 8]",
        "optimizer/0/nu/embed": "float32[16, 8]",
        "optimizer/0/nu/inner": "float32[8, 8]",
    }


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_have_another_signature(name: str) -> None:
    assert shapes(*OTHERS[name]()).signature() != shapes(chain()).signature()


def test_frozen_parameters_may_change_their_precision() -> None:
    assert shapes(chain(middle={"dtype": "bfloat16"})).signature() == shapes(chain()).signature()


def test_shapes_are_those_of_the_engine_with_its_shardings() -> None:
    setup = build(chain(student={"replicas": 2}), optimizer=optax.adam(0.1))
    taken = setup.engine.snapshot()
    wanted = snapshot_shapes(setup.engine.plan, setup.engine.compiled.optimizers)
    for have, want in ((taken.trained, wanted.trained), (taken.frozen, wanted.frozen)):
        found, asked = ({path: (leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in flat({**tree}).items()} for tree in (have, want))
        assert found == asked
    assert taken.signature() == wanted.signature()
