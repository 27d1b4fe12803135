"""What holds for encoders of images and of sound alike: packing, padding, dropout, precision, axes of a mesh, refusals."""

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
from model_support import Batch, clip, close, copies, image, of_sample, on_mesh, packed, parts

from maestro_jax.data import Item
from maestro_jax.errors import ConfigError
from maestro_jax.models import AudioEncoder, VisionTransformer

VISION = VisionTransformer(layers=2, embed=16, heads=2, mlp=20, patch_size=2, channels=1, width=10, rope_theta=100.0)
AUDIO = AudioEncoder(layers=2, embed=16, heads=2, mlp=20, mels=5, stride=4, width=10, rope_theta=100.0)
WINDOWS = dataclasses.replace(VISION, window=2, whole_layers=(1,), biases=True, patch_bias=False, projector_activation="gelu")
ENCODERS = {"rotary": VISION, "learned": dataclasses.replace(VISION, positions="learned", grid=6), "windows": WINDOWS, "audio": AUDIO}
# Units of the items: 4, 8, 12, 16 and 8; images have another resolution each.
IMAGES = [image(2, 2, 0), image(2, 4, 1), image(6, 2, 2), image(4, 4, 3), image(4, 2, 4)]
CLIPS = [clip(4, 0), clip(8, 1), clip(12, 2), clip(16, 3), clip(8, 4)]

each_encoder = pytest.mark.parametrize("kind", list(ENCODERS))
image_and_sound = pytest.mark.parametrize("kind", ["rotary", "audio"])


def laid(kind: str, rows: list[list[int]], length: int) -> Batch:
    """Packs the items of these numbers; item n belongs to sample 100 + n."""
    items: list[Item] = CLIPS if kind == "audio" else IMAGES
    return packed([[(100 + n, items[n]) for n in row] for row in rows], length)


@functools.cache
def measured(kind: str) -> Callable[..., Any]:
    """A jitted function of parameters, batch and a sample (0 takes all): its sum over outputs with its gradient, and the outputs."""
    _, _, apply = parts(ENCODERS[kind])

    def loss(params: Any, batch: Batch, sample: int) -> tuple[jax.Array, jax.Array]:
        hidden = apply(params, batch)["hidden"]
        step = batch["sample_ids"].shape[1] // hidden.shape[1]
        ids, real = batch["sample_ids"][:, ::step], batch["segment_ids"][:, ::step] > 0
        counted = real & ((ids == sample) | (sample == 0))
        return jnp.sum(jnp.where(counted[..., None], jnp.sin(3 * hidden.astype(jnp.float32)), 0.0)), hidden

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@each_encoder
def test_packed_equals_unpacked_per_item_in_rows_loss_and_gradient(kind: str) -> None:
    params, _, _ = parts(ENCODERS[kind])
    batch = laid(kind, [[0, 1, 2], [3, 4]], 28)
    (loss, hidden), gradient = measured(kind)(params, batch, 0)
    total, summed = 0.0, jax.tree.map(jnp.zeros_like, params)
    for n in range(5):
        alone = laid(kind, [[n]], 16)
        (one, rows), one_gradient = measured(kind)(params, alone, 0)
        np.testing.assert_allclose(of_sample(batch, hidden, 100 + n), of_sample(alone, rows, 100 + n), atol=3e-6)
        (in_pack, _), in_pack_gradient = measured(kind)(params, batch, 100 + n)
        np.testing.assert_allclose(in_pack, one, rtol=1e-5)
        close(in_pack_gradient, one_gradient)
        total, summed = total + float(one), jax.tree.map(jnp.add, summed, one_gradient)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    close(gradient, summed)


@image_and_sound
def test_the_order_of_items_in_rows_changes_no_row(kind: str) -> None:
    params, _, _ = parts(ENCODERS[kind])
    first, second = laid(kind, [[0, 1, 2], [3, 4]], 28), laid(kind, [[4, 2, 1], [0, 3]], 28)
    (_, rows), (_, others) = (measured(kind)(params, batch, 0)[0] for batch in (first, second))
    for n in range(5):
        np.testing.assert_allclose(of_sample(first, rows, 100 + n), of_sample(second, others, 100 + n), atol=3e-6)


