"""A chart for programs that know of CSS what SVG needs and no more: its colours in the place of variables."""

from __future__ import annotations

import re
from functools import cache

from anabranch.core.config.extras import how_to_install
from anabranch.core.errors import ConfigError
from anabranch.reports.page import resource
from anabranch.reports.svg import COLOURS

_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)
HUE, PAPER = "--hue", "#ffffff"
PIXELS_WIDE = 1600


def plain_svg(svg: str) -> str:
    """A chart that stands alone, light, with plain colours."""
    return _STYLE.sub(lambda _: f"<style>{_plain_style()}</style>", svg)


def png(svg: str) -> bytes:
    """The chart as a PNG, on white. Raises `ConfigError` without resvg."""
    try:
        import resvg_py
    except ModuleNotFoundError as error:
        raise ConfigError(f"a PNG needs resvg: {how_to_install('resvg_py')}; an SVG does not") from error
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=plain_svg(svg), width=PIXELS_WIDE, background=PAPER, sans_serif_family="DejaVu Sans"
        )
    )


@cache
def _plain_style() -> str:
    """The rules of style.css that are of charts, in its light colours."""
    css = resource("style.css")
    first = css[css.index("{") + 1 : css.index("}")]
    known = dict(re.findall(r"(--[\w-]+):\s*([^;]+);", first))
    rules = []
    for selectors, body in _RULE.findall(css):
        names = [name.strip() for name in selectors.split(",")]
        if not all(name.startswith("svg ") for name in names):
            continue
        for i in range(COLOURS if f"var({HUE})" in body else 1):
            colours = {**known, HUE: known[f"--c{i}"]}
            of = f".c{i}" if f"var({HUE})" in body else ""
            plain = body
            for variable, colour in colours.items():
                plain = plain.replace(f"var({variable})", colour)
            rules.append(f"{', '.join(name + of for name in names)} {{{plain}}}")
    return "\n".join(rules)
