"""What an engine learned from each update of a server's log: nothing, where it was refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anabranch.core.config.tables import Config
from anabranch.core.engine.engine import Engine
from anabranch.core.model.params import digest
from anabranch.core.snapshot import take_snapshot
from anabranch.host.build import Blueprint
from anabranch.host.journal import Replay
from anabranch.server.store.factory import open_store
from anabranch.server.verify import stored_run


@dataclass(frozen=True)
class Recorded:
    """An update of the log: its flaw ("" for none), and whether anything was learned from it."""

    flaw: str
    learned: bool


def learned(engine: Engine) -> str:
    """All that an update may change: the model, the states of strategy and planner, what devices hold."""
    snapshot = take_snapshot(engine, copy=False)
    names = ("version", "pending", "strategy", "broadcast", "planner")
    kept = {name: snapshot.meta[name] for name in names}
    arrays = {name: digest(array) for name, array in sorted(snapshot.arrays.items())}
    return json.dumps([kept, arrays, engine.counters.applied], sort_keys=True)


def recorded(data_dir: Path) -> dict[str, Recorded]:
    """The updates of a log, by id."""
    store, found = open_store("", data_dir), {}
    try:
        info, manifest = stored_run(store, data_dir)
        begin = partial(Blueprint.of(Config.from_json(info.config), manifest.spec).engine, manifest.tensors)
        replay = Replay(store, begin, receipt=store.receipt)
        before = learned(replay.engine)
        for _, record, _ in replay:
            after = learned(replay.engine)
            if record["kind"] == "update":
                found[record["update_id"]] = Recorded(record["flaw"], before != after)
            before = after
    finally:
        store.close()
    return found
