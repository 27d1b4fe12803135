"""Elements of SVG as text."""

from __future__ import annotations

import html
import math
import unicodedata

BLUE, ORANGE, GREY = "#2f7ed8", "#c0700c", "#808080"
"""Can be read on white and on black."""

SIZE = 13
"""Of text, in pixels."""


def element(tag: str, content: str = "", **attributes: str | float) -> str:
    """Writes an element.

    Args:
        tag: its name.
        content: elements or escaped text inside.
        attributes: values are escaped, numbers get one decimal at most; `_` in a name stands for `-`.

    >>> element("line", x1=0, y1=2.26, stroke_width=1, stroke="<a>")
    '<line x1="0" y1="2.3" stroke-width="1" stroke="&lt;a&gt;"/>'
    """
    words = [f'{name.strip("_").replace("_", "-")}="{_attribute(value)}"' for name, value in attributes.items()]
    start = " ".join([tag, *words])
    return f"<{start}>{content}</{tag}>" if content else f"<{start}/>"


def text(x: float, y: float, words: str, **attributes: str | float) -> str:
    """Writes a line of text that begins at `x`, or is placed by `text_anchor`; `y` is its base line."""
    return element("text", html.escape(words), x=x, y=y, **attributes)


def drawing(width: float, height: float, content: str, label: str) -> str:
    """Makes a drawing that shrinks where the page is narrower.

    Args:
        width: in pixels.
        height: in pixels.
        content: its elements.
        label: what it shows, for those who cannot see it.
    """
    width, height = math.ceil(width), math.ceil(height)
    return element(
        "svg",
        content,
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
        font_family="system-ui, sans-serif",
        font_size=SIZE,
        fill="currentColor",
        style="max-width:100%;height:auto",
    )


def text_width(words: str, size: float = SIZE) -> float:
    """Estimates how wide text is, in pixels, rather too wide; fonts differ from page to page."""
    return sum(size if unicodedata.east_asian_width(sign) in "WF" else 0.6 * size for sign in words)


def cut(words: str, length: int) -> str:
    """Shortens text to so many signs.

    >>> cut("cross_entropy", 8), cut("kl", 8)
    ('cross_e…', 'kl')
    """
    return words if len(words) <= length else words[: length - 1] + "…"


def readable(value: float) -> str:
    """Writes a number with four digits, zeros at the end included; '-' for NaN.

    >>> readable(5.45194), readable(6.95), readable(0.00123456), readable(0.0), readable(1234567.0), readable(float("nan"))
    ('5.452', '6.950', '0.001235', '0', '1.235e+06', '-')
    """
    if math.isnan(value):
        return "-"
    if not value:
        return "0"
    return f"{value:.0f}" if 999.5 <= abs(value) < 1e5 else f"{value:#.4g}"


def _attribute(value: str | float) -> str:
    return html.escape(value) if isinstance(value, str) else f"{round(value, 1):g}"
