"""The trainer: one object behind config files, notebooks and the command line.

`Trainer(graph=graph, data=Corpus(), steps=200).fit("runs/first")` trains, reports, evaluates and saves. `start()` places,
compiles and initialises only, and returns a `Run`, whose `steps()` can be iterated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax

from .checkpoint import Checkpoints
from .config import check_fields, configurable
from .data import Batches, Dataset, Part
from .data.batches import readable
from .data.sources import check_vocabulary
from .dry_run import sampled_step
from .errors import ConfigError, set_by
from .graph import Section, SectionGraph
from .huggingface.saving import SHARD_BYTES
from .initial_weights import given_weights
from .meshes import devices_wanted, process_group
from .metrics import TensorBoard
from .optimizers import AdamW, build_optimizer
from .places import DEVICES, number
from .plan_table import memory_text, plan_text
from .resume import Resumed, costs_state, resume, saved_costs, settings_of
from .run import Run
from .run_folder import CHECKPOINTS, RunFolder
from .runtime import Compiled, Engine, Plan, Preparer, make_plan, make_workload, requests_of
from .runtime.compile import Progress
from .runtime.costs import counted_costs
from .runtime.global_batch import Reader
from .runtime.memory import MemoryUse, memory_use, predict_bucket_bytes, predict_memory
from .runtime.program_cache import keep_programs
from .runtime.snapshot import snapshot_shapes
from .runtime.startup import exercise
from .runtime.state import Reading
from .runtime.watchdog import Standing, Watchdog
from .schedules import IN_FLIGHT, Policy, Wavefront, Workload
from .terminal import Terminal, screen_of
from .training import Training
from .verification import verify_run

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
"""What decides what is computed, besides this package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that a run needs and that may be wrong, checked before anything is compiled.

    Args:
        dataset: the data.
        plan: where the graph runs.
        batches: samples of each step; None for 0 steps.
        weights: section -> path -> array in a file.
        optimizers: section -> optax transformation.
    """

    dataset: Dataset
    plan: Plan
    batches: Batches | None
    weights: Mapping[str, Mapping[str, Any]]
    optimizers: Mapping[str, Any]


@configurable("train")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """What to train, on what, and for how long.

    Args:
        graph: the sections.
        data: a data source (with `load()`), or a `Dataset`.
        steps: optimizer steps; 0 only evaluates. In a folder with a run, that is its newest checkpoint.
        batch: samples in a step, over all replicas.
        seed: of initial parameters, data order and dropout.
        optimizer: for sections without one of their own.
        clip_norm: bound on the joint gradient norm of all sections; None does not clip.
        policy: decides what runs where and when.
        costs: what the policy takes tasks to cost: "counted" from the programs, equal on every machine, or "measured" at the beginning.
        run_ahead: most steps that are scheduled together, so that sections that wait for no update run ahead into later ones; 1: none.
        evaluate_every: steps between evaluations on held-out data; 0 evaluates at the start and the end only.
        evaluate_batches: most held-out batches in an evaluation; None takes all, 0 never evaluates.
        log_every: steps between lines on the screen; every step is in metrics.jsonl.
        checkpoint_every: steps between checkpoints; 0 writes one at the end and on an interruption only.
        keep_checkpoints: how many of the newest checkpoints stay.
        keep_best: held-out objective ("section/objective", lower is better) whose best checkpoint stays besides; None keeps none.
        skip_limit: most steps in a row that may be skipped because something is not finite, or whose samples may all be bad.
        timelines: steps, from 1, whose windows are recorded: timeline.html and trace.json show what ran when; () records none.
        metrics: where numbers go besides metrics.jsonl: TensorBoard(), WeightsAndBiases(), or None.
        on_bad_sample: what to do with a sample that cannot be read or fits no micro-batch: "raise", or "skip" it and count its kind.
        share_devices: with fewer devices than the plan asks for, let sections share them instead of refusing.
        in_flight: most unfinished tasks that a replica is given.
        adaptive: let a replica whose next task waits for its inputs run a later one first; one process only.
        save_dtype: precision of the final weights on disk.
        save_shard_bytes: most bytes of a file of the final weights of models that came from a folder of Hugging Face.
        compile_cache: folder where compiled programs are kept for later runs, set for the whole process; None leaves what is set.
        debug: check every argument of every program before it is called; slower.
    """

    graph: SectionGraph
    data: Any
    steps: int = 100
    batch: int = 16
    seed: int = 0
    optimizer: Any = dataclasses.field(default_factory=AdamW)
    clip_norm: float | None = 1.0
    policy: Policy = dataclasses.field(default_factory=Wavefront)
    costs: Literal["counted", "measured"] = "counted"
    run_ahead: int = 4
    evaluate_every: int = 0
    evaluate_batches: int | None = None
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    keep_best: str | None = None
    skip_limit: int = 10
    timelines: tuple[int, ...] = (10,)
    metrics: Any = dataclasses.field(default_factory=TensorBoard)
    on_bad_sample: Literal["raise", "skip"] = "raise"
    share_devices: bool = True
    in_flight: int = IN_FLIGHT
    adaptive: bool = False
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    save_shard_bytes: int = SHARD_BYTES
    compile_cache: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.data, Dataset):
            self._needs("data", "load", "a Dataset, or a data source with a method load()")
        self._needs("policy", "schedule", "a policy such as Wavefront(), with a method schedule()")
        if self.steps and not any(s.trainable for s in self.graph.sections):
            self._refuse("steps", "0, which evaluates: no section of the graph is trainable", str(self.steps))
        if self.seed >= 2**63:
            self._refuse("seed", "a number below 2**63", str(self.seed))
        least = {"steps": 0, "batch": 1, "seed": 0, "evaluate_every": 0, "evaluate_batches": 0, "log_every": 1, "in_flight": 1}
        least |= {"checkpoint_every": 0, "keep_checkpoints": 1, "skip_limit": 0, "run_ahead": 1, "save_shard_bytes": 1}
        for field, low in least.items():
            value = getattr(self, field)
            if value is not None and value < low:
                self._refuse(field, f"a whole number, at least {low}", str(value))
        if any(step < 1 for step in self.timelines):
            self._refuse("timelines", "numbers of steps, from 1", str(self.timelines))
        if self.clip_norm is not None and not self.clip_norm > 0:
            self._refuse("clip_norm", "a positive number, or None", str(self.clip_norm))
        objectives = [f"{s.name}/{name}" for s in self.graph.sections for name in s.objectives]
        if self.keep_best is not None and self.keep_best not in objectives:
            self._refuse("keep_best", f"one of {', '.join(objectives)}, or None", repr(self.keep_best))
        if self.metrics is not None:
            self._needs("metrics", "open", "TensorBoard(), WeightsAndBiases(), or None")

    def _needs(self, field: str, method: str, wanted: str) -> None:
        value = getattr(self, field)
        if isinstance(value, type):
            self._refuse(field, wanted, f"the class {value.__name__} itself: in a config file write @{value.__name__}(), with parentheses")
        if not callable(getattr(value, method, None)):
            # Shortened: the representation of a list of samples shows every array.
            self._refuse(field, wanted, f"{type(value).__name__}: {reprlib.repr(value)}")

    def _refuse(self, field: str, wanted: str, have: str) -> NoReturn:
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
        if process_group().count == 1:
            make_cpu_devices(devices_wanted(requests_of(self.graph)))
        devices = jax.devices()
        plan = make_plan(self.graph, dataset.specs, devices, share=self.share_devices)
        self._check_merges(plan, dataset)
        idle = len(devices) - len({d for s in plan.sections.values() for d in s.submesh.mesh.devices.flat})
        notes = [f"{idle} of {len(devices)} devices stay idle: no section asks for them"] if idle else []
        notes += [f"section {s.name!r}: {note}" for s in self.graph.sections for note in getattr(s.module, "notes", ())]
        return dataclasses.replace(plan, notes=(*plan.notes, *notes))

    def _check_merges(self, plan: Plan, dataset: Dataset) -> None:
        """Rows that are counted otherwise than they are made would be those of other places, of other images even."""
        for edge in plan.edges.values():
            stream = self.graph[edge.edge.producer].reads
            counted = dataset.merges.get(stream, edge.merge)
            if edge.edge.rows is not None and counted != edge.merge:
                raise ConfigError(
                    f"section {edge.edge.producer!r} makes other rows than the data counts.",
                    wanted=f"{counted} units of stream {stream!r} in a row, as {edge.edge.rows!r} counts them",
                    have=f"{edge.merge} units in a row",
                    fix="make the encoder's merge (units: its square) or stride that of the data",
                    anchor="units-per-row",
                    set_by=set_by(self.graph[edge.edge.producer], "module"),
                )

    def setup(self) -> Setup:
        """Loads the data, places the graph, opens weight files and makes optimizers; compiles and allocates nothing.

        Raises:
            MaestroError: whatever is wrong with data, graph, weights, optimizers or devices.
        """
        dataset = self.dataset()
        plan = self.plan(dataset)
        if self.adaptive and plan.group.count > 1:
            self._refuse("adaptive", "False where there are several processes: all must issue tasks in one order", "True")
        return Setup(
            dataset=dataset,
            plan=plan,
            batches=Batches(dataset, self.batch, self.seed, set_by=set_by(self, "batch")) if self.steps else None,
            weights={s.name: given_weights(s, plan, dataset) for s in self.graph.sections},
            optimizers=self.optimizers(),
        )

    def optimizers(self) -> dict[str, Any]:
        """Section -> optax transformation, for each section that is trained."""
        return {s.name: self._optimizer(s) for s in self.graph.sections if s.trainable}

    def _agree(self, plan: Plan, config_text: str = "") -> None:
        """Compares what every process must have alike: settings, plan and versions.

        Raises:
            ClusterError: something differs.
        """
        if plan.group.count == 1:
            return
        plain = (bool, int, float, str, tuple, type(None))
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        said = {f"train.{name}": repr(value) for name, value in fields.items() if isinstance(value, plain)}
        said |= {"train.policy": repr(self.policy), "Python": ".".join(platform.python_version_tuple()[:2])}
        said |= {package: importlib.metadata.version(package) for package in PACKAGES}
        said |= {f"plan, line {number}": line for number, line in enumerate(plan_text(plan, {}).splitlines(), start=1)}
        said |= {name: value for name, (value, _) in settings_of(config_text).items()}
        plan.group.agreed("settings", said, "their settings, plan and versions")

    def start(self, setup: Setup | None = None, progress: Progress | None = None) -> Run:
        """Compiles every program and makes the initial state.

        Args:
            setup: what `setup` returned; None calls it.
            progress: called after each compiled program.

        Raises:
            MaestroError: as `setup`.
        """
        setup = setup if setup is not None else self.setup()
        self._agree(setup.plan)
        return self._started(setup, progress)

    def _started(
        self,
        setup: Setup,
        progress: Progress | None = None,
        reading: Reading | None = None,
        standing: Standing | None = None,
        resumed: Resumed | None = None,
    ) -> Run:
        """Starts a run when the processes have agreed; it goes on from what is resumed."""
        if self.compile_cache is not None:
            keep_programs(Path(self.compile_cache).expanduser())
        evaluation = bool(setup.dataset.heldout) and self.evaluate_batches != 0
        compiled = Compiled(setup.plan, setup.optimizers, self.clip_norm, evaluation, progress)
        saved, step = (resumed.snapshot, resumed.commit.step) if resumed is not None else (None, 0)
        engine = Engine(compiled, self.seed, setup.weights, self.in_flight, self.debug, saved, standing, self.adaptive, reading)
        exercised = exercise(setup.plan)
        # Measured numbers differ from time to time; a run that goes on keeps those that it began with, and so its schedules.
        costs = saved_costs(setup.plan, resumed.commit.state) if self.costs == "measured" and resumed is not None else None
        preparer = Preparer(compiled, self.policy, setup.dataset.specs, self.seed, costs)
        run = Run(
            trainer=self,
            dataset=setup.dataset,
            batches=setup.batches,
            engine=engine,
            preparer=preparer,
            evaluation=evaluation,
            step=step,
            exercised=exercised,
            weights=setup.weights,
        )
        if self.costs == "measured" and self.steps and costs is None:
            run.measure_costs()
        return run

    def show_plan(self, terminal: Terminal) -> Setup:
        """Does all of `setup` and prints the plan."""
        setup = self.setup()
        self._show(setup, self.mean_units(setup.dataset), terminal)
        return setup

    def _show(self, setup: Setup, units: Mapping[str, float], terminal: Terminal) -> None:
        terminal.plan(setup.plan, units)
        for reason, count in setup.dataset.skipped.items():
            terminal.note(f"data: {count} skipped ({reason})")

    def dry_run(self, terminal: Terminal) -> None:
        """Checks everything, and prints the plan, the memory that it will take and a sampled step; compiles nothing."""
        setup = self.show_plan(terminal)
        uses = predict_memory(setup.plan, setup.optimizers, self.in_flight)
        terminal.memory(uses)
        if setup.batches is not None:
            terminal.finish(["", *sampled_step(self, setup, uses)])

    def workload(self, step: int = 0, setup: Setup | None = None) -> Workload:
        """Describes the steps from `step` on that are scheduled together (see `window`), for `maestro_jax.simulate`.

        Args:
            step: number of the first one, from 0.
            setup: what `setup` returned; None calls it.

        Raises:
            MaestroError: as `setup`, or a bad sample.
        """
        setup = setup if setup is not None else self.setup()
        if setup.batches is None:
            self._refuse("steps", "at least 1 to describe a step", "0")
        if step < 0:
            self._refuse("step", "the number of a step, from 0", str(step))
        steps = self.window(step)
        places = [setup.batches.places(n) for n in steps]
        batches = [batch.samples for batch, _ in self.reader(setup.plan, setup.dataset).read(setup.dataset.train, places, "workload")]
        made = make_workload(setup.plan, batches, True, counted_costs(setup.plan), predict_bucket_bytes(setup.plan))
        return dataclasses.replace(made, name=f"steps {step} to {steps[-1]}" if len(steps) > 1 else f"step {step}")

    def window(self, first: int) -> range:
        """The steps that are scheduled together when a window begins at step `first`, counted from 0.

        Where a window ends depends on its steps alone, so a run that goes on has the same ones.
        """
        # Where every section waits for updates, nothing could run ahead.
        most = self.run_ahead if not all(self.graph.runs_backward[s.name] for s in self.graph.sections) else 1
        end = first + 1
        while end % most and not self.pauses(end):
            end += 1
        return range(first, end)

    def pauses(self, step: int) -> bool:
        """Whether nothing waits after `step` steps: they are all, or an evaluation or a checkpoint sees the parameters of that step."""
        return step == self.steps or any(n and step % n == 0 for n in (self.evaluate_every, self.checkpoint_every))

    def fit(
        self,
        folder: Path | str | None = None,
        *,
        terminal: Terminal | None = None,
        restart: bool = False,
        verify_step: bool = False,
        config_text: str = "",
    ) -> Run:
        """Trains to the end: plan, compilation, evaluation, steps, checkpoints, final weights. Goes on with the run of the folder.

        Args:
            folder: where plan, metrics, checkpoints and weights go; made when everything has been checked. None writes nothing.
            terminal: the screen; None is standard output.
            restart: begin anew in a folder that holds a run.
            verify_step: before training, compare every section's gradient with one program on a few samples (see `verify`).
            config_text: the resolved configuration, for the run folder.

        Raises:
            MaestroError: as `setup`, or a folder that is in use, cannot be written, or holds a run that does not fit, or gradients
                that differ.
            Preempted: after SIGTERM, when checkpoint and weights have been written.
        """
        with contextlib.ExitStack() as stack:
            setup = self.setup()
            group = setup.plan.group
            screen = terminal if terminal is not None and group.first else stack.enter_context(screen_of(group))
            units = self.mean_units(setup.dataset) if group.first else {}
            self._show(setup, units, screen)
            if group.count > 1:
                self._check_processes(verify_step)
            standing = Standing()
            stack.enter_context(Watchdog(group, standing))
            self._agree(setup.plan, config_text)
            if folder is None:
                run = self._started(setup, screen.compiling, screen.reading, standing)
                self._before_training(run, screen, verify_step)
                Training(run, screen).fit()
                return run
            files = group.lead("run folder", lambda: RunFolder(folder, restart=restart, set_by="--workdir"))
            if files is not None:
                stack.enter_context(contextlib.closing(files))
            place = Path(folder) / CHECKPOINTS
            checkpoints = Checkpoints(place, self.keep_checkpoints, self.keep_best, set_by="--workdir", group=group)
            stack.callback(checkpoints.close)
            shapes = snapshot_shapes(setup.plan, setup.optimizers)
            state = {"signature": shapes.signature(), "data": self._data_state(setup)}
            group.agreed("data", state["data"], "the training data")
            resumed = resume(files, checkpoints, shapes, state["data"], config_text, self.steps, screen.note, setup.plan)
            step = resumed.commit.step if resumed is not None else 0
            # A run that is complete stays as it is.
            going = not step or step < self.steps
            plan = plan_text(setup.plan, units)
            if going and files is not None:
                files.write_config(config_text)
                files.write_plan(plan)
                files.write_env(dict(setup.dataset.notes))
            writer = None
            if self.metrics is not None and files is not None:
                writer = self.metrics.open(files.path, step=step, config_text=config_text)
                stack.callback(writer.close)
            run = self._started(setup, screen.compiling, screen.reading, standing, resumed)
            uses = self._before_training(run, screen, verify_step)
            if going and files is not None:
                files.write_plan(plan + memory_text(uses))
            state["schedule"] = {"policy": repr(self.policy), **costs_state(setup.plan, run.costs)}
            training = Training(run, screen, folder=files, checkpoints=checkpoints, writer=writer, state=state)
            if resumed is not None:
                training.restore(resumed.commit)
            training.fit()
        return run

    def _check_processes(self, verify_step: bool) -> None:
        """Refuses what one process alone can do."""
        if verify_step:
            self._refuse("graph", "one process for --verify_step: gradients do not depend on the layout", "several processes")

    def _before_training(self, run: Run, screen: Terminal, verify_step: bool) -> dict[str, MemoryUse]:
        """Shows what the compiled programs take, and verifies their gradients where that is wanted."""
        uses = memory_use(run.engine.compiled, self.in_flight)
        screen.memory(uses)
        if run.exercised.pairs:
            screen.note(f"tried {run.exercised.pairs} ways between devices of different processes: what was sent arrived")
        if verify_step:
            found = verify_run(run, progress=screen.compiling)
            found.require()
            screen.table(str(found))
        return uses

    def _data_state(self, setup: Setup) -> dict[str, Any]:
        """What decides which samples a step sees, together with its number."""
        return {"fingerprint": setup.dataset.fingerprint(), "seed": self.seed, "batch": self.batch}

    def mean_units(self, dataset: Dataset, samples: int = 256) -> dict[str, float]:
        """Section -> units in the items of a step, estimated from samples that are spread over the data, each part by its weight."""
        parts = dataset.parts or (Part("", len(dataset.train), 1.0),)
        whole, first = sum(part.weight for part in parts), 0
        found = dict.fromkeys((section.name for section in self.graph.sections), 0.0)
        for part in parts:
            places = range(first, first + part.samples, max(1, part.samples * len(parts) // samples))
            some, _ = readable(dataset.train, places)
            first += part.samples
            for section in self.graph.sections if some else ():
                units = sum(item.units for sample in some for item in sample.items.get(section.reads, ()))
                found[section.name] += self.batch * part.weight / whole * units / len(some)
        return found

    def _optimizer(self, section: Section) -> Any:
        owner = section if section.optimizer is not None else self
        return build_optimizer(owner.optimizer, set_by(owner, "optimizer"))

    def reader(self, plan: Plan, dataset: Dataset) -> Reader:
        """Reads the samples of steps; `on_bad_sample` says what is made of bad ones."""
        return Reader(plan, dataset.specs, skip=self.on_bad_sample == "skip")


def make_cpu_devices(count: int) -> None:
    """Makes `count` CPU devices, or as many as the launcher says, for machines without an accelerator; does nothing once JAX has started.

    Accelerators are not affected: this counts devices of the CPU platform only.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", number(os.environ, DEVICES) if DEVICES in os.environ else count)
    except RuntimeError:
        # The backends have been initialised: whoever did that decided how many devices there are.
        return
