"""A run's folder as a source: what it left, or what it still writes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from safetensors import safe_open

from anabranch.cockpit.source import Head, State
from anabranch.core.config.goal import Goal
from anabranch.core.errors import DataError, UnknownVersion
from anabranch.reports.journal_files import INITIAL, JOURNAL, PAYLOAD_FOLDER
from anabranch.reports.models import BEST, FINAL
from anabranch.reports.picture.happening import of_lines
from anabranch.reports.picture.picture import FOLDED_AT_ONCE, Picture
from anabranch.reports.recorder import EVENTS_FILE
from anabranch.reports.result import RESULT_FILE

LOOK_S = 0.1  # so often it is looked whether a file has grown
SILENT_S = 120.0  # a run that has written nothing for so long, and left no result, was killed


class RunFolder:
    """See `Source`. A folder has no orders."""

    orders, operator = None, ""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name or folder.resolve().name
        self._read: tuple[float, dict[str, Any]] | None = None

    def head(self) -> Head:
        """What `result.json` says, or the head of the journal of a run that has none yet."""
        result = self._result()
        return self._ended(result) if result is not None else self._going_on()

    def changed(self) -> None:
        """A folder takes no orders, and is read at each look."""

    def follow(self, picture: Picture, stop: threading.Event, caught_up: Callable[[], None]) -> None:
        """Read `events.jsonl` to its end, and on as long as it grows. Raises `DataError`."""
        path = self.folder / EVENTS_FILE
        if not path.is_file():
            raise DataError(f"{path} is missing: the run has left no record of what happened")
        if (result := self._result()) is not None and result["updates_applied"] and not path.stat().st_size:
            raise DataError(f"{path} is empty, and the run had updates: put its copy back")
        with path.open("rb") as file:
            rest = b""
            while True:
                over = self._over()  # asked before the rest is read, so that nothing is missed
                rest = _read_on(file, rest, picture, stop)
                caught_up()
                if over or stop.wait(LOOK_S):
                    return

    def server(self, picture: Picture) -> None:
        """A folder has no server."""

    @contextmanager
    def export(self, version: int | None) -> Iterator[Path]:
        """The last version, or the best one, which the run has left. Raises `UnknownVersion`."""
        held = {
            _version_of(path): path for path in (self.folder / BEST, self.folder / FINAL) if path.is_file()
        }
        wanted = max(held, default=0) if version is None else version
        if wanted not in held:
            which = " and ".join(map(str, sorted(held))) or "none"
            raise UnknownVersion(f"version {wanted} is not in {self.folder}: it has kept {which}")
        yield held[wanted]

    def _over(self) -> bool:
        return (self.folder / RESULT_FILE).is_file() or self._silent_s() > SILENT_S

    def _silent_s(self) -> float:
        """Who writes now writes at this clock's now: a time to come is of before it was set back."""
        path = self.folder / EVENTS_FILE
        return abs(time.time() - path.stat().st_mtime) if path.is_file() else SILENT_S * 2

    def _result(self) -> dict[str, Any] | None:
        path = self.folder / RESULT_FILE
        try:
            changed = path.stat().st_mtime
            if self._read is None or self._read[0] != changed:
                found = json.loads(path.read_text(encoding="utf-8"))
                self._read = changed, {key: found[key] for key in found if key not in HEAVY}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        return self._read[1]

    def _ended(self, result: Mapping[str, Any]) -> Head:
        config = dict(result["config"])
        goal = Goal(result.get("metric", "auto"), result.get("mode", "auto"), result.get("target"))
        state: State = "interrupted" if result.get("status") == "interrupted" else "finished"
        best = result.get("best_value")
        return Head(
            name=_name_of(config, self.name),
            strategy=result["strategy"],
            workload=result["workload"],
            kind=result["kind"],
            seed=result["seed"],
            state=state,
            why=result.get("given_up") or result.get("why", ""),
            given_up=bool(result.get("given_up")),
            config=config,
            started_at=_moment(result.get("started_at", "")),
            updates=result["updates_applied"],
            version=result["versions"],
            goal=goal,
            best=result.get("best_accuracy") if best is None else best,
            uptime_s=result.get("virtual_s") or result["wall_s"],
        )

    def _going_on(self) -> Head:
        """Of a run without a result: its journal begins with its settings."""
        config, first = _settings_of(self.folder / JOURNAL), self.folder / INITIAL
        run = config.get("run", {})
        silent = self._silent_s() > SILENT_S
        return Head(
            name=_name_of(config, self.name),
            strategy=config.get("strategy", {}).get("name", ""),
            workload=run.get("workload", ""),
            # Over Flower's Grid: a simulation keeps no update in a file of its own.
            kind="live" if (self.folder / PAYLOAD_FOLDER).is_dir() else "simulated",
            seed=run.get("seed", 0),
            state="interrupted" if silent else "running",
            why="it has left no result: it was killed, perhaps" if silent else "",
            config=config,
            started_at=first.stat().st_mtime if first.is_file() else None,
            goal=Goal.of_json(config),
        )


# What a list of runs can do without, and a result of a large fleet is mostly made of.
HEAVY = ("clients", "history", "coverage", "fairness", "rejections")


def _read_on(file: IO[bytes], rest: bytes, picture: Picture, stop: threading.Event) -> bytes:
    """Fold the whole lines that have come; returns what there is of the next one."""
    for found, left in of_lines(file, rest):
        rest = left
        for at in range(0, len(found), FOLDED_AT_ONCE):
            picture.tell(found[at : at + FOLDED_AT_ONCE])
        if stop.is_set():
            break
    return rest


def _settings_of(journal: Path) -> dict[str, Any]:
    """The configuration in the first line of a journal; empty where there is none. Raises `DataError`."""
    try:
        with journal.open(encoding="utf-8") as file:
            head = json.loads(file.readline() or "{}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{journal} cannot be read: {error}") from error
    return dict(head.get("config", {}))


def _version_of(path: Path) -> int:
    """The version of a model's file, which says so of itself."""
    with safe_open(path, framework="numpy") as file:
        return int((file.metadata() or {}).get("version", 0))


def _name_of(config: Mapping[str, Any], name: str) -> str:
    return str(config.get("run", {}).get("name") or name)


def _moment(text: str) -> float | None:
    """Unix seconds of an ISO 8601 text; None for an empty one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
