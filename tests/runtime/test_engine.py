"""Steps, updates and evaluation of an engine."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engines import Setup, build, worst_leaf
from support import chain, student_functions, teacher_functions, text_samples

from maestro_jax.data import Item, Sample
from maestro_jax.errors import DataError, EdgeError, MeshError, ScheduleError
from maestro_jax.graph import Objective, SectionGraph
from maestro_jax.runtime import dispatcher
from maestro_jax.runtime.programs import SectionFunctions
from maestro_jax.schedules import InOrder, Schedule, Workload

SAMPLES = text_samples(20)


def without_loss(samples: list[Sample]) -> list[Sample]:
    def silent(item: Item) -> Item:
        return dataclasses.replace(item, arrays={**item.arrays, "loss_mask": np.zeros(item.units, np.float32)})

    return [dataclasses.replace(s, items={"text": tuple(silent(i) for i in s.items["text"])}) for s in samples]


def unchanged(before: Any, after: Any) -> bool:
    return all(np.array_equal(before[n][p], after[n][p]) for n in before for p in before[n])


def objectives_of(setup: Setup, samples: list[Sample], step: int = 0) -> dict[str, float]:
    return setup.engine.step(setup.preparer.prepare(samples, step)).read(setup.objectives())


def test_objectives_are_sums_divided_once() -> None:
    """PEER_CASES 2 and 3: no mean of means; the last, partial micro-batch weighs as much as its tokens do."""
    setup = build(chain(student={"replicas": 2, "microbatch": (32,)}))
    metrics = objectives_of(setup, SAMPLES)
    loss, _ = build(chain(student={"replicas": 2, "microbatch": (32,)})).reference(SAMPLES)
    weights = {f"student/{name}": o.weight for name, o in setup.graph["student"].objectives.items()}
    assert sum(weights[name] * metrics[name] for name in weights) == pytest.approx(loss, rel=1e-5)


def test_a_step_that_counts_nothing_changes_nothing() -> None:
    setup = build(chain(), optimizer=optax.adamw(1e-2, weight_decay=0.1))
    before = setup.parameters()
    metrics = objectives_of(setup, without_loss(SAMPLES))
    assert metrics["applied"] == 0
    assert math.isnan(metrics["student/cross_entropy"])
    assert unchanged(before, setup.parameters())
    assert objectives_of(setup, SAMPLES, 1)["applied"] == 1
    assert not unchanged(before, setup.parameters())


def test_an_empty_step_changes_nothing() -> None:
    setup = build(chain())
    before = setup.parameters()
    assert objectives_of(setup, [])["applied"] == 0
    assert unchanged(before, setup.parameters())


def test_one_verdict_for_all_sections() -> None:
    """PEER_CASES 4: a gradient that is not finite in one section skips the step in every section."""
    setup = build(chain(teacher={"trainable": True}, middle={"trainable": True}), optimizer=optax.adam(1e-2))
    state = setup.engine.states["student"]
    before = setup.parameters()
    gradients, sums = state.holder(0, 0).take()
    path = next(iter(gradients))
    poison = np.zeros(gradients[path].shape, np.float32)
    poison.flat[0] = np.nan
    gradients[path] = jax.device_put(poison, gradients[path].sharding)
    state.holder(0, 0).put(gradients, sums)
    assert objectives_of(setup, SAMPLES)["applied"] == 0
    assert unchanged(before, setup.parameters())
    assert objectives_of(setup, SAMPLES)["applied"] == 1
    after = setup.parameters()
    assert all(not np.array_equal(before[n][p], after[n][p]) for n in before for p in before[n])


def test_one_norm_over_all_sections_clips() -> None:
    graph = chain(teacher={"trainable": True})
    setup = build(graph, optimizer=optax.sgd(1.0), clip_norm=0.01)
    before = setup.parameters()
    _, gradients = setup.reference(SAMPLES)
    norm = math.sqrt(sum(float((g**2).sum()) for leaves in gradients.values() for g in leaves.values()))
    metrics = objectives_of(setup, SAMPLES)
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    after = setup.parameters()
    moved = math.sqrt(sum(float(((after[n][p] - before[n][p]) ** 2).sum()) for n in before for p in before[n]))
    assert moved == pytest.approx(0.01, rel=1e-4)


def test_the_norm_does_not_depend_on_replicas() -> None:
    norms = [objectives_of(build(chain(student={"replicas": r})), SAMPLES)["gradient_norm"] for r in (1, 4)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_frozen_parts_stay_and_have_no_optimizer_state() -> None:
    setup = build(chain(student={"frozen": ("embed",)}), optimizer=optax.adam(1e-2))
    frozen = [p for p in setup.parameters()["student"] if p.startswith("embed")]
    assert frozen
    before = setup.parameters()
    objectives_of(setup, SAMPLES)
    after = setup.parameters()["student"]
    assert all(np.array_equal(before["student"][p], after[p]) == (p in frozen) for p in after)
    paths = [str(path) for path, _ in jax.tree_util.tree_flatten_with_path(setup.engine.states["student"].optimizer)[0]]
    assert not any(f in path for f in frozen for path in paths)


def test_parameters_are_equal_on_all_replicas() -> None:
    setup = build(chain(student={"replicas": 4}))
    for step in range(3):
        objectives_of(setup, SAMPLES, step)
    for value in setup.engine.states["student"].compute.values():
        shards = [np.asarray(s.data) for s in value.addressable_shards]
        assert all(np.array_equal(shards[0], s) for s in shards)


def test_evaluation_does_not_touch_training() -> None:
    setup, other = build(chain(), evaluation=True), build(chain(), evaluation=True)
    setup.engine.evaluate(setup.preparer.prepare(text_samples(8, seed=n), 0, training=False) for n in range(3))
    for step in range(2):
        assert objectives_of(setup, SAMPLES, step) == objectives_of(other, SAMPLES, step)


def test_evaluation_is_the_mean_over_all_batches() -> None:
    setup = build(chain(student={"replicas": 2}), evaluation=True)
    batches = [SAMPLES[:13], SAMPLES[13:]]
    values = setup.engine.evaluate(setup.preparer.prepare(b, 0, training=False) for b in batches)
    loss, _ = setup.reference(SAMPLES)
    weights = {f"student/{name}": o.weight for name, o in setup.graph["student"].objectives.items()}
    assert sum(weights[name] * values[name] for name in weights) == pytest.approx(loss, rel=1e-5)


@pytest.mark.quick
def test_nothing_compiles_in_steps_and_evaluations() -> None:
    setup = build(chain(teacher={"trainable": True, "replicas": 2}, student={"replicas": 2}), evaluation=True, optimizer=optax.adam(1e-2))
    prepared = [setup.preparer.prepare(text_samples(14, seed=n), n) for n in range(3)]
    compiled: list[str] = []

    def heard(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        for p in prepared:
            setup.engine.step(p).read(setup.objectives())
        setup.engine.evaluate([setup.preparer.prepare(SAMPLES, 0, training=False)])
        assert compiled == []
        jax.jit(lambda x: x * 1.25 + 3)(1.0)
        assert compiled  # the listener does hear compilations
    finally:
        jax.monitoring.clear_event_listeners()


def test_no_payload_is_read_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that reads its source to the host leaves the copy in the source's `_npy_value`."""
    sent: list[jax.Array] = []
    move = dispatcher.move

    def watched(parcels: Any, *rest: Any) -> Any:
        sent.extend(array for parcel in parcels for array in parcel.slot)
        return move(parcels, *rest)

    monkeypatch.setattr(dispatcher, "move", watched)
    setup = build(chain(teacher={"trainable": True, "axes": {"tensor": 2}, "replicas": 2}, student={"replicas": 1}))
    objectives_of(setup, SAMPLES)
    assert len(sent) > 10
    assert all(array._npy_value is None for array in sent)  # pyright: ignore[reportAttributeAccessIssue]


