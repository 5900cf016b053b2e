"""Curves as a figure: in a notebook, or as a file. The drawing is that of the reports."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.core.errors import ConfigError
from anabranch.reports.compare import Against, comparison_svg
from anabranch.reports.drawings import png
from anabranch.reports.result import Result

WIDTH_PX = 520


@dataclass(frozen=True)
class Figure:
    """A drawing as the text of an SVG file, which needs nothing else; light or dark as its reader has it."""

    svg: str = field(repr=False)
    title: str = ""

    def save(self, path: str | Path) -> Path:
        """Write it as an .svg, or as a .png of its light colours.

        Raises `ConfigError` for another kind of file, and for a PNG without resvg.
        """
        where = Path(path)
        match where.suffix:
            case ".svg":
                where.write_text(self.svg, encoding="utf-8")
            case ".png":
                where.write_bytes(png(self.svg))
            case _:
                raise ConfigError(f"{where}: a figure is an SVG or a PNG: end the name with .svg or .png")
        return where

    def _repr_html_(self) -> str:
        # As an image: the style of one drawing must not reach the page around it.
        data = base64.b64encode(self.svg.encode()).decode()
        style = f"width:100%;max-width:{WIDTH_PX}px"
        return f'<img alt="{self.title}" style="{style}" src="data:image/svg+xml;base64,{data}">'


def curves(results: Sequence[Result], against: Against = "time", metric: str = "") -> Figure:
    """The curves of runs of one workload; what differs in the seed alone is a mean with a band.

    Raises `DataError`.
    """
    return Figure(comparison_svg(results, against, metric), f"{metric or 'what counts'} over {against}")
