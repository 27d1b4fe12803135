"""The trainer: one object behind config files, notebooks and the command line.

trainer = Trainer(graph=graph, data=Corpus(), steps=200, batch=16)
run = trainer.start()          # places, compiles, initialises
for result in run.steps():     # or run.fit(), which also reports, evaluates and saves
print(result.step, result.metrics["loss"])
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from .config import config_folder, configurable, find_file
from .data import Batches, Dataset, Sample
from .data.sources import check_vocabulary
from .errors import CheckpointError, ConfigError, DataError, set_by
from .graph import Section, SectionGraph
from .meshes import devices_wanted
from .models.weights import WeightFile
from .optimizers import AdamW, build_optimizer
from .run import Run
from .run_folder import RunFolder
from .runtime import Compiled, Engine, Plan, Preparer, make_plan, requests_of
from .runtime.check_sample import check_sample
from .runtime.compile import Progress
from .schedules import InOrder, Policy
from .terminal import Terminal, plan_text


@configurable("train")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """What to train, on what, and for how long.

    Args:
        graph: the sections.
        data: a data source (with `load()`), or a `Dataset`.
        steps: optimizer steps; 0 only evaluates.
        batch: samples in a step, over all replicas.
        seed: of initial parameters, data order and dropout.
        optimizer: for sections without one of their own.
        clip_norm: bound on the joint gradient norm of all sections; None does not clip.
        policy: decides what runs where and when.
        evaluate_every: steps between evaluations on held-out data; 0 evaluates at the start and the end only.
        evaluate_batches: most held-out batches in an evaluation; None takes all, 0 never evaluates.
        log_every: steps between lines on the screen; every step is in metrics.jsonl.
        on_bad_sample: what to do with a sample that fits no micro-batch: "raise", or "skip" it and count.
        share_devices: with fewer devices than the plan asks for, let sections share them instead of refusing.
        in_flight: most unfinished tasks that a replica is given.
        save_dtype: precision of the final weights on disk.
    """

    graph: SectionGraph
    data: Any
    steps: int = 100
    batch: int = 16
    seed: int = 0
    optimizer: Any = dataclasses.field(default_factory=AdamW)
    clip_norm: float | None = 1.0
    policy: Policy = dataclasses.field(default_factory=InOrder)
    evaluate_every: int = 0
    evaluate_batches: int | None = None
    log_every: int = 10
    on_bad_sample: Literal["raise", "skip"] = "raise"
    share_devices: bool = True
    in_flight: int = 8
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        least = {"steps": 0, "batch": 1, "seed": 0, "evaluate_every": 0, "evaluate_batches": 0, "log_every": 1, "in_flight": 1}
        for field, low in least.items():
            value = getattr(self, field)
            if value is not None and value < low:
                self._refuse(field, f"a whole number, at least {low}", str(value))
        if self.clip_norm is not None and not self.clip_norm > 0:
            self._refuse("clip_norm", "a positive number, or None", str(self.clip_norm))
        for field in ("on_bad_sample", "save_dtype"):
            choices = typing.get_args(typing.get_type_hints(Trainer)[field])
            if getattr(self, field) not in choices:
                self._refuse(field, " or ".join(map(repr, choices)), repr(getattr(self, field)))

    def _refuse(self, field: str, wanted: str, have: str) -> None:
        raise ConfigError(
            f"the trainer has a wrong {field}.",
            wanted=wanted,
            have=have,
            fix=f"correct {field}",
            anchor="trainer-value",
            set_by=set_by(self, field),
        )

    def dataset(self) -> Dataset:
        """Loads the data.

        Raises:
            DataError: when there is none, or it does not fit the models.
        """
        dataset = self.data if isinstance(self.data, Dataset) else self.data.load()
        for section in self.graph.sections:
            size = getattr(section.module, "vocab_size", None)
            if size is not None:
                check_vocabulary(dataset, size, section.name, set_by=set_by(section, "module"))
        return dataset

    def plan(self, dataset: Dataset) -> Plan:
        """Places the graph on the devices at hand; without an accelerator, on CPU devices that it makes.

        Raises:
            MeshError: when the devices do not suffice and `share_devices` is off.
        """
        make_cpu_devices(devices_wanted(requests_of(self.graph)))
        return make_plan(self.graph, dataset.specs, jax.devices(), share=self.share_devices)

    def start(self, *, dataset: Dataset | None = None, plan: Plan | None = None, progress: Progress | None = None) -> Run:
        """Compiles every program and makes the initial state.

        Args:
            dataset: already loaded data; None loads it.
            plan: an already made plan; None makes it.
            progress: called after each compiled program.

        Raises:
            MaestroError: whatever is wrong with graph, data, weights or devices.
        """
        dataset = dataset if dataset is not None else self.dataset()
        plan = plan if plan is not None else self.plan(dataset)
        batches = Batches(dataset, self.batch, self.seed, set_by=set_by(self, "batch")) if self.steps else None
        given = {s.name: given_weights(s, plan, dataset) for s in self.graph.sections}
        evaluation = bool(dataset.heldout) and self.evaluate_batches != 0
        optimizers = {s.name: self._optimizer(s) for s in self.graph.sections if s.trainable}
        compiled = Compiled(plan, optimizers, self.clip_norm, evaluation, progress)
        engine = Engine(compiled, self.seed, given, self.in_flight)
        preparer = Preparer(compiled, self.policy, dataset.specs, self.seed)
        return Run(trainer=self, dataset=dataset, batches=batches, engine=engine, preparer=preparer, evaluation=evaluation)

    def show_plan(self, terminal: Terminal) -> tuple[Dataset, Plan]:
        """Loads the data, places the graph and prints the plan; returns both."""
        dataset = self.dataset()
        plan = self.plan(dataset)
        terminal.plan(plan, self.mean_units(dataset))
        for reason, count in dataset.skipped.items():
            terminal.note(f"data: {count} skipped ({reason})")
        return dataset, plan

    def fit(self, *, folder: RunFolder | None = None, terminal: Terminal | None = None, config_text: str = "") -> Run:
        """Trains to the end: plan, compilation, evaluation, steps, final weights.

        Args:
            folder: where plan, metrics and weights go; None writes nothing.
            terminal: the screen; None is silent.
            config_text: the resolved configuration, for the run folder.
        """
        with contextlib.ExitStack() as stack:
            screen = terminal if terminal is not None else stack.enter_context(Terminal(io.StringIO(), interactive=False))
            dataset, plan = self.show_plan(screen)
            if folder is not None:
                folder.write_config(config_text)
                folder.write_plan(plan_text(plan, self.mean_units(dataset)))
                folder.write_env(dict(dataset.notes))
            run = self.start(dataset=dataset, plan=plan, progress=screen.compiling)
            run.fit(folder=folder, terminal=screen)
        return run

    def mean_units(self, dataset: Dataset, samples: int = 256) -> dict[str, float]:
        """Section -> units in the items of a step, estimated from the first samples."""
        some = [dataset.train[n] for n in range(min(samples, len(dataset.train)))]
        found = {}
        for section in self.graph.sections:
            units = sum(item.units for sample in some for item in sample.items.get(section.reads, ()))
            found[section.name] = self.batch * units / len(some) if some else 0.0
        return found

    def _optimizer(self, section: Section) -> Any:
        owner = section if section.optimizer is not None else self
        return build_optimizer(owner.optimizer, set_by(owner, "optimizer"))

    def fitting(self, plan: Plan, dataset: Dataset, samples: Sequence[Sample]) -> tuple[list[Sample], list[DataError]]:
        """Splits a batch into samples that every section can hold and the errors of the others.

        Raises:
            DataError: for the first bad sample, when `on_bad_sample` is "raise".
        """
        good, bad = [], []
        for sample in samples:
            try:
                check_sample(plan, dataset.specs, sample)
            except DataError as error:
                if self.on_bad_sample == "raise":
                    raise
                bad.append(error)
            else:
                good.append(sample)
        return good, bad


def make_cpu_devices(count: int) -> None:
    """Makes `count` CPU devices, for machines without an accelerator; does nothing once JAX has started.

    Accelerators are not affected: this counts devices of the CPU platform only.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # The backends have been initialised: whoever did that decided how many devices there are.
        return


