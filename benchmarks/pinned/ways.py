"""The ways of training that are compared, in the order of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How a way of training is called.

    Args:
        title: for people.
        reason: why it is as fast as it is.
    """

    title: str
    reason: str


_SEQUENTIAL = Way(title="sequential", reason="one task at a time: a core waits while the other one computes")

WAYS: Mapping[str, Mapping[str, Way]] = {
    "multimodal": {
        "wavefront": Way(title="wavefront", reason="samples are reordered so that both cores have work: text-only ones come first"),
        "in_order": Way(title="in order", reason="the language model waits for images at first, and vision for gradients at last"),
        "lockstep": Way(title="lockstep", reason="arrival order, in rounds of micro-batches"),
        "sequential": _SEQUENTIAL,
        "shared": Way(
            title="time-shared on both cores", reason="each core runs both sections; gradients of both are summed over the cores"
        ),
        "one_packed": Way(
            title="one program, images packed and balanced",
            reason="each core computes both sections on half of the samples",
        ),
        "one_largest": Way(title="one program, images padded to the largest size", reason="as packed, but each image has a row of its own"),
        "one_slots": Way(
            title="one program, images padded to the largest number and size",
            reason="besides, each sample has as many images as the one with most",
        ),
    },
    "distillation": {
        "wavefront": Way(title="wavefront with run-ahead", reason="the teacher computes later steps of a window while the student learns"),
        "sequential": _SEQUENTIAL,
        "one_packed": Way(title="one program", reason="each core computes teacher and student on half of the samples, packed"),
        "tunix": Way(
            title="google-tunix, a row for each sample",
            reason="rows are padded to the longest sample; whole logits of two models; a program for each",
        ),
        "tunix_packed": Way(title="google-tunix, rows packed by us", reason="as above, with little padding"),
    },
}
"""Case -> name of a way -> how it is called."""
