"""The decoder: its parameters, packing, dropout, sharding inside a replica, and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_support import close, copies, on_mesh, parts

from maestro_jax.errors import ConfigError
from maestro_jax.models import Decoder
from maestro_jax.models.layers import rotary_angles

TINY = Decoder(vocab_size=32, layers=2, embed=16, heads=4, kv_heads=2, mlp=24, loss_chunk=8)


def pack(rows: list[list[int]], length: int) -> dict[str, jax.Array]:
    """Packs samples, each a list of sample numbers per row; sample s has 3 + 2 s tokens that depend on s alone."""
    batch = {name: np.zeros((len(rows), length), np.int32) for name in ("tokens", "targets", "segment_ids", "positions", "sample_ids")}
    mask = np.zeros((len(rows), length), np.float32)
    for row, samples in enumerate(rows):
        start = 0
        for segment, sample in enumerate(samples, 1):
            units = 3 + 2 * sample
            text = np.random.default_rng(sample).integers(0, 32, units + 1)
            here = (row, slice(start, start + units))
            batch["tokens"][here], batch["targets"][here], batch["positions"][here] = text[:-1], text[1:], np.arange(units)
            batch["segment_ids"][here], batch["sample_ids"][here], mask[here] = segment, 100 + sample, 1.0
            start += units
    arrays = {name: jnp.asarray(value) for name, value in batch.items()}
    return {**arrays, "sample_ids": arrays["sample_ids"].astype(jnp.uint32), "loss_mask": jnp.asarray(mask)}


def hidden_by_token(batch: dict[str, jax.Array], hidden: jax.Array) -> dict[tuple[int, int], np.ndarray]:
    ids, positions, real = (np.asarray(batch[name]) for name in ("sample_ids", "positions", "segment_ids"))
    return {(int(ids[at]), int(positions[at])): np.asarray(hidden[at]) for at in zip(*np.nonzero(real), strict=True)}


def test_paths_shapes_and_names_of_parameters() -> None:
    params, names, _ = parts(TINY)
    assert {path: (value.shape, names[path]) for path, value in params.items()} == {
        "embedding/weight": ((32, 16), ("vocab", "embed")),
        "head/weight": ((32, 16), ("vocab", "embed")),
        "final_norm/scale": ((16,), ("embed",)),
        "layers/attention_norm/scale": ((2, 16), ("layers", "embed")),
        "layers/attention/query": ((2, 16, 4, 4), ("layers", "embed", "heads", "head_dim")),
        "layers/attention/key": ((2, 16, 2, 4), ("layers", "embed", "kv_heads", "head_dim")),
        "layers/attention/value": ((2, 16, 2, 4), ("layers", "embed", "kv_heads", "head_dim")),
        "layers/attention/output": ((2, 4, 4, 16), ("layers", "heads", "head_dim", "embed")),
        "layers/mlp_norm/scale": ((2, 16), ("layers", "embed")),
        "layers/mlp/gate": ((2, 16, 24), ("layers", "embed", "mlp")),
        "layers/mlp/up": ((2, 16, 24), ("layers", "embed", "mlp")),
        "layers/mlp/down": ((2, 24, 16), ("layers", "mlp", "embed")),
    }
    assert {str(value.dtype) for value in params.values()} == {"float32"}


def test_norms_of_queries_and_keys_and_biases_are_parameters_of_each_layer() -> None:
    params, names, _ = parts(dataclasses.replace(TINY, qk_norm=True, qkv_bias=True))
    more = {path: (value.shape, names[path]) for path, value in params.items() if path not in parts(TINY)[0]}
    assert more == {
        "layers/attention/query_norm/scale": ((2, 4), ("layers", "head_dim")),
        "layers/attention/key_norm/scale": ((2, 4), ("layers", "head_dim")),
        "layers/attention/query_bias": ((2, 4, 4), ("layers", "heads", "head_dim")),
        "layers/attention/key_bias": ((2, 2, 4), ("layers", "kv_heads", "head_dim")),
        "layers/attention/value_bias": ((2, 2, 4), ("layers", "kv_heads", "head_dim")),
    }
    assert float(jnp.max(jnp.abs(params["layers/attention/query_bias"]))) == 0.0


def test_a_decoder_without_objective_has_no_head_and_gives_hidden_states_alone() -> None:
    params, _, apply = parts(dataclasses.replace(TINY, objective="none"))
    assert "head/weight" not in params
    assert set(jax.eval_shape(apply, params, pack([[1]], 8))) == {"hidden"}


def test_a_tied_decoder_uses_its_embedding_as_head_and_trains_it_through_both() -> None:
    params, _, apply = parts(dataclasses.replace(TINY, tied=True))
    assert "head/weight" not in params
    batch = pack([[1, 2]], 16)
    outputs = jax.jit(apply)(params, batch)
    logits = outputs["hidden"][0] @ params["embedding/weight"].T
    wanted = -jnp.sum(batch["loss_mask"][0] * jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][0][:, None], 1)[:, 0])
    np.testing.assert_allclose(outputs["cross_entropy"], wanted, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: apply(p, batch)["cross_entropy"]))(params)["embedding/weight"]
    unused = np.setdiff1d(np.arange(32), np.asarray(batch["tokens"]))
    assert float(jnp.min(jnp.max(jnp.abs(gradient[unused]), axis=1))) > 0


def test_packed_equals_unpacked_per_sample_in_hidden_states_loss_and_gradient() -> None:
    params, _, apply = parts(TINY)
    both = jax.jit(jax.value_and_grad(lambda p, b: (lambda o: (o["cross_entropy"], o["hidden"]))(apply(p, b)), has_aux=True))
    batch = pack([[1, 2, 0], [3]], 20)
    (loss, hidden), gradient = both(params, batch)
    packed, alone_loss, alone_gradient = hidden_by_token(batch, hidden), 0.0, jax.tree.map(jnp.zeros_like, params)
    for sample in range(4):
        alone = pack([[sample]], 9)
        (one_loss, one_hidden), one_gradient = both(params, alone)
        for token, value in hidden_by_token(alone, one_hidden).items():
            np.testing.assert_allclose(packed[token], value, atol=2e-6)
        weighted = {**batch, "loss_mask": batch["loss_mask"] * (batch["sample_ids"] == 100 + sample)}
        (in_pack, _), in_pack_gradient = both(params, weighted)
        np.testing.assert_allclose(in_pack, one_loss, rtol=2e-6)
        for a, b in zip(jax.tree.leaves(in_pack_gradient), jax.tree.leaves(one_gradient), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))))
        alone_loss += float(one_loss)
        alone_gradient = jax.tree.map(jnp.add, alone_gradient, one_gradient)
    np.testing.assert_allclose(loss, alone_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(alone_gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def test_what_padding_holds_changes_no_loss_and_no_gradient() -> None:
    params, _, apply = parts(TINY)
    both = jax.jit(jax.value_and_grad(lambda p, b: apply(p, b)["cross_entropy"]))
    batch = pack([[1, 2]], 20)
    other = {**batch, "tokens": jnp.where(batch["segment_ids"] == 0, 7, batch["tokens"])}
    for a, b in zip(jax.tree.leaves(both(params, batch)), jax.tree.leaves(both(params, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropout_of_a_sample_does_not_move_with_its_micro_batch() -> None:
    params, _, apply = parts(dataclasses.replace(TINY, dropout=0.3))
    apply = jax.jit(apply)
    key = {"key": jnp.array([5, 6], jnp.uint32)}
    first, second = pack([[1, 2, 0], [3]], 20), pack([[3, 0]], 16)
    wanted = hidden_by_token(first, apply(params, first | key)["hidden"])
    got = hidden_by_token(second, apply(params, second | key)["hidden"])
    for token, value in got.items():
        np.testing.assert_allclose(value, wanted[token], atol=2e-6)
    calm = hidden_by_token(second, apply(params, second)["hidden"])
    assert all(float(np.max(np.abs(calm[token] - got[token]))) > 0.01 for token in got)


def test_bfloat16_parameters_give_bfloat16_hidden_states_and_a_float32_loss() -> None:
    params, _, apply = parts(TINY)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    batch = pack([[1, 2, 0], [3]], 20)
    outputs, wide = jax.jit(apply)(narrow, batch), jax.jit(apply)(params, batch)
    assert (outputs["hidden"].dtype, outputs["cross_entropy"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(outputs["cross_entropy"], wide["cross_entropy"], rtol=0.01)
    gradients = jax.eval_shape(jax.grad(lambda p: apply(p, batch)["cross_entropy"]), narrow)
    assert {str(x.dtype) for x in jax.tree.leaves(gradients)} == {"bfloat16"}


def test_residuals_hold_no_second_copy_of_a_weight() -> None:
    # No table or activation of these sizes has as many elements as a weight of the layers.
    params, _, apply = parts(dataclasses.replace(TINY, vocab_size=37))
    batch = pack([[1, 2, 0], [3]], 20)
    for path in ("layers/attention/query", "layers/attention/key", "layers/mlp/gate", "layers/mlp/down"):
        assert copies(lambda p: apply(p, batch)["cross_entropy"], params, path) == 0, path


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"qk_norm": True, "qkv_bias": True}])
def test_tensor_and_fsdp_axes_give_equal_results_and_never_gather(changes: dict[str, Any]) -> None:
    params, names, apply = parts(dataclasses.replace(TINY, dropout=0.1, **changes))
    batch = pack([[1, 2, 0], [3], [4], [0, 0, 0]], 20) | {"key": jnp.array([5, 6], jnp.uint32)}
    both = jax.value_and_grad(lambda p, b: (lambda o: (o["cross_entropy"], o["accuracy"]))(apply(p, b)), has_aux=True)
    wanted = jax.device_get(jax.jit(both)(params, batch))
    got, collectives = on_mesh(both, params, names, batch)
    close(got, wanted)
    assert collectives == set()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"heads": 5, "kv_heads": 5}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"head_dim": 3}, "head_dim"),
        ({"dropout": 1.0}, "dropout"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"objective": "previous_token"}, "objective"),
        ({"rope_sections": (1, 1, 1)}, "rope_sections"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 32, "layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "mlp": 24}
    with pytest.raises(ConfigError, match=rf"Decoder\.{field} does not fit") as caught:
        Decoder(**sizes | changes)
    assert caught.value.anchor == "decoder-shape"


def test_positions_in_three_dimensions_turn_their_own_pairs_and_equal_ones_are_those_of_text() -> None:
    config = dataclasses.replace(TINY, head_dim=8, rope_sections=(1, 1, 2))
    params, _, apply = parts(config)
    batch = pack([[1, 2]], 16)

    def hidden(*positions: jax.Array) -> np.ndarray:
        more = {"rope_positions": jnp.stack(positions, axis=-1)} if positions else {}
        return np.asarray(jax.jit(apply)(params, {**batch, **more})["hidden"])

    place = batch["positions"]
    np.testing.assert_array_equal(hidden(place, place, place), hidden())
    moved = [hidden(*(3 * place if n == dimension else place for n in range(3))) for dimension in range(3)]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert float(np.max(np.abs(moved[one] - moved[other]))) > 1e-4
    angles = rotary_angles(jnp.array([[[5, 7, 11]]]), 8, 10000.0, None, (1, 1, 2))
    np.testing.assert_allclose(angles[0][0, 0], np.cos([5.0, 7.0 * 0.1, 11.0 * 0.01, 11.0 * 0.001]), atol=1e-6)


def test_an_unknown_attention_is_refused_when_the_configuration_is_made() -> None:
    with pytest.raises(ConfigError, match="unknown kind of attention"):
        dataclasses.replace(TINY, attention="sparse")


def test_asking_a_headless_decoder_for_its_head_says_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match="no output head") as caught:
        dataclasses.replace(TINY, objective="none")(nnx.Rngs(0)).head_weight()
    assert "next_token" in caught.value.fix
