"""Qwen2 and Qwen2.5, dense: Llama's shape with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from ..models.decoder import Decoder
from .causal import FREE, IGNORED, decoder_fields, decoder_sizes, decoder_tensors, refuse_sliding_window
from .family import ConfigReader, Family, Part, register_family


def qwen2_fields(reader: ConfigReader) -> dict[str, Any]:
    """Reads the fields of `Decoder` from a `config.json` of model type "qwen2"."""
    refuse_sliding_window(reader)
    # Positions in three dimensions, which the files of text models name only to turn them off.
    reader.only("use_mrope", False)
    return decoder_fields(reader) | {"qkv_bias": True}


QWEN2 = register_family(
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        parts={"": Part(kind=Decoder, fields=qwen2_fields, sizes=decoder_sizes, tensors=decoder_tensors, free=FREE)},
        ignored=IGNORED,
    )
)
