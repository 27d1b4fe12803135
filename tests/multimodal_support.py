"""Small multimodal graphs and samples for tests: vision and audio into a language model, and a generator downstream of it.

Dimensions: R rows, L length, D width, P features of a patch or frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import VOCAB, WIDTH

from maestro_jax.data import ArraySpec, Item, Sample
from maestro_jax.graph import Objective, Section, SectionGraph

MERGE = 2
FEATURES = 3
FLOATS = ArraySpec(dtype="float32")
SPECS: Mapping[str, Mapping[str, ArraySpec]] = {
    "text": {"tokens": ArraySpec(), "targets": ArraySpec(), "loss_mask": FLOATS, "image_rows": ArraySpec(), "audio_rows": ArraySpec()},
    "image": {"patches": ArraySpec(shape=(FEATURES,), dtype="float32")},
    "audio": {"frames": ArraySpec(shape=(FEATURES,), dtype="float32")},
    "redraw": {"target": ArraySpec(shape=(FEATURES,), dtype="float32"), "state_rows": ArraySpec()},
}


def omni_samples(count: int, seed: int = 0, kinds: str = "tiar") -> list[Sample]:
    """Samples of text with up to three images and two clips each, and for some a picture to redraw.

    Args:
        count: how many.
        seed: another seed is another list.
        kinds: which streams may occur: "i" images, "a" clips, "r" redrawing.
    """
    random = np.random.default_rng(seed)
    return [_sample(f"s{n}", random, kinds) for n in range(count)]


def _sample(name: str, random: np.random.Generator, kinds: str) -> Sample:
    def items(key: str, most: int, sizes: tuple[int, ...]) -> tuple[Item, ...]:
        chosen = [int(random.choice(sizes)) for _ in range(int(random.integers(0, most + 1)))]
        return tuple(Item(units=u, arrays={key: random.normal(size=(u, FEATURES)).astype(np.float32)}) for u in chosen)

    images = items("patches", 3, (2, 4, 6)) if "i" in kinds else ()
    clips = items("frames", 2, (1, 3, 5)) if "a" in kinds else ()
    rows = {"image_rows": sum(i.units // MERGE for i in images), "audio_rows": sum(i.units for i in clips)}
    units = int(random.integers(3, 10)) + sum(rows.values())
    tokens = random.integers(0, VOCAB, (2, units)).astype(np.int32)
    arrays: dict[str, Any] = {"tokens": tokens[0], "targets": tokens[1], "loss_mask": (random.random(units) > 0.3).astype(np.float32)}
    places = random.permutation(units)
    for name_of, total in rows.items():
        pointers = np.full(units, -1, np.int32)
        # Any order, anywhere; now and then a row that nobody takes.
        taken = [row for row in random.permutation(total) if random.random() > 0.1]
        pointers[places[: len(taken)]] = taken
        places = places[len(taken) :]
        arrays[name_of] = pointers
    streams = {"text": (Item(units=units, arrays=arrays),), "image": images, "audio": clips}
    if "r" in kinds and random.random() > 0.4:
        target = random.normal(size=(1, FEATURES)).astype(np.float32)
        state = np.array([random.integers(0, units)], np.int32)
        streams["redraw"] = (Item(units=1, arrays={"target": target, "state_rows": state}),)
    return Sample(id=name, items={stream: found for stream, found in streams.items() if found})


def encoder(key: str, merge: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(init, apply) of an encoder whose every `merge` units become one row, `hidden` [R, L / merge, D]."""

    def init(random: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(random)
        return {"inner": jax.random.normal(first, (FEATURES, WIDTH)), "out": jax.random.normal(second, (merge * WIDTH, WIDTH)) * 0.5}

    def apply(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        hidden = jnp.tanh(batch[key] @ params["inner"])
        rows, length, width = hidden.shape
        return {"hidden": hidden.reshape(rows, length // merge, merge * width) @ params["out"]}

    return init, apply


def language(random: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(random)
    return {"embed": jax.random.normal(first, (VOCAB, WIDTH)), "head": jax.random.normal(second, (VOCAB, WIDTH))}


def speak(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], **inputs: jax.Array) -> dict[str, jax.Array]:
    """Each token alone: its embedding and what arrives for it."""
    hidden = jnp.tanh(params["embed"][batch["tokens"]] + sum(inputs.values()))
    logs = jax.nn.log_softmax(hidden @ params["head"].T)
    found = jnp.take_along_axis(logs, batch["targets"][..., None], axis=-1)[..., 0]
    return {"hidden": hidden, "cross_entropy": -(found * batch["loss_mask"]).sum()}


def redraw(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], state: jax.Array) -> dict[str, jax.Array]:
    wrong = jnp.square(state @ params["out"] - batch["target"]).sum(-1)
    return {"redraw": (wrong * (batch["segment_ids"] > 0)).sum()}


def omni(**overrides: Mapping[str, Any]) -> SectionGraph:
    """Vision and audio into a language model, and a generator that takes the state of one token.

    Args:
        overrides: section name -> fields of its `Section` to set, or None to leave the section out.
    """

    def paint(random: jax.Array) -> dict[str, jax.Array]:
        return {"out": jax.random.normal(random, (WIDTH, FEATURES))}

    fields: dict[str, dict[str, Any]] = {
        "vision": {"module": encoder("patches", MERGE), "reads": "image", "microbatch": (8, 16)},
        "audio": {"module": encoder("frames", 1), "reads": "audio", "microbatch": 8},
        "llm": {
            "module": (language, speak),
            "inputs": {"image": "vision.hidden[image_rows]", "audio": "audio.hidden[audio_rows]"},
            "objectives": {"cross_entropy": Objective()},
            "microbatch": (40, 60),
        },
        "generator": {
            "module": (paint, redraw),
            "reads": "redraw",
            "inputs": {"state": "llm.hidden[state_rows]"},
            "objectives": {"redraw": Objective(weight=0.5, count=lambda item: item.units)},
            "microbatch": 4,
        },
    }
    return SectionGraph(sections=tuple(Section(name=name, **{**values, **overrides.get(name, {})}) for name, values in fields.items()))
