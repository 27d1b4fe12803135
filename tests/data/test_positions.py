"""Rotary positions of three axes, unit by unit."""

from __future__ import annotations

import numpy as np
import pytest

from maestro_jax.data import rope_positions


def one_by_one(rows: list[int], grids: list[tuple[int, int]]) -> list[list[int]]:
    """The rule as it is told: text counts on, an image spreads from where it lies, the text after it goes on behind its longer side."""
    found, position, left = [], 0, list(grids)
    waiting: list[list[int]] = []
    for row in rows:
        if row < 0:
            found.append([position] * 3)
            position += 1
            continue
        if not waiting:
            height, width = left.pop(0)
            waiting = [[position, position + h, position + w] for h in range(height) for w in range(width)]
            position += max(height, width)
        found.append(waiting.pop(0))
    return found


@pytest.mark.parametrize(
    "pieces",
    [
        [3],
        [(1, 1)],
        [2, (2, 3), 4, (3, 2), (1, 5), 1],
        [(4, 4), (1, 1), 2],
    ],
)
def test_positions_follow_the_rule(pieces: list[int | tuple[int, int]]) -> None:
    grids = [piece for piece in pieces if isinstance(piece, tuple)]
    rows: list[int] = []
    for piece in pieces:
        taken = sum(row >= 0 for row in rows)
        rows += [-1] * piece if isinstance(piece, int) else range(taken, taken + piece[0] * piece[1])
    found = rope_positions(np.array(rows, np.int32), grids)
    assert found.dtype == np.int32
    assert found.tolist() == one_by_one(rows, grids)
