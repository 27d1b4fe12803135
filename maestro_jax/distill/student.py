"""A student with its teacher's output head beside its loss: the module of a distilled section.

The teacher's last hidden state arrives as the input `teacher_hidden`; its head lives here, as a part that the section
freezes (`frozen=("teacher_head",)`) and loads from the teacher's weights. Logits never travel.

Dimensions: R rows, L length, D width of the student, E width of the teacher.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
from flax import nnx

from ..config import configurable
from ..errors import ConfigError, set_by
from ..models.decoder import Decoder
from ..models.layers import VocabularyTable
from ..models.weights import Source, weights_below
from .objectives import distillation_sums


class Student(Protocol):
    """What a student module must offer besides its parameters; `DecoderModule` does."""

    def __call__(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns at least "hidden" [R, L, D], the last hidden states."""
        ...

    def head_weight(self) -> jax.Array:
        """Returns the vocabulary head [V, D] that belongs to the hidden states."""
        ...


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Distilled:
    """A student that learns through its teacher's head; objectives: kl, cross_entropy, teacher_entropy, accuracy.

    Args:
        student: a Decoder with a head, or any callable that takes rngs and gives a module like it (see Student).
        teacher: the teacher's model, such as HuggingFace(), which gives the two sizes and the weights of the head; or None.
        teacher_vocab_size: rows of the teacher's head.
        teacher_embed: width of the teacher's hidden states.
        temperature: softens both distributions of the KL; its square multiplies the KL.
        chunk: most tokens whose logits exist at once in the loss.

    Raises:
        ConfigError: a size or the temperature is not positive, a size is missing, or the student has no head.
    """

    student: Callable[[nnx.Rngs], Any]
    teacher: Any = None
    teacher_vocab_size: int = 0
    teacher_embed: int = 0
    temperature: float = 1.0
    chunk: int = 256

    def __post_init__(self) -> None:
        teacher = getattr(self.teacher, "config", self.teacher)
        for field, size in {"teacher_vocab_size": "vocab_size", "teacher_embed": "embed"}.items():
            if not getattr(self, field):
                object.__setattr__(self, field, getattr(teacher, size, 0))
        for field in ("teacher_vocab_size", "teacher_embed", "temperature", "chunk"):
            if getattr(self, field) <= 0:
                raise ConfigError(
                    f"Distilled.{field} does not fit.",
                    wanted="a positive number",
                    have=f"{field}={getattr(self, field)!r}",
                    set_by=set_by(self, field),
                    fix="name the teacher, or take the sizes from its Decoder; temperatures are usually between 1 and 4",
                    anchor="distilled-shape",
                )
        student = getattr(self.student, "config", self.student)
        if isinstance(student, Decoder) and not student.has_head:
            raise ConfigError(
                "Distilled.student has no output head, so it predicts nothing that could be compared with the teacher.",
                wanted="a Decoder with objective='next_token' or tied=True",
                have=f"objective={student.objective!r}, tied={student.tied}",
                set_by=set_by(self, "student"),
                fix="set Decoder.objective = 'next_token' for the student; its own loss is not computed here",
                anchor="decoder-without-head",
            )

    @property
    def vocab_size(self) -> int | None:
        """Of the student: tokens and targets are its own; a teacher of another size meets it on the shared prefix."""
        return getattr(self.student, "vocab_size", None)

    @property
    def initial_weights(self) -> Mapping[str, Source]:
        """Those that the student names, and those of the teacher's head."""
        head = {f"teacher_{path}": source for path, source in weights_below("head", self.teacher).items()}
        # A source is a folder and a part of it; the head lies below the part.
        found = {path: (source[0], f"{source[1]}/head".lstrip("/")) for path, source in head.items() if isinstance(source, tuple)}
        return {**weights_below("student", self.student), **found}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the two vocabularies."""
        student, teacher = self.vocab_size, self.teacher_vocab_size
        if student is None or student == teacher:
            return ()
        longer, shared = "teacher" if student < teacher else "student", min(student, teacher)
        return (f"the KL runs over the first {shared} token ids, as the {longer} alone has rows for {max(student, teacher)} (padding)",)

    def __call__(self, rngs: nnx.Rngs) -> DistilledModule:
        """Builds the module with new parameters."""
        return DistilledModule(self, rngs=rngs)


class DistilledModule(nnx.Module):
    """Parameters at `student/...` and `teacher_head/weight` [teacher vocabulary, teacher width].

    Args:
        config: sizes and choices.
        rngs: source of the initial parameters; those of the teacher's head are meant to be replaced by loaded ones.
    """

    def __init__(self, config: Distilled, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.student = config.student(rngs)
        self.teacher_head = VocabularyTable(config.teacher_vocab_size, config.teacher_embed, rngs=rngs)

    def __call__(self, batch: Mapping[str, jax.Array], teacher_hidden: jax.Array) -> dict[str, jax.Array]:
        """Computes the student's hidden states and the sums of all distillation objectives.

        Args:
            batch: what the student reads, with "targets" int32 and "loss_mask" float32 [R, L].
            teacher_hidden: [R, L, E], the teacher's last hidden states, after its final norm.

        Returns:
            "hidden" [R, L, D], and the sums "kl", "cross_entropy", "teacher_entropy", "accuracy" of `distillation_sums`.
        """
        hidden_RLD = self.student(batch)["hidden"]
        sums = distillation_sums(
            hidden_RLD.reshape(-1, hidden_RLD.shape[-1]),
            self.student.head_weight(),
            teacher_hidden.reshape(-1, teacher_hidden.shape[-1]),
            self.teacher_head.weight[...],
            batch["targets"].reshape(-1),
            batch["loss_mask"].reshape(-1),
            self.config.temperature,
            self.config.chunk,
        )
        return {"hidden": hidden_RLD, **sums}
