"""Rows of figures, as what people work on them with: plain dictionaries, pandas, polars."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from anabranch.core.config.extras import how_to_install
from anabranch.core.errors import ConfigError
from anabranch.reports.text import NOTHING

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

ROWS_SHOWN = 20


class Records(Sequence[Mapping[str, Any]]):
    """Rows with named columns, in order; every row has every column, with None where it has no value.

    A sequence of mappings, and a frame of whichever library is there.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], columns: Iterable[str] = ()) -> None:
        found = list(rows)
        names = dict.fromkeys([*columns, *(name for row in found for name in row)])
        self.columns = tuple(names)
        self._rows: list[dict[str, Any]] = [{name: row.get(name) for name in names} for row in found]

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice | str) -> Mapping[str, Any] | Records:
        if isinstance(index, slice):
            return Records(self._rows[index], self.columns)
        if isinstance(index, str):
            raise TypeError(f"rows go by their numbers; of a column write .column({index!r})")
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)

    def column(self, name: str) -> list[Any]:
        """The values of one column. Raises `KeyError`."""
        if name not in self.columns:
            raise KeyError(f"there is no column {name!r}: there are {', '.join(self.columns)}")
        return [row[name] for row in self._rows]

    def to_pandas(self) -> pd.DataFrame:
        """A `pandas.DataFrame`. Raises `ConfigError`, which says how to install pandas."""
        frame: pd.DataFrame = _library("pandas").DataFrame(self._columns())
        return frame

    def to_polars(self) -> pl.DataFrame:
        """A `polars.DataFrame`. Raises `ConfigError`, which says how to install polars."""
        frame: pl.DataFrame = _library("polars").DataFrame(self._columns(), infer_schema_length=None)
        return frame

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows as a CSV file, with the names of the columns in its first line."""
        where = Path(path)
        with where.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self._rows)
        return where

    def _columns(self) -> dict[str, list[Any]]:
        return {name: self.column(name) for name in self.columns}

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        shown = self._rows[:ROWS_SHOWN]
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        lines = "".join(f"<tr>{''.join(_cell(value) for value in row.values())}</tr>" for row in shown)
        more = f"<p>{len(self) - len(shown)} more rows</p>" if len(self) > len(shown) else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>{more}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"<td>{value:.6g}</td>"
    return f"<td>{NOTHING if value is None else escape(str(value))}</td>"


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(f"{name} is not installed: {how_to_install(name)}") from None
