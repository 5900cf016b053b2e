"""What parts of a model and server optimisers go together with: each cell of a page is tried.

.venv/bin/python tests/support/combination_table.py      # writes docs/combinations.md anew
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kept_state import SPEC, Life, Tables, config_of
from trained_table import COLUMNS, ROWS, trained

from anabranch.core import events as ev
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.updates import Capability
from anabranch.host.build import Blueprint
from anabranch.host.rollback import check_rollback
from anabranch.server.verify import verify
from anabranch.testing.models import tensors

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
MIDDLE, END = 12, 24  # turns of devices; the server is killed in the middle
WORKS, REFUSED = "works", "refused"
HEADINGS, WHY = ("## On a server", "## On devices"), "## Why not"


def _strategy(name: str, **params: Any) -> dict[str, Any]:
    return {"strategy": {"name": name, **params}}


def _planner(name: str, **more: Any) -> dict[str, Any]:
    return {"submodel": {"name": name, **more}}


NESTEROV = {"name": "nesterov", "lr": 0.5, "momentum": 0.5}
FRAGMENTS = _planner("fragments", parts=3)
GROWN = {**_planner("progressive", warm_up_versions=1, grow_at=(0.05, 0.1)), "run": {"versions_max": 40}}
STAGED = ParamSpec.of(
    tensors(),
    stages=[
        ModelStage("hidden.weight", "hidden.bias"),
        ModelStage("lstm.weight_hh", "lstm.bias"),
        ModelStage("out.weight", "out.bias"),
    ],
)
BUFFER, ROUNDS = (
    _strategy("fedbuff", buffer_size=3),
    _strategy("fedavg", clients_per_round=3, deadline_s=10.0),
)
STREAMING = {"client": {"push": "elastic", "push_when": "interval", "merge": "blend", "merge_weight": 0.5}}
SYSTEMS: dict[str, Tables] = {
    "`fedbuff`, whole models": BUFFER,
    "`fragments`, `fedbuff`": {**BUFFER, **FRAGMENTS},
    "`fragments`, `qafel`": {**_strategy("qafel", buffer_size=3), **FRAGMENTS},
    "`fragments`, `fedavg`": {**ROUNDS, **FRAGMENTS},
    "`fragments`, `teasq_drop`": {**_strategy("teasq_drop", cache_size=3), **FRAGMENTS},
    "`fragments`, `delayed_nesterov`": {**_strategy("delayed_nesterov", buffer_size=3), **FRAGMENTS},
    "`progressive`, `fedbuff`": {**BUFFER, **GROWN},
    "`progressive`, `fedavg`": {**ROUNDS, **GROWN},
    "`progressive`, `teasq_drop`": {**_strategy("teasq_drop", cache_size=3), **GROWN},
    "`alternate`, `fedbuff`": {**BUFFER, **_planner("alternate", turns=["hidden.*", "lstm.*"], period=2)},
    "Streaming DiLoCo": {**_strategy("fedasync", alpha=0.5), **FRAGMENTS, **STREAMING},
    "`fedbuff`, Nesterov": _strategy("fedbuff", buffer_size=3, outer=NESTEROV),
    "`fedavg`, Adam": {"strategy": {**ROUNDS["strategy"], "outer": {"name": "adam", "lr": 0.05}}},
    "`delayed_nesterov`": _strategy("delayed_nesterov", buffer_size=3),
    "`phased`": _strategy(
        "phased",
        phases=[
            {"strategy": "fedavg", "clients_per_round": 2, "deadline_s": 10.0, "until_versions": 1},
            {"strategy": "fedbuff", "buffer_size": 2},
        ],
    ),
    "`ist`, `fedavg`": {**ROUNDS, **_planner("ist", parts=2)},
    "`heterofl`, `fedbuff`": {**BUFFER, **_planner("heterofl")},
    "`asyncdrop`": _strategy("asyncdrop"),
    "`teasq_drop`": _strategy("teasq_drop", cache_size=3),
}
ROLLBACK, PRIVACY = "rollback", "privacy"
FEATURES: dict[str, Tables] = {
    "`int4`": {"uplink": {"codec": "int4(256)|zstd"}},
    "`topk`": {"uplink": {"codec": "topk(0.5)|int8(256)|gaps|zstd"}},
    "error feedback": {"uplink": {"codec": "ef(0.9)|topk(0.5)|int8(256)|gaps|zstd"}},
    "delta log": {"downlink": {"codec": "log(1)"}},
    "chain downlink": {"downlink": {"codec": "int8(256)|zstd"}},
    "robust rule": {"robust": {"rule": "centred_clipping", "clip": 3.0}},
    "cut": {"robust": {"clip": 3.0}},
    ROLLBACK: {},
    PRIVACY: {"privacy": {"noise": 1.0, "clip": 1.0}, "model": {"buffers": "local"}},
}


def spec_of(tables: Tables) -> ParamSpec:
    """The model of the kept servers; for a run that grows it, in three stages, of which none has a buffer."""
    return STAGED if tables.get("submodel") == GROWN["submodel"] else SPEC


def refusal(system: str, feature: str) -> str:
    """Why a server of that cell does not begin, or its rollback is not taken; empty where both are."""
    tables = {**SYSTEMS[system], **FEATURES[feature]}
    try:
        engine = Blueprint.of(config_of("", tables), spec_of(tables), key=bytes(32)).engine(tensors())
        if feature == ROLLBACK:
            engine.handle(ev.Enrolled(0.0, "device-4", Capability()))
            check_rollback(engine, ev.RolledBack(0.0, 0, 0, ("device-4",)))
    except ConfigError as error:
        return str(error)
    return ""


def tried(system: str, feature: str) -> str:
    """What comes of a cell: empty where it works, else why it is refused.

    Works: it makes versions; a server that is killed in the middle stands where it stood, and ends with the
    model of one that was not; its log replays. Raises `AssertionError` for a cell that is neither.
    """
    if why := refusal(system, feature):
        return why
    tables = {**SYSTEMS[system], **FEATURES[feature]}
    with tempfile.TemporaryDirectory() as unbroken, tempfile.TemporaryDirectory() as killed:
        found = _played(tables, Path(unbroken), feature == ROLLBACK, kill=False)
        again = _played(tables, Path(killed), feature == ROLLBACK, kill=True)
        told = 1 if feature == PRIVACY else 2  # the noise of each run is another
        assert again[:told] == found[:told], (system, feature)
        assert verify(Path(killed), whole=True).problems == (), (system, feature)
    return ""


def _played(tables: Tables, folder: Path, rolls_back: bool, kill: bool) -> tuple[int, str]:
    """The version and the digest of the model that a run ends with."""
    tables = {**tables, "server": {"data_dir": str(folder)}}
    life = Life("", folder, tables, spec_of(tables))
    try:
        life.play(0, MIDDLE)
        if rolls_back:
            life.tell(ev.RolledBack(life.now, max(0, life.books.engine.version - 1), 0, ("device-4",)))
        if kill:
            stood = life.expected
            life.close()
            life = Life("", folder, tables, spec_of(tables))
            assert life.expected == stood
        life.play(MIDDLE, END)
        assert life.books.engine.version > 1
        return life.expected["version"], life.expected["model_sha256"]
    finally:
        life.close()


@dataclass(frozen=True)
class Grid:
    """A table of the page: `tried(row, column)` says what comes of a cell, see `tried` below."""

    rows: Collection[str]
    columns: Collection[str]
    tried: Callable[[str, str], str]

    @property
    def head(self) -> str:
        """The table's first line."""
        return f"| | {' | '.join(self.columns)} |"


