"""A model's own chat template: `chat_template.jinja`, or what JSON files of its folder have, run as transformers runs it.

The template is Jinja, in a sandbox, with the settings and the two functions that transformers gives it. What an answer is, the template
does not say; it is found by writing the conversation once more with a mark in the place of each answer. Trained on are the answers, each
with the token that ends it (`eos_token`).
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..config import find_file
from ..errors import DataError
from .chat import turns_of
from .json_lines import BadLine

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
OLDER = "chat_template.json"  # of processors, which some models of vision and language have
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

# From a private use area: no text has them.
_MARK = "\ue010{}\ue011"


class ChatTemplate:
    """A chat template with the tokens that it names.

    Args:
        source: the template.
        tokens: name -> text of special tokens ("eos_token" and others).
        place: of the file, for error texts.
        set_by: what names it.

    Attributes:
        source: as given.
        tokens: as given.

    Raises:
        DataError: the template is not understood.

    >>> source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    >>> template = ChatTemplate(source, {"eos_token": "<end>"}, "a doctest")
    >>> text, ((start, stop),) = template.conversation([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}])
    >>> text, text[start:stop]
    ('[user]1+1?<end>[assistant]2<end>', '2<end>')
    """

    def __init__(self, source: str, tokens: dict[str, str], place: str, set_by: str = "the calling program") -> None:
        self.source, self.tokens, self._place, self._set_by = source, tokens, place, set_by
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise self._refused("cannot be read.", "a Jinja template", f"{type(error).__name__}: {error}") from error

    @classmethod
    def load(cls, name: str | Path, near: Path | None = None, set_by: str = "the calling program") -> ChatTemplate:
        """Reads the template of a model.

        Args:
            name: the model's folder, or a file with a template.
            near: a config file or its folder, where it is looked for as well.
            set_by: where the name was set, for error texts.

        Raises:
            ConfigError: there is no such folder.
            DataError: it has no template.
        """
        path = find_file(name, near, set_by=set_by)
        folder = path if path.is_dir() else path.parent
        config = _json_object(folder / CONFIG)
        tokens = {token: _text(config[token]) for token in TOKENS if config.get(token) is not None}
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), tokens, str(path), set_by)
        if (path / FILE).is_file():
            return cls((path / FILE).read_text(encoding="utf-8"), tokens, str(path / FILE), set_by)
        source = _json_object(path / OLDER).get("chat_template", config.get("chat_template"))
        if isinstance(source, list):
            source = {each.get("name"): each.get("template") for each in source}.get("default")
        if not isinstance(source, str):
            raise DataError(
                f"{path} has no chat template.",
                wanted=f"a file {FILE}, or chat_template in {OLDER} or {CONFIG}",
                have=", ".join(sorted(file.name for file in path.iterdir())) or "an empty folder",
                fix="name the folder of a model that was trained on conversations, or leave chat_template out (ChatML)",
                anchor="chat-template",
                set_by=set_by,
            )
        return cls(source, tokens, str(path / CONFIG), set_by)

    def write(self, messages: Sequence[dict[str, Any]], *, ask: bool = False) -> str:
        """Returns the text of messages, whose contents are what the template takes; with `ask`, and the beginning of an answer.

        Raises:
            BadLine: the template refuses them.
        """
        try:
            return self._template.render(messages=messages, tools=None, documents=None, add_generation_prompt=ask, **self.tokens)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadLine("refused by the chat template", f"{type(error).__name__}: {error}") from error

    def conversation(self, messages: Any, content_of: Callable[[str], Any] = str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """As `maestro_jax.data.chat.conversation`, in this template.

        Args:
            messages: what `messages_of` returned.
            content_of: makes of a text the content that the template takes.

        Raises:
            BadLine: the messages are no conversation, the template refuses them, or it changes what an answer says.
        """
        turns = turns_of(messages)
        text = self.write([{"role": role, "content": content_of(content)} for role, content in turns])
        hidden = [(role, _MARK.format(number) if role == "assistant" else content) for number, (role, content) in enumerate(turns)]
        marked = self.write([{"role": role, "content": content_of(content)} for role, content in hidden])
        pieces = re.split("\ue010(\\d+)\ue011", marked)
        end = self.tokens.get("eos_token", "")
        # Some templates take white space off around an answer; nothing else may differ.
        for answers in ([content for _, content in turns], [content.strip() for _, content in turns]):
            found, spans = pieces[0], []
            for number, after in zip(pieces[1::2], pieces[2::2], strict=True):
                start = len(found)
                found += answers[int(number)]
                spans.append((start, len(found) + (len(end) if after.startswith(end) else 0)))
                found += after
            if found == text and len(spans) == sum(role == "assistant" for role, _ in turns):
                return text, tuple(spans)
        raise BadLine("changed by the chat template", f"{self._place} writes an answer otherwise than it stands in the line")

    def _refused(self, what: str, wanted: str, have: str) -> DataError:
        fix = "use the template of another version of the model, or leave chat_template out (ChatML)"
        what = f"the chat template {self._place} {what}"
        return DataError(what, wanted=wanted, have=have, fix=fix, anchor="chat-template", set_by=self._set_by)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> str:
    """A token's text; files give it as such, or with how it is matched."""
    return token["content"] if isinstance(token, dict) else str(token)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    # Jinja's own would write some characters as HTML has them.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise(text: str) -> None:
    raise jinja2.TemplateError(text)
