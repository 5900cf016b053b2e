"""Curves as a figure: in a notebook, or as a file. The drawing is that of the reports."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.core.errors import ConfigError
from anabranch.reports.compare import Against, comparison_svg
from anabranch.reports.result import Result

WIDTH_PX = 520


@dataclass(frozen=True)
class Figure:
    """A drawing as the text of an SVG file, which needs nothing else; light or dark as its reader has it."""

    svg: str = field(repr=False)
    title: str = ""

    def save(self, path: str | Path) -> Path:
        """Write it as an SVG file. Raises `ConfigError` for another kind of file."""
        where = Path(path)
        if where.suffix != ".svg":
            raise ConfigError(f"{where}: a figure is written as SVG: end the name with .svg")
        where.write_text(self.svg, encoding="utf-8")
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
