"""What people train: models as NNX modules that are called with a packed batch, made by configurations."""

from __future__ import annotations

from .attention import attention, check_attention, register_attention
from .attention_choice import SectionRows, rows_of, traced_for
from .audio import AudioEncoder, AudioEncoderModule
from .decoder import Decoder, DecoderModule
from .fusion import Multimodal, MultimodalModule
from .generator import Redraw, RedrawModule
from .heads import chunked_sums, cross_entropy_sums, masked_sums, next_token_sums, vocabulary_logits
from .noise import token_dropout
from .projector import Projector, ProjectorModule
from .rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from .vision import VisionTransformer, VisionTransformerModule

__all__ = [
    "AudioEncoder",
    "AudioEncoderModule",
    "Decoder",
    "DecoderModule",
    "LinearScaling",
    "Llama3Scaling",
    "Multimodal",
    "MultimodalModule",
    "Projector",
    "ProjectorModule",
    "Redraw",
    "RedrawModule",
    "RopeScaling",
    "SectionRows",
    "VisionTransformer",
    "VisionTransformerModule",
    "YarnScaling",
    "attention",
    "check_attention",
    "chunked_sums",
    "cross_entropy_sums",
    "masked_sums",
    "next_token_sums",
    "register_attention",
    "rows_of",
    "token_dropout",
    "traced_for",
    "vocabulary_logits",
]
