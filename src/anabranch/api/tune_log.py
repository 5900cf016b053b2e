"""`trials.jsonl`: what a tuning was asked, then every leg that has ended, a line each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from anabranch.api.halving import Leg
from anabranch.api.tune_legs import LegEnd
from anabranch.core.errors import ConfigError, DataError
from anabranch.reports.folders import TRIALS_FILE
from anabranch.reports.settings import told_apart
from anabranch.support.code import changed_code

LegKind = Literal["trial", "fresh"]
# In the plan. Those of older releases have no code, and their settings lack what came since.
CODE, CONFIG = "code", "config"


def _other_than(plan: Mapping[str, Any], line: str) -> str:
    """What a plan on record is of that this one is not, in words; empty if it is the same."""
    try:
        known = dict(json.loads(line))
        # Of legs that have ended nobody knows whom `auto` came to.
        settings = told_apart(known[CONFIG], plan[CONFIG], auto_is_any=False)
    except (ValueError, TypeError, KeyError, AttributeError):
        return "settings, ranges or options"
    if settings:
        return f"settings: {'; '.join(settings)}"
    if {**known, **{key: plan[key] for key in (CODE, CONFIG)}} != plan:
        return "ranges or options"
    changed = " and ".join(changed_code(known.get(CODE, {}), plan[CODE]))
    return f"code, as that of {changed} has changed" if changed else ""


class TuneLog:
    """The legs on record in a folder, of the tuning that `plan` says.

    A last line that was not written to its end is not there. Raises `ConfigError` where the folder has
    another tuning, or one of other `code` (a digest for each place), `DataError` where a line is damaged.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any], code: Mapping[str, str]) -> None:
        self._path, self._ends = folder / TRIALS_FILE, dict[tuple[LegKind, Leg], LegEnd]()
        first = json.dumps({"kind": "plan", **plan, CODE: code}, sort_keys=True, default=str)
        whole = self._whole_lines()
        if whole and (other := _other_than(json.loads(first), whole[0])):
            raise ConfigError(
                f"{folder} has another tuning, of other {other}; name another folder with --out (out=), or "
                "move that one away"
            )
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in whole or [first])
        part = self._path.with_suffix(".tmp")
        part.write_text(text, encoding="utf-8")
        part.replace(self._path)
        for number, line in enumerate(whole[1:], 2):
            self._take(line, number)

    def end(self, kind: LegKind, leg: Leg) -> LegEnd | None:
        """Where a leg has ended, if it has."""
        return self._ends.get((kind, leg))

    def add(self, kind: LegKind, leg: Leg, share: float, choice: Mapping[str, Any], end: LegEnd) -> None:
        """A leg has ended."""
        row = {"kind": kind, **vars(leg), "share": share, "choice": choice, **end.to_json()}
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row, default=str) + "\n")
        self._ends[kind, leg] = end

    def _whole_lines(self) -> list[str]:
        if not self._path.is_file():
            return []
        *whole, _ = self._path.read_text(encoding="utf-8").split("\n")
        return whole

    def _take(self, line: str, number: int) -> None:
        try:
            row = json.loads(line)
            leg = Leg(row["trial"], row["rung"], row["seed"])
            self._ends[row["kind"], leg] = LegEnd.from_json(row)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self._path}: line {number} is damaged: {error!r}; tune in another folder"
            ) from error
