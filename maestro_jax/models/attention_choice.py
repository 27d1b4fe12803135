"""Which kind of attention serves a section best (`attention="auto"`), and what is known of a section while it is traced.

A model does not know how the rows that it gets were packed. Whoever traces the module of a section says so, with `rows_of`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from .one_sample import CUDNN_FEATURES

AUTO = "auto"
"""Takes the kind that suits platform, dtype, row length and packing."""

BLOCKWISE_FROM = 1024
"""Row length from which on "blockwise" is taken: shorter rows are few blocks, and their scores are small (`benchmarks/attention.py`)."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionRows:
    """What is known of the rows of a section.

    Args:
        section: its name, for texts.
        packed: whether a row may hold several items.
        set_by: where that was set, for error texts.
        chosen: filled while the module is traced: what "auto" took and why, each once.
        kinds: filled while the module is traced: the kinds of attention that it has.
    """

    section: str
    packed: bool
    set_by: str
    chosen: dict[str, None] = dataclasses.field(default_factory=dict)
    kinds: dict[str, None] = dataclasses.field(default_factory=dict)


_ROWS: ContextVar[SectionRows | None] = ContextVar("rows", default=None)
_PLATFORM: ContextVar[str | None] = ContextVar("platform", default=None)


@contextlib.contextmanager
def rows_of(rows: SectionRows) -> Iterator[None]:
    """Tells `attention` about the rows of the section whose module is traced inside."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Says that what is traced inside is meant for another platform ("cpu", "gpu", ...) than JAX's default."""
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def known_rows() -> SectionRows | None:
    """Returns what is known of the rows of the section that is being traced; None outside of sections."""
    return _ROWS.get()


def choose(*, length: int, features: int, dtype: jnp.dtype, windows: bool = False, platform: str | None = None) -> str:
    """Takes a kind of attention, and logs the reason once for each section.

    Args:
        length: of the rows.
        features: of a head.
        dtype: of keys and values.
        windows: whether segments are parts of items.
        platform: "cpu", "gpu", ...; None: what `traced_for` says, or else JAX's default.

    Returns:
        The name of a kind.
    """
    rows = _ROWS.get()
    one_item = rows is not None and not rows.packed and not windows
    kind, reason = _suited(platform or _PLATFORM.get() or jax.default_backend(), length, features, jnp.dtype(dtype), one_item)
    if rows is not None:
        text = f"section {rows.section!r}: attention is {kind!r}: {reason}"
        if text not in rows.chosen:
            rows.chosen[text] = None
            _log.info(text)
    return kind


def _suited(platform: str, length: int, features: int, dtype: jnp.dtype, one_item: bool) -> tuple[str, str]:
    # Transformer Engine's kernel is never taken unasked: nobody has run it here.
    if platform == "gpu" and one_item and dtype.itemsize == 2 and features in CUDNN_FEATURES:
        return "one_sample", f"each row holds one item, and cuDNN serves {features} features a head in {dtype}"
    if length >= BLOCKWISE_FROM:
        return (
            "blockwise",
            f"rows of {length} units: blocks that no query sees are left out, and memory grows with length, not with its square",
        )
    return "dense", f"rows of {length} units, less than {BLOCKWISE_FROM}"