def given_weights(section: Section, plan: Plan, dataset: Dataset) -> dict[str, Any]:
    """Opens the weight files of a section.

    Returns:
        Path -> array in a file.

    Raises:
        CheckpointError: a missing file or tensor, another shape, or weights made with another tokenizer.
    """
    if section.weights is None:
        return {}
    sources: Mapping[str, str] = {"": section.weights} if isinstance(section.weights, str) else section.weights
    origin = set_by(section, "weights")
    shapes = plan.sections[section.name].shapes.params
    given: dict[str, Any] = {}
    for prefix, source in sources.items():
        name, _, inside = source.partition(":")
        file = WeightFile(find_file(name, near=config_folder(section, "weights"), set_by=origin), origin)
        _check_tokenizer(section, file, dataset, origin)
        stored = file.arrays(inside)
        start = prefix + "/" if prefix else ""
        wanted = {path: shape.shape for path, shape in shapes.items() if path.startswith(start)}
        problems = [f"{path}: wanted, not in the file" for path in wanted if path[len(start) :] not in stored]
        problems += [
            f"{path}: {list(stored[path[len(start) :]].shape)} in the file, {list(shape)} in the module"
            for path, shape in wanted.items()
            if path[len(start) :] in stored and stored[path[len(start) :]].shape != shape
        ]
        if problems or not wanted:
            raise _weights_do_not_fit(section, file.path, prefix, problems or [f"no parameter of the module lies below {prefix!r}"], origin)
        given |= {path: stored[path[len(start) :]] for path in wanted}
    return given


def _check_tokenizer(section: Section, file: WeightFile, dataset: Dataset, origin: str) -> None:
    have, want = file.tokenizer_fingerprint, dataset.tokenizer_fingerprint
    if section.check_tokenizer and have is not None and want is not None and have != want:
        raise CheckpointError(
            f"the weights of section {section.name!r} were trained with another tokenizer.",
            wanted=f"tokenizer {want[:16]}..., which the data uses",
            have=f"tokenizer {have[:16]}... in {file.path}",
            fix="use the model's own tokenizer for the data, or set check_tokenizer=False if token ids agree where it matters",
            anchor="other-tokenizer",
            set_by=origin,
        )


def _weights_do_not_fit(section: Section, path: Path, prefix: str, problems: list[str], origin: str) -> CheckpointError:
    more = f"\nand {len(problems) - 8} more" if len(problems) > 8 else ""
    return CheckpointError(
        f"weights do not fit section {section.name!r}{f' below {prefix!r}' if prefix else ''}.",
        wanted="every parameter there with the module's shape",
        have="\n".join(problems[:8]) + more,
        fix=f"make the module's sizes those of {path.name}, or name the right prefix ('file:prefix in the file')",
        anchor="weights-do-not-fit",
        set_by=origin,
    )
