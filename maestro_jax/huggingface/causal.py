"""What the families of Llama's shape share: most keys of `config.json`, the scaling of rotary positions, and most tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..models.decoder import Decoder
from ..models.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from .family import ConfigReader
from .layout import Sizes, Tensor

FREE = ("objective", "dropout", "loss_chunk", "attention")
"""Fields of a `Decoder` that no checkpoint decides."""

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""`hidden_act` -> `Decoder.activation`."""


def decoder_fields(reader: ConfigReader, *, theta: float = 10000.0, epsilon: float = 1e-6, sections: bool = False) -> dict[str, Any]:
    """Reads what all such decoders have in common.

    Args:
        reader: of the file, or of the object in it that describes the decoder.
        theta: base of rotary positions where nothing is said.
        epsilon: of the norms where nothing is said.
        sections: whether rotary positions have three dimensions.

    Returns:
        Fields of `Decoder`.
    """
    heads = reader.take("num_attention_heads", int)
    embed = reader.take("hidden_size", int)
    activation = reader.take("hidden_act", str, "silu")
    if activation not in ACTIVATIONS:
        reader.refuse(f"hidden_act = {activation!r}: only {', '.join(ACTIVATIONS)} are implemented")
    # Dropout of attention weights is not implemented; that of outputs is a choice of the training run.
    reader.only("attention_dropout", 0)
    return {
        "vocab_size": reader.take("vocab_size", int),
        "layers": reader.take("num_hidden_layers", int),
        "embed": embed,
        "heads": heads,
        "kv_heads": reader.take("num_key_value_heads", int, heads),
        "head_dim": reader.take("head_dim", int, embed // heads),
        "mlp": reader.take("intermediate_size", int),
        "norm_epsilon": reader.take("rms_norm_eps", float, epsilon),
        "tied": reader.take("tie_word_embeddings", bool, False),
        "activation": ACTIVATIONS.get(activation, "silu"),
        **rope_fields(reader, theta, sections),
    }


def rope_fields(reader: ConfigReader, theta: float, sections: bool) -> dict[str, Any]:
    """Reads base and scaling of rotary positions: `rope_theta` and `rope_scaling`, or `rope_parameters` as newer files have it.

    Args:
        reader: of the object with these keys.
        theta: base where nothing is said.
        sections: whether positions have three dimensions.

    Returns:
        "rope_theta", "rope_scaling" and "rope_sections" of `Decoder`.
    """
    theta = reader.take("rope_theta", float, theta)
    older, newer = reader.take("rope_scaling", dict, {}), reader.take("rope_parameters", dict, {})
    rope = ConfigReader({**older, **newer}, reader.path, reader.set_by)
    theta = rope.take("rope_theta", float, theta)
    kind = rope.take("rope_type", str, rope.take("type", str, "default"))
    rope.only("partial_rotary_factor", 1)
    parts = tuple(rope.take("mrope_section", list)) if sections else ()
    if sections:
        if len(parts) != 3 or not all(type(part) is int and part > 0 for part in parts):
            rope.refuse(f"mrope_section = {list(parts)}: three numbers are needed, for time, rows and columns")
        # Older files call unscaled positions in three dimensions a type of their own.
        kind = "default" if kind == "mrope" else kind
    scaling = None
    if kind in _SCALINGS:
        scaling = _SCALINGS[kind](rope, reader.values.get("max_position_embeddings"))
    elif kind != "default":
        rope.refuse(f"rope_type = {kind!r}: only default, {', '.join(_SCALINGS)} are implemented")
    unread = [f"{key} = {rope.values[key]!r}: not known of rope_type {kind!r}" for key in sorted(set(rope.values) - rope.read)]
    for problem in (*rope.problems, *unread):
        reader.refuse(f"rotary positions: {problem}")
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_sections": parts}


def _linear(rope: ConfigReader, longest: Any) -> LinearScaling:
    return LinearScaling(factor=rope.take("factor", float))


def _llama3(rope: ConfigReader, longest: Any) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.take("factor", float),
        low_freq_factor=rope.take("low_freq_factor", float),
        high_freq_factor=rope.take("high_freq_factor", float),
        original_length=_original_length(rope, longest),
    )