GRIDS = (Grid(SYSTEMS, FEATURES, tried), Grid(ROWS, COLUMNS, trained))


Reasons = dict[str, dict[str, list[str]]]  # by their texts: the columns that are refused, by row


def nameless(why: str) -> str:
    """A refusal as the page has it, once for all strategies and planners that are refused so."""
    return re.sub(r"(strategy|submodel\.name(?: =| is)) '\w+'", r"\1 NAME", why)


def lines_of(grid: Grid, why: Reasons) -> list[str]:
    """The lines of its table; why cells are refused goes into `why`."""
    table = [grid.head, "|---" * (len(grid.columns) + 1) + "|"]
    for row in grid.rows:
        reasons = {column: grid.tried(row, column) for column in grid.columns}
        cells = [REFUSED if reasons[column] else WORKS for column in grid.columns]
        table.append(f"| {row} | {' | '.join(cells)} |")
        for column, text in reasons.items():
            if text:
                why.setdefault(nameless(text), {}).setdefault(row, []).append(column)
    return table


def lines_of_reasons(why: Reasons) -> list[str]:
    """A line for each: `- row with column, column; row with column: text`."""
    where = {
        text: "; ".join(f"{row} with {', '.join(columns)}" for row, columns in rows.items())
        for text, rows in why.items()
    }
    return [f"- {cells}: {text}" for text, cells in where.items()]


def reasons_in(lines: Iterable[str]) -> Reasons:
    """The inverse."""
    found: Reasons = {}
    for line in lines:
        if line.startswith("- "):
            cells, _, text = line.removeprefix("- ").partition(": ")
            assert text not in found, text
            rows = (cell.split(" with ") for cell in cells.split("; "))
            found[text] = {row: columns.split(", ") for row, columns in rows}
    return found


def main() -> None:
    """Write the tables into the page."""
    lines, why = PAGE.read_text(encoding="utf-8").splitlines(), Reasons()
    for heading, grid in zip(HEADINGS, GRIDS, strict=True):
        table = lines_of(grid, why)
        start = next(i for i in range(lines.index(heading), len(lines)) if lines[i].startswith("| "))
        end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
        lines[start:end] = table
    until = lines.index(WHY)
    PAGE.write_text("\n".join([*lines[:until], WHY, "", *lines_of_reasons(why), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
