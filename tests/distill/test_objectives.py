"""The distillation sums equal the plain formula, and are what their names say."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.distill import distillation_sums

NAMES = ("kl", "cross_entropy", "teacher_entropy", "accuracy")


def problem(
    tokens: int = 24, width: int = 6, vocab: int = 19, teacher_width: int = 9, teacher_vocab: int = 19, dtype: str = "float32"
) -> list[Any]:
    keys = jax.random.split(jax.random.key(tokens + vocab), 6)
    shapes = [(tokens, width), (vocab, width), (tokens, teacher_width), (teacher_vocab, teacher_width)]
    arrays = [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=False)]
    targets = jax.random.randint(keys[4], (tokens,), 0, vocab)
    mask = jax.random.uniform(keys[5], (tokens,)) * (jnp.arange(tokens) % 5 != 0)
    return [*arrays, targets, mask]


def plain(x: jax.Array, head: jax.Array, y: jax.Array, teacher: jax.Array, targets: jax.Array, mask: jax.Array, t: float) -> dict[str, Any]:
    student_logits, teacher_logits = (a.astype(jnp.float32) @ b.astype(jnp.float32).T for a, b in ((x, head), (y, teacher)))
    shared = min(student_logits.shape[1], teacher_logits.shape[1])
    log_p, log_q = (jax.nn.log_softmax(logits[:, :shared] / t) for logits in (teacher_logits, student_logits))
    p = jnp.exp(log_p)
    hard = -jnp.take_along_axis(jax.nn.log_softmax(student_logits), targets[:, None], axis=1)[:, 0]
    return {
        "kl": jnp.sum(mask * t**2 * jnp.sum(p * (log_p - log_q), axis=1)),
        "cross_entropy": jnp.sum(mask * hard),
        "teacher_entropy": jnp.sum(mask * t**2 * -jnp.sum(p * log_p, axis=1)),
        "accuracy": jnp.sum(mask * (jnp.argmax(student_logits, axis=1) == targets)),
    }


CASES = [(24, 8, 19, 19, 1.0), (25, 8, 19, 19, 2.0), (5, 64, 19, 23, 1.0), (30, 7, 19, 12, 3.0), (9, 1, 4, 5, 0.5)]


@pytest.mark.parametrize(("tokens", "chunk", "vocab", "teacher_vocab", "temperature"), CASES)
def test_values_and_gradients_equal_the_plain_formula(tokens: int, chunk: int, vocab: int, teacher_vocab: int, temperature: float) -> None:
    inputs = problem(tokens, vocab=vocab, teacher_vocab=teacher_vocab)
    ours = functools.partial(distillation_sums, temperature=temperature, chunk=chunk)
    formula = functools.partial(plain, t=temperature)
    got, wanted = jax.jit(ours)(*inputs), jax.jit(formula)(*inputs)
    for name in NAMES:
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=1e-6, err_msg=name)
    # Weights that differ, so that a mixed up cotangent cannot cancel.
    mixed = lambda sums: 0.7 * sums["kl"] + 0.2 * sums["cross_entropy"] + 5.0 * sums["teacher_entropy"] + 3.0 * sums["accuracy"]  # noqa: E731
    gradients, wanted_gradients = (jax.jit(jax.grad(lambda *x, f=f: mixed(f(*x)), (0, 1)))(*inputs) for f in (ours, formula))
    for a, b in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_kl_of_equal_models_is_zero_and_so_is_its_gradient(temperature: float) -> None:
    x, head, _, _, targets, mask = problem()
    ours = lambda *s: distillation_sums(s[0], s[1], x, head, targets, mask, temperature=temperature, chunk=8)  # noqa: E731
    sums, pull = jax.vjp(ours, x, head)
    zero = {name: jnp.zeros(()) for name in NAMES}
    assert abs(float(sums["kl"])) <= 1e-6 * float(jnp.sum(mask))
    assert float(sums["teacher_entropy"]) > 1.0
    assert all(float(jnp.max(jnp.abs(g))) < 1e-6 for g in pull({**zero, "kl": jnp.ones(())}))


def test_kl_and_entropy_add_up_to_the_soft_cross_entropy() -> None:
    inputs, t = problem(), 2.0
    sums = distillation_sums(*inputs, temperature=t, chunk=8)
    x, head, y, teacher, _, mask = inputs
    soft = -jnp.sum(jax.nn.softmax(y @ teacher.T / t) * jax.nn.log_softmax(x @ head.T / t), axis=1)
    np.testing.assert_allclose(sums["kl"] + sums["teacher_entropy"], t**2 * jnp.sum(mask * soft), rtol=1e-5)


def test_the_square_of_the_temperature_keeps_the_size_of_the_gradient() -> None:
    inputs = problem()

    def norm(temperature: float) -> float:
        gradient = jax.grad(lambda x: distillation_sums(x, *inputs[1:], temperature=temperature, chunk=8)["kl"])(inputs[0])
        return float(jnp.linalg.norm(gradient))

    # At high temperature the gradient tends to (student - teacher logits) / V, whatever T is.
    np.testing.assert_allclose(norm(100.0), norm(200.0), rtol=0.05)


def test_the_teacher_and_the_mask_get_gradient_zero() -> None:
    inputs = problem()
    x, head, y, teacher, targets, mask = inputs
    kl = lambda y, teacher, mask: distillation_sums(x, head, y, teacher, targets, mask, 2.0, 8)["kl"]  # noqa: E731
    gradients = jax.grad(kl, (0, 1, 2))(y, teacher, mask)
    assert all(float(jnp.max(jnp.abs(g))) == 0.0 for g in gradients)


def test_rows_beyond_the_shared_prefix_touch_only_the_cross_entropy() -> None:
    inputs = problem(vocab=19, teacher_vocab=12)
    gradient = jax.grad(lambda head: distillation_sums(inputs[0], head, *inputs[2:], chunk=8)["kl"])(inputs[1])
    assert float(jnp.max(jnp.abs(gradient[12:]))) == 0.0
    assert float(jnp.min(jnp.max(jnp.abs(gradient[:12]), axis=1))) > 0.0


def test_bfloat16_inputs_give_float32_sums_close_to_the_plain_formula() -> None:
    inputs = problem(64, dtype="bfloat16")
    ours, formula = functools.partial(distillation_sums, temperature=2.0, chunk=16), functools.partial(plain, t=2.0)
    got, wanted = jax.jit(ours)(*inputs), jax.jit(formula)(*inputs)
    for name in NAMES:
        assert got[name].dtype == jnp.float32
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5, err_msg=name)
    gradients, wanted_gradients = (jax.jit(jax.grad(lambda *x, f=f: f(*x)["kl"], (0, 1)))(*inputs) for f in (ours, formula))
    for a, b in zip(gradients, wanted_gradients, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.02 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_memory_does_not_grow_with_tokens_times_vocabulary(direction: str) -> None:
    chunk, vocab, width, teacher_width = 64, 4096, 8, 12

    def temporary_bytes(tokens: int) -> int:
        loss = lambda *x: (lambda sums: sums["kl"] + sums["cross_entropy"])(distillation_sums(*x, temperature=2.0, chunk=chunk))  # noqa: E731
        shapes = jax.eval_shape(lambda: problem(tokens, width, vocab, teacher_width, vocab))
        program = jax.jit(loss if direction == "forward" else jax.grad(loss, (0, 1)))
        analysis = program.lower(*shapes).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = temporary_bytes(1024), temporary_bytes(8192)
    assert large - small < 8 * 4 * (width + teacher_width) * (8192 - 1024)
    assert large < 16 * 4 * chunk * vocab


def test_the_backward_of_the_teacher_is_never_run() -> None:
    x, head, y, teacher, targets, mask = problem()
    backwards: list[str] = []

    @jax.custom_vjp
    def observed(y: jax.Array) -> jax.Array:
        return y

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        backwards.append("run")
        return (cotangent,)

    observed.defvjp(lambda y: (y, None), backward)

    def loss(scale: jax.Array) -> jax.Array:
        sums = distillation_sums(scale * x, head, observed(scale * y), observed(scale * teacher), targets, mask, 2.0, 8)
        return sums["kl"]

    assert float(jax.grad(loss)(jnp.ones(()))) != 0.0
    assert backwards == []
