"""Folders of Qwen2.5-VL without transformers: two models in one, older and newer files, refusals, and two sections that make one folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maestro_jax.config import load as load_config
from maestro_jax.data import LongTail
from maestro_jax.errors import ConfigError
from maestro_jax.final_weights import save_sections
from maestro_jax.graph import Objective, Section
from maestro_jax.huggingface import Folder, HuggingFace, load
from maestro_jax.models import Decoder, Multimodal, VisionTransformer
from maestro_jax.trainer import Trainer

CONFIGS = Path(__file__).parent.parent.parent / "configs"

TEXT: Mapping[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 40,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
}
VISION: Mapping[str, Any] = {
    "depth": 2,
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_heads": 2,
    "in_chans": 3,
    "out_hidden_size": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
WHOLE: Mapping[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 30,
    "video_token_id": 31,
    "vision_start_token_id": 32,
    "vision_end_token_id": 33,
    "tie_word_embeddings": False,
    "transformers_version": "4.41.2",
}
OLDER = {**WHOLE, **TEXT, "bos_token_id": 1, "eos_token_id": 2, "vision_token_id": 34, "vision_config": dict(VISION)}
"""The keys of Qwen2.5-VL-7B-Instruct's own file, with small sizes: the language model's stand beside those of the whole."""

_ROPE = {"mrope_section": [1, 1, 2], "rope_theta": 1000000.0, "rope_type": "default"}
NEWER = {
    **WHOLE,
    "text_config": {
        **{k: v for k, v in TEXT.items() if not k.startswith("rope")},
        "rope_parameters": _ROPE,
        "model_type": "qwen2_5_vl_text",
    },
    "vision_config": {**VISION, "in_channels": 3, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}},
}
"""As transformers 5 writes it."""


PUBLISHED: Mapping[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
PUBLISHED_VISION: Mapping[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""The sizes of Qwen2.5-VL-7B-Instruct."""


