"""Conversations as text, in one plain template (that of ChatML, which many models know) or in a model's own.

(Those whose tokenizer has `<|im_start|>` and `<|im_end|>` as single tokens; any other tokenizer writes them in several.) A turn is

    <|im_start|>ROLE
    CONTENT<|im_end|>

with a line break at its end. A content that is a list of parts, as Hugging Face's templates take it, is the text of them all. Trained on
are the content of the assistant's turns and the `<|im_end|>` after it, by which a model says that its answer is complete. A model's own
template is read by `maestro_jax.data.chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .json_lines import BadLine, short

ROLES = ("system", "user", "assistant")
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

_SPEAKERS = {"human": "user", "gpt": "assistant"}  # what "from" says where "role" would say the other


def messages_of(record: Mapping[str, Any]) -> Any:
    """Returns the messages of a line, or None when it has none.

    >>> messages_of({"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]})
    [{'role': 'user', 'content': '1+1?'}, {'role': 'assistant', 'content': '2'}]

    Args:
        record: the object of a line, with "messages" (of "role" and "content") or, where it has none, "conversations" (of "from"
            and "value", the form that ShareGPT and LLaVA made common).
    """
    if record.get("messages") is not None:
        return record["messages"]
    turns = record.get("conversations")
    return [_message(turn) for turn in turns] if isinstance(turns, list) else turns


def conversation(messages: Any) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Writes messages in the template of this module.

    Args:
        messages: what `messages_of` returned.

    Returns:
        The text, and `(start, stop)` of the characters in it that are trained on.

    Raises:
        BadLine: they are no conversation, or there is no answer in it.

    >>> text, ((start, stop),) = conversation([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}])
    >>> print(text, end="")
    <|im_start|>user
    1+1?<|im_end|>
    <|im_start|>assistant
    2<|im_end|>
    >>> text[start:stop]
    '2<|im_end|>'
    """
    text, spans = "", []
    for role, content in turns_of(messages):
        text += f"{TURN_START}{role}\n"
        if role == "assistant":
            spans.append((len(text), len(text) + len(content) + len(TURN_END)))
        text += f"{content}{TURN_END}\n"
    return text, tuple(spans)


def turns_of(messages: Any) -> list[tuple[str, str]]:
    """Returns role and content of each message.

    Args:
        messages: what `messages_of` returned.

    Raises:
        BadLine: they are no conversation, or there is no answer in it.
    """
    if not isinstance(messages, list):
        raise BadLine("no text", f"messages is {short(messages)}")
    turns = []
    for number, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES:
            raise BadLine("unknown role", f"message {number}: {short(message if role is None else role)}")
        if isinstance(content, list):
            content = "".join(_text(part, number) for part in content)
        if not isinstance(content, str):
            raise BadLine("no text", f"message {number} with content {short(content)}")
        if role == "assistant" and not content.strip():
            raise BadLine("empty", f"message {number}: an answer with no character but white space")
        turns.append((role, content))
    if not any(role == "assistant" for role, _ in turns):
        raise BadLine("no answer", f"{len(messages)} messages, none of them the assistant's")
    return turns


def _text(part: Any, number: int) -> str:
    """The text of `{"type": "text", "text": ...}`."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise BadLine("no text", f"message {number} with the part {short(part)}")
    return text


def _message(turn: Any) -> Any:
    """A turn of "conversations" as one of "messages"; what is no such turn stays, to be refused by what it is."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker = turn["from"]
    return {"role": _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker, "content": turn.get("value")}
