"""Text that came from elsewhere, as a terminal and a log may show it."""

from __future__ import annotations

import unicodedata

LAYOUT = "\n\t"
_CONTROL = ("Cc", "Cs", "Zl", "Zp")  # of Unicode: what moves a cursor, or ends a line
_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # what has text read backwards


def visible(text: str, kept: str = "") -> str:
    r"""The text with its control characters, but for those `kept`, as escapes: `\x1b`."""
    return text if text.isprintable() else "".join(c if c in kept else _shown(c) for c in text)


def _shown(c: str) -> str:
    hidden = unicodedata.category(c) in _CONTROL or unicodedata.bidirectional(c) in _TURNING
    return c.encode("unicode_escape").decode() if hidden else c
