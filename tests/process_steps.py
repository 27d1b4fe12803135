"""What tests of training steps run in each of several processes: steps with their gradients, and what must be refused."""

from __future__ import annotations

import atexit
import collections
import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from engines import build
from multimodal_support import SPECS, omni, omni_samples
from process_transfers import anchor_of
from support import TEXT_SPECS, chain, text_samples

from maestro_jax import configurables  # noqa: F401  (registers what configs name)
from maestro_jax.config import load
from maestro_jax.data import Dataset, LazySamples, Sample
from maestro_jax.errors import DataError
from maestro_jax.meshes import ProcessGroup
from maestro_jax.meshes.transport import Transport
from maestro_jax.optimizers import Sgd
from maestro_jax.runtime import Preparer, feeds, startup
from maestro_jax.runtime.completions import Completions
from maestro_jax.runtime.global_batch import Reader
from maestro_jax.runtime.measure import measure
from maestro_jax.runtime.program_cache import keep_programs
from maestro_jax.runtime.startup import exercise
from maestro_jax.schedules import InOrder, Sequential
from maestro_jax.trainer import Trainer

BINDINGS = {
    "kd_tiny.gin": [
        "train.batch=6",
        "Corpus.max_length=64",
        "teacher/Section.microbatch=[128]",
        "teacher/Section.row_length=64",
        "student/Section.microbatch=[64, 128]",
        "student/Section.row_length=64",
        "student/Decoder.layers=1",
    ],
    "omni_tiny.gin": [
        "train.batch=8",
        "vision/Section.microbatch=[256]",
        "audio/Section.microbatch=[128]",
        "llm/Section.microbatch=[256]",
        "generator/Section.microbatch=[4]",
        "VisionTransformer.layers=1",
        "AudioEncoder.layers=1",
        "Decoder.layers=1",
    ],
}
"""Shipped config -> what makes it small: less depth, fewer samples and buckets. The graph stays, and all that is random in its steps."""

SGD = ["train.steps=20", "train.optimizer=@Sgd()", "Sgd.learning_rate=0.05", "train.evaluate_batches=0", "train.metrics=None"]


def trainer_of(name: str, bindings: Sequence[str]) -> Trainer:
    """The trainer of a shipped config, or of a small graph of the tests.

    Args:
        name: of the config or graph.
        bindings: further ones of a config.
    """
    if name in BINDINGS:
        return load(name, [*BINDINGS[name], *SGD, *bindings], root="train").build()
    graphs: dict[str, Callable[[], Any]] = {
        "chain": lambda: (chain(teacher={"replicas": 2, "trainable": True}), TEXT_SPECS, text_samples(22)),
        "tensor": lambda: (chain(teacher={"axes": {"tensor": 2}, "trainable": True}), TEXT_SPECS, text_samples(22)),
        "omni": lambda: (omni(vision={"replicas": 2}, llm={"replicas": 2}), SPECS, omni_samples(22)),
    }
    graph, specs, samples = graphs[name]()
    data = Dataset(train=samples[:14], heldout=samples[14:], specs=specs)
    return Trainer(graph=graph, data=data, batch=10, steps=20, optimizer=Sgd(learning_rate=0.05), policy=InOrder(), metrics=None)


def steps(group: ProcessGroup, name: str, *bindings: str) -> dict[str, Any]:
    """Gradients of the first step, numbers of twenty steps and of an evaluation, and what was sent between processes, and is left of it."""
    before = len(jax.live_arrays())
    with mock.patch.multiple(Transport, offer=noted("offer"), fetch=noted("fetch")):
        found = trained(trainer_of(name, bindings))
    gc.collect()
    transfers = {kind: sorted(sent.elements()) for kind, sent in NOTED.items()}
    return {**found, **transfers, "left": len(jax.live_arrays()) - before}


def trained(trainer: Trainer) -> dict[str, Any]:
    setup = trainer.setup()
    run, plan = trainer.start(setup), setup.plan
    assert setup.batches is not None
    [(batch, _)] = trainer.reader(plan, setup.dataset).read(setup.dataset.train, [setup.batches.places(0)], "the first step")
    window = Preparer(run.engine.compiled, trainer.policy, setup.dataset.specs, trainer.seed).prepare(batch, 0)
    return {
        "gradients": {
            f"{section}/{path}": [[[[p.start, p.stop] for p in s.index], np.asarray(s.data).tolist()] for s in leaf.addressable_shards]
            for section, leaves in run.engine.accumulate(window).items()
            for path, leaf in leaves.items()
        },
        "steps": [result.metrics for result in run.steps()],
        "evaluation": run.evaluate(),
        "sections": {name: list(section.submesh.processes) for name, section in plan.sections.items()},
    }


NOTED: dict[str, collections.Counter[str]] = {"offer": collections.Counter(), "fetch": collections.Counter()}


