"""Qwen3, dense: Llama's shape with norms on the queries and keys of each head, whose size is apart from the width."""

from __future__ import annotations

from typing import Any

from ..models.decoder import Decoder
from .causal import FREE, IGNORED, decoder_fields, decoder_sizes, decoder_tensors, refuse_sliding_window
from .family import ConfigReader, Family, Part, register_family


def qwen3_fields(reader: ConfigReader) -> dict[str, Any]:
    """Reads the fields of `Decoder` from a `config.json` of model type "qwen3"."""
    refuse_sliding_window(reader)
    reader.only("attention_bias", False)
    # Where other families divide the width by the heads, transformers takes 128 for a Qwen3 file that does not say.
    return decoder_fields(reader) | {"qk_norm": True, "head_dim": reader.take("head_dim", int, 128)}


QWEN3 = register_family(
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        parts={"": Part(kind=Decoder, fields=qwen3_fields, sizes=decoder_sizes, tensors=decoder_tensors, free=FREE)},
        ignored=IGNORED,
    )
)
