"""What older releases have left on disks, and must be read for ever: it is in tests/golden/state.tar.gz.

    python tests/support/kept_state.py

adds what has a new name here, made by the tree as it is. The rest stays as an older one left it: where a
format changes, a new name beside the old one has it.

Servers' data in the middle of a run, with a snapshot before the end of the log; folders of simulated runs; a
device's outbox. `expected.json` has the digests of all of it. What a server has lived through is a function
of the names here, so the folders of every strategy hold what that strategy has to remember.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.client.outbox import Outbox, UpdateEntry
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import Granted
from anabranch.core.limits import Limits
from anabranch.core.model.chains import payload_codec
from anabranch.core.model.params import ParamSpec, digest
from anabranch.core.model.updates import Ask, Capability, LocalPlan, Task, Update
from anabranch.core.retention import Keep
from anabranch.core.snapshot import state_digest
from anabranch.host.build import Blueprint
from anabranch.protos.convert import submodel_to_proto
from anabranch.server.app import every_of
from anabranch.server.books import Books, Call
from anabranch.server.manifest import Manifest, keep_manifest, kept_manifest
from anabranch.server.models import Models
from anabranch.server.recovery import recover, refolder
from anabranch.server.store.factory import open_store
from anabranch.simulation.run import simulate
from anabranch.testing.models import GROUPS, tensors
from anabranch.workloads.app import App, Examples, Shard

ARCHIVE = Path(__file__).parents[1] / "golden" / "state.tar.gz"
LIMITS = Limits(free_disk_bytes_min=0)
TURNS, SAVED_AT = 90, 60
SPEC = ParamSpec.of(tensors(), GROUPS, buffers=("out.bias",))
CODECS = ("raw", "f32", "int8", "int4", "topk", "gaps", "bitmap", "zstd", "bf16", "huffman", "deadzone")

Tables = Mapping[str, Mapping[str, Any]]
SERVERS: dict[str, Tables] = {
    "fedbuff": {
        "strategy": {"name": "fedbuff", "buffer_size": 4, "momentum": 0.5, "flush_s": 30.0},
        "robust": {"rule": "centred_clipping", "clip": 3.0, "window_max": 40, "tasks_per_minute": 500.0},
        "uplink": {"codec": "topk(0.5)|int8(256)|gaps|zstd"},
    },
    "fedavg": {
        "strategy": {"name": "fedavg", "clients_per_round": 4, "deadline_s": 20.0},
        "submodel": {"name": "heterofl"},
    },
    "fedavg-median": {
        "strategy": {"name": "fedprox", "clients_per_round": 4},
        "robust": {"rule": "median"},
        "submodel": {"name": "random"},
    },
    "qafel": {"strategy": {"name": "qafel", "buffer_size": 3}},
    "asyncdrop": {"strategy": {"name": "asyncdrop"}, "model": {"buffers": "latest"}},
    "fedasync": {"strategy": {"name": "fedasync"}, "submodel": {"name": "ist", "parts": 3}},
    "teasq": {
        "strategy": {"name": "teasq", "cache_size": 4, "cap": 4, "mode": "paper", "flush_s": 40.0},
    },
    "teasq_drop": {
        "strategy": {"name": "teasq_drop", "cache_size": 4, "cap": 4},
        "robust": {"rule": "centred_clipping"},
        "submodel": {"name": "fedrolex"},
    },
    "aced": {"strategy": {"name": "aced", "staleness_max": 6}},
    "ca2fl": {"strategy": {"name": "ca2fl", "buffer_size": 4}},
    "scheduled": {"strategy": {"name": "fedbuff", "buffer_size": 3, "scheduler": {"name": "equal_time"}}},
}
RUNS: dict[str, Tables] = {
    "kept": {"strategy": {"name": "fedbuff", "buffer_size": 2}, "submodel": {"name": "none"}},
    "again": {"strategy": {"name": "teasq"}, "run": {"keep_payloads": False}},
}
SIZE = {"run": {"updates_max": 12}, "fleet": {"examples_per_client": 40, "clients": 4}}


class Additions(App):
    """Training that is exact, and so the same on every kind of processor: products and powers are not."""

    name = "additions"

    def model(self) -> dict[str, Any]:
        """Zeros."""
        return {"w": np.zeros(300, np.float32)}

    def data(self, shard: Shard) -> Examples:
        """As many as are asked for."""
        return Examples(np.zeros((400, 1), np.float32), np.zeros(400, np.int64))

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        """Sixteenths are added."""
        model["w"] += np.random.default_rng(seed).integers(-8, 9, 300).astype(np.float32) / 16
        return {"loss": 1.0}

    def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
        """Nothing is learned."""
        return {"accuracy": 0.5}


APPS = {"kept": None, "again": Additions()}


def config_of(name: str, tables: Tables | None = None) -> Config:
    """The settings of a server: those of its name, or others."""
    base = {"server": {"lease_s": 15.0, "lease_min_s": 5.0, "snapshot_every_versions": 0}}
    every = {"server": {"snapshot_every_updates": 0, "snapshot_every_events": 0}}
    return merge([("base", base), ("every", every), ("name", SERVERS[name] if tables is None else tables)])


class Life:
    """A server without a network over a data folder; to open it again is to recover."""

    def __init__(self, name: str, folder: Path, tables: Tables | None = None, spec: ParamSpec = SPEC) -> None:
        self.folder, self.spec = folder, spec
        self.store, config = open_store("", folder, LIMITS), config_of(name, tables)
        manifest = Manifest("test", spec, tensors())
        self.found = recover(self.store, config, manifest, LIMITS, wall=lambda: 1_000_000.0)
        keep_manifest(kept_manifest(folder), manifest)
        self.models = Models(folder / "models", spec, manifest.frozen)
        place = (self.found.seq, self.found.saved, self.found.history)
        engine = self.found.engine
        self.books = Books(
            engine, self.store, self.models, every_of(config), *place, LIMITS, Keep.of(config.server.keep)
        )
        self.begin = partial(self.found.blueprint.engine, manifest.tensors)
        self.books.refold = refolder(self.store, self.begin)
        self.now = self.found.last_now

    @property
    def expected(self) -> dict[str, Any]:
        """The digests of where it stands."""
        engine = self.books.engine
        lines = "\n".join(json.dumps(r, sort_keys=True) for _, r in self.store.records(0))
        return {
            "state_sha256": state_digest(engine),
            "model_sha256": digest(engine.vector),
            "version": engine.version,
            "log_sha256": hashlib.sha256(lines.encode()).hexdigest(),
        }

    def close(self) -> None:
        """As a server is killed: no last snapshot."""
        self.models.close()
        self.store.close()

    def tell(self, event: ev.Event, inline: bytes | None = None) -> Call:
        """One event in a batch of its own."""
        call = Call(event, inline)
        if isinstance(event, ev.RolledBack):
            call.folding = self.books.begin_rollback(event)
        self.books.commit([call])
        if call.error is not None:
            raise call.error
        return call

    def play(self, first: int, last: int) -> None:
        """So many turns, each of one device, and what operators do now and then."""
        rng = np.random.default_rng(first)
        for number in range(first, last):
            self.now += float(rng.integers(1, 8)) / 4.0
            self.order(number)
            self.turn(f"device-{number % 7}", number, rng)

    def order(self, number: int) -> None:
        at, rolls_back = self.now, self.books.engine.strategy.rolls_back
        said = {"client.learning_rate": 0.01, "robust.clip": 2.5, "server.tasks_per_client": 2}
        orders: dict[int, list[ev.Event]] = {
            0: [self.enrolled(n) for n in range(7)],
            10: [ev.Paused(at), ev.Resumed(at)],
            20: [ev.Quarantined(at, "device-6", "looks odd"), ev.Released(at, "device-6")],
            25: [ev.SettingsChanged(at, said, "operator of a test", at_start=False)],
            40: [ev.RolledBack(at, 2, 0, ("device-5",))] if rolls_back else [],
            70: [self.enrolled(3, examples=77), ev.Quarantined(at, "device-5", "odd again")],
            75: ([ev.RolledBack(at, self.books.engine.version - 1, 0, ("device-4",))] if rolls_back else []),
        }
        for event in orders.get(number, []):
            self.tell(event)
        if number % 12 == 7:
            self.tell(ev.Ticked(self.now))

    def enrolled(self, number: int, examples: int = 10) -> ev.Enrolled:
        said = Capability(examples * (number + 1), number % 3 << 30, 1e6, accelerator="cpu", codecs=CODECS)
        return ev.Enrolled(self.now, f"device-{number}", said)

    def turn(self, client: str, number: int, rng: np.random.Generator) -> None:
        asked = self.tell(ev.TaskAsked(self.now, Ask(client, f"task-{number}", number % 3 or None)))
        granted = [e.task for e in asked.effects if isinstance(e, Granted)]
        for task in granted:
            self.tell(ev.LeaseRenewed(self.now + 0.5, client, task.task_id, 6.0))
        open_tasks = [t for t in self.books.engine.ledger.tasks.values() if t.client_id == client]
        if not open_tasks or number % 5 == 4:  # some are left open
            return
        task = open_tasks[0]
        if number % 17 == 11:
            diverged = number % 2 == 0
            self.tell(ev.TaskDropped(self.now + 1.0, client, task.task_id, "the battery is low", diverged))
        else:
            self.push(task, number, rng)

    def push(self, task: Task, number: int, rng: np.random.Generator) -> None:
        codec, layout = make_codec(text := payload_codec(task.uplink)), Layout.of(self.spec, task.submodel)
        values = (rng.integers(-64, 64, layout.size) / 512.0).astype(np.float32)
        data = codec.encode(values, layout, number)
        delta = codec.decode(data, layout)
        flaw = "delta has 3 values that are not finite" if number % 23 == 19 else ""
        update = Update(
            update_id=f"update-{number}",
            task_id=task.task_id,
            client_id=task.client_id,
            base_version=task.base_version,
            examples=3 + number % 4,
            delta=np.empty(0, np.float32) if flaw else delta,
            submodel=task.submodel,
            local_steps=5,
            metrics={"train_s": 0.25 * (1 + number % 3), "loss": 1.0 / 3.0},
        )
        payload = ev.Payload(hashlib.sha256(data).hexdigest(), len(data), text, layout.size)
        self.tell(ev.UpdateArrived(self.now + 1.0, update, payload, flaw, other_base=number == 33), data)


def entries(manifest_sha256: str) -> list[UpdateEntry]:
    """What a device has in its outbox: of a whole model, of a part of it, of a model it knows by its head."""
    common: dict[str, Any] = {"manifest_sha256": manifest_sha256, "examples": 9, "local_steps": 4}
    data = np.arange(8, dtype=np.float32).tobytes()
    units = Blueprint.of(config_of("asyncdrop"), SPEC).engine(tensors())
    units.handle(ev.Enrolled(0.0, "device-0", Capability()))
    (granted,) = units.handle(ev.TaskAsked(0.0, Ask("device-0", "task-0")))
    assert isinstance(granted, Granted)
    assert granted.task.submodel is not None
    part = submodel_to_proto(granted.task.submodel)
    told: dict[str, Any] = {"metrics": {"train_s": 0.1}, "base_head": "ab" * 32}
    rest: dict[str, Any] = {"codec": "topk(0.5)|f32|gaps|zstd", "payload": data, "values": 8}
    return [
        UpdateEntry("update-a", "task-a", base_version=3, codec="raw", payload=data, values=8, **common),
        UpdateEntry("update-b", "task-b", base_version=4, submodel=part, **rest, **common),
        UpdateEntry("update-c", "task-c", base_version=5, **rest, **common, **told),
    ]


def make(root: Path) -> None:
    """What is not there yet."""
    path = root / "expected.json"
    expected: dict[str, Any] = {"servers": {}, "runs": {}, "outbox": {}}
    if path.exists():
        expected = json.loads(path.read_text(encoding="utf-8"))
    for name in SERVERS.keys() - expected["servers"].keys():
        expected["servers"][name] = _server(name, root / "servers" / name)
    outbox = Outbox(root / "outbox")
    for entry in entries(SPEC.layout_hash):
        if entry.update_id not in expected["outbox"]:
            outbox.put(entry)
            data = (root / "outbox" / f"{entry.update_id}.update").read_bytes()
            expected["outbox"][entry.update_id] = hashlib.sha256(data).hexdigest()
    for name in RUNS.keys() - expected["runs"].keys():
        expected["runs"][name] = _run(name, root / "runs" / name)
    path.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def _server(name: str, folder: Path) -> dict[str, Any]:
    life = Life(name, folder)
    life.play(0, SAVED_AT)
    life.books.save(life.now)
    life.play(SAVED_AT, TURNS)
    life.books.project()
    found = life.expected
    life.close()
    return found


def _run(name: str, folder: Path) -> dict[str, Any]:
    config = merge([("size", SIZE), ("base", {"run": {"workload": "synthetic"}}), ("name", RUNS[name])])
    result = simulate(config, folder, APPS[name], keep_payloads=config.run.keep_payloads)
    return {key: getattr(result, key) for key in ("model_sha256", "journal_sha256")}


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without whose it is, and without what is made again of the rest."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return None if "/models/" in entry.name or entry.name.endswith(("best.safetensors", ".html")) else entry


def main() -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as folder:
        if ARCHIVE.exists():
            with tarfile.open(ARCHIVE) as archive:
                archive.extractall(folder, filter="data")
        make(Path(folder) / "state")
        with tarfile.open(ARCHIVE, "w:gz") as archive:
            archive.add(Path(folder) / "state", "state", filter=_plain)


if __name__ == "__main__":
    main()