@image_and_sound
def test_no_item_sees_another_of_its_row(kind: str) -> None:
    params, _, apply = parts(ENCODERS[kind])
    batch = laid(kind, [[0, 1, 2], [3, 4]], 28)
    name = "frames" if kind == "audio" else "patches"

    def of_item(values: jax.Array) -> jax.Array:
        hidden = apply(params, {**batch, name: values})["hidden"]
        return jnp.sum(jnp.where((batch["sample_ids"][:, ::4] == 101)[..., None], hidden, 0.0))

    reached = np.any(np.asarray(jax.jit(jax.grad(of_item))(batch[name])) != 0, axis=-1)
    np.testing.assert_array_equal(reached, np.asarray(batch["sample_ids"]) == 101)


@image_and_sound
def test_padding_may_hold_ones_or_zeros(kind: str) -> None:
    params, _, _ = parts(ENCODERS[kind])
    batch = laid(kind, [[0, 1], [4]], 28)
    name = "frames" if kind == "audio" else "patches"
    ones = {**batch, name: jnp.where((batch["segment_ids"] == 0)[..., None], 1.0, batch[name])}
    ((loss, hidden), gradient), (wanted, wanted_gradient) = measured(kind)(params, ones, 0), measured(kind)(params, batch, 0)
    assert bool(jnp.all(jnp.isfinite(hidden)))
    np.testing.assert_array_equal(loss, wanted[0])
    close(gradient, wanted_gradient, 1e-6)


@image_and_sound
def test_a_batch_of_padding_alone_has_finite_rows_and_no_gradient(kind: str) -> None:
    params, _, _ = parts(ENCODERS[kind])
    empty = jax.tree.map(jnp.zeros_like, laid(kind, [[0, 1], [4]], 28))
    (_, hidden), gradient = measured(kind)(params, empty, 0)
    assert bool(jnp.all(jnp.isfinite(hidden)))
    assert all(float(jnp.max(jnp.abs(value))) == 0.0 for value in gradient.values())


@image_and_sound
def test_dropout_of_an_item_does_not_move_with_its_micro_batch(kind: str) -> None:
    params, _, apply = parts(dataclasses.replace(ENCODERS[kind], dropout=0.3))
    key = {"key": jnp.array([5, 6], jnp.uint32)}
    first, second = laid(kind, [[0, 1, 2], [3, 4]], 28), laid(kind, [[3, 2]], 28)
    rows, others = (jax.jit(apply)(params, batch | key)["hidden"] for batch in (first, second))
    calm = jax.jit(apply)(params, second)["hidden"]
    for sample in (102, 103):
        noisy = of_sample(second, others, sample)
        np.testing.assert_allclose(of_sample(first, rows, sample), noisy, atol=3e-6)
        assert float(np.min(np.max(np.abs(noisy - of_sample(second, calm, sample)), axis=1))) > 0.01


@image_and_sound
def test_layers_are_stacked_and_their_parameters_named(kind: str) -> None:
    params, names, _ = parts(ENCODERS[kind])
    assert len([path for path in params if path.startswith("layers/")]) == 9
    assert params["layers/mlp/up"].shape == (2, 16, 20)
    assert names["layers/mlp/up"] == ("layers", "embed", "mlp")
    assert {path: names[path] for path in params if path.startswith("projector/")} == {
        "projector/up": ("embed", "mlp"),
        "projector/down": ("mlp", "embed"),
    }
    assert all(names[path].count("embed") == 1 for path in params)


@each_encoder
def test_the_loss_reaches_every_parameter(kind: str) -> None:
    params, _, _ = parts(ENCODERS[kind])
    _, gradient = measured(kind)(params, laid(kind, [[0, 1, 2], [3, 4]], 28), 0)
    assert min(float(jnp.max(jnp.abs(value))) for value in gradient.values()) > 1e-3


@image_and_sound
def test_bfloat16_parameters_give_bfloat16_rows_close_to_float32(kind: str) -> None:
    params, _, _ = parts(ENCODERS[kind])
    batch = laid(kind, [[0, 1, 2], [3, 4]], 28)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    ((_, hidden), gradient), ((_, wide), _) = (measured(kind)(p, batch, 0) for p in (narrow, params))
    assert hidden.dtype == jnp.bfloat16
    assert {str(value.dtype) for value in gradient.values()} == {"bfloat16"}
    assert float(jnp.max(jnp.abs(hidden.astype(jnp.float32) - wide))) < 0.05 * float(jnp.max(jnp.abs(wide)))


