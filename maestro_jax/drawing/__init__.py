"""Drawings for notebooks: HTML and SVG as text, without a plotting library.

Objects of the package draw themselves (`_repr_html_`) with what is here. It knows graphs, schedules and plain numbers and nothing of
the runtime, so that `graph` and `schedules` may use it.

Text and lines take the colour of the page (`currentColor`), and the few other colours are of middle lightness: everything can be read
on light and on dark pages. Shapes have attributes only, no style sheets and no definitions, because sites that show stored notebooks
remove those.
"""

from __future__ import annotations
