"""Tiny random models of transformers, saved as folders: what tests of parity compare with. Needs the extra `parity`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'maestro_jax[parity]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries themselves, about one another
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'maestro_jax[parity]'")

SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
"""Of all tiny models; head_dim is apart from hidden_size / heads."""

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_yarn": ("Qwen3", {"rope_parameters": {**_YARN, "rope_theta": 1e4}}),
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3": ("Llama", {"rope_parameters": {**_LLAMA3, "rope_theta": 1e4}, "tie_word_embeddings": True}),
    "llama_linear_gelu": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}, "hidden_act": "gelu"}),
    "qwen2": ("Qwen2", {"head_dim": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}
"""Name of a case -> family, and what its config.json says beside the sizes."""


def tiny_model(case: str, seed: int = 0, **changes: Any) -> Any:
    """Makes a model of transformers with random weights; biases and norms are random too, so that each of them matters."""
    family, fields = CASES[case]
    settings = {name: value for name, value in {**SIZES, **fields, **changes}.items() if value is not None}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or "bias" in name else 0.15
            parameter.copy_(spread * torch.randn_like(parameter) + (1.0 if "norm" in name else 0.0))
    return model


def tiny_folder(folder: Path, case: str, **changes: Any) -> Any:
    """Saves such a model to a folder and returns it."""
    model = tiny_model(case, **changes)
    model.save_pretrained(folder)
    return model


def opened(folder: Path) -> Any:
    """Opens a folder with transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def logits_of(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """The logits [L, V] of one text, alone in its batch."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()


def texts(lengths: Sequence[int], seed: int = 0, vocab: int = 96) -> list[list[int]]:
    """Random texts of these lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab, length).tolist() for length in lengths]
