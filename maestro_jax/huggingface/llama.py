"""Llama 2 and 3.x: the plain decoder; 3.1 and later scale rotary positions by the type "llama3"."""

from __future__ import annotations

from typing import Any

from ..models.decoder import Decoder
from .causal import FREE, IGNORED, decoder_fields, decoder_sizes, decoder_tensors
from .family import ConfigReader, Family, Part, register_family


def llama_fields(reader: ConfigReader) -> dict[str, Any]:
    """Reads the fields of `Decoder` from a `config.json` of model type "llama"."""
    reader.only("attention_bias", False)
    reader.only("mlp_bias", False)
    # How a matrix product was split while the model was trained; the result is the same.
    reader.ignore("pretraining_tp")
    return decoder_fields(reader)


LLAMA = register_family(
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        parts={"": Part(kind=Decoder, fields=llama_fields, sizes=decoder_sizes, tensors=decoder_tensors, free=FREE)},
        ignored=IGNORED,
    )
)
