"""The step is exact: gradients equal those of one monolithic program, whatever the layout, micro-batches and order."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engines import Setup, build, worst_leaf
from flax import linen, nnx
from support import chain, teacher_functions, text_samples

from maestro_jax.distill import Distilled
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.models import Decoder
from maestro_jax.schedules import InOrder, Policy, Sequential

TOLERANCE = 1e-5
SAMPLES = text_samples(20)


def assert_exact(setup: Setup, samples: Any = SAMPLES) -> None:
    _, want = setup.reference(samples)
    assert worst_leaf(setup.gradients(samples), want) < TOLERANCE


@pytest.mark.quick
@pytest.mark.parametrize("policy", [InOrder(), Sequential()], ids=["in_order", "sequential"])
def test_both_policies(policy: Policy) -> None:
    assert_exact(build(chain(student={"replicas": 2}), policy=policy))


@pytest.mark.parametrize("teacher", [1, 2, 4])
@pytest.mark.parametrize("student", [1, 2, 4])
def test_every_pair_of_replica_counts(teacher: int, student: int) -> None:
    """PEER_CASES 1: an upstream gradient must not depend on a ratio of data-parallel degrees."""
    sections = {"teacher": {"replicas": teacher}, "middle": {"submesh": "teacher"}, "student": {"replicas": student}}
    assert_exact(build(chain(**sections)))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("rows", [None, 32])
def test_tensor_axis_and_rows(tensor: int, rows: int | None) -> None:
    wide = {"axes": {"tensor": tensor}, "microbatch": (32, 96), "row_length": rows}
    assert_exact(build(chain(teacher=wide, student={"axes": {"tensor": tensor}, "microbatch": (64,), "row_length": rows})))


@pytest.mark.parametrize(("teacher", "student"), [((32,), (128,)), ((128,), (32,)), ((64, 96), (40, 56))])
def test_unequal_micro_batches(teacher: tuple[int, ...], student: tuple[int, ...]) -> None:
    """PEER_CASES 6: every micro-batch of the consumer receives its rows, from whichever producer micro-batch."""
    assert_exact(build(chain(teacher={"microbatch": teacher}, student={"microbatch": student, "replicas": 2})))


def test_frozen_middle_passes_the_gradient() -> None:
    setup = build(chain(teacher={"trainable": True}, middle={"trainable": False}))
    _, want = setup.reference(SAMPLES)
    assert set(want) == {"teacher", "student"}
    assert all(np.abs(g).max() > 0 for g in want["teacher"].values())
    assert_exact(setup)


def test_forward_only_teacher() -> None:
    assert_exact(build(chain(teacher={"trainable": False}, middle={"trainable": False}, student={"replicas": 4})))


def test_shared_submesh() -> None:
    shared = {"submesh": "together"}
    assert_exact(build(chain(teacher={**shared, "axes": {"tensor": 2}}, middle=shared, student={**shared, "replicas": 2}), devices=2))


def test_one_device_for_everything() -> None:
    assert_exact(build(chain(teacher={"submesh": "a"}, middle={"submesh": "a"}, student={"submesh": "a"}), devices=1))


def test_gradients_do_not_change_when_accumulated_twice() -> None:
    """Accumulators are zero again after a step: the second step must not see the first."""
    setup = build(chain())
    first, second = setup.gradients(SAMPLES), setup.gradients(SAMPLES)
    assert all(np.array_equal(first[n][p], second[n][p]) for n in first for p in first[n])


def test_five_steps_of_descent() -> None:
    setup = build(chain(teacher={"trainable": True}, student={"replicas": 2}), optimizer=optax.sgd(0.05))
    params = setup.parameters()
    for step in range(5):
        samples = text_samples(12, seed=step)
        _, gradients = setup.reference(samples, params)
        params = {n: {p: v - 0.05 * gradients[n][p] if p in gradients.get(n, {}) else v for p, v in s.items()} for n, s in params.items()}
        setup.engine.step(setup.preparer.prepare(samples, step))
    assert worst_leaf(setup.parameters(), params) < 1e-6


def distillation(**student: Any) -> SectionGraph:
    teacher = Decoder(vocab_size=40, layers=2, embed=16, heads=4, kv_heads=2, mlp=24, tied=True)
    small = Decoder(vocab_size=40, layers=1, embed=8, heads=2, kv_heads=2, mlp=16, tied=True)
    objectives = {"kl": Objective(weight=0.5), "cross_entropy": Objective(weight=0.5), "teacher_entropy": Objective(weight=0.0)}
    return SectionGraph(
        sections=(
            Section(name="teacher", module=teacher, trainable=False, axes={"tensor": 2}, microbatch=(64, 128), row_length=32),
            Section(
                name="student",
                module=Distilled(student=small, teacher_vocab_size=40, teacher_embed=16, temperature=2.0, chunk=24),
                inputs={"teacher_hidden": "teacher.hidden"},
                objectives=objectives,
                frozen=("teacher_head",),
                microbatch=(64,),
                row_length=32,
                **student,
            ),
        )
    )


@pytest.mark.parametrize("layout", [{}, {"replicas": 4}, {"replicas": 2, "axes": {"tensor": 2}}], ids=str)
def test_distillation_of_our_own_models(layout: dict[str, Any]) -> None:
    setup = build(distillation(**layout))
    samples = text_samples(12, vocab=40)
    gradients = setup.gradients(samples)
    assert not any(path.startswith("teacher_head") for path in gradients["student"])
    assert worst_leaf(gradients, setup.reference(samples)[1]) < TOLERANCE


def test_dropout_does_not_move_with_the_layout() -> None:
    """PEER_CASES 19: the mask is keyed by sample and position, so gradients with dropout agree across layouts."""

    def gradients(policy: Policy, **layout: Any) -> Any:
        module = Decoder(vocab_size=16, layers=2, embed=16, heads=2, kv_heads=2, mlp=16, dropout=0.3)
        section = Section(name="model", module=module, objectives={"cross_entropy": Objective()}, **layout)
        return build(SectionGraph(sections=(section,)), policy=policy).gradients(SAMPLES, step=3)

    one = gradients(Sequential(), microbatch=(640,))
    many = gradients(InOrder(), microbatch=(32, 64), row_length=32, replicas=4)
    assert worst_leaf(many, one) < TOLERANCE
    plain = build(
        SectionGraph(
            sections=(
                Section(
                    name="model",
                    module=Decoder(vocab_size=16, layers=2, embed=16, heads=2, kv_heads=2, mlp=16),
                    objectives={"cross_entropy": Objective()},
                    microbatch=(640,),
                ),
            )
        )
    )
    assert worst_leaf(plain.gradients(SAMPLES), one) > 0.01


def test_a_mutable_nnx_module_of_a_user() -> None:
    class Regression(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embedding = nnx.Embed(16, 8, rngs=rngs)
            self.out = nnx.Linear(8, 16, rngs=rngs)

        def __call__(self, batch: Any) -> dict[str, Any]:
            logits = self.out(self.embedding(batch["tokens"]))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return {"cross_entropy": jnp.sum(losses * batch["loss_mask"])}

    section = Section(name="model", module=Regression, objectives={"cross_entropy": Objective()}, microbatch=64, replicas=2)
    assert_exact(build(SectionGraph(sections=(section,))))


def test_three_kinds_of_module_train_together() -> None:
    """A plain pair of functions feeds a Linen module, which feeds an NNX module."""

    class Middle(linen.Module):
        @linen.compact
        def __call__(self, batch: Any, hidden: Any) -> dict[str, Any]:
            return {"hidden": jnp.tanh(linen.Dense(12)(hidden))}

    class Last(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.out = nnx.Linear(12, 16, rngs=rngs)

        def __call__(self, batch: Any, hidden: Any) -> dict[str, Any]:
            losses = optax.softmax_cross_entropy_with_integer_labels(self.out(hidden), batch["targets"])
            return {"cross_entropy": jnp.sum(losses * batch["loss_mask"])}

    sections = (
        Section(name="first", module=teacher_functions(8), microbatch=64),
        Section(name="second", module=Middle(), inputs={"hidden": "first.hidden"}, microbatch=48, replicas=2),
        Section(name="third", module=Last, inputs={"hidden": "second.hidden"}, microbatch=96, objectives={"cross_entropy": Objective()}),
    )
    assert_exact(build(SectionGraph(sections=sections)))


def test_bfloat16_compute_keeps_float32_masters_and_sums() -> None:
    half = {"dtype": "bfloat16"}
    setup = build(chain(teacher={**half, "trainable": True}, middle=half, student=half))
    state = setup.engine.states["student"]
    assert {str(v.dtype) for v in state.compute.values()} == {"bfloat16"}
    assert {str(v.dtype) for v in state.master.values()} == {"float32"}
    gradients = setup.gradients(SAMPLES)
    assert {str(g.dtype) for leaves in gradients.values() for g in leaves.values()} == {"float32"}
    assert worst_leaf(gradients, setup.reference(SAMPLES)[1]) < 0.05