def _yarn(rope: ConfigReader, longest: Any) -> YarnScaling:
    return YarnScaling(
        factor=rope.take("factor", float),
        original_length=_original_length(rope, longest),
        beta_fast=rope.take("beta_fast", float, 32.0),
        beta_slow=rope.take("beta_slow", float, 1.0),
        attention_factor=rope.take("attention_factor", float, None),
        truncate=rope.take("truncate", bool, True),
    )


def _original_length(rope: ConfigReader, longest: Any) -> int:
    # As transformers: where the length is left out, it is that of the finished model.
    return rope.take("original_max_position_embeddings", int, *([longest] if isinstance(longest, int) else []))


_SCALINGS: Mapping[str, Callable[[ConfigReader, Any], RopeScaling]] = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
"""`rope_type` -> what reads the scaling."""


def refuse_sliding_window(reader: ConfigReader) -> None:
    """Refuses layers that see a window of tokens; the window's size does not matter where none uses it."""
    reader.only("use_sliding_window", False)
    reader.ignore("sliding_window", "max_window_layers")
    for kind in sorted(set(reader.take("layer_types", list, [])) - {"full_attention"}):
        reader.refuse(f"layer_types has {kind!r}: only 'full_attention' is implemented")


def decoder_sizes(decoder: Decoder) -> Sizes:
    """Letters of the layouts below -> sizes."""
    return {
        "layers": decoder.layers,
        "V": decoder.vocab_size,
        "D": decoder.embed,
        "H": decoder.heads,
        "G": decoder.kv_heads,
        "K": decoder.head_size,
        "F": decoder.mlp,
    }


_LAYER = "model.layers.{layer}."
_ALWAYS = (
    Tensor("model.embed_tokens.weight", "embedding/weight", "V D"),
    Tensor("model.norm.weight", "final_norm/scale", "D"),
    Tensor(_LAYER + "input_layernorm.weight", "layers/attention_norm/scale", "D"),
    Tensor(_LAYER + "self_attn.q_proj.weight", "layers/attention/query", "(H K) D -> D H K"),
    Tensor(_LAYER + "self_attn.k_proj.weight", "layers/attention/key", "(G K) D -> D G K"),
    Tensor(_LAYER + "self_attn.v_proj.weight", "layers/attention/value", "(G K) D -> D G K"),
    Tensor(_LAYER + "self_attn.o_proj.weight", "layers/attention/output", "D (H K) -> H K D"),
    Tensor(_LAYER + "post_attention_layernorm.weight", "layers/mlp_norm/scale", "D"),
    Tensor(_LAYER + "mlp.gate_proj.weight", "layers/mlp/gate", "F D -> D F"),
    Tensor(_LAYER + "mlp.up_proj.weight", "layers/mlp/up", "F D -> D F"),
    Tensor(_LAYER + "mlp.down_proj.weight", "layers/mlp/down", "D F -> F D"),
)
_HEAD = (Tensor("lm_head.weight", "head/weight", "V D"),)
_QK_NORM = (
    Tensor(_LAYER + "self_attn.q_norm.weight", "layers/attention/query_norm/scale", "K"),
    Tensor(_LAYER + "self_attn.k_norm.weight", "layers/attention/key_norm/scale", "K"),
)
_QKV_BIAS = (
    Tensor(_LAYER + "self_attn.q_proj.bias", "layers/attention/query_bias", "(H K) -> H K"),
    Tensor(_LAYER + "self_attn.k_proj.bias", "layers/attention/key_bias", "(G K) -> G K"),
    Tensor(_LAYER + "self_attn.v_proj.bias", "layers/attention/value_bias", "(G K) -> G K"),
)


def decoder_tensors(decoder: Decoder) -> tuple[Tensor, ...]:
    """The tensors of a decoder, by its choices."""
    more = (() if decoder.tied else _HEAD) + (_QK_NORM if decoder.qk_norm else ()) + (_QKV_BIAS if decoder.qkv_bias else ())
    return _ALWAYS + more


IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")
"""Tensors that may be there beside a decoder's own: rates of rotary positions, and the head where it is tied to the embedding."""
