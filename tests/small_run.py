"""A small training that gin files can name, for tests that run the command: `small_run.graph`, `small_run.dataset`.

Three sections in a row: a frozen one that may run ahead, one that is trained and has dropout, and one with the losses.

With the environment variable SMALL_RUN_SAMPLES, every process that imports this appends to that file the ids of the samples of each step
that it has trained. With SMALL_RUN_DEATH, such as "1 8 write_pieces", one of several processes kills itself inside the save of a step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from damage_support import die_inside_a_save
from support import TEXT_SPECS, VOCAB, WIDTH, Functions, middle_functions, text_samples, wired

from maestro_jax.checkpoint import Checkpoints
from maestro_jax.data import Dataset
from maestro_jax.graph import SectionGraph
from maestro_jax.models import token_dropout
from maestro_jax.step_policies import SkipLimit

SAMPLES, DEATH = "SMALL_RUN_SAMPLES", "SMALL_RUN_DEATH"

CONFIG = """
train.graph = @small_run.graph()
train.data = @small_run.dataset()
train.batch = 6
train.steps = 24
train.evaluate_every = 6
train.checkpoint_every = 4
train.keep_checkpoints = 2
train.keep_best = 'c/cross_entropy'
train.optimizer = @Sgd()
Sgd.learning_rate = 0.05
Sgd.momentum = 0.9
"""
"""What the gin file says; a test may add lines."""

SETTINGS = {
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "PYTHONPATH": os.pathsep.join(str(path) for path in (Path(__file__).parent, Path(__file__).parent.parent)),
}
"""Environment in which the command has the settings of the tests, and so the same programs and numbers."""

LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "first": {"a": {"replicas": 2}, "b": {}, "c": {"replicas": 2}},
    "second": {
        "a": {"axes": {"tensor": 2}, "microbatch": (32, 64)},
        "b": {"replicas": 2, "microbatch": 48},
        "c": {"axes": {"tensor": 2}, "microbatch": 64},
    },
}


def noisy(functions: Functions, rate: float = 0.2) -> Functions:
    """Functions of a section with dropout on `hidden`."""
    init, apply = functions

    def with_noise(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], hidden: jax.Array) -> dict[str, jax.Array]:
        kept = token_dropout(hidden, rate, batch.get("key"), batch["sample_ids"], batch["positions"], layer=0, place=0)
        return apply(params, batch, kept)

    return init, with_noise


def graph(layout: str = "first") -> SectionGraph:
    """The graph on one of the layouts."""
    fields = {name: dict(values) for name, values in LAYOUTS[layout].items()}
    fields["a"]["trainable"] = False
    fields["b"]["module"] = noisy(middle_functions(WIDTH))
    # Not `Named`, so its parameters have no logical names and stay whole.
    fields["b"]["inputs"] = {"hidden": "a.hidden"}
    return wired("chain", fields)


def dataset() -> Dataset:
    """Twenty samples to train on, so that a run has several epochs, and a few held out."""
    return Dataset(train=text_samples(20), heldout=text_samples(7, seed=1), specs=TEXT_SPECS, vocab_size=VOCAB)


def log_samples(path: Path | str) -> None:
    """From now on, appends the ids of the samples of each step that is trained to a file."""
    add = SkipLimit.add

    def logged(self: SkipLimit, step: int, **fields: Any) -> None:
        with Path(path).open("a") as file:
            file.write(json.dumps({"step": step, "samples": list(fields["samples"])}) + "\n")
        add(self, step, **fields)

    SkipLimit.add = logged


def logged_samples(path: Path) -> dict[int, list[str]]:
    """Step -> ids of its samples, which every process that trained the step must agree on."""
    found: dict[int, list[str]] = {}
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            record = json.loads(line)
            assert found.setdefault(record["step"], record["samples"]) == record["samples"]
    return found


def die_in_save(process: str, step: str, moment: str) -> None:
    """From now on, one of several processes kills itself when it saves a step; see `die_inside_a_save` for the moment."""
    save = Checkpoints.save

    def saved(*args: Any, **fields: Any) -> None:
        if (os.environ["MAESTRO_PROCESS"], str(args[1])) == (process, step):
            die_inside_a_save(moment)
        save(*args, **fields)

    Checkpoints.save = saved


if SAMPLES in os.environ:
    log_samples(os.environ[SAMPLES])
if DEATH in os.environ:
    die_in_save(*os.environ[DEATH].split())
