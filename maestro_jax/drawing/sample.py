"""A sample as a picture: its images and sound with the number of each row, and its text with the units that take these rows.

A sample does not say what its arrays mean, so they are known by the names that the package's own data gives them: "patches" with
"coords" are an image, "frames" are sound, "tokens" are text, and `NAME_rows` of a text are the rows of stream NAME that its units take.
All other items are listed with the dtypes and shapes of their arrays. Nothing here fails because of what an array holds.
"""

from __future__ import annotations

import dataclasses
import html
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from .svg import BLUE, GREY, ORANGE, cut, drawing, element, text, text_width
from .tables import table_html

WIDTH = 900
"""Of the drawing."""

MOST_STREAMS, MOST_ITEMS, MOST_UNITS, MOST_ARRAYS = 8, 8, 160, 24
"""Most streams, items of each, units of text, and arrays without a picture that are shown."""

IMAGE_CELLS, SOUND_CELLS = (64, 96), (40, 220)
"""Most cells of a picture, down and across; of a larger one every second is shown, or every third, and so on."""

IMAGE_PIXELS, SOUND_PIXELS = (96, 400), (96, 880)
"""Height and width in pixels up to which the cells of a picture grow; those of an image have 2 pixels at least."""

BLACK, NUMBER = "#202020", "#ffb000"
"""Of the lowest brightness, and of the numbers of rows, which can be read on all of them."""

GAP, LINE = 12, 26
"""Between pictures, and from one line of text to the next."""

SMALLEST = 12
"""Least height and width in pixels of a row that is framed."""

_NUMBERS = re.compile(r"bool|(u?int|b?float)\d+\w*")
_IDS = 2**31  # tokenizers fail above

_Place = tuple[int, int, int, int]  # left, top, width, height


class ItemLike(Protocol):
    """What is drawn of an `Item`."""

    @property
    def units(self) -> int:
        """Its length."""
        ...

    @property
    def arrays(self) -> Mapping[str, Any]:
        """One row a unit."""
        ...


class SampleLike(Protocol):
    """What is drawn of a `Sample`."""

    @property
    def id(self) -> str:
        """Its name."""
        ...

    @property
    def items(self) -> Mapping[str, Sequence[ItemLike]]:
        """Per stream, the items in order."""
        ...


def sample_html(sample: SampleLike, decode: Callable[[list[int]], str] | None = None, most: int = MOST_UNITS) -> str:
    """Draws a sample.

    A text is a box for each unit, and one for its last target: blue where it takes a row of an image, orange for one of sound. What
    the loss counts has a frame, unless it counts everything. The size is bounded: what is left out is named below.

    Args:
        sample: with items of any kind.
        decode: what a token says, such as `tokenizer.decode`; without it, tokens are numbers.
        most: most tokens that are shown.
    """
    return _Drawing(sample, decode, most).html()


