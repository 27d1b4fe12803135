"""What is made of samples that are left out: told once of each kind, counted, and an end when one after the other is bad."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import DataError, TrainingError

if TYPE_CHECKING:
    from .runtime.global_batch import BadSample

_ALL = ""  # the row of all samples, among those of streams; no stream has this name


class BadSampleLimit:
    """Ends a run in which one sample after the other is bad: of all samples, or of those with items of one stream.

    A few bad samples are a matter of the data. As many as `limit` + 1 steps take, and no good one between them, are not. Where there has
    been no good one at all, the configuration is wrong, as when the inputs of two sections are exchanged, and skipping would hide it: as
    many as one step takes (and more than `limit`) end the run then, and so does its last step.

    Args:
        limit: most steps in a row whose samples may all be bad.
        batch: samples of a step.
        steps: number of the run's last step.
        set_by: where the limit was set, for the error.
    """

    def __init__(self, limit: int, *, batch: int, steps: int, set_by: str = "the calling program: BadSampleLimit.limit") -> None:
        self._most, self._most_at_first = (limit + 1) * batch, max(limit + 1, batch)
        self._steps, self._set_by = steps, set_by
        self._good: set[str] = set()  # Streams of which there has been a good sample.
        # Stream -> kind -> how many since the last good sample, and the text of the first one's error.
        self._rows: dict[str, dict[str, tuple[int, str]]] = {}

    def add(self, step: int, good: Sequence[Collection[str]], bad: Sequence[BadSample]) -> None:
        """Takes a step.

        Args:
            step: its number; steps come in order.
            good: the streams of each sample that was used.
            bad: the samples that were left out.

        Raises:
            TrainingError: too many in a row were bad.
        """
        seen = {stream for streams in good for stream in (_ALL, *streams)}
        self._good |= seen
        self._rows = {stream: row for stream, row in self._rows.items() if stream not in seen}
        for sample in bad:
            for stream in {_ALL, *sample.streams} - seen:
                row = self._rows.setdefault(stream, {})
                count, first = row.get(sample.error.anchor, (0, str(sample.error)))
                row[sample.error.anchor] = count + 1, first
        for stream, row in sorted(self._rows.items()):
            count = sum(count for count, _ in row.values())
            too_many = count >= (self._most if stream in self._good else self._most_at_first)
            if too_many or (step == self._steps and not self._good):
                raise self._end(step, stream, count, row)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        rows = {stream: {kind: list(found) for kind, found in row.items()} for stream, row in self._rows.items()}
        return {"good": sorted(self._good), "rows": rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self._good = set(state["good"])
        self._rows = {stream: {kind: (int(n), str(first)) for kind, (n, first) in row.items()} for stream, row in state["rows"].items()}

    def _end(self, step: int, stream: str, count: int, row: Mapping[str, tuple[int, str]]) -> TrainingError:
        which = f"sample with items of stream {stream!r}" if stream else "sample"
        among = f"any {self._most}, which is what skip_limit + 1 steps take" if stream in self._good else f"the first {self._most_at_first}"
        kinds = sorted(row, key=lambda kind: -row[kind][0])
        return TrainingError(
            f"training ends at step {step}: no {which} can be used.",
            wanted=f"a good {which} among {among}",
            have=f"{count} bad ones in a row: {', '.join(f'{kind} {row[kind][0]}' for kind in kinds)}\n"
            f"the first of kind {kinds[0]}:\n{row[kinds[0]][1]}",
            fix="where all are bad alike, mend the configuration (inputs, reads and microbatch of sections; root and limits of the data); "
            "otherwise mend the data, or raise skip_limit",
            anchor="no-good-sample",
            set_by=self._set_by,
        )


def cause_of(error: DataError) -> str:
    """Says in one line why a sample is left out.

    >>> cause_of(DataError("sample 'a' is bad.", wanted="one", have="no file", fix="mend it", anchor="missing", set_by="a.jsonl:3"))
    "sample 'a' is bad. Have: no file; wanted: one; set by a.jsonl:3."
    """
    return " ".join(f"{error.what} Have: {error.have}; wanted: {error.wanted}; set by {error.set_by}.".split())


def count_lines(training: Mapping[str, int], heldout: Mapping[str, int], *, repeats: bool) -> list[str]:
    """Says how many samples were left out, in at most two lines.

    Args:
        training: kind -> how often.
        heldout: kind -> how many in an evaluation.
        repeats: whether the same samples may have come in several epochs.

    >>> count_lines({"media-missing": 4, "clip-empty": 1}, {}, repeats=False)
    ['5 samples were skipped: clip-empty 1, media-missing 4 (explained in docs/errors.md)']
    >>> count_lines({"clip-empty": 2}, {}, repeats=True)
    ['samples were skipped 2 times, again in each epoch: clip-empty 2 (explained in docs/errors.md)']
    """
    lines = []
    for counts, many in ((training, "samples were skipped"), (heldout, "held-out samples were skipped")):
        if counts:
            total, again = sum(counts.values()), repeats and counts is training
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
            start = f"{many} {total} times, again in each epoch" if again else f"{total} {many}"
            lines.append(f"{start}: {kinds} (explained in docs/errors.md)")
    return lines
