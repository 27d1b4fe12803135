"""The drawing of a sample: images, sound and text as pictures, everything else as a table, never too large."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.data import Item, Sample, image_item
from maestro_jax.data.interleaved import Interleaved
from maestro_jax.drawing.sample import BLACK, MOST_ARRAYS, MOST_ITEMS, MOST_STREAMS, MOST_UNITS, NUMBER, sample_html
from maestro_jax.drawing.svg import BLUE, GREY, ORANGE

SVG = "{http://www.w3.org/2000/svg}"
LARGEST = 2_000_000  # signs: browsers draw that at once


def item(units: int, **arrays: Any) -> Item:
    return Item(units=units, arrays=arrays)


def sample(**items: Item | list[Item]) -> Sample:
    found = {stream: tuple(each) if isinstance(each, list) else (each,) for stream, each in items.items()}
    return Sample(id="here/1", items=found)


def image(height: int = 8, width: int = 8, channels: int = 1, patch: int = 2) -> Item:
    pixels = np.random.default_rng(0).random((height, width, channels))
    return image_item(pixels, patch_size=patch, merge=2)


def sound(frames: int, bands: int = 4) -> Item:
    return item(frames, frames=np.linspace(-1, 1, frames * bands, dtype=np.float32).reshape(frames, bands))


def seen() -> Sample:
    """Two images of 4 and 6 rows and a clip of 2; between them one token each, and an answer of two."""
    text = Interleaved()
    text.place("image", 4)
    text.write([70])
    text.place("image", 6)
    text.write([71])
    text.place("audio", 2)
    text.write([72])
    text.write([80, 81], "image")
    return sample(text=text.item(), image=[image(), image(8, 12)], audio=sound(8))


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{html}</div>")


def numbers(html: str) -> list[str]:
    """Numbers of rows in pictures."""
    return [each.text or "" for each in parsed(html).iter(f"{SVG}text") if each.get("fill") == NUMBER]


def boxes(html: str) -> list[tuple[str, str, bool]]:
    """What stands in the boxes of a text, their colours, and whether they are framed."""
    found = list(parsed(html).iter())
    pairs = itertools.pairwise(found)
    return [(b.text or "", a.get("fill", ""), a.get("stroke") != "none") for a, b in pairs if a.get("rx") and b.tag == f"{SVG}text"]


def words(html: str) -> list[str]:
    return [word for word, _, _ in boxes(html)]


def table(html: str) -> list[list[str]]:
    return [[cell.text or "" for cell in row.iter("td")] for row in parsed(html).iter("tr")][1:]


def pictures(html: str) -> list[tuple[float, float]]:
    """Width and height of each."""
    found = [each for each in parsed(html).iter(f"{SVG}rect") if each.get("fill") == BLACK]
    return [(float(each.get("width", 0)), float(each.get("height", 0))) for each in found]


def lit(html: str) -> Mapping[str, set[tuple[int, int]]]:
    """Colour -> (column, row) of the cells that are filled with it."""
    cells: dict[str, set[tuple[int, int]]] = {}
    for path in parsed(html).iter(f"{SVG}path"):
        for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d", "")):
            cells.setdefault(path.get("stroke", ""), set()).update((int(x) + n, int(y)) for n in range(int(length)))
    return cells


def test_a_sample_draws_itself() -> None:
    assert seen()._repr_html_() == sample_html(seen())


def test_the_label_names_the_sample_and_counts_its_items() -> None:
    html = sample_html(seen())
    assert html.startswith("<p>sample here/1: text 1, image 2, audio 1</p>")
    assert [each.get("aria-label") for each in parsed(html).iter(f"{SVG}svg")] == ["sample here/1: text 1, image 2, audio 1"]


def test_every_row_of_images_and_sound_has_its_number() -> None:
    assert numbers(sample_html(seen())) == [*map(str, range(10)), "0", "1"]


def test_units_that_take_rows_name_them_in_the_colour_of_their_stream() -> None:
    drawn = [(word, colour) for word, colour, _ in boxes(sample_html(seen()))]
    images = [(str(row), BLUE) for row in range(10)]
    plain = [(str(token), "currentColor") for token in (70, 71, 72, 80, 81)]
    assert drawn == [*images[:4], plain[0], *images[4:], plain[1], ("0", ORANGE), ("1", ORANGE), *plain[2:]]


def test_rows_of_a_stream_without_a_picture_are_grey() -> None:
    text = item(2, tokens=np.array([5, 0]), maps_rows=np.array([-1, 0]))
    assert boxes(sample_html(sample(text=text))) == [("5", "currentColor", False), ("0", GREY, False)]


def test_what_the_loss_counts_is_framed() -> None:
    assert [word for word, _, framed in boxes(sample_html(seen())) if framed] == ["80", "81"]


def test_nothing_is_framed_where_the_loss_counts_everything() -> None:
    text = item(2, tokens=np.array([5, 6]), targets=np.array([6, 7]), loss_mask=np.ones(2))
    assert boxes(sample_html(sample(text=text))) == [(word, "currentColor", False) for word in "567"]


def test_tokens_are_written_as_decoded_with_signs_for_spaces() -> None:
    says = {5: " a\n", 6: "<b>", 7: "", 8: "\x07"}
    text = item(5, tokens=np.array([5, 6, 7, 8, -3]))
    html = sample_html(sample(text=text), decode=lambda ids: says[ids[0]])
    assert words(html) == ["␣a↵", "<b>", "7", "�", "-3"]


def test_two_texts_stand_on_lines_of_their_own_with_the_names_of_their_streams() -> None:
    pair = sample(chosen=item(1, tokens=np.array([5])), rejected=item(1, tokens=np.array([6])))
    found = [(each.text, each.get("y")) for each in parsed(sample_html(pair)).iter(f"{SVG}text")]
    assert [word for word, _ in found] == ["chosen:", "5", "rejected:", "6"]
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_lie_where_they_lie_in_the_image(channels: int) -> None:
    pixels = np.zeros((8, 12, channels))
    pixels[1, 10] = pixels[6, 2] = 1
    html = sample_html(sample(image=image_item(pixels, patch_size=2, merge=2)))
    assert lit(html) == {"#f9f9f9": {(10, 1), (2, 6)}}


def test_low_bands_of_sound_lie_below() -> None:
    frames = np.full((3, 4), -1.0)
    frames[2, 0] = 1
    assert lit(sample_html(sample(audio=item(3, frames=frames)))) == {"#f9f9f9": {(2, 3)}}


@pytest.mark.parametrize(
    ("frames", "greys"),
    [
        ([-1, 0, 0.3, 1], {0: None, 1: "#9c9c9c", 2: "#bbbbbb", 3: "#f9f9f9"}),
        ([0, 0.3], {0: "#9c9c9c", 1: "#bbbbbb"}),  # as it is, so that pictures can be compared
        ([100, 200, 300], {0: None, 1: "#9c9c9c", 2: "#f9f9f9"}),
        ([np.nan, np.inf, -np.inf, 0], {0: None, 1: "#f9f9f9", 2: None, 3: "#9c9c9c"}),
    ],
)
def test_brightness_from_minus_one_to_one_is_shown_as_it_is_and_other_is_scaled(frames: list[float], greys: dict[int, str | None]) -> None:
    cells = lit(sample_html(sample(audio=item(len(frames), frames=np.array(frames, float)[:, None]))))
    assert {x: colour for colour, places in cells.items() for x, _ in places} == {x: grey for x, grey in greys.items() if grey}


@pytest.mark.parametrize(
    ("stream", "rows"),
    [
        (image(), 0),  # nothing says how many rows there are
        (image(), 3),  # 16 patches are no multiple of 3
        (image(), 2),  # 8 patches make no square
        (item(3, patches=np.zeros((3, 4)), coords=np.array([[0, 0], [0, 1], [1, 0]])), 1),  # nor do 3
        (sound(24), 5),  # 4 frames a row would be 6 rows
        ([sound(3), sound(5)], 2),  # a row of 4 frames would lie in both
        (sound(400), 100),  # too narrow to be told apart
    ],
)
def test_rows_that_cannot_be_told_have_no_numbers(stream: Item | list[Item], rows: int) -> None:
    text = item(400, tokens=np.arange(400), media_rows=np.where(np.arange(400) < rows, np.arange(400), -1))
    html = sample_html(sample(text=text, media=stream))
    assert pictures(html)
    assert numbers(html) == []


def test_of_a_large_image_every_second_cell_is_shown() -> None:
    pixels = np.zeros((128, 2, 1))
    pixels[1::2] = 1
    assert lit(sample_html(sample(image=image_item(pixels, patch_size=1, merge=1)))) == {}
    assert lit(sample_html(sample(image=image_item(1 - pixels, patch_size=1, merge=1)))) == {"#f9f9f9": {(0, y) for y in range(64)}}


def test_other_arrays_are_listed_with_dtypes_and_shapes() -> None:
    pair = [item(1, left=np.zeros((1, 3, 2)), right=np.zeros(1, "int8")), item(2, words=["a", "<b>"])]
    assert table(sample_html(sample(pairs=pair))) == [
        ["pairs", "0", "1", "left", "float64[1, 3, 2]"],
        ["pairs", "0", "1", "right", "int8[1]"],
        ["pairs", "1", "2", "words", "list"],
    ]


def test_a_sample_without_items_says_so() -> None:
    assert sample_html(Sample(id="a", items={})) == "<p>sample a: no items</p>"


def test_names_are_escaped() -> None:
    odd = Sample(id="<i>\ud800", items={"<script>": (item(1, **{"<b>": np.zeros(1)}),)})
    assert "<script>" not in sample_html(odd)
    assert table(sample_html(odd))[0][0] == "<script>"


ODD: dict[str, Any] = {
    "no units": np.zeros((0, 4)),
    "no numbers": np.zeros((4, 0)),
    "one dimension": np.zeros(4),
    "none": np.zeros(()),
    "three": np.zeros((4, 2, 2)),
    "other length": np.zeros((3, 4)),
    "nan": np.full((4, 4), np.nan),
    "infinite": np.array([[np.inf, -np.inf, np.nan, 1e308]] * 4),
    "huge": np.array([[-1e308, 1e308, 0, 0]] * 4),
    "flags": np.ones((4, 4), bool),
    "bytes": np.full((4, 4), 255, np.uint8),
    "large": np.full((4, 4), 2**64 - 1, np.uint64),
    "bfloat16": jnp.ones((4, 4), "bfloat16"),
    "complex": np.ones((4, 4), complex),
    "texts": np.full((4, 4), "a"),
    "objects": np.full((4, 4), None),
    "dates": np.zeros((4, 4), "datetime64[s]"),
    "records": np.zeros(4, [("a", "i4")]),
    "masked": np.ma.masked_all((4, 4)),
    "lists": [[0.0] * 4] * 4,
    "description": jax.ShapeDtypeStruct((4, 4), "float32"),
    "nothing": None,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", ["patches", "coords", "frames", "tokens", "targets", "image_rows", "loss_mask"])
def test_odd_arrays_are_drawn_or_listed(name: str, odd: Any) -> None:
    usual = {
        "text": {"tokens": np.arange(4), "targets": np.arange(4), "image_rows": np.array([0, -1, -1, -1])},
        "image": {"patches": np.zeros((4, 4)), "coords": np.array([[0, 0], [0, 1], [1, 0], [1, 1]])},
    }
    streams = {stream: {**arrays, **({name: odd} if name in arrays else {})} for stream, arrays in usual.items()}
    streams["other"] = {name: odd}
    html = sample_html(sample(**{stream: item(4, **arrays) for stream, arrays in streams.items()}), decode=str)
    assert "sample here/1" in (next(iter(parsed(html))).text or "")
    assert pictures(html) or table(html)


@pytest.mark.parametrize(
    ("coords", "drawn"),
    [
        ([[0, 0], [10**9, 10**9]], True),
        ([[0, 0], [0, 0]], True),
        ([[0, -1], [0, 0]], False),
        ([[0.5, 0.0], [1.0, 0.0]], False),
        ([[0, 0, 0], [0, 0, 1]], False),
    ],
)
def test_an_image_needs_whole_places_from_zero(coords: list[list[float]], drawn: bool) -> None:
    html = sample_html(sample(image=item(2, patches=np.zeros((2, 4)), coords=np.array(coords))))
    assert (len(pictures(html)), len(table(html))) == ((1, 0) if drawn else (0, 2))


def test_what_is_no_item_is_listed() -> None:
    odd: Any = {"text": ("words", None, item(1, tokens=None), Item(units=1, arrays=None))}  # pyright: ignore[reportArgumentType]
    assert [row[-1] for row in table(sample_html(Sample(id="a", items=odd)))] == ["str", "NoneType", "NoneType", "Item"]


def test_long_texts_are_cut_with_a_note() -> None:
    html = sample_html(sample(text=item(5000, tokens=np.arange(5000))))
    assert words(html) == [str(token) for token in range(MOST_UNITS)]
    assert html.endswith(f"<p>not shown: {5000 - MOST_UNITS:,} more tokens</p>")
    assert len(words(sample_html(sample(text=item(5000, tokens=np.arange(5000))), most=7))) == 7


def test_many_images_and_many_streams_are_cut_with_a_note() -> None:
    html = sample_html(sample(image=[image()] * 11))
    assert len(pictures(html)) == MOST_ITEMS
    assert html.endswith(f"<p>not shown: {11 - MOST_ITEMS} more items of image</p>")
    many = sample_html(sample(**{f"s{number}": image() for number in range(11)}))
    assert len(pictures(many)) == MOST_STREAMS
    assert many.endswith(f"<p>not shown: {11 - MOST_STREAMS} more streams</p>")


def test_many_arrays_are_cut_with_a_note() -> None:
    html = sample_html(sample(a=item(1, **{f"array{number}": np.zeros(1) for number in range(50)})))
    assert len(table(html)) == MOST_ARRAYS
    assert html.endswith(f"<p>not shown: {50 - MOST_ARRAYS} more arrays</p>")


def test_long_names_and_words_are_cut() -> None:
    long = "a" * 10_000
    odd = Sample(id=long, items={long: (item(1, **{long: np.zeros(1)}), item(1, tokens=np.zeros(1, int)))})
    assert len(sample_html(odd, decode=lambda ids: long)) < 2000


@pytest.mark.parametrize(
    "large",
    [
        image(448, 448, channels=3, patch=14),
        image(16, 4096),
        image(1024, 1024),
        sound(3000, bands=500),
        item(3000, frames=np.random.default_rng(0).random((3000, 128))),
        item(100_000, tokens=np.arange(100_000)),
    ],
    ids=["photo", "wide", "fine", "clip", "noise", "text"],
)
def test_the_size_is_bounded(large: Item) -> None:
    html = sample_html(sample(one=[large] * 100), decode=lambda ids: "long " * 100)
    assert len(html) < LARGEST
    assert all(width <= 900 and height <= 130 for width, height in pictures(html))


def test_everything_lies_inside_the_drawing() -> None:
    root = parsed(sample_html(sample(image=[image(8, 64)] * 8, audio=[sound(100), sound(9)], text=item(300, tokens=np.arange(300)))))
    [svg] = root.iter(f"{SVG}svg")
    for rect in root.iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
        assert 0 <= x < x + width <= float(svg.get("width", 0))
        assert 0 <= y < y + height <= float(svg.get("height", 0))