class _Drawing:
    """What is found in a sample, part by part."""

    def __init__(self, sample: SampleLike, decode: Callable[[list[int]], str] | None, most: int) -> None:
        self.sample, self.decode, self.most = sample, decode, most
        self.page = _Page()
        self.colours: dict[str, str] = {}
        self.listed: list[list[str]] = []
        self.left_out: list[str] = []

    def html(self) -> str:
        streams = list(self.sample.items.items())
        self._leave_out(len(streams) - MOST_STREAMS, "streams")
        streams = streams[:MOST_STREAMS]
        for stream, items in streams:
            self._pictures(stream, [(number, item) for number, item in enumerate(items) if _array(item, "tokens") is None])
        self._texts([(stream, item) for stream, items in streams for item in items if _array(item, "tokens") is not None])
        counts = ", ".join(f"{_plain(stream)} {len(items)}" for stream, items in streams) or "no items"
        label = f"sample {_plain(self.sample.id, 200)}: {counts}"
        parts = [f"<p>{html.escape(label)}</p>", self.page.html(label)]
        if self.listed:
            rows = self.listed[:MOST_ARRAYS]
            parts.append(table_html(["stream", "item", "units", "array", "values"], rows, numbers=(1, 2)))
            self._leave_out(len(self.listed) - len(rows), "arrays")
        if self.left_out:
            parts.append(f"<p>not shown: {html.escape(', '.join(self.left_out))}</p>")
        return "".join(parts)

    def _leave_out(self, count: int, what: str) -> None:
        if count > 0:
            self.left_out.append(f"{count:,} more {what}")

    def _pictures(self, stream: str, items: Sequence[tuple[int, ItemLike]]) -> None:
        """Draws images and sound of a stream, and lists what is neither."""
        size, first = _units_of_a_row(self.sample, stream), 0
        for number, item in items[:MOST_ITEMS]:
            picture = _image(item, size) or _sound(item, size)
            if picture is None:
                self.listed += _listed(stream, number, item)
            else:
                self.colours[stream] = picture.colour
                height, width = picture.height * picture.cell[0], picture.width * picture.cell[1]
                self.page.add(picture.svg(*self.page.place(width, height, GAP), first))
            first += _units(item) // size if size else 0
        self._leave_out(len(items) - MOST_ITEMS, f"items of {_plain(stream)}")

    def _texts(self, texts: Sequence[tuple[str, ItemLike]]) -> None:
        room, more = self.most, 0
        for stream, item in texts:
            tokens = [*_numbers(item, "tokens"), *_numbers(item, "targets")[-1:]]
            shown = tokens[:room]
            room, more = room - len(shown), more + len(tokens) - len(shown)
            self.page.new_line()
            if shown and len(texts) > 1:
                name = f"{_plain(stream)}:"
                x, y = self.page.place(text_width(name) + 12, LINE, 0)
                self.page.add(text(x, y + 17, name, font_weight="bold"))
            for words, colour, framed in self._boxes(item, shown):
                self._box(words, colour, framed)
        self._leave_out(more, "tokens")

    def _box(self, words: str, colour: str, framed: bool) -> None:
        width = text_width(words) + 8
        x, y = self.page.place(width, LINE, 0)
        frame = {"stroke": "currentColor" if framed else "none", "stroke_width": 2}
        fill = {"fill": colour, "fill_opacity": "0.08" if colour == "currentColor" else "0.4"}
        self.page.add(element("rect", x=x + 1, y=y + 2, width=width - 2, height=21, rx=3, **frame, **fill))
        self.page.add(text(x + 4, y + 17, words))

    def _boxes(self, item: ItemLike, tokens: Sequence[int | float]) -> Iterator[tuple[str, str, bool]]:
        """What stands in the box of each token, its colour, and whether it has a frame."""
        rows = _rows(item)
        counted = [weight > 0 for weight in _numbers(item, "loss_mask")]
        framed = [False, *(counted if not all(counted) else ())]  # a unit's target is the next token
        for unit, token in enumerate(tokens):
            taken = next(((stream, found[unit]) for stream, found in rows.items() if unit < len(found) and found[unit] >= 0), None)
            asked = unit < len(framed) and framed[unit]
            if taken is None:
                yield self._word(token), "currentColor", asked
            else:
                yield str(taken[1]), self.colours.get(taken[0], GREY), asked

    def _word(self, token: int | float) -> str:
        """What a token says; its number where that is nothing or not known."""
        words = self.decode([int(token)]) if self.decode and isinstance(token, int) and 0 <= token < _IDS else ""
        return _plain(words.replace("\n", "↵").replace(" ", "␣"), 24) or str(token)


