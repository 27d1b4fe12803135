"""The chunked loss equals the plain formula, in value, gradient and precision, and stays small."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.models import masked_sums, next_token_sums
from maestro_jax.models.heads import cross_entropy_sums


def problem(tokens: int, width: int = 8, vocab: int = 37, dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(tokens), 4)
    hidden = jax.random.normal(keys[0], (tokens, width)).astype(dtype)
    head = jax.random.normal(keys[1], (vocab, width)).astype(dtype)
    return hidden, head, jax.random.randint(keys[2], (tokens,), 0, vocab), jax.random.uniform(keys[3], (tokens,))


def plain(hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32).T
    return -jnp.sum(mask * jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0])


def chunked(chunk: int) -> Callable[..., jax.Array]:
    return lambda *x: next_token_sums(*x, chunk=chunk)["cross_entropy"]


def value_and_gradients(loss: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array]]]:
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


@pytest.mark.parametrize(("tokens", "chunk"), [(32, 8), (29, 8), (7, 16), (1, 1), (12, 5)])
def test_value_and_gradients_equal_the_plain_formula(tokens: int, chunk: int) -> None:
    inputs = problem(tokens)
    wanted, wanted_gradients = value_and_gradients(plain)(*inputs)
    got, gradients = value_and_gradients(chunked(chunk))(*inputs)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def test_correct_counts_masked_hits_and_the_first_of_equal_logits_wins() -> None:
    logits = jnp.array([[0.0, 2.0, 2.0], [0.0, 2.0, 2.0], [3.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    sums = cross_entropy_sums(logits, jnp.array([1, 2, 0, 0]), jnp.array([1.0, 1.0, 0.5, 0.0]))
    assert float(sums["accuracy"]) == 1.5


def test_several_masks_give_what_one_at_a_time_gives() -> None:
    hidden, head, targets, mask = problem(29)
    masks = {"one": mask, "two": (targets % 2).astype(jnp.float32)}
    objectives = (("a", "cross_entropy", "one"), ("b", "cross_entropy", "two"), ("hits", "accuracy", "two"))

    def several(hidden: jax.Array, head: jax.Array) -> jax.Array:
        sums = masked_sums(hidden, head, targets, masks, objectives, chunk=8)
        return 2.0 * sums["a"] - sums["b"] + sums["hits"]

    def single(hidden: jax.Array, head: jax.Array) -> jax.Array:
        one, two = (next_token_sums(hidden, head, targets, masks[name], chunk=8) for name in ("one", "two"))
        return 2.0 * one["cross_entropy"] - two["cross_entropy"] + two["accuracy"]

    (got, gradients), (wanted, wanted_gradients) = (value_and_gradients(f)(hidden, head) for f in (several, single))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def test_masked_tokens_add_nothing_even_with_a_target_outside_of_the_vocabulary() -> None:
    hidden, head, targets, mask = problem(16)
    mask = mask.at[10:].set(0.0)
    far = targets.at[10:].set(-100)
    got = value_and_gradients(chunked(4))(hidden, head, far, mask)
    wanted = value_and_gradients(chunked(4))(hidden[:10], head, targets[:10], mask[:10])
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(got[1][1], wanted[1][1], atol=1e-6)
    np.testing.assert_array_equal(got[1][0][10:], 0.0)


def test_an_all_masked_batch_has_loss_and_gradient_zero() -> None:
    hidden, head, targets, mask = problem(8)
    value, gradients = value_and_gradients(chunked(4))(hidden, head, targets, 0.0 * mask)
    assert float(value) == 0.0
    assert all(float(jnp.max(jnp.abs(x))) == 0.0 for x in gradients)


def test_the_head_gradient_of_bfloat16_is_accumulated_in_float32() -> None:
    # 4,096 equal contributions: a bfloat16 sum would stop growing at 256 times one of them.
    tokens = 4096
    hidden, head = jnp.ones((tokens, 1), jnp.bfloat16), jnp.zeros((2, 1), jnp.bfloat16)
    loss = lambda head: chunked(1)(hidden, head, jnp.zeros(tokens, jnp.int32), jnp.ones(tokens))  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(head).astype(jnp.float32), [[-2048.0], [2048.0]])


def test_bfloat16_inputs_give_float32_sums_close_to_the_plain_formula() -> None:
    inputs = problem(64, dtype="bfloat16")
    value, gradients = value_and_gradients(chunked(16))(*inputs)
    wanted, wanted_gradients = value_and_gradients(plain)(*inputs)
    assert (value.dtype, gradients[0].dtype, gradients[1].dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.02 * float(jnp.max(jnp.abs(b))))


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    width, vocab, chunk = 8, 4096, 64

    def temporary_bytes(tokens: int) -> int:
        inputs = jax.eval_shape(lambda: problem(tokens, width, vocab))
        analysis = jax.jit(jax.grad(chunked(chunk), (0, 1))).lower(*inputs).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = temporary_bytes(1024), temporary_bytes(8192)
    assert large - small < 8 * 4 * width * (8192 - 1024)
    assert large < 8 * 4 * chunk * vocab