def tensors_of(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Random tensors by the names and shapes of such a checkpoint, with the sizes above."""
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (40, 16),
        "model.embed_tokens.weight": (40, 16),
        "model.norm.weight": (16,),
        "visual.patch_embed.proj.weight": (8, 3, 2, 14, 14),
        "visual.merger.ln_q.weight": (8,),
        "visual.merger.mlp.0.weight": (32, 32),
        "visual.merger.mlp.0.bias": (32,),
        "visual.merger.mlp.2.weight": (16, 32),
        "visual.merger.mlp.2.bias": (16,),
    }
    for layer in range(2):
        text = {
            "input_layernorm.weight": (16,),
            "post_attention_layernorm.weight": (16,),
            "self_attn.q_proj.weight": (16, 16),
            "self_attn.q_proj.bias": (16,),
            "self_attn.k_proj.weight": (8, 16),
            "self_attn.k_proj.bias": (8,),
            "self_attn.v_proj.weight": (8, 16),
            "self_attn.v_proj.bias": (8,),
            "self_attn.o_proj.weight": (16, 16),
            "mlp.gate_proj.weight": (24, 16),
            "mlp.up_proj.weight": (24, 16),
            "mlp.down_proj.weight": (16, 24),
        }
        vision = {
            "norm1.weight": (8,),
            "norm2.weight": (8,),
            "attn.qkv.weight": (24, 8),
            "attn.qkv.bias": (24,),
            "attn.proj.weight": (8, 8),
            "attn.proj.bias": (8,),
            "mlp.gate_proj.weight": (10, 8),
            "mlp.gate_proj.bias": (10,),
            "mlp.up_proj.weight": (10, 8),
            "mlp.up_proj.bias": (10,),
            "mlp.down_proj.weight": (8, 10),
            "mlp.down_proj.bias": (8,),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in text.items()}
        shapes |= {f"visual.blocks.{layer}.{name}": shape for name, shape in vision.items()}
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def vl_folder(folder: Path, values: Mapping[str, Any] = OLDER) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors_of(values), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("values", [OLDER, NEWER])
def test_older_and_newer_files_become_the_same_two_models(values: dict[str, Any], tmp_path: Path) -> None:
    models = Folder(vl_folder(tmp_path / "one", values)).models
    assert {name: model.config for name, model in models.items()} == {
        "vision": VisionTransformer(
            layers=2,
            embed=8,
            heads=2,
            mlp=10,
            width=16,
            patch_size=14,
            frames=2,
            window=8,
            whole_layers=(1,),
            biases=True,
            patch_bias=False,
            projector_activation="gelu",
        ),
        "language": Decoder(
            vocab_size=40,
            layers=2,
            embed=16,
            heads=2,
            kv_heads=1,
            head_dim=8,
            mlp=24,
            rope_theta=1e6,
            rope_sections=(1, 1, 2),
            qkv_bias=True,
        ),
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vision_config": {**VISION, "hidden_act": "quick_gelu"}}, "vision_config: hidden_act = 'quick_gelu'"),
        ({"vision_config": {**VISION, "in_chans": 4}}, "vision_config: in_chans = 4"),
        ({"vision_config": {**VISION, "deepstack_visual_indexes": [1]}}, "vision_config: deepstack_visual_indexes = [1]"),
        ({"vision_config": {**VISION, "rope_parameters": {"rope_type": "linear"}}}, "rope_type = 'linear'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 2]}}, "mrope_section = [2, 2]"),
        ({"rope_scaling": {"type": "mrope"}}, "mrope_section = None"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"audio_config": {}}, "audio_config = {}"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**OLDER, **changes}))
    with pytest.raises(ConfigError) as caught:
        Folder(tmp_path)
    assert named in caught.value.have
    assert caught.value.anchor == "model-not-implemented"


def sections_of(folder: Path, **vision: Any) -> list[Section]:
    """A tower, and a language model that reads its rows."""
    name = str(folder)
    decoder = Multimodal(decoder=HuggingFace(folder=name, part="language"), inputs=("image",), objectives={})
    return [
        Section(name="vision", module=HuggingFace(folder=name, part="vision"), reads="image", microbatch=64, **vision),
        Section(
            name="llm",
            module=decoder,
            inputs={"image": "vision.hidden[image_rows]"},
            objectives={"cross_entropy": Objective()},
            microbatch=64,
        ),
    ]


def arrays_of(folder: Path, factor: float) -> dict[str, dict[str, np.ndarray]]:
    """Section -> its parameters, changed as by training."""
    given = {
        part: {path: factor * np.asarray(value) for path, value in load(folder, part=part)[1].items()} for part in ("vision", "language")
    }
    return {"vision": given["vision"], "llm": {f"decoder/{path}": value for path, value in given["language"].items()}}


def test_two_sections_of_one_model_make_one_folder(tmp_path: Path) -> None:
    source = vl_folder(tmp_path / "model")
    arrays = arrays_of(source, 2.0)
    assert save_sections(tmp_path / "out", sections_of(source), arrays.__getitem__, None, "float32", 10**9) == [
        tmp_path / "out" / "vision_llm"
    ]
    found, before = load_file(tmp_path / "out" / "vision_llm" / "model.safetensors"), load_file(source / "model.safetensors")
    assert found.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(found[name], 2.0 * value, err_msg=name)


def test_a_section_alone_makes_a_folder_with_the_rest_of_the_model_as_it_was(tmp_path: Path) -> None:
    source = vl_folder(tmp_path / "model")
    arrays = arrays_of(source, 2.0)
    assert save_sections(tmp_path / "out", sections_of(source)[1:], arrays.__getitem__, None, "float32", 10**9) == [
        tmp_path / "out" / "llm"
    ]
    found, before = load_file(tmp_path / "out" / "llm" / "model.safetensors"), load_file(source / "model.safetensors")
    for name, value in before.items():
        np.testing.assert_array_equal(found[name], value if name.startswith("visual.") else 2.0 * value, err_msg=name)


def test_two_sections_with_the_same_part_make_two_folders(tmp_path: Path) -> None:
    source = vl_folder(tmp_path / "model")
    llm = sections_of(source)[1]
    arrays = arrays_of(source, 2.0)["llm"]
    other = Section(name="other", module=llm.module, inputs=llm.inputs, objectives=llm.objectives, microbatch=64)
    saved = save_sections(tmp_path / "out", [llm, other], lambda name: arrays, None, "float32", 10**9)
    assert saved == [tmp_path / "out" / "llm", tmp_path / "out" / "other"]


@pytest.mark.parametrize(("name", "trained"), [("qwen2_5_vl_7b", True), ("qwen2_5_vl_7b_frozen_tower", False)])
def test_the_shipped_configs_have_the_sizes_of_the_published_model_and_are_planned_without_it(
    name: str, trained: bool, tmp_path: Path
) -> None:
    made: Trainer = load_config(str(CONFIGS / f"{name}.gin"), [], root="train").build()
    (tmp_path / "config.json").write_text(json.dumps({**OLDER, **PUBLISHED, "vision_config": {**VISION, **PUBLISHED_VISION}}))
    models = Folder(tmp_path).models
    tower, llm = made.graph.sections
    assert dataclasses.replace(tower.module, attention="dense") == models["vision"].config
    assert dataclasses.replace(llm.module.decoder, attention="dense") == models["language"].config
    assert tower.trainable == trained
    plan = made.setup().plan
    parameters = {section: sum(int(np.prod(s.shape)) for s in p.shapes.params.values()) for section, p in plan.sections.items()}
    # Added up from the shapes of the checkpoint's tensors, independently of this code.
    assert parameters == {"vision": 676_550_144, "llm": 7_615_616_512}


def test_made_up_samples_have_long_tails_and_fit_what_they_are_made_for() -> None:
    data = LongTail(samples=400, longest=512, shortest=16, most_side=8, patch=6, vocab_size=100).load()
    units = [sample.items["text"][0].units for sample in data.train]
    images = [len(sample.items.get("image", ())) for sample in data.train]
    assert max(units) <= 512
    assert sum(count > 0 for count in images) == 200
    assert images.count(1) > images.count(2) > 0
    assert max(images) >= 8
    for sample in data.train[:50]:
        rows = sum(image.units for image in sample.items.get("image", ())) // 4
        taken = sample.items["text"][0].arrays["image_rows"]
        np.testing.assert_array_equal(taken[taken >= 0], np.arange(rows))
    again = LongTail(samples=400, longest=512, shortest=16, most_side=8, patch=6, vocab_size=100).load()
    assert data.fingerprint() == again.fingerprint()
    assert units == [sample.items["text"][0].units for sample in again.train]
