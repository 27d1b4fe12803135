"""Folders of tiny Qwen3 models, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 40,
}
"""The keys of Qwen3-8B's own file, with small sizes."""


def tensors_of(values: Mapping[str, Any], dtype: Any = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Random tensors, by the names and shapes that transformers gives a Qwen3 model."""
    sizes = [values[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")]
    embed, mlp, heads, kv_heads, head_dim = sizes
    shapes = {"model.embed_tokens.weight": (values["vocab_size"], embed), "model.norm.weight": (embed,)}
    shapes |= {} if values["tie_word_embeddings"] else {"lm_head.weight": (values["vocab_size"], embed)}
    for layer in range(values["num_hidden_layers"]):
        parts = {
            "input_layernorm": (embed,),
            "post_attention_layernorm": (embed,),
            "self_attn.q_proj": (heads * head_dim, embed),
            "self_attn.k_proj": (kv_heads * head_dim, embed),
            "self_attn.v_proj": (kv_heads * head_dim, embed),
            "self_attn.o_proj": (embed, heads * head_dim),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "mlp.gate_proj": (mlp, embed),
            "mlp.up_proj": (mlp, embed),
            "mlp.down_proj": (embed, mlp),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def qwen3_folder(folder: Path, values: Mapping[str, Any] = QWEN3, tensors: Mapping[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """Writes a folder of `values` (with `changes`) and random tensors, or these; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**values, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text("{}")
    save_file(dict(tensors_of(values) if tensors is None else tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
