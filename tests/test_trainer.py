"""The trainer: data, weights, plan, steps, reports and files of a run."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file
from support import TEXT_SPECS, chain, text_samples

from maestro_jax.data import Dataset, LazySamples, Part, Sample
from maestro_jax.data.lazy import Digest
from maestro_jax.distill import Distilled
from maestro_jax.errors import CheckpointError, ConfigError, DataError, GraphError, MaestroError, MeshError
from maestro_jax.graph import Objective
from maestro_jax.initial_weights import as_given, given_weights
from maestro_jax.models import Decoder
from maestro_jax.models.weights import WeightFile, save_weights
from maestro_jax.optimizers import AdamW, Sgd, WarmupCosine, build_optimizer
from maestro_jax.record import read_records
from maestro_jax.schedules import InOrder
from maestro_jax.terminal import Terminal
from maestro_jax.trainer import Trainer


def dataset(**fields: Any) -> Dataset:
    return Dataset(**{"train": text_samples(24), "heldout": text_samples(7, seed=1), "specs": TEXT_SPECS, **fields})


def trainer(**fields: Any) -> Trainer:
    return Trainer(**{"graph": chain(), "data": dataset(), "steps": 3, "batch": 8, "optimizer": Sgd(learning_rate=0.05), **fields})


def test_a_run_reports_evaluates_and_saves(tmp_path: Path) -> None:
    screen = io.StringIO()
    with Terminal(screen, interactive=False) as terminal:
        run = trainer(evaluate_every=2).fit(tmp_path / "run", terminal=terminal, config_text="# none\n")
    text = screen.getvalue()
    assert "compiled 1" in text
    assert "student: cross_entropy " in text
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3]
    assert all(r["applied"] and r["gradient_norm"] > 0 and r["tokens"] > 0 for r in records)
    assert [r["tokens_per_second"] is None for r in records] == [True, False, False]
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [e["step"] for e in evaluations] == [0, 2, 3]
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"config.gin", "plan.txt", "env.json", "weights"}
    saved = WeightFile(tmp_path / "run" / "weights" / "student.safetensors", "the test").arrays()
    assert {p: np.asarray(a[:]).tolist() for p, a in saved.items()} == {p: v.tolist() for p, v in run.engine.parameters("student").items()}


def test_steps_can_be_iterated() -> None:
    run = trainer().start()
    results = list(run.steps())
    assert [r.step for r in results] == [1, 2, 3]
    assert results[0].metrics["loss"] > results[-1].metrics["loss"] - 5
    assert set(run.evaluate()) == {"student/cross_entropy", "student/square"}


def test_the_loss_is_the_weighted_sum_of_objectives() -> None:
    result = next(iter(trainer().start().steps()))
    want = result.metrics["student/cross_entropy"] + 0.1 * result.metrics["student/square"]
    assert result.metrics["loss"] == pytest.approx(want, rel=1e-6)


def test_the_same_seed_gives_the_same_run() -> None:
    losses = [[r.metrics["loss"] for r in trainer(seed=5).start().steps()] for _ in range(2)]
    assert losses[0] == losses[1]
    assert losses[0] != [r.metrics["loss"] for r in trainer(seed=6).start().steps()]


def test_the_window_of_a_named_step_is_recorded(tmp_path: Path) -> None:
    ahead = chain(teacher={"trainable": False})
    run = trainer(graph=ahead, steps=4, run_ahead=2, timelines=(4,)).fit(tmp_path)
    [found] = read_records(tmp_path)
    assert (found.first_step, len(found.workload.steps)) == (3, 2)
    assert found.nominal  # costs are counted
    assert {task.section for task in found.measured.tasks} == {"teacher", "middle", "student"}
    assert all(0 <= issued <= task.start <= task.end for issued, task in zip(found.issued, found.measured.tasks, strict=True))
    assert {path.name for path in tmp_path.glob("t*")} == {"timelines", "timeline.html", "trace.json", "tensorboard"}
    assert run.records == []  # it was moved


def test_without_named_steps_nothing_is_recorded(tmp_path: Path) -> None:
    trainer(timelines=(), metrics=None).fit(tmp_path)
    assert list(tmp_path.glob("t*")) == []


def test_the_next_steps_can_be_recorded_on_request() -> None:
    run = trainer().start()
    assert [run.record().first_step, run.record().first_step] == [1, 2]
    assert [result.step for result in run.steps()] == [3]
    assert run.records == []
    with pytest.raises(ConfigError, match="no step is left"):
        run.record()


def test_recording_changes_no_numbers() -> None:
    plain, watched = (trainer(timelines=steps).start() for steps in ((), (1, 3)))
    assert [result.metrics for result in plain.steps()] == [result.metrics for result in watched.steps()]
    assert [found.first_step for found in watched.records] == [1, 3]


def test_nothing_compiles_after_the_start_line(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    started: list[str] = []

    def heard(event: str, duration_secs: float, **kwargs: Any) -> None:
        if started and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    monkeypatch.setattr(Terminal, "start", lambda self, text: started.append(text))
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        graph = chain(teacher={"microbatch": (32, 64)}, student={"replicas": 2, "microbatch": (32, 96)})
        trainer(graph=graph, steps=6, evaluate_every=2, optimizer=AdamW()).fit()
        assert started
        assert compiled == []
    finally:
        jax.monitoring.clear_event_listeners()


def test_no_steps_only_evaluate() -> None:
    run = trainer(steps=0, data=dataset(train=[])).fit()
    assert run.step == 0
    assert run.evaluate()["student/cross_entropy"] > 0


def test_long_samples_are_refused_or_skipped_and_counted() -> None:
    graph = chain(middle={"microbatch": 20})
    with pytest.raises(DataError, match="is longer than the largest micro-batch of section 'middle'"):
        list(trainer(graph=graph).start().steps())
    run = trainer(graph=graph, on_bad_sample="skip").start()
    assert len(list(run.steps())) == 3
    seen = [s for step in range(3) for s in run._batches(step)] if run._batches else []
    assert run.skipped_samples.total() == run.skipped_samples["sample-too-long"] == sum(s.items["text"][0].units > 20 for s in seen) > 0


class Damaged(LazySamples):
    """The samples of `text_samples`, of which every third cannot be read."""

    def __len__(self) -> int:
        return 20

    def read(self, number: int) -> Sample:
        if number % 3 == 0:
            raise DataError(f"sample {number}: gone.", wanted="a file", have="none", fix="restore it", anchor="media-missing")
        return text_samples(20)[number]

    def hash_into(self, digest: Digest) -> None:
        digest.update(b"damaged")


def test_samples_that_cannot_be_read_are_refused_or_skipped_and_counted_by_kind() -> None:
    data = dataset(train=Damaged(), heldout=Damaged())
    with pytest.raises(DataError, match=r"sample \d+: gone"):
        list(trainer(data=data).start().steps())
    run = trainer(data=data, on_bad_sample="skip", batch=20, steps=2).start()
    results = list(run.steps())
    assert [len(run.bad_samples(result.step)) for result in results] == [7, 7]
    assert run.skipped_samples == {"media-missing": 14}
    for _ in range(2):
        assert run.evaluate()["student/cross_entropy"] > 0
        assert run.skipped_heldout == {"media-missing": 7}
        assert len(run.bad_samples(0)) == 7
    assert run.skipped_samples == {"media-missing": 14}


def test_weights_are_loaded_by_prefix(tmp_path: Path) -> None:
    params = trainer().start().engine.parameters("teacher")
    save_weights(tmp_path / "t.safetensors", {f"inside/{p}": v + 1 for p, v in params.items()})
    run = trainer(graph=chain(teacher={"weights": f"{tmp_path / 't.safetensors'}:inside"})).start()
    assert all(np.array_equal(run.engine.parameters("teacher")[p], v + 1) for p, v in params.items())


def test_what_is_frozen_is_saved_as_it_came_also_from_lower_precision(tmp_path: Path) -> None:
    params = trainer().start().engine.parameters("student")
    exact = {path: value + np.float32(1 / 3) for path, value in params.items()}
    save_weights(tmp_path / "s.safetensors", exact)
    fields = {"frozen": ("embed", "head"), "dtype": "bfloat16", "weights": str(tmp_path / "s.safetensors")}
    run = trainer(graph=chain(student=fields), steps=1).start()
    list(run.steps())
    assert run.engine.parameters("student")["embed"].dtype != np.float32
    [path] = [path for path in run.save(tmp_path / "saved") if path.stem == "student"]
    saved = load_file(path)
    for name in ("embed", "head"):
        np.testing.assert_array_equal(saved[name], exact[name])
    assert not np.array_equal(saved["inner"], exact["inner"])


def test_what_is_frozen_and_is_no_longer_what_a_file_has_is_saved_as_it_is() -> None:
    file = {"a": np.array([0.1, 0.2], np.float32)}
    held = {"a": np.array([0.1, 0.3], np.float16)}
    assert as_given(held, file)["a"] is held["a"]
    assert as_given({"a": file["a"].astype(np.float16)}, file)["a"].tolist() == file["a"].tolist()


@pytest.mark.parametrize("wrong", ["missing", "shape"])
def test_weights_that_do_not_fit_are_listed(tmp_path: Path, wrong: str) -> None:
    t = trainer(graph=chain(teacher={"weights": str(tmp_path / "t.safetensors")}))
    arrays = {"embed": np.zeros((16, 8), np.float32), "inner": np.zeros((8, 8 if wrong == "missing" else 9), np.float32)}
    if wrong == "missing":
        del arrays["embed"]
    save_weights(tmp_path / "t.safetensors", arrays)
    with pytest.raises(CheckpointError, match="weights do not fit section 'teacher'") as caught:
        t.start()
    assert caught.value.have == (
        "embed: wanted, not in the file" if wrong == "missing" else "inner: [8, 9] in the file, [8, 8] in the module"
    )


def test_weights_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    """PEER_CASES 13: equal widths with other tokenizers would train on garbage."""
    save_weights(tmp_path / "t.safetensors", {"embed": np.zeros((16, 8)), "inner": np.zeros((8, 8))}, tokenizer="a" * 64)
    data = dataset(tokenizer_fingerprint="b" * 64)
    graph = chain(teacher={"weights": str(tmp_path / "t.safetensors")})
    plan = trainer().plan(data)
    with pytest.raises(CheckpointError, match="were trained with another tokenizer"):
        given_weights(graph["teacher"], plan, data)
    allowed = dataclasses.replace(graph["teacher"], check_tokenizer=False)
    assert set(given_weights(allowed, plan, data)) == {"embed", "inner"}


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_text("no weights")
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        trainer(graph=chain(teacher={"weights": str(tmp_path / "t.safetensors")})).start()


def test_foreign_vocabulary_is_refused() -> None:
    graph = chain(teacher={"module": Decoder(vocab_size=10, layers=1, embed=8, heads=2, kv_heads=2, mlp=8)})
    with pytest.raises(DataError, match="vocabulary"):
        trainer(graph=graph, data=dataset(vocab_size=16)).dataset()


def test_fewer_devices_are_shared_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(teacher={"axes": {"tensor": 2}}, student={"replicas": 2})
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)
    plan = trainer(graph=graph).plan(dataset())
    assert "sections share them" in plan.notes[0]
    assert {d.id for s in plan.sections.values() for d in s.submesh.mesh.devices.flat} == {0, 1}
    with pytest.raises(MeshError, match="cannot be placed"):
        trainer(graph=graph, share_devices=False).plan(dataset())


def test_everything_is_checked_before_a_folder_is_made(tmp_path: Path) -> None:
    wrong = [{"optimizer": "adam"}, {"batch": 1000}, {"graph": chain(teacher={"weights": "nowhere.safetensors"})}]
    for fields in wrong:
        with pytest.raises(MaestroError):
            trainer(**fields).fit(tmp_path / "run", terminal=Terminal(io.StringIO()))
        assert not (tmp_path / "run").exists()


def test_an_interrupt_ends_the_step_and_saves(tmp_path: Path) -> None:
    screen = io.StringIO()

    class Interrupting(Terminal):
        def step(self, record: Any) -> None:
            super().step(record)
            if record["step"] == 1:
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer(steps=50, log_every=2).fit(tmp_path / "run", terminal=Interrupting(screen, interactive=False))
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "run" / "weights" / "student.safetensors").exists()
    assert re.search(r"interrupted after step [1-4]/50", screen.getvalue())


def test_an_interrupt_in_the_last_evaluation_still_saves(tmp_path: Path) -> None:
    class Interrupting(Terminal):
        def evaluation(self, step: int, values: Any) -> None:
            if step == 2:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer(steps=2).fit(tmp_path / "run", terminal=Interrupting(io.StringIO(), interactive=False))
    assert (tmp_path / "run" / "weights" / "student.safetensors").exists()


def test_results_and_runs_are_short_when_printed() -> None:
    run = trainer(steps=1).start()
    [result] = run.steps()
    assert repr(run) == "Run(step 1/1, sections teacher, middle, student)"
    assert repr(result).startswith("StepResult(step=1, loss=")
    assert len(repr(result)) < 250
    assert all(type(value) is float for value in result.metrics.values())


@pytest.mark.parametrize(("field", "value"), [("graph", 1), ("data", None), ("data", Dataset), ("policy", "in_order"), ("policy", InOrder)])
def test_what_cannot_be_used_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(wrong {field}|Trainer\.{field} has a wrong type)"):
        trainer(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", -1),
        ("batch", 0),
        ("clip_norm", 0.0),
        ("clip_norm", float("nan")),
        ("on_bad_sample", "ignore"),
        ("in_flight", 0),
        ("checkpoint_every", -1),
        ("keep_checkpoints", 0),
        ("keep_best", "student/perplexity"),
        ("skip_limit", -1),
        ("timelines", (10, 0)),
        ("metrics", "tensorboard"),
        ("steps", "5"),
    ],
)
def test_wrong_values_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(wrong {field}|Trainer\.{field} has a wrong type)"):
        trainer(**{field: value})


def test_optimizers_are_built_or_refused() -> None:
    given = optax.sgd(1.0)
    assert build_optimizer(given, "here") is given
    assert isinstance(build_optimizer(AdamW(learning_rate=WarmupCosine(peak=1.0, steps=4)), "here"), optax.GradientTransformation)
    with pytest.raises(ConfigError, match="an optimizer cannot be used"):
        build_optimizer("adam", "here")


def test_norm_scales_do_not_decay() -> None:
    params = {"layers/norm/scale": np.ones((2, 3), np.float32), "head/weight": np.ones((2, 3), np.float32)}
    zero = jax.tree.map(np.zeros_like, params)
    transformation = AdamW(learning_rate=0.1, weight_decay=0.5).build()
    updates: Any = transformation.update(zero, transformation.init(params), params)[0]
    assert float(np.abs(updates["layers/norm/scale"]).max()) == 0
    assert float(updates["head/weight"][0, 0]) == pytest.approx(-0.05)


def test_a_schedule_needs_room_to_decay() -> None:
    with pytest.raises(ConfigError, match="no room for its decay"):
        WarmupCosine(peak=1.0, steps=5, warmup=5)


def test_numpy_numbers_are_numbers() -> None:
    made = trainer(steps=np.int64(2), graph=chain(student={"microbatch": np.int64(64), "replicas": np.int32(2)}))
    assert type(made.steps) is int
    assert made.graph["student"].buckets == (64,)


def test_there_must_be_something_to_train() -> None:
    frozen: Any = {name: {"trainable": False} for name in ("teacher", "middle", "student")}
    with pytest.raises(ConfigError, match="wrong steps") as caught:
        trainer(graph=chain(**frozen))
    assert caught.value.wanted == "0, which evaluates: no section of the graph is trainable"
    assert trainer(graph=chain(**frozen), steps=0).fit().evaluate()["student/cross_entropy"] > 0


def test_what_an_objective_counts_must_exist() -> None:
    graph = chain(student={"objectives": {"cross_entropy": Objective(count="los_mask")}})
    with pytest.raises(GraphError, match="counts an array that its items do not have") as caught:
        trainer(graph=graph).setup()
    assert "did you mean 'loss_mask'" in caught.value.wanted


def test_a_count_must_be_a_number() -> None:
    graph = chain(student={"objectives": {"cross_entropy": Objective(count=lambda item: -1.0)}})
    with pytest.raises(DataError, match="an objective cannot be counted"):
        list(trainer(graph=graph).start().steps())


def test_an_axis_that_nothing_uses_is_refused() -> None:
    with pytest.raises(ConfigError, match="an axis that no rule uses") as caught:
        trainer(graph=chain(teacher={"axes": {"tesnor": 2}})).setup()
    assert "did you mean 'tensor'" in caught.value.wanted


def test_a_distilled_student_needs_rows_for_all_tokens_of_the_data() -> None:
    small = Decoder(vocab_size=10, layers=1, embed=8, heads=2, kv_heads=2, mlp=8)
    module = Distilled(student=small, teacher_vocab_size=16, teacher_embed=8)
    graph = chain(student={"module": module, "objectives": {"kl": Objective()}, "frozen": ("teacher_head",)})
    with pytest.raises(DataError, match="vocabulary"):
        trainer(graph=graph, data=dataset(vocab_size=16)).dataset()


def test_compiled_programs_are_kept_in_a_folder_of_the_users_choice(tmp_path: Path) -> None:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for folder, width in (("one", 12), ("two", 13)):
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
            run = trainer(compile_cache=str(tmp_path / folder), graph=chain(width=width)).start()
            # Every program has an entry, and each trainer's lie in its own folder.
            assert len([*(tmp_path / folder).glob("*-cache")]) >= len(run.engine.compiled.programs)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_mean_units_weigh_parts_as_steps_do() -> None:
    samples = [*text_samples(40, shortest=4, longest=4), *text_samples(4, shortest=12, longest=12)]
    samples = [dataclasses.replace(sample, id=f"{number}") for number, sample in enumerate(samples)]
    data = dataset(train=samples, parts=(Part("short", 40, 1.0), Part("long", 4, 3.0)))
    assert trainer(batch=4).mean_units(data)["teacher"] == 4 + 3 * 12


def test_samples_without_a_data_set_are_named_in_a_few_words() -> None:
    with pytest.raises(ConfigError, match="the trainer has a wrong data") as caught:
        trainer(data=text_samples(500))
    assert caught.value.have.startswith("list: [Sample(")
    assert len(caught.value.have) < 400
