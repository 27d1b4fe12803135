"""What several tests build: random text samples, and small graphs of plain functions (a chain, or wired as a test says).

`import support` works in every test: pytest puts this folder on the path.

Dimensions: R rows, L length, D width, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maestro_jax.data import ArraySpec, Item, Sample
from maestro_jax.graph import Objective, Section, SectionGraph

VOCAB = 16
WIDTH = 8

Functions = tuple[Callable[[jax.Array], dict[str, jax.Array]], Callable[..., dict[str, jax.Array]]]

TEXT_SPECS: Mapping[str, Mapping[str, ArraySpec]] = {
    "text": {"tokens": ArraySpec(), "targets": ArraySpec(), "loss_mask": ArraySpec(dtype="float32")}
}
"""Arrays of the one stream that `text_samples` makes."""


def text_samples(count: int, seed: int = 0, vocab: int = VOCAB, shortest: int = 3, longest: int = 30) -> list[Sample]:
    """Makes samples "s0", "s1", ... of random tokens, of `shortest` to `longest` units, each with a target and a loss mask."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        units = int(random.integers(shortest, longest + 1))
        tokens_2L = random.integers(0, vocab, (2, units)).astype(np.int32)
        mask_L = (random.random(units) > 0.3).astype(np.float32)
        item = Item(units=units, arrays={"tokens": tokens_2L[0], "targets": tokens_2L[1], "loss_mask": mask_L})
        samples.append(Sample(id=f"s{number}", items={"text": (item,)}))
    return samples


def teacher_functions(width: int, vocab: int = VOCAB) -> Functions:
    """(init, apply) of a section without inputs: returns `hidden` [R, L, D]."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        embed, inner = jax.random.split(key)
        return {"embed": jax.random.normal(embed, (vocab, width)) * 0.5, "inner": jax.random.normal(inner, (width, width)) * 0.5}

    def apply(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"hidden": jnp.tanh(params["embed"][batch["tokens"]] @ params["inner"])}

    return init, apply


def middle_functions(width: int) -> Functions:
    """(init, apply) of a section that takes `hidden` and returns `hidden`, both [R, L, D]."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"inner": jax.random.normal(key, (width, width)) * 0.5}

    def apply(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], hidden: jax.Array) -> dict[str, jax.Array]:
        return {"hidden": jnp.sin(hidden @ params["inner"])}

    return init, apply


def student_functions(width: int, vocab: int = VOCAB) -> Functions:
    """(init, apply) of a section that takes `hidden` [R, L, D] and returns the sums `cross_entropy` and `square`."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        embed, inner, head = jax.random.split(key, 3)
        return {
            "embed": jax.random.normal(embed, (vocab, width)),
            "inner": jax.random.normal(inner, (width, width)) * 0.5,
            "head": jax.random.normal(head, (vocab, width)),
        }

    def apply(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], hidden: jax.Array) -> dict[str, jax.Array]:
        x_RLD = jnp.tanh((params["embed"][batch["tokens"]] + hidden) @ params["inner"])
        log_RLV = jax.nn.log_softmax(x_RLD @ params["head"].T)
        found_RL = jnp.take_along_axis(log_RLV, batch["targets"][..., None], axis=-1)[..., 0]
        mask_RL = batch["loss_mask"]
        return {"cross_entropy": -(found_RL * mask_RL).sum(), "square": (jnp.square(x_RLD).sum(-1) * mask_RL).sum()}

    return init, apply


def chain(width: int = WIDTH, **overrides: Mapping[str, Any]) -> SectionGraph:
    """Makes the graph teacher -> middle -> student; teacher and student train, the frozen middle passes gradients.

    Args:
        width: of every section.
        overrides: section name -> fields of its `Section` to set, for example `student=dict(replicas=4)`.
    """
    fields: dict[str, dict[str, Any]] = {
        "teacher": {"module": teacher_functions(width), "microbatch": (32, 64)},
        "middle": {"module": middle_functions(width), "trainable": False, "inputs": {"hidden": "teacher.hidden"}, "microbatch": 48},
        "student": {
            "module": student_functions(width),
            "inputs": {"hidden": "middle.hidden"},
            "objectives": {"cross_entropy": Objective(), "square": Objective(weight=0.1)},
            "microbatch": 32,
        },
    }
    unknown = overrides.keys() - fields.keys()
    if unknown:
        raise ValueError(f"chain has no sections {sorted(unknown)}")
    return SectionGraph(sections=tuple(Section(name=name, **{**values, **overrides.get(name, {})}) for name, values in fields.items()))


WIRINGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "pair": {"a": (), "b": ("a",)},
    "chain": {"a": (), "b": ("a",), "c": ("b",)},
    "long": {"a": (), "b": ("a",), "c": ("b",), "d": ("c",)},
    "triangle": {"a": (), "b": ("a",), "c": ("a", "b")},
    "diamond": {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")},
}
"""Name of a graph -> its sections, producers first, each with the sections whose `hidden` it takes."""

LOGICAL_NAMES: Mapping[str, tuple[str, ...]] = {"embed": ("vocab", "embed"), "inner": ("embed", "mlp"), "head": ("vocab", "embed")}
"""Logical names of the parameters of all functions here."""


class Named(nnx.Module):
    """Plain functions as a module whose parameters declare logical names, so that mesh axes can split them."""

    def __init__(self, functions: Functions, rngs: nnx.Rngs) -> None:
        init, self.apply = functions
        made = init(rngs.params())
        self.paths = tuple(made)
        for path, value in made.items():
            setattr(self, path, nnx.Param(value, out_sharding=LOGICAL_NAMES[path], eager_sharding=False))

    def __call__(self, batch: Mapping[str, jax.Array], **inputs: jax.Array) -> dict[str, jax.Array]:
        return self.apply({path: getattr(self, path)[...] for path in self.paths}, batch, **inputs)


def joining(functions: Functions) -> Functions:
    """Functions that take `hidden`, as functions of any number of inputs: their product, so that each one's gradient needs the others."""
    init, apply = functions

    def joined(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], **inputs: jax.Array) -> dict[str, jax.Array]:
        return apply(params, batch, hidden=math.prod(1.0 + inputs[name] for name in sorted(inputs)))

    return init, joined


def wired(wiring: str, layout: Mapping[str, Mapping[str, Any]], width: int = WIDTH) -> SectionGraph:
    """Makes a graph of sections a, b, ...: the first embeds tokens, the last has two objectives, those between pass rows on.

    Args:
        wiring: a name of `WIRINGS`.
        layout: section name -> fields of its `Section` to set; a section that is not named runs on one device.
        width: of every section.
    """
    producers = WIRINGS[wiring]
    consumed = {name for names in producers.values() for name in names}
    sections = []
    for name, taken in producers.items():
        functions = middle_functions(width) if name in consumed else student_functions(width)
        functions = joining(functions) if taken else teacher_functions(width)
        objectives = {} if name in consumed else {"cross_entropy": Objective(), "square": Objective(weight=0.1)}
        fields = {
            "module": functools.partial(Named, functions),
            "inputs": {f"from_{each}": f"{each}.hidden" for each in taken},
            "objectives": objectives,
            "microbatch": 32,
        }
        sections.append(Section(name=name, **{**fields, **layout.get(name, {})}))
    return SectionGraph(sections=tuple(sections))