class _Page:
    """Boxes side by side, and a new line where one has no room."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.x, self.y, self.bottom = 1.0, 1.0, 1.0

    def place(self, width: float, height: float, gap: float) -> tuple[float, float]:
        if self.x + width > WIDTH:
            self.new_line()
        found = self.x, self.y
        self.x += width + gap
        self.bottom = max(self.bottom, self.y + height + gap)
        return found

    def new_line(self) -> None:
        self.x, self.y = 1.0, self.bottom

    def add(self, part: str) -> None:
        self.parts.append(part)

    def html(self, label: str) -> str:
        return drawing(WIDTH, self.bottom + 2, "".join(self.parts), label) if self.parts else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Picture:
    """Cells of brightness, row by row from above (None: nothing there), and where the rows of an encoder lie among them."""

    cells: list[list[float | None]]
    cell: tuple[float, float]  # height and width in pixels
    rows: Sequence[_Place]
    colour: str

    @property
    def height(self) -> int:
        return len(self.cells)

    @property
    def width(self) -> int:
        return len(self.cells[0])

    def svg(self, x: float, y: float, first: int) -> str:
        """The picture at a place, with the number of each row, beginning with `first`."""
        high, wide = self.cell
        whole: dict[str, float] = {"x": x, "y": y, "width": self.width * wide, "height": self.height * high}
        parts = [element("rect", "", **whole, fill=BLACK)]
        # A line through the middle of a row of cells fills them; half of what squares take.
        shift = f"translate({x:g} {y + high / 2:g}) scale({wide:.6g} {high:.6g})"
        parts.append(element("g", self._levels(), transform=shift, fill="none", shape_rendering="crispEdges"))
        framed = all(w * wide >= SMALLEST and h * high >= SMALLEST for _, _, w, h in self.rows)
        for number, (left, top, w, h) in enumerate(self.rows if framed else (), first):
            place: dict[str, float] = {"x": x + left * wide, "y": y + top * high, "width": w * wide, "height": h * high}
            parts.append(element("rect", "", **place, fill="none", stroke=self.colour))
            if text_width(str(number), 10) + 2 <= w * wide:
                parts.append(text(place["x"] + 2, place["y"] + 11, str(number), fill=NUMBER, font_size=10, font_weight="bold"))
        return "".join(parts)

    def _levels(self) -> str:
        """A path for each of eight greys."""
        finite = [value for row in self.cells for value in row if value is not None and math.isfinite(value)]
        # The package's own images and sounds are from -1 to 1, and so can be compared.
        low, high = min(finite, default=-1), max(finite, default=1)
        low, high = (-1, 1) if low >= -1 and high <= 1 else (low, high)
        runs: dict[int, list[str]] = {}
        for y, row in enumerate(self.cells):
            levels = [_level(value, low, high) for value in row]
            starts = [x for x in range(len(levels)) if x == 0 or levels[x] != levels[x - 1]]
            for start, end in zip(starts, [*starts[1:], len(levels)], strict=True):
                runs.setdefault(levels[start], []).append(f"M{start} {y}h{end - start}")
        return "".join(
            element("path", d="".join(found), stroke="#" + f"{32 + 31 * level:02x}" * 3) for level, found in sorted(runs.items()) if level
        )


def _level(value: float | None, low: float, high: float) -> int:
    share = 0.0 if value is None or high <= low else (value - low) / (high - low)
    # In this order, NaN becomes 0.
    return int(min(7.0, max(0.0, 8 * share)))


def _image(item: ItemLike, size: int) -> _Picture | None:
    """An image of patches, if the item is one; `size` patches become one row, 0 if nobody knows."""
    patches, coords = _array(item, "patches", dimensions=2), _array(item, "coords", dimensions=2)
    if patches is None or coords is None or coords.dtype.kind not in "iu" or coords.shape[1] != 2 or not len(coords) or coords.min() < 0:
        return None
    channels = _channels(patches.shape[1])
    if not channels:
        return None
    side = math.isqrt(patches.shape[1] // channels)
    rows, columns = (1 + last for last in coords.max(axis=0).tolist())
    factor = max(-(-rows * side // IMAGE_CELLS[0]), -(-columns * side // IMAGE_CELLS[1]))
    within, between = min(side, factor), -(-factor // side)
    shown = (coords % between == 0).all(axis=1)
    thin = patches[shown].reshape(-1, side, side, channels)[:, within // 2 :: within, within // 2 :: within].tolist()
    places, side = (coords[shown] // between).tolist(), len(range(within // 2, side, within))
    cells: list[list[float | None]] = [[None] * (-(-columns // between) * side) for _ in range(-(-rows // between) * side)]
    for (row, column), patch in zip(places, thin, strict=True):
        for y, line in enumerate(patch, row * side):
            cells[y][column * side : (column + 1) * side] = [sum(pixel) / channels for pixel in line]
    pixels = max(2, min(IMAGE_PIXELS[0] // len(cells), IMAGE_PIXELS[1] // len(cells[0])))
    blocks = _blocks(places, size, side) if between == 1 else []
    return _Picture(cells=cells, cell=(pixels, pixels), rows=blocks, colour=BLUE)


def _channels(numbers: int) -> int:
    """Channels of a square patch, 1 or 3, of which a number of pixels allows one at most; 0 if it is none."""
    return next((count for count in (1, 3) if numbers and math.isqrt(numbers // count) ** 2 * count == numbers), 0)


def _blocks(places: Sequence[Sequence[int]], size: int, side: int) -> list[_Place]:
    """Where the patches of each row lie; nothing if they make no squares, since then `size` is a bad guess."""
    found = []
    for start in range(0, len(places), size) if size else ():
        rows, columns = zip(*places[start : start + size], strict=True)
        extent = 1 + max(rows) - min(rows)
        if extent != 1 + max(columns) - min(columns) or extent**2 != size:
            return []
        found.append((min(columns) * side, min(rows) * side, extent * side, extent * side))
    return found


def _sound(item: ItemLike, size: int) -> _Picture | None:
    """Frames from left to right, low bands below, if the item has some; `size` frames become one row, 0 if nobody knows."""
    frames = _array(item, "frames", dimensions=2)
    if frames is None or not all(frames.shape):
        return None
    units, bands = frames.shape
    down, across = -(-bands // SOUND_CELLS[0]), -(-units // SOUND_CELLS[1])
    thin = frames[::across, ::down].tolist()
    cells: list[list[float | None]] = [[frame[band] for frame in thin] for band in reversed(range(len(thin[0])))]
    rows = [(start, 0, size, len(cells)) for start in range(0, units, size)] if size and across == 1 else []
    cell = (max(1, SOUND_PIXELS[0] // len(cells)), max(1, min(4, SOUND_PIXELS[1] // len(thin))))
    return _Picture(cells=cells, cell=cell, rows=rows, colour=ORANGE)


def _units_of_a_row(sample: SampleLike, stream: str) -> int:
    """How many units of a stream become one row, judging by how many rows are taken; 0 if it cannot be told."""
    units = [_units(item) for item in sample.items[stream]]
    taken = [row for items in sample.items.values() for item in items for row in _rows(item).get(stream, ())]
    rows = max(taken, default=-1) + 1
    size = sum(units) // rows if rows else 0
    return size if size and sum(units) == size * rows and not any(count % size for count in units) else 0


def _rows(item: ItemLike) -> dict[str, list[int]]:
    """Stream -> the row of it that each unit takes, below 0 for none."""
    names = [name for name in _arrays(item) if isinstance(name, str) and name.endswith("_rows")]
    found = {name.removesuffix("_rows"): _numbers(item, name) for name in names}
    return {stream: rows for stream, rows in found.items() if all(isinstance(row, int) for row in rows)}


def _listed(stream: str, number: int, item: ItemLike) -> list[list[str]]:
    """Rows of the table for an item, one an array."""
    start = [_plain(stream), str(number), str(_units(item))]
    arrays = {str(name): array for name, array in _arrays(item).items()} or {"-": item}
    return [[*start, _plain(name), _values(array)] for name, array in arrays.items()]


def _values(array: Any) -> str:
    """Dtype and shape, or the type of what is no array."""
    shape = _shape(array)
    return type(array).__name__ if shape is None else _plain(f"{array.dtype}[{', '.join(map(str, shape))}]", 60)


def _shape(array: Any) -> tuple[int, ...] | None:
    shape = getattr(array, "shape", None)
    return shape if isinstance(shape, tuple) and hasattr(array, "dtype") else None


def _array(item: ItemLike, name: str, dimensions: int = 1) -> Any:
    """An array of an item, if it has a row of numbers for each unit, else None."""
    array: Any = _arrays(item).get(name, ())
    shape = _shape(array)
    if shape is None or not _NUMBERS.fullmatch(str(array.dtype)) or len(shape) != dimensions or shape[0] != _units(item):
        return None
    # A masked array has holes, and what describes an array has no numbers.
    return array if hasattr(array, "tolist") and not hasattr(array, "mask") else None


def _numbers(item: ItemLike, name: str, dimensions: int = 1) -> list[Any]:
    array = _array(item, name, dimensions)
    return [] if array is None else array.tolist()


def _arrays(item: ItemLike) -> Mapping[str, Any]:
    """The arrays of an item; of something else, which a user's data may hold, none."""
    arrays = getattr(item, "arrays", None)
    return arrays if isinstance(arrays, Mapping) else {}


def _units(item: ItemLike) -> int:
    units = getattr(item, "units", 0)
    return int(units) if isinstance(units, numbers.Integral) else 0


def _plain(words: str, most: int = 40) -> str:
    """Of one line, and only signs that every page shows."""
    return cut("".join(sign if sign.isprintable() else "�" for sign in str(words)), most)
