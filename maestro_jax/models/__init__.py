"""What people train: models as NNX modules that are called with a packed batch, made by configurations."""

from __future__ import annotations

from .attention import attention, check_attention, register_attention
from .decoder import Decoder, DecoderModule
from .heads import chunked_sums, cross_entropy_sums, next_token_sums, vocabulary_logits
from .noise import token_dropout

__all__ = [
    "Decoder",
    "DecoderModule",
    "attention",
    "check_attention",
    "chunked_sums",
    "cross_entropy_sums",
    "next_token_sums",
    "register_attention",
    "token_dropout",
    "vocabulary_logits",
]
