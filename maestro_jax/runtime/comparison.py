"""Compares gradients leaf by leaf, each difference relative to what counts as large in its leaf, and says what was found."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..errors import GraphError

Gradients = Mapping[str, Mapping[str, np.ndarray]]

FLOOR = 0.01
"""Least scale of a leaf, as a share of the largest |g| of its section.

Some gradients are 0 in exact arithmetic (the bias of attention keys, a shift before a softmax), and what is computed is the rounding of
numbers as large as other gradients of the section. Relative to themselves such leaves are never right. With the usual limit of 1e-4 the
floor allows them 1e-6 of the section's largest, about ten roundings of float32. A leaf that is smaller throughout is not judged; a wrong
factor in a leaf of 1e-4 of the section's largest is still a hundred times the limit.
"""

_HEADER = ("section", "parameters", "worst", "max|difference|", "of max|g|", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafComparison:
    """The gradient of one parameter on a plan, beside that of one program.

    Args:
        section: its section.
        path: its path in the section.
        difference: largest |difference| of any element; NaN where there is none to take.
        scale: largest |g| of the leaf in one program, at least `FLOOR` of the largest in its section; NaN where that is not finite.
        relative: difference / scale; infinite where one of them is not finite.
        remark: why a leaf cannot be compared ("not finite on the plan"), else empty.
    """

    section: str
    path: str
    difference: float
    scale: float
    relative: float
    remark: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Verification:
    """How far the gradients of a plan are from those of one program; prints itself as a table.

    Args:
        leaves: one comparison for every trained parameter.
        limit: largest relative difference that is right.
        samples: ids of the samples that were used.
        notes: sentences on what these samples did not exercise.
        origins: section -> where its module was set.
    """

    leaves: tuple[LeafComparison, ...]
    limit: float
    samples: tuple[str, ...]
    notes: tuple[str, ...] = ()
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def worst(self) -> LeafComparison:
        """The leaf with the largest relative difference."""
        return max(self.leaves, key=lambda leaf: leaf.relative)

    @property
    def ok(self) -> bool:
        """Whether every leaf is finite and within the limit."""
        return self.worst.relative <= self.limit

    def require(self) -> None:
        """Refuses a plan that computes another gradient.

        Raises:
            GraphError: names the worst leaf and how many others are wrong.
        """
        if self.ok:
            return
        worst, wrong = self.worst, [leaf for leaf in self.leaves if leaf.relative > self.limit]
        amount = worst.remark or f"a difference of {worst.difference:.3g}, {worst.relative:.3g} of max|g| = {worst.scale:.3g}"
        raise GraphError(
            f"the plan computes another gradient of section {worst.section!r} than one program does.",
            wanted=f"differences of at most {self.limit:g} of max|g| in every trained parameter",
            have=f"{worst.path}: {amount}\n{len(wrong)} of {len(self.leaves)} parameters are wrong\n{self}",
            fix="see that every module keeps the items of a row apart (segment_ids), returns sums, draws noise by sample and position,\n"
            "and computes in the precision of its parameters; if all do, report this with the table",
            anchor="verify-step",
            set_by=self.origins.get(worst.section, "the calling program"),
        )

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        # Names to the left, numbers to the right.
        places = [f"{{:{'>' if column in (1, 3, 4) else '<'}{width}}}" for column, width in enumerate(widths)]
        lines = ["  ".join(places).format(*row).rstrip() for row in rows]
        return "\n".join([self._headline(), *lines, *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        worst = self.worst
        return f"Verification(ok={self.ok}, worst={worst.section}/{worst.path} {worst.relative:.3g}, samples={len(self.samples)})"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""

        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        header = line(_HEADER, "th")
        body = "".join(line(row, "td") for row in self._rows())
        notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in self.notes)
        return f"<p>{html.escape(self._headline())}</p><table>{header}{body}</table>{notes}"

    def _headline(self) -> str:
        verdict = "equal" if self.ok else "NOT EQUAL"
        return f"gradients of the plan and of one program on {len(self.samples)} samples: {verdict} (limit {self.limit:g} of max|g|)"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for section in dict.fromkeys(leaf.section for leaf in self.leaves):
            leaves = [leaf for leaf in self.leaves if leaf.section == section]
            worst = max(leaves, key=lambda leaf: leaf.relative)
            numbers = (worst.remark, "-") if worst.remark else (f"{worst.difference:.2e}", f"{worst.relative:.2e}")
            yield section, str(len(leaves)), worst.path, *numbers, "ok" if worst.relative <= self.limit else "WRONG"


def compare(have: Gradients, want: Gradients) -> tuple[LeafComparison, ...]:
    """Compares every leaf that either side has.

    Args:
        have: section -> path -> gradient on the plan.
        want: section -> path -> gradient of one program, float32.

    Returns:
        One comparison a leaf, in the order of `want`.

    >>> found = compare({"a": {"w": np.array([1.0, 2.0])}}, {"a": {"w": np.array([1.0, 4.0])}})
    >>> found[0].difference, found[0].scale, found[0].relative
    (2.0, 4.0, 0.5)
    """
    found = []
    for section in dict.fromkeys([*want, *have]):
        ours, theirs = have.get(section, {}), want.get(section, {})
        largest = max((_largest(g) for g in theirs.values() if np.isfinite(g).all()), default=0.0)
        found += [_compared(section, path, ours.get(path), theirs.get(path), FLOOR * largest) for path in dict.fromkeys([*theirs, *ours])]
    return tuple(found)


def _compared(section: str, path: str, have: np.ndarray | None, want: np.ndarray | None, floor: float) -> LeafComparison:
    remark = _remark(have, want)
    if have is None or want is None or remark:
        return LeafComparison(section=section, path=path, difference=math.nan, scale=math.nan, relative=math.inf, remark=remark)
    difference, scale = _largest(have.astype(np.float64) - want), max(_largest(want), floor)
    # A section without any gradient has no scale: then nothing but 0 is right.
    relative = difference / scale if scale else (math.inf if difference else 0.0)
    return LeafComparison(section=section, path=path, difference=difference, scale=scale, relative=relative)


def _remark(have: np.ndarray | None, want: np.ndarray | None) -> str:
    if have is None or want is None:
        return "missing on the plan" if have is None else "missing in one program"
    if have.shape != want.shape:
        return f"shape {list(have.shape)} on the plan, {list(want.shape)} in one program"
    wrong = {"the plan": not np.isfinite(have).all(), "one program": not np.isfinite(want).all()}
    if all(wrong.values()):
        return "not finite on the plan and in one program"
    if wrong["one program"]:
        return "not finite in one program"
    return "not finite on the plan" if wrong["the plan"] else ""


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))
