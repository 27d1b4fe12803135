"""The built-in corpus: 79 chapters of the Python language reference, which every Python brings along.

It needs no download, so the main job runs on any machine. The text differs a little between Python versions;
`Dataset.notes` records its hash, and nothing depends on its exact words.
"""

from __future__ import annotations

import collections
import dataclasses
import platform
from collections.abc import Iterator

from ..config import configurable
from ..errors import DataError
from .documents import Document
from .sources import TextSource


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus(TextSource):
    """The help topics of the standard library (`pydoc_data.topics`), about 465,000 characters of English text.

    Its fields are those of `TextSource`.
    """

    def read(self, skipped: collections.Counter[str]) -> Iterator[Document]:
        """Yields one document a topic, named `"topics/{topic}"`; none is ever skipped."""
        yield from corpus_documents()

    def describe(self) -> dict[str, str]:
        """Names the text, the Python that it comes from, and the tokenizer."""
        return {"corpus": "pydoc_data.topics", "python": platform.python_version(), "tokenizer": self.tokenizer}


def corpus_documents() -> list[Document]:
    """Returns the help topics, sorted by name.

    Raises:
        DataError: this Python was installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python has no built-in text.",
            wanted="the module pydoc_data.topics of the standard library",
            have=f"{type(error).__name__}: {error}",
            fix="install the full standard library, or use your own text files: data = @TextFolder()",
            anchor="built-in-corpus-missing",
        ) from error
    return [Document(f"topics/{name}", topics[name]) for name in sorted(topics)]