def test_residuals_hold_no_copy_of_parameters() -> None:
    """The forward of a section that runs backward returns activations only: fewer bytes than its parameters."""
    graph = chain(teacher={"trainable": True, "microbatch": (32,)})
    setup = build(graph)
    compiled = setup.engine.compiled
    functions = SectionFunctions(compiled.plan, compiled.plan.sections["middle"], graph["middle"].buckets[-1])
    a = compiled.arguments["middle"]
    inputs = (a.params(0), a.frozen(0), a.feed(graph["middle"].buckets[-1], 0, True), a.slots_in(0), a.sums(0))
    with jax.set_mesh(compiled.plan.sections["middle"].submesh.replica_meshes[0]):
        _, _, kept, _ = jax.eval_shape(functions.forward_residuals, *inputs)
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
    assert not {p.shape for p in compiled.plan.sections["middle"].trained.values()} & set(shapes)
    assert functions.residuals is not None
    assert any(n is not None for n in functions.residuals.from_argument)


def test_a_shuffled_route_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEER_CASES 5: rows that meet other samples than their own raise, and do not train on garbage."""
    from maestro_jax.runtime import feeds

    route = feeds.route

    def shuffled(*args: Any) -> Any:
        found = route(*args)
        if found is None:
            return None
        place = found.place.copy()
        place[: found.rows] = np.roll(place[: found.rows], 1)
        return dataclasses.replace(found, place=place)

    setup = build(chain())
    monkeypatch.setattr(feeds, "route", shuffled)
    with pytest.raises(EdgeError, match=r"met the wrong consumer in step 0"):
        setup.engine.step(setup.preparer.prepare(SAMPLES, 0))


def test_an_array_on_another_mesh_is_named() -> None:
    """PEER_CASES 18: the error names section, argument, its devices and the wanted ones."""
    setup = build(chain())
    state = setup.engine.states["student"]
    path = next(iter(state.compute))
    elsewhere = jax.device_put(np.zeros(state.compute[path].shape, np.float32), jax.devices()[7])
    state._params[0][path] = elsewhere
    with pytest.raises(MeshError, match=rf"{path}.*section 'student', replica 0") as caught:
        setup.engine.step(setup.preparer.prepare(SAMPLES, 0))
    assert caught.value.have.startswith("devices [7]")


def test_a_sample_that_fits_no_micro_batch_is_named() -> None:
    setup = build(chain(middle={"microbatch": 16}))
    with pytest.raises(DataError, match=r"sample '.*' is longer than the largest micro-batch of section 'middle'"):
        setup.preparer.prepare(SAMPLES, 0)


def test_a_schedule_that_leaves_a_sample_out_is_refused() -> None:
    class Forgetful:
        def schedule(self, workload: Workload) -> Schedule:
            return InOrder().schedule(dataclasses.replace(workload, steps=tuple(step[:-1] for step in workload.steps)))

    setup = build(chain(), policy=Forgetful())
    with pytest.raises(ScheduleError, match="does not run every item once: item 0 of sample 19 in section 'middle'"):
        setup.preparer.prepare(SAMPLES, 0)


def test_tasks_are_issued_in_the_order_of_the_schedule() -> None:
    setup = build(chain(student={"replicas": 2}))
    prepared = setup.preparer.prepare(SAMPLES, 0)
    setup.engine.step(prepared)
    assert tuple(setup.engine.last_tasks) == prepared.schedule.tasks


def test_one_task_in_flight_is_enough() -> None:
    setup = build(chain(teacher={"trainable": True}), in_flight=1)
    assert worst_leaf(setup.gradients(SAMPLES), setup.reference(SAMPLES)[1]) < 1e-5


def judged(**judge: Any) -> SectionGraph:
    """A trained teacher whose only loss lies in a frozen section below it."""
    return chain(teacher={"trainable": True}, middle={"trainable": True}, student={"trainable": False, **judge})


def test_a_loss_in_a_frozen_section_is_reported_and_starts_anew_each_step() -> None:
    setup = build(judged(replicas=2))
    loss, gradients = setup.reference(SAMPLES)
    assert worst_leaf(setup.gradients(SAMPLES), gradients) < 1e-5
    first, second = (objectives_of(setup, SAMPLES, step) for step in range(2))
    assert first["student/cross_entropy"] + 0.1 * first["student/square"] == pytest.approx(loss, rel=1e-5)
    assert second["student/cross_entropy"] < first["student/cross_entropy"]


def poisoned(name: str) -> Any:
    """The student of `chain` with an objective that is not finite."""
    init, apply = student_functions(8)
    return init, lambda params, batch, hidden: {**apply(params, batch, hidden), name: jnp.float32(jnp.nan)}


@pytest.mark.parametrize(("objective", "applied"), [("cross_entropy", 0.0), ("square", 1.0)])
def test_only_weighted_objectives_decide_the_verdict_wherever_they_are(objective: str, applied: float) -> None:
    objectives = {"cross_entropy": Objective(), "square": Objective(weight=0.0)}
    setup = build(judged(module=poisoned(objective), objectives=objectives))
    assert objectives_of(setup, SAMPLES)["applied"] == applied


def test_padding_does_not_make_a_norm_nan() -> None:
    """Rows of padding hold ones, so that a module may divide by their norm; real rows without a payload hold zeros."""
    init, apply = student_functions(8)

    def normalised(params: Any, batch: Any, hidden: Any) -> Any:
        return apply(params, batch, hidden / jnp.linalg.norm(hidden, axis=-1, keepdims=True))

    setup = build(chain(student={"module": (init, normalised), "microbatch": (64,)}))
    assert worst_leaf(setup.gradients(SAMPLES), setup.reference(SAMPLES)[1]) < 1e-5


def test_samples_of_several_items_fit_where_each_item_has_one_partner() -> None:
    pieces = text_samples(15, shortest=40, longest=57)
    samples = [Sample(id=f"m{n}", items={"text": tuple(p.items["text"][0] for p in pieces[5 * n : 5 * n + 5])}) for n in range(3)]
    sizes = {"microbatch": 64}
    setup = build(chain(teacher=sizes, middle=sizes, student={**sizes, "replicas": 2}))
    assert worst_leaf(setup.gradients(samples), setup.reference(samples)[1]) < 1e-5


def test_typed_keys_may_be_residuals() -> None:
    init, apply = teacher_functions(8)

    def noisy(params: Any, batch: Any) -> Any:
        key = jax.random.wrap_key_data(batch["key"]) if "key" in batch else jax.random.key(0)
        return jax.checkpoint(lambda p, k: {"hidden": apply(p, batch)["hidden"] * jax.random.uniform(k)})(params, key)

    setup = build(chain(teacher={"module": (init, noisy), "replicas": 2}))
    assert objectives_of(setup, SAMPLES)["applied"] == 1.0


@pytest.mark.parametrize("part", ["compute", "accumulators", "master"])
def test_use_after_donation_is_caught_under_debug(part: str) -> None:
    setup = build(chain(student={"replicas": 2}), debug=True)
    assert objectives_of(setup, SAMPLES)["applied"] == 1
    state = setup.engine.states["student"]
    if part == "accumulators":
        gradients, sums = state.holder(0, 0).take()
        state.holder(0, 0).put(gradients, sums)
        victim = next(iter(gradients.values()))
    else:
        victim = next(iter(getattr(state, part).values()))
    victim.delete()
    with pytest.raises(MeshError, match=r"of section 'student' was donated to an earlier program"):
        objectives_of(setup, SAMPLES, 1)
