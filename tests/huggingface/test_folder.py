"""Folders of Hugging Face without transformers: layouts, refusals by name, and what is written is what was read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folder_support import QWEN3, qwen3_folder, tensors_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from maestro_jax.errors import CheckpointError, ConfigError
from maestro_jax.huggingface import Folder, HuggingFace, Tensor, load, save
from maestro_jax.huggingface.layout import StackedArray
from maestro_jax.models import Decoder, Llama3Scaling

LLAMA3: Mapping[str, Any] = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@given(st.data())
def test_any_slice_of_a_parameter_is_that_slice_of_the_whole(data: st.DataObject) -> None:
    layouts = ["(H K) D -> D H K", "D (H K) -> H K D", "(H K) -> H K", "F D -> D F", "V D", "(H K F) D -> F D K H", "D H K F -> (H K F) D"]
    tensor = Tensor("layers.{layer}.weight", "weight", data.draw(st.sampled_from(layouts)))
    sizes = {"layers": 3, "H": 4, "K": 3, "D": 5, "F": 2, "V": 7}
    random = np.random.default_rng(0)
    stored = {name: random.normal(size=tensor.tensor_shape(sizes)) for name in tensor.names(sizes)}
    array = StackedArray(tensor, sizes, stored.__getitem__)
    whole = array[()]
    for name, layer in zip(tensor.names(sizes), whole, strict=True):
        np.testing.assert_array_equal(tensor.written(layer, sizes), stored[name])
    bounds = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in array.shape]
    index = tuple(slice(*pair) for pair in bounds)
    np.testing.assert_array_equal(array[index], whole[index])


@given(st.data())
def test_any_slice_of_one_of_several_parameters_in_a_tensor_is_that_slice_of_the_whole(data: st.DataObject) -> None:
    sizes = {"layers": 2, "H": 4, "K": 3, "D": 5}
    stored = np.random.default_rng(0).normal(size=(3 * 4 * 3, 5))
    pieces = [Tensor("weight", name, "(3 H K) D -> D H K", piece) for piece, name in enumerate("qkv")]
    wholes = [StackedArray(tensor, sizes, {"weight": stored}.__getitem__)[()] for tensor in pieces]
    assert pieces[0].tensor_shape(sizes) == stored.shape
    np.testing.assert_array_equal(np.concatenate([t.written(w, sizes) for t, w in zip(pieces, wholes, strict=True)]), stored)
    which = data.draw(st.integers(0, 2))
    bounds = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in (5, 4, 3)]
    index = tuple(slice(*pair) for pair in bounds)
    array = StackedArray(pieces[which], sizes, {"weight": stored}.__getitem__)
    np.testing.assert_array_equal(array[index], wholes[which][index])


def test_no_more_than_the_heads_of_a_slice_is_read() -> None:
    class Recording:
        def __getitem__(self, index: Any) -> np.ndarray:
            read.append(index)
            return np.zeros([part.stop - part.start for part in index])

    read: list[Any] = []
    tensor = Tensor("layers.{layer}.weight", "weight", "(H K) D -> D H K")
    array = StackedArray(tensor, {"layers": 4, "H": 8, "K": 2, "D": 6}, lambda name: Recording())
    assert array[1:3, 3:6, 4:6].shape == (2, 3, 2, 2)
    assert read == [(slice(8, 12), slice(3, 6))] * 2


def test_the_numbers_of_a_config_become_those_of_a_decoder(tmp_path: Path) -> None:
    (model,) = Folder(qwen3_folder(tmp_path)).models.values()
    sizes: dict[str, Any] = {"vocab_size": 40, "layers": 3, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 24}
    assert model.config == Decoder(**sizes, rope_theta=1e6, norm_epsilon=1e-6, qk_norm=True)


def test_scaling_of_rotary_positions_is_read_in_its_older_and_newer_form(tmp_path: Path) -> None:
    wanted = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
    older = qwen3_folder(tmp_path / "older", rope_theta=5e5, rope_scaling=LLAMA3)
    newer = qwen3_folder(tmp_path / "newer", rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    for folder in (older, newer):
        (model,) = Folder(folder).models.values()
        assert (model.config.rope_theta, model.config.rope_scaling) == (5e5, wanted)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"num_experts": 128}, "num_experts = 128"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, "mrope_section"),
        ({"rope_scaling": {**LLAMA3, "short_factor": 2.0}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, "factor = None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}, "partial_rotary_factor = 0.5"),
        ({"hidden_act": "relu2"}, "hidden_act = 'relu2'"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers = '3'"),
        ({"model_type": "qwen3_moe"}, "model_type = 'qwen3_moe'"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"a_new_feature": 1}, "a_new_feature = 1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    with pytest.raises(ConfigError) as caught:
        Folder(tmp_path)
    assert named in caught.value.have
    assert caught.value.anchor == "model-not-implemented"


def test_all_that_is_not_implemented_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "num_experts": 8, "attention_bias": True, "use_sliding_window": True}))
    with pytest.raises(ConfigError) as caught:
        Folder(tmp_path)
    assert [line.split(" = ")[0] for line in caught.value.have.splitlines()] == ["use_sliding_window", "attention_bias", "num_experts"]


def test_missing_unknown_and_misshapen_tensors_are_one_error(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    tensors |= {"model.layers.3.mlp.up_proj.weight": np.zeros(2), "lm_head.weight": np.zeros((41, 16))}
    with pytest.raises(CheckpointError) as caught:
        Folder(qwen3_folder(tmp_path, tensors=tensors)).arrays()
    assert set(caught.value.have.splitlines()) == {
        "model.norm.weight: missing",
        "model.layers.2.mlp.up_proj.weight: missing",
        "model.layers.3.mlp.up_proj.weight: unknown to 'qwen3'",
        "lm_head.weight: [41, 16] in the file, [40, 16] by config.json",
    }


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = qwen3_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors_of(QWEN3), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors"):
        Folder(folder).arrays()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder of a model"):
        Folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    folder = Folder(tmp_path)
    with pytest.raises(CheckpointError, match="has no weights"):
        folder.arrays()


@pytest.mark.parametrize("shard_bytes", [10_000_000, 2_000])
def test_what_is_saved_has_the_bits_that_were_loaded(shard_bytes: int, tmp_path: Path) -> None:
    folder = qwen3_folder(tmp_path / "one")
    _, parameters = load(folder)
    arrays = {path: np.asarray(value) for path, value in parameters.items()}
    made = save(tmp_path / "two", Folder(folder), arrays, dtype="bfloat16", shard_bytes=shard_bytes)
    files = sorted(made.glob("*.safetensors"))
    found = {name: value for file in files for name, value in load_file(file).items()}
    wanted = load_file(folder / "model.safetensors")
    assert {name: (value.dtype, value.tobytes()) for name, value in found.items()} == {n: (v.dtype, v.tobytes()) for n, v in wanted.items()}
    assert json.loads((made / "config.json").read_text()) == QWEN3
    assert (made / "tokenizer_config.json").read_text() == "{}"
    if shard_bytes == 2_000:
        index = json.loads((made / "model.safetensors.index.json").read_text())
        assert len(files) > 4
        assert all(len(load_file(file)) == 1 or file.stat().st_size < 2_000 + 1_000 for file in files)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
        assert {name: index["weight_map"][name] for file in files for name in load_file(file)} == index["weight_map"]


def test_what_is_not_given_is_copied_from_the_source(tmp_path: Path) -> None:
    folder = qwen3_folder(tmp_path / "one")
    norm = np.arange(16, dtype=np.float32)
    found = load_file(save(tmp_path / "two", Folder(folder), {"final_norm/scale": norm}) / "model.safetensors")
    wanted = load_file(folder / "model.safetensors")
    assert [name for name in wanted if wanted[name].tobytes() != found[name].tobytes()] == ["model.norm.weight"]
    np.testing.assert_array_equal(found["model.norm.weight"], norm)


def test_a_model_that_is_saved_again_leaves_no_shard_of_the_former_and_no_other_file_is_lost(tmp_path: Path) -> None:
    folder = qwen3_folder(tmp_path / "one")
    made = save(tmp_path / "two", Folder(folder), {}, shard_bytes=2_000)
    (made / "notes.txt").write_text("mine")
    save(made, Folder(folder), {})
    assert {file.name for file in made.iterdir()} == {"config.json", "model.safetensors", "tokenizer_config.json", "notes.txt"}
    norm = np.arange(16, dtype=np.float32)
    save(made, Folder(made), {"final_norm/scale": norm})
    found, wanted = load_file(made / "model.safetensors"), load_file(folder / "model.safetensors")
    assert [name for name in wanted if wanted[name].tobytes() != found[name].tobytes()] == ["model.norm.weight"]


def test_the_dtype_of_a_saved_model_is_in_its_config(tmp_path: Path) -> None:
    made = save(tmp_path / "two", Folder(qwen3_folder(tmp_path / "one")), {}, dtype="float32")
    assert json.loads((made / "config.json").read_text())["torch_dtype"] == "float32"
    assert {str(value.dtype) for value in load_file(made / "model.safetensors").values()} == {"float32"}


def test_a_tied_model_ignores_a_head_beside_its_embedding_and_lends_it_to_students(tmp_path: Path) -> None:
    tensors = tensors_of({**QWEN3, "tie_word_embeddings": True})
    folder = qwen3_folder(tmp_path, tensors={**tensors, "lm_head.weight": np.zeros((40, 16))}, tie_word_embeddings=True)
    arrays = Folder(folder).arrays()
    np.testing.assert_array_equal(arrays["head/weight"][:], tensors["model.embed_tokens.weight"])


def test_choices_change_what_a_config_leaves_open_and_nothing_else(tmp_path: Path) -> None:
    folder = str(qwen3_folder(tmp_path))
    assert HuggingFace(folder=folder, choices={"objective": "none", "dropout": 0.1}).config.dropout == 0.1
    with pytest.raises(ConfigError, match=r"HuggingFace\.choices") as caught:
        HuggingFace(folder=folder, choices={"rope_theta": 1.0})
    assert caught.value.have == "'rope_theta'"
