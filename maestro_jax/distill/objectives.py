"""Distillation over a vocabulary: forward KL with temperature, and cross-entropy, in one pass over chunks of tokens.

The teacher's distribution is made where it is used, from its last hidden state and its head: a hidden state of a few
hundred numbers travels between sections, never the logits. Both logits exist for one chunk of tokens at a time.

    kl(token) = T^2 * sum_v p_v (log p_v - log q_v),   p = softmax(teacher / T),   q = softmax(student / T)

The factor T^2 is on: it keeps the size of the gradient independent of the temperature (Hinton, Vinyals and Dean,
"Distilling the Knowledge in a Neural Network", arXiv 1503.02531, section 2.1). The teacher's entropy is not part of the
KL and is reported apart, so the KL of two equal models is 0; soft cross-entropy is the sum of the two.

Dimensions: N tokens, C tokens of a chunk, D width of the student, E width of the teacher, V vocabulary of the student,
U vocabulary of the teacher, P = min(U, V), the shared prefix.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..models.heads import Sums, chunked_sums, cross_entropy_sums, vocabulary_logits


def distillation_sums(
    student_hidden_ND: jax.Array,
    student_head_VD: jax.Array,
    teacher_hidden_NE: jax.Array,
    teacher_head_UE: jax.Array,
    targets_N: jax.Array,
    mask_N: jax.Array,
    temperature: float = 1.0,
    chunk: int = 256,
) -> Sums:
    """Sums of the distillation objectives over tokens.

    Where the vocabularies differ in size (padding of one table, usually), both softmaxes of the KL run over the shared
    prefix; the cross-entropy runs over the student's whole vocabulary.

    Args:
        student_hidden_ND: last hidden states of the student, float32 or bfloat16.
        student_head_VD: its vocabulary head.
        teacher_hidden_NE: last hidden states of the teacher.
        teacher_head_UE: its vocabulary head.
        targets_N: int32, the next token of each token.
        mask_N: float32 weight of each token, 0 for padding.
        temperature: T, positive; 1 leaves the distributions as they are.
        chunk: most tokens whose logits exist at once; it need not divide N.

    Returns:
        Float32 scalars, in nats: "kl" (times T^2), "teacher_entropy" of the teacher at T (times T^2), "cross_entropy" of the
        student at temperature 1 against the targets, and "accuracy", the tokens whose target the student ranks first.
        Differentiable in the student's two arguments. The teacher and the mask are constants: their gradient is zero.

    >>> x_ND, head_VD = jnp.eye(3, 2), jnp.ones((4, 2))
    >>> sums = distillation_sums(x_ND, head_VD, x_ND, head_VD, jnp.zeros(3, jnp.int32), jnp.ones(3), temperature=2.0)
    >>> float(sums["kl"]), round(float(sums["teacher_entropy"]), 4)
    (0.0, 16.6355)
    """
    tokens = {"targets": targets_N, "mask": mask_N, "teacher_hidden": teacher_hidden_NE}
    return chunked_sums(_DistillationTerms(temperature), chunk, student_hidden_ND, student_head_VD, tokens, teacher_head_UE)


@dataclasses.dataclass(frozen=True)
class _DistillationTerms:
    temperature: float

    def __call__(self, logits_CV: jax.Array, tokens: Any, constants: Any) -> Sums:
        teacher_CU = vocabulary_logits(tokens["teacher_hidden"], constants)
        shared = min(logits_CV.shape[1], teacher_CU.shape[1])
        log_p_CP = self._log_softmax(teacher_CU[:, :shared])
        log_q_CP = self._log_softmax(logits_CV[:, :shared])
        p_CP = jnp.exp(log_p_CP)
        weight_C = tokens["mask"] * self.temperature**2
        kl_C = jnp.sum(p_CP * (log_p_CP - log_q_CP), axis=1)
        entropy_C = -jnp.sum(p_CP * log_p_CP, axis=1)
        plain = cross_entropy_sums(logits_CV, tokens["targets"], tokens["mask"])
        return {"kl": jnp.sum(weight_C * kl_C), "teacher_entropy": jnp.sum(weight_C * entropy_C), **plain}

    def _log_softmax(self, logits_CP: jax.Array) -> jax.Array:
        # Undivided at temperature 1, so that the compiler sees that the cross-entropy has the same normaliser.
        scaled_CP = logits_CP if self.temperature == 1.0 else logits_CP / self.temperature
        return scaled_CP - jax.nn.logsumexp(scaled_CP, axis=1, keepdims=True)
