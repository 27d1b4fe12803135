"""Qwen2.5-VL: a vision tower with windows, and Qwen2's decoder with rotary positions in three dimensions.

The tower attends in windows of 8 x 8 patches in most layers. Checkpoints and transformers sort patches by window first; here a patch
keeps its place, as attention inside a window does not depend on the order of patches. Videos are not implemented, so what only they use is
not read.
"""

from __future__ import annotations

from typing import Any

from ..models.decoder import Decoder
from ..models.vision import VisionTransformer
from .causal import FREE, IGNORED, decoder_fields, decoder_sizes, decoder_tensors, refuse_sliding_window
from .family import ConfigReader, Family, Part, register_family
from .layout import Sizes, Tensor

VISION, LANGUAGE = "vision", "language"
"""Names of the two parts."""


def vision_fields(reader: ConfigReader) -> dict[str, Any]:
    """Reads the fields of `VisionTransformer` from a `config.json` of model type "qwen2_5_vl"."""
    vision = reader.inside("vision_config")
    vision.only("hidden_act", "silu")
    vision.only("in_chans", 3)
    # What only videos need, and a second name for the size of a patch.
    vision.ignore("tokens_per_second", "spatial_patch_size")
    rope = ConfigReader(vision.take("rope_parameters", dict, {}), vision.path, vision.set_by)
    rope.only("rope_type", "axial")
    theta = rope.take("rope_theta", float, 10000.0)
    for problem in (*rope.problems, *(f"{key}: not known" for key in sorted(set(rope.values) - rope.read))):
        vision.refuse(f"rotary positions: {problem}")
    patch, merge = vision.take("patch_size", int, 14), vision.take("spatial_merge_size", int, 2)
    window = vision.take("window_size", int, 112) // (merge * patch) * merge
    embed = vision.take("hidden_size", int)
    return {
        "layers": vision.take("depth", int),
        "embed": embed,
        "heads": vision.take("num_heads", int),
        "mlp": vision.take("intermediate_size", int),
        "width": vision.take("out_hidden_size", int),
        "patch_size": patch,
        "channels": vision.take("in_channels", int, 3),
        "frames": vision.take("temporal_patch_size", int, 2),
        "merge": merge,
        "window": max(window, merge),
        "whole_layers": tuple(vision.take("fullatt_block_indexes", list, [])),
        "rope_theta": theta,
        "norm_epsilon": 1e-6,
        "biases": True,
        "patch_bias": False,
        "projector_activation": "gelu",
    }


def language_fields(reader: ConfigReader) -> dict[str, Any]:
    """Reads the fields of `Decoder` from such a file; older ones have them beside those of the whole, newer ones in an object."""
    tied = reader.take("tie_word_embeddings", bool, False)
    text = reader.inside("text_config") if reader.values.get("text_config") is not None else reader
    if text is not reader:
        # Names of tokens stand in both; those of the whole count.
        text.ignore(*TOKENS)
    reader.ignore(*TOKENS)
    refuse_sliding_window(text)
    fields = decoder_fields(text, theta=1e6, epsilon=1e-5, sections=True)
    return fields | {"qkv_bias": True, "tied": tied or fields["tied"]}


def vision_sizes(vision: VisionTransformer) -> Sizes:
    """Letters of the layouts below -> sizes."""
    return {
        "layers": vision.layers,
        "D": vision.embed,
        "H": vision.heads,
        "K": vision.head_size,
        "F": vision.mlp,
        "C": vision.channels,
        "T": vision.frames,
        "P": vision.patch_size,
        "Q": vision.patch_size,
        "M": vision.merge**2 * vision.embed,
        "N": vision.merge**2 * vision.embed,
        "W": vision.width or 0,
    }


TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
"""Keys that tell which tokens stand for images: for those who write texts, not for the models."""

_BLOCK = "visual.blocks.{layer}."
_VISION = (
    Tensor("visual.patch_embed.proj.weight", "patches/weight", "D C T P Q -> (C T P Q) D"),
    Tensor(_BLOCK + "norm1.weight", "layers/attention_norm/scale", "D"),
    Tensor(_BLOCK + "attn.qkv.weight", "layers/attention/query", "(3 H K) D -> D H K", piece=0),
    Tensor(_BLOCK + "attn.qkv.weight", "layers/attention/key", "(3 H K) D -> D H K", piece=1),
    Tensor(_BLOCK + "attn.qkv.weight", "layers/attention/value", "(3 H K) D -> D H K", piece=2),
    Tensor(_BLOCK + "attn.qkv.bias", "layers/attention/query_bias", "(3 H K) -> H K", piece=0),
    Tensor(_BLOCK + "attn.qkv.bias", "layers/attention/key_bias", "(3 H K) -> H K", piece=1),
    Tensor(_BLOCK + "attn.qkv.bias", "layers/attention/value_bias", "(3 H K) -> H K", piece=2),
    Tensor(_BLOCK + "attn.proj.weight", "layers/attention/output", "D (H K) -> H K D"),
    Tensor(_BLOCK + "attn.proj.bias", "layers/attention/output_bias", "D"),
    Tensor(_BLOCK + "norm2.weight", "layers/mlp_norm/scale", "D"),
    Tensor(_BLOCK + "mlp.gate_proj.weight", "layers/mlp/gate", "F D -> D F"),
    Tensor(_BLOCK + "mlp.gate_proj.bias", "layers/mlp/gate_bias", "F"),
    Tensor(_BLOCK + "mlp.up_proj.weight", "layers/mlp/up", "F D -> D F"),
    Tensor(_BLOCK + "mlp.up_proj.bias", "layers/mlp/up_bias", "F"),
    Tensor(_BLOCK + "mlp.down_proj.weight", "layers/mlp/down", "D F -> F D"),
    Tensor(_BLOCK + "mlp.down_proj.bias", "layers/mlp/down_bias", "D"),
    Tensor("visual.merger.ln_q.weight", "final_norm/scale", "D"),
    Tensor("visual.merger.mlp.0.weight", "projector/up", "N M -> M N"),
    Tensor("visual.merger.mlp.0.bias", "projector/up_bias", "N"),
    Tensor("visual.merger.mlp.2.weight", "projector/down", "W N -> N W"),
    Tensor("visual.merger.mlp.2.bias", "projector/down_bias", "W"),
)

QWEN2_5_VL = register_family(
    Family(
        model_type="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        parts={
            VISION: Part(
                kind=VisionTransformer,
                fields=vision_fields,
                sizes=vision_sizes,
                tensors=lambda vision: _VISION,
                free=("dropout", "attention"),
            ),
            LANGUAGE: Part(kind=Decoder, fields=language_fields, sizes=decoder_sizes, tensors=decoder_tensors, free=FREE),
        },
        ignored=IGNORED,
    )
)