@image_and_sound
def test_tensor_and_fsdp_axes_give_equal_results_and_never_gather(kind: str) -> None:
    params, names, _ = parts(ENCODERS[kind])
    batch = laid(kind, [[0, 1], [2], [3], [4]], 16)
    wanted = jax.device_get(measured(kind)(params, batch, 0))
    got, collectives = on_mesh(lambda p, b: measured(kind)(p, b, 0), params, names, batch)
    close(got, wanted)
    assert collectives == set()


@image_and_sound
def test_residuals_hold_no_second_copy_of_a_weight(kind: str) -> None:
    params, _, apply = parts(dataclasses.replace(ENCODERS[kind], projector_mlp=23))
    batch = laid(kind, [[0, 1, 2], [3, 4]], 28)
    for path in ("layers/attention/query", "layers/mlp/gate", "projector/up", "projector/down"):
        assert copies(lambda p: jnp.sum(apply(p, batch)["hidden"]), params, path) == 0, path


@image_and_sound
def test_without_a_width_the_last_hidden_states_come_out_side_by_side(kind: str) -> None:
    config = dataclasses.replace(ENCODERS[kind], width=None)
    params, _, apply = parts(config)
    assert not any(path.startswith("projector") for path in params)
    hidden = jax.jit(apply)(params, laid(kind, [[0, 1, 2], [3, 4]], 28))["hidden"]
    assert hidden.shape == (2, 7, 16 if kind == "audio" else 64)
    np.testing.assert_allclose(jnp.mean(jnp.square(hidden.reshape(2, -1, 16)), axis=-1), 1.0, rtol=0.02)


@pytest.mark.parametrize(
    ("config", "changes", "field"),
    [
        (VISION, {"layers": 0}, "layers"),
        (VISION, {"heads": 3}, "heads"),
        (VISION, {"head_dim": 6}, "head_dim"),
        (VISION, {"embed": 12}, "heads"),
        (VISION, {"patch_size": 0}, "patch_size"),
        (VISION, {"merge": 0}, "merge"),
        (VISION, {"grid": 0}, "grid"),
        (VISION, {"width": 0}, "width"),
        (VISION, {"dropout": 1.0}, "dropout"),
        (AUDIO, {"head_dim": 3}, "head_dim"),
        (AUDIO, {"mels": 0}, "mels"),
        (AUDIO, {"stride": 0}, "stride"),
        (AUDIO, {"kernel": 4}, "kernel"),
        (AUDIO, {"projector_mlp": -1}, "projector_mlp"),
        (AUDIO, {"norm_epsilon": 0.0}, "norm_epsilon"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_field(config: Any, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{type(config).__name__}\.{field} does not fit") as caught:
        dataclasses.replace(config, **changes)
    assert caught.value.anchor == "encoder-shape"


@pytest.mark.parametrize("changes", [{"positions": "both"}, {"layers": 1.5}])
def test_a_field_of_another_type_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has a wrong type"):
        dataclasses.replace(VISION, **changes)


@pytest.mark.parametrize(
    ("kind", "config", "wanted", "have"),
    [
        ("rotary", dataclasses.replace(VISION, patch_size=4), "16 numbers a unit (patch_size=4)", "4 numbers a unit"),
        ("rotary", dataclasses.replace(VISION, merge=4), "rows of a length that 16 divides", "rows of 28 units"),
        ("audio", dataclasses.replace(AUDIO, mels=8), "8 numbers a unit (mels=8)", "5 numbers a unit"),
        ("audio", dataclasses.replace(AUDIO, stride=8), "rows of a length that 8 divides", "rows of 28 units"),
    ],
)
def test_items_that_do_not_fit_the_encoder_are_refused(kind: str, config: Any, wanted: str, have: str) -> None:
    with pytest.raises(ConfigError, match="does not fit the items that it reads") as caught:
        jax.eval_shape(config(nnx.Rngs(0)), laid(kind, [[0]], 28))
    assert wanted in caught.value.wanted
    assert caught.value.have == have
    assert caught.value.anchor == "encoder-units"
