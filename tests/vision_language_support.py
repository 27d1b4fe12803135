"""Folders of a tiny vision-language model, as far as its data goes: configuration, tokenizer, chat template, image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TOKENS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}

_TEXT = "system user assistant You are a helpful assistant. What is it? A cat and a dog."

# As transformers' Qwen2Tokenizer has it.
_WORD = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""

# Does what that of Qwen2.5-VL does, but for videos and for numbers of images.
TEMPLATE = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for content in message['content'] %}
{%- if content['type'] == 'image' or 'image' in content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

PROCESSOR: Mapping[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
"""preprocessor_config.json of Qwen2.5-VL-7B-Instruct."""


def tokenizer() -> Tokenizer:
    """A tokenizer like that of Qwen2.5-VL, of the 256 bytes and a few pairs of them."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_WORD), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([_TEXT] * 9, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return made


def write_folder(folder: Path, *, template: str = TEMPLATE, processor: Mapping[str, Any] = PROCESSOR, **config: Any) -> Path:
    """Writes the files of a folder, but for the weights; `config` changes its config.json."""
    folder.mkdir(exist_ok=True)
    own = tokenizer()
    own.save(str(folder / "tokenizer.json"))
    ids = {f"{name}_token_id": own.token_to_id(f"<|{token}|>") for name, token in TOKENS.items()}
    files = {
        "config.json": {"model_type": "qwen2_5_vl", **ids, **config},
        "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "preprocessor_config.json": processor,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def write_image(path: Path, height: int, width: int, seed: int = 0) -> None:
    """Writes a picture of random colours in areas of 8 x 8 pixels."""
    images: Any = pytest.importorskip("PIL.Image", reason="the extra examples is not installed")
    random = np.random.default_rng(seed)
    areas = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    images.fromarray(areas.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]).save(path)