def noted(kind: str) -> Callable[..., Any]:
    """A method of the transport that notes each call in `NOTED`: name, sender, receiver and how many arrays."""
    method = getattr(Transport, kind)

    def noting(self: Transport, name: str, process: int, arrays: Sequence[Any]) -> Any:
        ends = (self.index, process) if kind == "offer" else (process, self.index)
        NOTED[kind][f"{name} {ends} {len(arrays)}"] += 1
        return method(self, name, process, arrays)

    return noting


def disagree(group: ProcessGroup) -> dict[str, Any]:
    """One process makes another schedule; then its rows claim to be others."""
    setup = build(chain(teacher={"trainable": True}))
    samples = text_samples(14)
    setup.preparer.policy = Sequential() if group.index else InOrder()
    found = {"schedule": anchor_of(lambda: setup.preparer.prepare(samples, 0))}
    setup.preparer.policy = InOrder()
    right = feeds.sent
    feeds.sent = (lambda *args: "0" * 16) if group.index == 0 else right
    window = setup.preparer.prepare(samples, 0)
    if group.index:
        found["payload"] = anchor_of(lambda: setup.engine.accumulate(window))
    else:
        # Its rows are fetched before they are refused.
        threading.Thread(target=lambda: setup.engine.accumulate(window), daemon=True).start()
    # What was asked of the other process never comes, and an orderly end would wait for it.
    atexit.register(end_at_once, group)
    return found


def end_at_once(group: ProcessGroup) -> None:
    # The others hear of the end from the first process.
    time.sleep(group.first)
    os._exit(0)


def refused(group: ProcessGroup) -> dict[str, Any]:
    """A replica over both processes, of three devices each, which also run others."""
    return {"layout": anchor_of(lambda: build(chain(teacher={"replicas": 2, "axes": {"tensor": 2}})))}


def reads(group: ProcessGroup) -> dict[str, Any]:
    """Each process reads its share, and besides what runs on its devices."""
    samples, read = text_samples(16), []

    class Counting(LazySamples):
        def __len__(self) -> int:
            return len(samples)

        def read(self, number: int) -> Sample:
            read.append(number)
            if number == 5:
                raise DataError("sample 5 is bad.", wanted="a", have="b", fix="c", anchor="d")
            return samples[number]

    setup = build(chain(teacher={"trainable": True, "replicas": 4}, middle={"submesh": "s"}, student={"submesh": "s"}))
    [(batch, bad)] = Reader(setup.engine.plan, TEXT_SPECS, skip=True).read(Counting(), [range(16)], "reads")
    share = sorted(read)
    setup.preparer.prepare(batch, 0)
    return {"share": share, "ids": [sample.id for sample in batch.samples], "bad": [b.error.what for b in bad], "all": len(set(read))}


def timeline(group: ProcessGroup) -> dict[str, Any]:
    """A recorded step, after one that is not."""
    setup = build(chain(middle={"submesh": "s"}, student={"submesh": "s", "replicas": 2}, teacher={"replicas": 2}))
    setup.engine.step(setup.preparer.prepare(text_samples(14), 0)).wait()
    window = setup.preparer.prepare(text_samples(14), 1)
    completions = Completions(setup.engine.plan, window)
    list(setup.engine.run(window, completions))
    return completions.record().to_json()


def measured(group: ProcessGroup) -> dict[str, Any]:
    """What tasks of all processes took, and transfers between them."""
    setup = build(chain(teacher={"trainable": True}, middle={"submesh": "s"}, student={"submesh": "s"}))
    exercised = exercise(setup.engine.plan)
    before = {name: setup.engine.parameters(name) for name in setup.engine.states}
    found = measure(setup.engine, [setup.preparer.prepare(text_samples(14), n) for n in range(2)])
    same = all(np.array_equal(value, before[n][path]) for n in before for path, value in setup.engine.parameters(n).items())
    return {"tasks": [[m.section, m.kind, m.nanoseconds] for m in found], "delays": dict(exercised.delays), "same": same}


def misplaced(group: ProcessGroup) -> dict[str, Any]:
    """Rows that arrive as others in one process."""
    setup = build(chain(teacher={"trainable": True}, middle={"submesh": "s"}, student={"submesh": "s"}))
    right = startup._contents
    if group.index == 0:
        startup._contents = lambda wire, name: right(wire, name) + (1 if name.endswith("False 1") else 0)
    return {"anchor": anchor_of(lambda: exercise(setup.engine.plan))}


def kept(group: ProcessGroup, folder: str) -> dict[str, Any]:
    """How many programs of each process come from the cache."""
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    keep_programs(Path(folder))
    setup = build(chain(teacher={"trainable": True}, middle={"submesh": "s"}, student={"submesh": "s"}))
    asked, found = (sum(name.endswith(end) for name in hits) for end in ("/compile_requests_use_cache", "/cache_hits"))
    return {"programs": len(setup.engine.compiled.programs), "asked": asked, "found": found, "index": jax.process_index()}
