"""Chat templates of models: what is written, what of it is trained on, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maestro_jax.data import Jsonl
from maestro_jax.data.chat import conversation
from maestro_jax.data.chat_template import ChatTemplate
from maestro_jax.data.json_lines import BadLine
from maestro_jax.errors import DataError

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}"

LLAMA = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('only two may speak') }}{% endif %}
    {{- '<|start|>' + message.role + '<|end|>\n\n' + message.content | trim + eos_token }}
{%- endfor %}"""

# As Qwen3's: the last answer follows an empty thought, and what an answer of the past thought is left out.
THINKING = """{%- for m in messages %}
    {%- set content = m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content %}
    {{- '<|im_start|>' + m.role + '\n' + ('<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' else '') }}
    {{- content + '<|im_end|>' + '\n' }}
{%- endfor %}"""

CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "2, too"},
]


def spoken(source: str, messages: list[dict[str, str]] = CHAT, **tokens: str) -> tuple[str, list[str]]:
    text, spans = ChatTemplate(source, tokens, "the test").conversation(messages)
    return text, [text[start:stop] for start, stop in spans]


def test_a_template_of_chatml_writes_what_our_own_writes() -> None:
    assert ChatTemplate(CHATML, {"eos_token": "<|im_end|>"}, "the test").conversation(CHAT) == conversation(CHAT)


def test_answers_are_found_also_where_they_are_written_without_white_space_around_them() -> None:
    text, answers = spoken(LLAMA, [{**m, "content": f" {m['content']}\n"} for m in CHAT], bos_token="<s>", eos_token="<|eot|>")
    assert text.startswith("<s><|start|>user<|end|>\n\n1 + 1?<|eot|>")
    assert answers == ["2<|eot|>", "2, too<|eot|>"]


def test_what_a_template_adds_before_an_answer_is_not_trained_on() -> None:
    text, answers = spoken(THINKING, eos_token="<|im_end|>")
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n2, too<|im_end|>\n")
    assert answers == ["2<|im_end|>", "2, too<|im_end|>"]


def test_an_answer_that_a_template_changes_is_refused() -> None:
    with pytest.raises(BadLine, match="otherwise than it stands"):
        spoken(THINKING, [CHAT[0], {"role": "assistant", "content": "<think>so</think>2"}], eos_token="<|im_end|>")


def test_a_conversation_that_the_template_refuses_is_a_bad_line() -> None:
    with pytest.raises(BadLine, match="only two may speak"):
        spoken(LLAMA, [{"role": "system", "content": "be brief"}, *CHAT], bos_token="", eos_token="")


def test_a_template_runs_in_a_sandbox() -> None:
    with pytest.raises(BadLine, match="SecurityError"):
        spoken("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")


def test_templates_are_found_where_models_have_them(tmp_path: Path) -> None:
    config = {"chat_template": LLAMA, "bos_token": {"content": "<s>"}, "eos_token": "<|eot|>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    inside = ChatTemplate.load(tmp_path).conversation(CHAT)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": [{"name": "default", "template": LLAMA}]}))
    assert ChatTemplate.load(tmp_path).conversation(CHAT) == inside
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "an older one"}))
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    assert ChatTemplate.load(tmp_path).conversation(CHAT) == inside
    assert ChatTemplate.load(tmp_path / "chat_template.jinja").conversation(CHAT) == inside


def test_a_folder_without_a_template_and_one_that_is_not_understood_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has no chat template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in %}")
    with pytest.raises(DataError, match="cannot be read"):
        ChatTemplate.load(tmp_path)


def test_json_lines_are_written_in_the_template_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|eot|>"}))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    source = Jsonl(path=str(tmp_path / "chats.jsonl"), chat_template=str(tmp_path))
    [document] = source.read({})  # pyright: ignore[reportArgumentType] - nothing is skipped
    assert document.text.startswith("<s><|start|>user<|end|>")
    assert [document.text[start:stop] for start, stop in document.loss_spans or ()] == ["2<|eot|>", "2, too<|eot|>"]
