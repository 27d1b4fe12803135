"""Distillation by google-tunix's DistillationTrainer, of the same modules with the same optimizer, data parallel over all cores.

It runs in an environment of its own. What its interface asks for is different from `one_program`: the logits of teacher and student exist
as whole arrays, forward functions of the teacher and of the student are programs of their own, its loss is a mean over all places of a
batch (scaled here to the mean over tokens, so that losses and updates are the same), and a batch comes in parts of equal size, whose
gradients are added up.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tunix.distillation.distillation_trainer import (  # pyright: ignore[reportMissingImports]
    DistillationTrainer,
    TrainingConfig,
    TrainingInput,
)
from tunix.distillation.strategies.logit import LogitStrategy  # pyright: ignore[reportMissingImports]

from maestro_jax.data import Batches, Sample

from .cases import CLIP_NORM, SEED, Case, optimizer
from .layouts import Layout, balanced, batch_arrays

PARTS = 4
"""In which a batch comes, so that logits fit into memory."""

Masks = Mapping[str, jax.Array]


class Teacher(nnx.Module):
    """The teacher's layers, with the head that the student of the other ways holds beside its loss."""

    def __init__(self, decoder: Any, head: Any) -> None:
        self.decoder, self.head = decoder, head

    def head_weight(self) -> jax.Array:
        """Returns the head `[vocabulary, width]`."""
        return self.head.weight[...]


class Tunix:
    """A trainer over all devices.

    Args:
        case: distillation.
        way: "tunix" gives each sample a row of its own, as Tunix's examples do; "tunix_packed" packs several into one.
        windows: not needed.
    """

    def __init__(self, case: Case, way: str, windows: int) -> None:
        del windows
        self.case, self._step = case, 0
        self._graph, self._specs = case.graph(), case.dataset.specs
        row = self._graph.sections[0].row_length or 1
        self._layout = Layout(kind="packed" if way == "tunix_packed" else "largest", padded="text", row=row)
        self._batches = Batches(case.dataset, case.batch, SEED)
        self._mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
        self._ready = self._prepared()
        self._places = PARTS * self._ready[0].input_tokens.size
        # Its loss is divided by all places; counted are the tokens alone.
        self._factor = self._places / case.units()[case.main]
        teacher, student = self._models()
        self._losses: list[float] = []
        # Variables carry logical names of axes, which are no axes of this mesh.
        with nnx.use_eager_sharding(False):
            self._trainer = self._made(teacher, student)

    def window(self) -> list[float]:
        """Trains a window of steps; returns their losses when all has ended."""
        self._losses.clear()

        def batches() -> Any:
            for _ in range(self.case.window):
                yield from self._ready
                self._ready = self._prepared()

        with nnx.use_eager_sharding(False):
            self._trainer.train(batches())
        jax.block_until_ready(nnx.state(self._trainer.model))
        return [float(np.mean(self._losses[n : n + PARTS])) * self._factor for n in range(0, len(self._losses), PARTS)]

    def facts(self) -> dict[str, Any]:
        """Units of a step with padding."""
        return {"scheduled": {section.name: self._places for section in self._graph.sections}}

    def close(self) -> None:
        """Nothing runs in the background."""

    def _made(self, teacher: nnx.Module, student: nnx.Module) -> DistillationTrainer:
        strategy = LogitStrategy(_logits, _logits, _labels(self._vocab), temperature=1.0, alpha=0.5)
        chain = optax.chain(optax.scale(self._factor), optax.clip_by_global_norm(CLIP_NORM), _of_nnx(optimizer().build()))
        config = TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=PARTS)
        trainer = DistillationTrainer(student, teacher, strategy, chain, config)
        trainer.with_gen_model_input_fn(lambda x: {"tokens": x.input_tokens, "masks": x.input_mask})
        # It is called for one window after the other, and stays open in between.
        trainer.is_managed_externally = True
        buffered = trainer._buffer_metrics

        def noted(buffer: Any, loss: Any, **rest: Any) -> Any:
            self._losses.append(loss)
            return buffered(buffer, loss=loss, **rest)

        trainer._buffer_metrics = noted
        return trainer

    @property
    def _vocab(self) -> int:
        module: Any = self._graph.sections[0].module
        return module.vocab_size

    def _models(self) -> tuple[nnx.Module, nnx.Module]:
        """Teacher and student with the parameters with which the other ways begin, on every device."""
        teacher, distilled = (self._initial(section) for section in self._graph.sections)
        return Teacher(teacher, distilled.teacher_head), distilled.student

    def _initial(self, section: Any) -> Any:
        def build() -> Any:
            with nnx.use_eager_sharding(False):
                return section.module(nnx.Rngs(jax.random.fold_in(jax.random.key(SEED), zlib.crc32(section.name.encode()))))

        module = nnx.eval_shape(build)
        nnx.update(module, jax.jit(lambda: nnx.state(build()), out_shardings=NamedSharding(self._mesh, PartitionSpec()))())
        return module

    def _prepared(self) -> list[TrainingInput]:
        """Packs the samples of the next step."""
        samples: list[Sample] = [self.case.dataset.train[n] for n in self._batches.places(self._step)]
        self._step += 1
        bins = balanced(samples, self._layout, ["text"], PARTS * jax.device_count())
        merges = {edge.label: 1 for edge in self._graph.edges}
        arrays = batch_arrays(self._graph, self._specs, merges, self._layout, bins)[self.case.main]
        sharding = NamedSharding(self._mesh, PartitionSpec("data"))

        def put(array: np.ndarray, part: int) -> jax.Array:
            # Bins n, n + PARTS, ... are those of part n, one of each device.
            rows = array[part::PARTS].reshape(-1, *array.shape[2:])
            return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

        names = ("segment_ids", "positions", "sample_ids", "targets")
        return [
            TrainingInput(input_tokens=put(arrays["tokens"], part), input_mask={name: put(arrays[name], part) for name in names})
            for part in range(PARTS)
        ]


def _logits(model: Any, tokens: jax.Array, masks: Masks) -> jax.Array:
    """Logits `[rows, length, vocabulary]`; zero where there is no token, so that nothing counts there."""
    decoder = getattr(model, "decoder", model)
    batch = {"tokens": tokens, **{name: masks[name] for name in ("segment_ids", "positions", "sample_ids")}}
    hidden = decoder.hidden_states(decoder.embed(batch), batch)
    logits = jnp.einsum("RLD,VD->RLV", hidden, model.head_weight())
    return jnp.where(masks["segment_ids"][..., None] > 0, logits, 0.0)


def _labels(vocab: int) -> Any:
    def labels(tokens: jax.Array, masks: Masks) -> jax.Array:
        """One-hot next tokens; zeros where there is no token."""
        return jax.nn.one_hot(masks["targets"], vocab) * (masks["segment_ids"] > 0)[..., None]

    return labels


def _of_nnx(made: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation of a state of NNX: with flat paths of parameters, whose names say what decays."""

    def flat(state: Any) -> dict[str, jax.Array]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        return {"/".join(str(part.key) for part in path if hasattr(part, "key")): leaf for path, leaf in leaves}

    def init(params: Any) -> Any:
        return made.init(flat(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        found: Any
        found, state = made.update(flat(updates), state, flat(params))
        return jax.tree.unflatten(jax.tree.structure(updates), [found[path] for path in flat(updates)]), state

    return optax.GradientTransformation(init, update)
