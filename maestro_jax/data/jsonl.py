"""A user's own JSON Lines files as a data source: texts, or conversations of which only the answers are trained on.

How a conversation is written is in `maestro_jax.data.chat`, and in `maestro_jax.data.chat_template` for a model's own template.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from ..config import config_folder, configurable
from ..errors import DataError, set_by
from .chat import conversation, messages_of
from .documents import Document
from .json_lines import BadLine, JsonLines, Line, check_characters, id_of, record_of, short
from .sources import TextSource

Writer = Callable[[Any], tuple[str, tuple[tuple[int, int], ...]]]
"""Messages -> text, and (start, stop) of the characters in it that are trained on."""

_WANTED = """a JSON object in one line, in UTF-8: {"text": "..."}, or
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or
{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
with the roles system, user and assistant; an "id" is a text or a whole number"""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl(TextSource):
    """JSON Lines files, one document a line: `{"text": ...}`, or `{"messages": [{"role": ..., "content": ...}, ...]}`.

    Of messages only the assistant's are trained on, see `maestro_jax.data.chat` for how they are written;
    `{"conversations": [{"from": "human", "value": ...}, ...]}` is another form of them. Where a line has text too, the messages
    count. An `"id"` names the document (so that it stays in training or held out when lines move), else its file and line
    number do. Lines of white space alone do not count. The fields that are not listed here are those of `TextSource`.

    Args:
        path: a file, a folder (of which all `*.jsonl` are read), or a pattern such as `"chats/**/*.jsonl"`, from the
            current folder or from that of the config file that names it.
        on_bad_line: what to do with a line that is no such object, or has no text: "raise", or "skip" (count it).
        chat_template: folder of a model whose own template writes conversations, or a file with such a template; None: that of ChatML.

    Raises:
        ConfigError: a value is out of range.
    """

    origin: ClassVar[str] = "path"

    path: str
    on_bad_line: Literal["raise", "skip"] = "raise"
    chat_template: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_bad_line not in ("raise", "skip"):
            raise self._bad_value("on_bad_line", "'raise' or 'skip'")

    def describe(self) -> dict[str, str]:
        """Names the path and the tokenizer."""
        return {"corpus": self.path, "tokenizer": self.tokenizer}

    def read(self, skipped: collections.Counter[str]) -> Iterator[Document]:
        """Yields the lines of the files, which are in the order of their paths.

        Raises:
            DataError: there is no such file, one cannot be read, an id comes twice, or a line is bad and `on_bad_line` is
                "raise".
        """
        lines = JsonLines(
            self.path,
            config_folder(self, "path"),
            skip=self.on_bad_line == "skip",
            wanted=_WANTED,
            set_by=set_by(self, "path"),
        )
        write = conversation
        if self.chat_template is not None:
            from .chat_template import ChatTemplate  # here, because nothing else needs Jinja

            write = ChatTemplate.load(self.chat_template, config_folder(self, "chat_template"), set_by(self, "chat_template")).conversation
        seen: dict[str, Line] = {}
        for line in lines:
            try:
                document = document_of(line.content, line.name, write)
            except BadLine as error:
                lines.bad(line, skipped, error)
                continue
            if document.name in seen:
                raise _repeated_id(document.name, seen[document.name].place, line.place)
            # Its content would keep the whole file in memory.
            seen[document.name] = line._replace(content=b"")
            yield document


def document_of(line: bytes, default_name: str, write: Writer = conversation) -> Document:
    """Reads one line.

    Args:
        line: a JSON object in UTF-8.
        default_name: the document's name when the line has no id.
        write: writes messages as text, and says what of it is trained on.

    Raises:
        BadLine: it is no document.

    >>> document_of(b'{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}', "a:1").loss_spans
    ((54, 65),)
    """
    return document_in(record_of(line), default_name, write)


def document_in(record: dict[str, Any], default_name: str, write: Writer = conversation) -> Document:
    """Takes the document out of a line's object (see `document_of`)."""
    name, messages = id_of(record) or default_name, messages_of(record)
    if messages is not None:
        document = Document(name, *write(messages))
    elif isinstance(record.get("text"), str):
        document = Document(name, record["text"])
    else:
        found = f"text is {short(record['text'])}" if "text" in record else f"an object with the keys {short(list(record))}"
        raise BadLine("no text", found)
    if not document.text.strip():
        raise BadLine("empty", "no character but white space")
    check_characters(document.name + document.text)
    return document


def _repeated_id(name: str, first: str, second: str) -> DataError:
    return DataError(
        f"two lines have the id {name!r}.",
        wanted="an id of its own for each line, over all files that are read together",
        have=f"{first} and {second}",
        set_by=second,
        fix='remove one of the lines, change its id, or remove "id" from all lines: file and line number then name them',
        anchor="repeated-sample-id",
    )
