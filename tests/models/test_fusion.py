"""A decoder with rows of other models in the places of tokens: where they go, what is summed, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_support import Batch, close, on_mesh, packed, parts

from maestro_jax.data import ArraySpec, Item
from maestro_jax.errors import ConfigError
from maestro_jax.graph import Objective, Section, SectionGraph, graph_shapes
from maestro_jax.models import AudioEncoder, Decoder, Multimodal, Projector, Redraw, VisionTransformer
from maestro_jax.models.fusion import Kind

DECODER = Decoder(vocab_size=32, layers=2, embed=16, heads=4, kv_heads=2, mlp=24, loss_chunk=8)
OBJECTIVES: dict[str, tuple[Kind, str]] = {
    "cross_entropy": ("cross_entropy", "loss_mask"),
    "digit_accuracy": ("accuracy", "image_mask"),
    "tone_accuracy": ("accuracy", "audio_mask"),
    "text_cross_entropy": ("cross_entropy", "text_mask"),
}
FUSED = Multimodal(decoder=DECODER, objectives=OBJECTIVES, chunk=8)
MASKS = ("image_mask", "audio_mask", "text_mask")


def text(seed: int, units: int = 10) -> Item:
    """Tokens of which units 1 and 4 take rows of images and unit 6 one of sound; each other unit counts in one of the masks."""
    random = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {name: random.integers(0, 32, units).astype(np.int32) for name in ("tokens", "targets")}
    arrays |= {name: np.full(units, -1, np.int32) for name in ("image_rows", "audio_rows")}
    arrays["image_rows"][[1, 4]], arrays["audio_rows"][6] = [1, 0], 0
    kinds = random.integers(0, 3, units)
    arrays |= {name: (kinds == n).astype(np.float32) for n, name in enumerate(MASKS)}
    arrays["loss_mask"] = np.ones(units, np.float32)
    return Item(units=units, arrays=arrays)


def batch_of(*seeds: int, length: int = 24) -> Batch:
    return packed([[(100 + seed, text(seed)) for seed in seeds]], length)


def arriving(batch: Batch, width: int = 16) -> dict[str, jax.Array]:
    """Inputs as a section gets them: rows where they are taken, zeros where not, ones in padding."""
    found = {}
    for n, name in enumerate(("image", "audio")):
        rows = jax.random.normal(jax.random.key(n), (*batch["tokens"].shape, width))
        taken = jnp.where((batch[f"{name}_rows"] >= 0)[..., None], rows, 0.0)
        found[name] = jnp.where((batch["segment_ids"] == 0)[..., None], 1.0, taken)
    return found


@functools.cache
def jitted(config: Multimodal) -> Callable[..., dict[str, jax.Array]]:
    apply = parts(config)[2]
    return jax.jit(lambda params, batch, inputs: apply(params, batch, **inputs))


@functools.cache
def measured() -> Callable[..., Any]:
    """A jitted function of parameters, inputs and batch: the cross-entropy with its gradients in the first two, and all outputs."""
    apply = parts(FUSED)[2]

    def loss(params: Any, inputs: Any, batch: Batch) -> Any:
        outputs = apply(params, batch, **inputs)
        return outputs["cross_entropy"], outputs

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def test_rows_stand_for_their_tokens_and_other_tokens_are_left_alone() -> None:
    params, _, _ = parts(FUSED)
    batch = batch_of(1, 2)
    inputs = arriving(batch)
    # The same as tokens of a larger vocabulary: each row that arrives is the embedding of a token of its own.
    table, tokens = np.asarray(params["decoder/embedding/weight"]), np.array(batch["tokens"])
    for name in ("image", "audio"):
        for at in np.argwhere((np.asarray(batch[f"{name}_rows"]) >= 0) & (np.asarray(batch["segment_ids"]) > 0)):
            tokens[tuple(at)] = len(table)
            table = np.concatenate([table, np.asarray(inputs[name])[tuple(at)][None]])
    larger = dataclasses.replace(DECODER, vocab_size=len(table), objective="none")
    plain = {path.removeprefix("decoder/"): value for path, value in params.items()} | {"embedding/weight": jnp.asarray(table)}
    wanted = jax.jit(parts(larger)[2])(plain, {**batch, "tokens": jnp.asarray(tokens)})["hidden"]
    real = np.asarray(batch["segment_ids"]) > 0
    np.testing.assert_allclose(np.asarray(jitted(FUSED)(params, batch, inputs)["hidden"])[real], np.asarray(wanted)[real], atol=3e-6)


def test_what_arrives_elsewhere_and_the_placeholder_tokens_change_nothing() -> None:
    params, _, _ = parts(FUSED)
    batch = batch_of(1, 2)
    inputs, wanted = arriving(batch), jitted(FUSED)(params, batch, arriving(batch))
    takes = {name: (batch[f"{name}_rows"] >= 0) & (batch["segment_ids"] > 0) for name in inputs}
    garbage = {name: jnp.where(takes[name][..., None], rows, 55.0) for name, rows in inputs.items()}
    others = {**batch, "tokens": jnp.where(takes["image"] | takes["audio"], 9, batch["tokens"])}
    for got in (jitted(FUSED)(params, batch, garbage), jitted(FUSED)(params, others, inputs)):
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_gradient_reaches_the_rows_that_arrive_and_no_others() -> None:
    params, _, _ = parts(FUSED)
    batch = batch_of(1, 2)
    _, (gradient, of_inputs) = measured()(params, arriving(batch), batch)
    for name, value in of_inputs.items():
        takes = (np.asarray(batch[f"{name}_rows"]) >= 0) & (np.asarray(batch["segment_ids"]) > 0)
        np.testing.assert_array_equal(np.any(np.asarray(value) != 0, axis=-1), takes)
    unused = np.setdiff1d(np.arange(32), np.asarray(batch["tokens"])[(np.asarray(batch["segment_ids"]) > 0)])
    assert float(np.max(np.abs(np.asarray(gradient["decoder/embedding/weight"])[unused]))) == 0.0
    assert min(float(jnp.max(jnp.abs(value))) for value in gradient.values()) > 0.0


def test_packed_equals_unpacked_per_sample_in_sums_and_gradient() -> None:
    params, _, _ = parts(FUSED)
    batch = batch_of(1, 2)
    inputs = arriving(batch)
    (_, outputs), gradients = measured()(params, inputs, batch)
    sums, total, of_rows = dict.fromkeys(OBJECTIVES, 0.0), jax.tree.map(jnp.zeros_like, params), []
    for n, seed in enumerate((1, 2)):
        span = slice(10 * n, 10 * n + 24)
        alone = batch_of(seed)
        rows = {name: jnp.pad(value[:, span], ((0, 0), (0, 24 - value[:, span].shape[1]), (0, 0))) for name, value in inputs.items()}
        (_, found), gradient = measured()(params, rows, alone)
        sums = {name: sums[name] + float(found[name]) for name in sums}
        total = jax.tree.map(jnp.add, total, gradient[0])
        of_rows.append(jax.tree.map(lambda x: np.asarray(x)[:, :10], gradient[1]))
    for name, value in sums.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-5, err_msg=name)
    close(gradients[0], total)
    joined = {name: np.concatenate([of_rows[0][name], of_rows[1][name]], axis=1) for name in inputs}
    close(jax.tree.map(lambda x: np.asarray(x)[:, :20], gradients[1]), joined)


def test_each_objective_is_summed_over_its_own_mask() -> None:
    params, _, _ = parts(FUSED)
    batch = batch_of(1, 2)
    outputs = jitted(FUSED)(params, batch, arriving(batch))
    logits = np.asarray(outputs["hidden"] @ params["decoder/head/weight"].T, np.float64)
    targets = np.asarray(batch["targets"])[..., None]
    costs = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets, -1)[..., 0]
    hits = logits.argmax(-1) == targets[..., 0]
    for name, (kind, mask) in OBJECTIVES.items():
        wanted = np.sum(np.asarray(batch[mask]) * (costs if kind == "cross_entropy" else hits))
        np.testing.assert_allclose(outputs[name], wanted, rtol=1e-5, err_msg=name)


def test_a_batch_of_padding_with_ones_has_finite_states_and_gradients() -> None:
    params, _, _ = parts(FUSED)
    empty = jax.tree.map(jnp.zeros_like, batch_of(1, 2))
    (loss, outputs), gradients = measured()(params, arriving(empty), empty)
    assert float(loss) == 0.0
    assert bool(jnp.all(jnp.isfinite(outputs["hidden"])))
    assert all(float(jnp.max(jnp.abs(value))) == 0.0 for value in jax.tree.leaves(gradients))


def test_bfloat16_parameters_take_float32_rows_and_give_float32_sums() -> None:
    params, _, _ = parts(FUSED)
    batch = batch_of(1, 2)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    got, wide = (jitted(FUSED)(p, batch, arriving(batch)) for p in (narrow, params))
    assert (got["hidden"].dtype, got["cross_entropy"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(got["cross_entropy"], wide["cross_entropy"], rtol=0.02)


def test_tensor_and_fsdp_axes_give_equal_results_and_never_gather() -> None:
    config = dataclasses.replace(FUSED, projectors={"image": Projector(embed=6, width=16)})
    params, names, apply = parts(config)
    batch = packed([[(seed, text(seed))] for seed in range(4)], 12)
    inputs = {"audio": arriving(batch)["audio"], "image": arriving(batch, width=6)["image"]}
    both = jax.value_and_grad(lambda p, b, i: (lambda o: (o["cross_entropy"], o["digit_accuracy"]))(apply(p, b, **i)), has_aux=True)
    wanted = jax.device_get(jax.jit(both)(params, batch, inputs))
    got, collectives = on_mesh(both, params, names, batch, inputs)
    close(got, wanted)
    assert collectives == set()


def test_a_projector_of_an_input_brings_its_rows_to_the_decoders_width() -> None:
    config = dataclasses.replace(FUSED, projectors={"image": Projector(embed=6, width=16, mlp=9)})
    params, _, _ = parts(config)
    assert {path for path in params if not path.startswith("decoder/")} == {"image_projector/up", "image_projector/down"}
    batch = batch_of(1)
    inputs = {"audio": arriving(batch)["audio"], "image": arriving(batch, width=6)["image"]}
    rows = jax.nn.gelu(inputs["image"] @ params["image_projector/up"]) @ params["image_projector/down"]
    plain = {path: value for path, value in params.items() if path.startswith("decoder/")}
    wanted = jitted(FUSED)(plain, batch, {**inputs, "image": rows})
    np.testing.assert_allclose(jitted(config)(params, batch, inputs)["hidden"], wanted["hidden"], atol=3e-6)


def test_without_objectives_there_are_hidden_states_alone_and_no_head_is_needed() -> None:
    config = Multimodal(decoder=dataclasses.replace(DECODER, objective="none"), inputs=("image",), objectives={})
    batch = batch_of(1)
    assert set(jax.eval_shape(config(nnx.Rngs(0)), batch, image=arriving(batch)["image"])) == {"hidden"}


def test_the_vocabulary_is_the_decoders() -> None:
    assert FUSED.vocab_size == 32


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"inputs": ("image", "image")}, "inputs"),
        ({"inputs": ("my image",)}, "inputs"),
        ({"projectors": {"imago": Projector(embed=6, width=16)}}, "projectors"),
        ({"objectives": {"hidden": ("accuracy", "loss_mask")}}, "objectives"),
    ],
)
def test_names_that_cannot_be_used_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"Multimodal\.{field} has a name that cannot be used") as caught:
        dataclasses.replace(FUSED, **changes)
    assert caught.value.anchor == "multimodal-names"


def test_an_unknown_kind_of_objective_and_a_chunk_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Multimodal\.objectives has a wrong type"):
        dataclasses.replace(FUSED, objectives={"f1": ("f1", "loss_mask")})
    with pytest.raises(ConfigError, match=r"Multimodal\.chunk does not fit"):
        dataclasses.replace(FUSED, chunk=0)


def test_a_decoder_without_a_head_is_refused_where_there_are_objectives() -> None:
    with pytest.raises(ConfigError, match="no output head") as caught:
        Multimodal(decoder=dataclasses.replace(DECODER, objective="none"))
    assert caught.value.anchor == "decoder-without-head"


@pytest.mark.parametrize(
    ("without", "inputs", "anchor", "have"),
    [
        ((), {"image": 16}, "multimodal-names", "inputs ['image']"),
        (("audio_rows",), {"image": 16, "audio": 16}, "multimodal-names", "'audio_rows'"),
        (("text_mask",), {"image": 16, "audio": 16}, "multimodal-names", "'text_mask'"),
        ((), {"image": 16, "audio": 12}, "multimodal-width", "rows of 12 numbers"),
    ],
)
def test_what_does_not_arrive_as_it_should_is_refused(without: tuple[str, ...], inputs: dict[str, int], anchor: str, have: str) -> None:
    batch = {name: value for name, value in batch_of(1).items() if name not in without}
    with pytest.raises(ConfigError) as caught:
        jax.eval_shape(FUSED(nnx.Rngs(0)), batch, **{name: jnp.ones((1, 24, width)) for name, width in inputs.items()})
    assert (caught.value.anchor, caught.value.have) == (anchor, have)


def test_rows_of_images_need_their_places_where_positions_have_three_dimensions() -> None:
    config = Multimodal(decoder=dataclasses.replace(DECODER, rope_sections=(1, 1)), objectives=OBJECTIVES)
    inputs = {name: jnp.ones((1, 24, 16)) for name in ("image", "audio")}
    with pytest.raises(ConfigError) as caught:
        jax.eval_shape(config(nnx.Rngs(0)), batch_of(1), **inputs)
    assert caught.value.have == "'rope_positions'"
    places = {"rope_positions": jnp.zeros((1, 24, 2), jnp.int32)}
    assert jax.eval_shape(config(nnx.Rngs(0)), {**batch_of(1), **places}, **inputs)["hidden"].shape == (1, 24, 16)


def test_encoders_decoder_and_generator_fit_together_as_sections() -> None:
    sections = (
        Section(
            name="vision",
            module=VisionTransformer(layers=1, embed=8, heads=2, mlp=8, patch_size=2, channels=1, width=16),
            reads="image",
            microbatch=(16, 32),
        ),
        Section(name="audio", module=AudioEncoder(layers=1, embed=8, heads=2, mlp=8, mels=5, width=16), reads="audio", microbatch=32),
        Section(
            name="llm",
            module=FUSED,
            inputs={"image": "vision.hidden[image_rows]", "audio": "audio.hidden[audio_rows]"},
            objectives={name: Objective(count=mask) for name, (_, mask) in OBJECTIVES.items()},
            microbatch=64,
            row_length=32,
        ),
        Section(
            name="generator",
            module=Redraw(embed=16, pixels=64),
            reads="redraw",
            inputs={"state": "llm.hidden[state_rows]"},
            objectives={"redraw": Objective(count=lambda item: item.units)},
            microbatch=8,
        ),
    )
    numbers, whole = ("tokens", "targets", "image_rows", "audio_rows"), ArraySpec()
    weight = ArraySpec(dtype="float32")
    specs = {
        "text": dict.fromkeys(numbers, whole) | dict.fromkeys(("loss_mask", *MASKS), weight),
        "image": {"patches": ArraySpec(shape=(4,), dtype="float32"), "coords": ArraySpec(shape=(2,))},
        "audio": {"frames": ArraySpec(shape=(5,), dtype="float32")},
        "redraw": {"target": ArraySpec(shape=(64,), dtype="float32"), "state_rows": whole},
    }
    shapes = graph_shapes(SectionGraph(sections=sections), specs)
    assert {label.split("->")[0]: (row.shape, shapes.merges[label]) for label, row in shapes.edges.items()} == {
        "vision.hidden": ((16,), 4),
        "audio.hidden": ((16,), 2),
        "llm.hidden": ((16,), 1),
    }
    assert hash(nnx.graphdef(FUSED(nnx.Rngs(0)))) == hash(nnx.graphdef(dataclasses.replace(FUSED)(nnx.Rngs(0))))
