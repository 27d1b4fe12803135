"""What broke for users of such systems, with sections that run for some samples only: counts, verdicts, pairings, balance, noise.

PEER_CASES 3, 4, 6, 7, 9 and 19. That packed images and clips equal those alone (23) is in `tests/models/test_encoder.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
from engines import Setup, build, worst_leaf
from model_support import parts
from multimodal_support import FEATURES, FLOATS, SPECS, omni, omni_samples
from support import WIDTH

from maestro_jax.data import ArraySpec, Item, Sample
from maestro_jax.data.packing import pack
from maestro_jax.graph import SectionGraph, graph_shapes
from maestro_jax.models import VisionTransformer
from maestro_jax.runtime import make_plan, make_workload, reference_gradients
from maestro_jax.runtime.costs import counted_costs
from maestro_jax.schedules import InOrder, Policy, Schedule, Sequential, Wavefront, Workload

SAMPLES = omni_samples(13)
WEIGHTS = {"llm/cross_entropy": 1.0, "generator/redraw": 0.5}
Values = Mapping[str, Mapping[str, np.ndarray]]


def same(before: Values, after: Values, names: Sequence[str] = ("vision", "audio", "llm", "generator")) -> bool:
    return all(before[n][p].tobytes() == after[n][p].tobytes() for n in names for p in before[n])


def changed(before: Values, after: Values, name: str) -> bool:
    return all(not np.array_equal(before[name][p], after[name][p]) and np.isfinite(after[name][p]).all() for p in before[name])


def optimizer_state(setup: Setup) -> list[Any]:
    return jax.tree.leaves(jax.device_get({name: setup.engine.states[name].optimizer for name in setup.engine.compiled.trained}))


def masked(sample: Sample, weight: float) -> Sample:
    """The sample with every target of its text counting `weight`."""
    items = [
        dataclasses.replace(i, arrays={**i.arrays, "loss_mask": np.full(i.units, weight, np.float32)}) for i in sample.items.get("text", ())
    ]
    return dataclasses.replace(sample, items={**sample.items, "text": tuple(items)})


@pytest.fixture(scope="module")
def setup() -> Setup:
    """Every step leaves other parameters behind, so tests compare with those that they find."""
    shared = {"submesh": "rest"}
    graph = omni(vision={"microbatch": 16}, audio=shared, llm={"replicas": 2, "microbatch": 60}, generator=shared)
    return build(graph, specs=SPECS, optimizer=optax.adamw(1e-2, weight_decay=0.1))


@pytest.mark.quick
def test_the_last_partial_micro_batch_weighs_as_much_as_its_units(setup: Setup) -> None:
    """PEER_CASES 3: sums of all micro-batches, divided once."""
    window = setup.preparer.prepare(SAMPLES, 0)
    used = {t.items: sum(SAMPLES[s].items["text"][n].units for s, n in t.items) for t in window.schedule.tasks if t.section == "llm"}
    filled = [units for items, units in used.items() if items]
    assert len(filled) > 2
    assert min(filled) < 0.7 * max(filled), "the test needs a micro-batch that is far from full"
    loss, _ = setup.reference(SAMPLES)
    values = setup.engine.step(window).read(setup.objectives())
    assert sum(weight * values[name] for name, weight in WEIGHTS.items()) == pytest.approx(loss, rel=1e-5)


def test_a_loss_whose_section_has_no_items_changes_nothing_and_is_not_nan_elsewhere(setup: Setup) -> None:
    """PEER_CASES 3: nothing to redraw in this batch."""
    samples = omni_samples(10, seed=5, kinds="tia")
    gradients = setup.gradients(samples)
    assert all((g == 0).all() for g in gradients["generator"].values())
    before = setup.parameters()
    report = setup.engine.step(setup.preparer.prepare(samples, 0))
    values = report.read(setup.objectives())
    assert report.prepared.counts["generator", "redraw"] == 0
    assert math.isnan(values["generator/redraw"])
    assert (values["applied"], math.isfinite(values["gradient_norm"])) == (1, True)
    assert report.not_finite(setup.objectives(), WEIGHTS) == ()
    after = setup.parameters()
    assert all(changed(before, after, name) for name in ("vision", "audio", "llm"))
    assert all(np.isfinite(value).all() for value in after["generator"].values())


def test_a_loss_that_counts_no_unit_leaves_the_gradient_to_the_other(setup: Setup) -> None:
    """PEER_CASES 3: no target of the text counts; images are redrawn."""
    samples = [masked(s, 0.0) for s in SAMPLES]
    gradients = setup.gradients(samples)
    _, want = setup.reference(samples)
    # The head is reached by the text's loss alone.
    assert (gradients["llm"].pop("head") == 0).all()
    assert (want["llm"].pop("head") == 0).all()
    assert worst_leaf(gradients, want) < 1e-5
    assert setup.engine.step(setup.preparer.prepare(samples, 0)).read(setup.objectives())["applied"] == 1


def test_a_step_in_which_no_loss_counts_changes_nothing(setup: Setup) -> None:
    """PEER_CASES 3: images and clips run, and weight decay would change parameters."""
    samples = [masked(s, 0.0) for s in omni_samples(10, seed=5, kinds="tia")]
    before, state = setup.parameters(), optimizer_state(setup)
    report = setup.engine.step(setup.preparer.prepare(samples, 0))
    assert report.read(setup.objectives())["applied"] == 0
    assert report.not_finite(setup.objectives(), WEIGHTS) == ()
    assert same(before, setup.parameters())
    assert all(np.array_equal(a, b) for a, b in zip(state, optimizer_state(setup), strict=True))


@pytest.mark.quick
@pytest.mark.parametrize("section", ["vision", "generator"])
def test_one_verdict_for_all_sections(setup: Setup, section: str) -> None:
    """PEER_CASES 4: a gradient that is not finite in one section skips the step in every section, and the next step is as it was."""
    holder = setup.engine.states[section].holder(0, 0)
    gradients, sums = holder.take()
    path = next(iter(gradients))
    poison = np.zeros(gradients[path].shape, np.float32)
    poison.flat[-1] = np.inf
    gradients[path] = jax.device_put(poison, gradients[path].sharding)
    holder.put(gradients, sums)
    before, state = setup.parameters(), optimizer_state(setup)
    report = setup.engine.step(setup.preparer.prepare(SAMPLES, 0))
    values = report.read(setup.objectives())
    assert values["applied"] == 0
    assert math.isfinite(values["llm/cross_entropy"] + values["generator/redraw"])
    assert report.not_finite(setup.objectives(), WEIGHTS) == (f"the gradient of section {section!r} is not finite",)
    assert same(before, setup.parameters())
    assert all(np.array_equal(a, b) for a, b in zip(state, optimizer_state(setup), strict=True))
    assert setup.engine.step(setup.preparer.prepare(SAMPLES, 1)).read(setup.objectives())["applied"] == 1
    after = setup.parameters()
    assert all(changed(before, after, name) for name in before)


def test_without_images_adam_moves_the_encoder_as_for_a_zero_gradient(setup: Setup) -> None:
    """PEER_CASES 7: moments decay and weights do; nothing is skipped, nothing is NaN."""
    for step in range(2):
        setup.engine.step(setup.preparer.prepare(SAMPLES, step))
    before = setup.parameters()["vision"]
    state = jax.device_get(setup.engine.states["vision"].optimizer)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    with jax.default_device(jax.devices()[0]):
        updates, _ = optimizer.update({path: np.zeros_like(value) for path, value in before.items()}, state, before)
        want = jax.device_get(optax.apply_updates(before, updates))
    report = setup.engine.step(setup.preparer.prepare(omni_samples(8, kinds="t"), 2))
    assert report.read(setup.objectives())["applied"] == 1
    after = setup.parameters()["vision"]
    for path, value in want.items():
        assert not np.array_equal(before[path], value)
        np.testing.assert_allclose(after[path], value, rtol=1e-6, atol=1e-9)


@dataclasses.dataclass(frozen=True)
class OneSize:
    """In order, with one size of micro-batch for each section."""

    sizes: Mapping[str, int]

    def schedule(self, workload: Workload) -> Schedule:
        sections = {name: dataclasses.replace(s, buckets=(self.sizes[name],), bucket_bytes=None) for name, s in workload.sections.items()}
        return InOrder().schedule(dataclasses.replace(workload, sections=sections))


def seeing(**overrides: Mapping[str, Any]) -> SectionGraph:
    """The graph of vision and the language model alone."""
    llm = {"inputs": {"image": "vision.hidden[image_rows]"}, **overrides["llm"]}
    sections = (omni()["vision"], omni()["llm"])
    return SectionGraph(sections=tuple(dataclasses.replace(s, **{"vision": overrides["vision"], "llm": llm}[s.name]) for s in sections))


def test_every_pairing_of_sizes_of_micro_batches() -> None:
    """PEER_CASES 6: one image to a micro-batch, or all; one text, or all; and what lies between."""
    ladders = {"vision": (6, 18, 96), "llm": (24, 70, 220)}
    fields = {name: {"microbatch": ladder, "fan_in": 16, "fan_out": 16} for name, ladder in ladders.items()}
    setup = build(seeing(**fields), specs=SPECS)
    samples = omni_samples(9, kinds="ti")
    _, want = setup.reference(samples)
    counts = set()
    for sizes in itertools.product(*ladders.values()):
        setup.preparer.policy = OneSize(dict(zip(ladders, sizes, strict=True)))
        tasks = setup.preparer.prepare(samples, 0).schedule.tasks
        counts.add(tuple(sum(t.section == name and t.kind.startswith("forward") for t in tasks) for name in ladders))
        assert worst_leaf(setup.gradients(samples), want) < 1e-5
    assert len(counts) == 9, "sizes must cut the batch differently"
    assert min(counts) == (1, 1)


def seen(items: Sequence[int]) -> dict[str, tuple[Item, ...]]:
    """Images of these numbers of patches, and a text that takes none of their rows."""
    random = np.random.default_rng(0)
    images = [Item(units=u, arrays={"patches": random.normal(size=(u, FEATURES)).astype(np.float32)}) for u in items]
    text = omni_samples(1, kinds="t")[0].items["text"]
    return {"image": tuple(images), "text": text} if images else {"text": text}


def shares(policy: Policy, workload: Workload) -> float:
    """Time of the busiest replica of vision, relative to the mean of all."""
    busy = [0] * workload.sections["vision"].replicas
    for task in policy.schedule(workload).tasks:
        if task.section == "vision" and task.kind != "update":
            busy[task.replica] += task.end - task.start
    return max(busy) * len(busy) / sum(busy)


@pytest.mark.quick
def test_a_few_huge_images_are_balanced_by_cost() -> None:
    """PEER_CASES 9: three images as large as twenty others, among four replicas."""
    vision = {"microbatch": (64, 128, 320), "replicas": 4}
    graph = omni(vision=vision, llm={"submesh": "rest"}, audio={"submesh": "rest"}, generator={"submesh": "rest"})
    plan = make_plan(graph, SPECS, jax.devices())
    small = [Sample(id=f"small{n}", items=seen([16, 16])) for n in range(32)]
    samples = [*(Sample(id=f"huge{n}", items=seen([320])) for n in range(3)), *small]
    # Much work for each patch, as in a large encoder; the costs of these small functions are those of a call.
    costs = counted_costs(plan)
    heavy = dataclasses.replace(costs.sections["vision"].forward, per_unit=2000)
    sections = {**costs.sections, "vision": dataclasses.replace(costs.sections["vision"], forward=heavy, backward=heavy)}
    workload = make_workload(plan, [samples], True, dataclasses.replace(costs, sections=sections))
    wavefront, in_order = shares(Wavefront(), workload), shares(InOrder(), workload)
    assert wavefront < 1.05
    assert in_order > 1.1


PATCHES = VisionTransformer(layers=1, embed=8, heads=2, mlp=8, patch_size=1, channels=FEATURES, merge=1, width=WIDTH, dropout=0.3)


def with_places(sample: Sample) -> Sample:
    """Gives every patch of a sample a row and a column."""
    images = sample.items.get("image", ())
    placed = [
        dataclasses.replace(i, arrays={**i.arrays, "coords": np.stack(np.divmod(np.arange(i.units), 2), axis=-1).astype(np.int32)})
        for i in images
    ]
    return dataclasses.replace(sample, items={**sample.items, **({"image": tuple(placed)} if images else {})})


def noisy(policy: Policy, **vision: Any) -> Setup:
    specs = {**SPECS, "image": {**SPECS["image"], "coords": ArraySpec(shape=(2,))}}
    graph = seeing(vision={"module": PATCHES, **vision}, llm={"microbatch": 80})
    return build(graph, specs=specs, policy=policy)


def test_dropout_of_images_does_not_move_with_micro_batches_replicas_or_order() -> None:
    """PEER_CASES 19."""
    samples = [with_places(s) for s in omni_samples(10, kinds="ti")]
    setup = noisy(InOrder(), microbatch=(24,), row_length=8, replicas=2)
    window = setup.preparer.prepare(samples, 3)
    micros = [task for task in window.schedule.tasks if task.items]
    keys = {task.section: np.asarray(window.feeds[task.section, task.items].arrays["batch"]["key"]) for task in micros}
    shapes = graph_shapes(setup.graph, setup.preparer.specs)
    # Each image has a row of its own there.
    _, want = reference_gradients(setup.graph, shapes, setup.preparer.specs, setup.parameters(), samples, keys)
    for policy, batch in ((InOrder(), samples), (Sequential(), samples[::-1])):
        setup.preparer.policy = policy
        assert worst_leaf(setup.gradients(batch, step=3), want) < 1e-5
    assert worst_leaf(setup.gradients(samples, step=4), want) > 0.01


def test_two_equal_images_of_a_sample_have_masks_of_their_own() -> None:
    """PEER_CASES 19."""
    params, _, apply = parts(PATCHES)
    image = with_places(omni_samples(20, kinds="ti")[3]).items["image"][0]
    specs = {**SPECS["image"], "coords": ArraySpec(shape=(2,)), "unused": FLOATS}
    image = dataclasses.replace(image, arrays={**image.arrays, "unused": np.zeros(image.units, np.float32)})
    packed = pack([(0, 0), (0, 1)], [(77, image), (77, image)], [(0, 0), (0, image.units)], specs, (1, 2 * image.units))
    for key, equal in (({}, True), ({"key": np.array([1, 2], np.uint32)}, False)):
        hidden = np.asarray(jax.jit(apply)(params, {**packed.arrays, **key})["hidden"])[0]
        first, second = hidden[: image.units], hidden[image.units :]
        assert np.allclose(first, second, atol=1e-6) == equal
