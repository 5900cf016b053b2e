"""What was run: a file for each cell, a line of JSON for each run; a kill loses the run in hand alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.studies import Tables

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Record:
    """A run: whose, and what it came to. `key` is of its settings: another definition is another run.

    `accuracy`, or what else its cell is judged by, in %, the mean over the run's last fifth; `half` the same
    of the fifth before its middle. `worst_tenth`: of the devices at the end, each judged on the classes that
    it has. `curve`: seconds, accuracy in %, MB up, MB down at each evaluation; of tuning runs it is empty.
    """

    row: str
    setting: dict[str, float]
    share: float
    seed: int
    part: str
    key: str
    accuracy: float
    half: float
    worst_tenth: float | None
    updates: int
    versions: int
    staleness: float
    up_mb: float
    down_mb: float
    model_sha256: str
    curve: list[list[float]]

    @property
    def both_ways_mb(self) -> float:
        """Up and down, of all devices."""
        return self.up_mb + self.down_mb


def key_of(layers: Iterable[Tables]) -> str:
    """A digest of the settings that a run is given; those that it leaves at their defaults are no part of it.

    So what was run stays known when the product gets another setting.
    """
    said: dict[str, dict[str, Any]] = {}
    for table, keys in (item for layer in layers for item in layer.items()):
        said.setdefault(table, {}).update(keys)
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """The runs of one cell. Those whose definition has changed lie in the file, and nobody asks for them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records = {record.key: record for record in _read(path)}

    @classmethod
    def of(cls, cell: str, folder: Path = RESULTS) -> Store:
        """That of a cell, by its name."""
        return cls(folder / f"{cell.replace('/', '.')}.jsonl")

    def add(self, record: Record) -> None:
        """Written before this returns, in one piece."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        line = json.dumps(asdict(record), allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn and self._path.stat().st_size else "") + line + "\n")
        self.records[record.key] = record


def _read(path: Path) -> Iterator[Record]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by a kill: it is run again
        yield Record(**found)
