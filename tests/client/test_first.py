"""`run.initial = "built"`: each device builds version 0, and all else is as where it is fetched."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents import SHARD
from frozen_apps import BASE_BYTES, HEAD_SIZE, Head
from live_server import live_server
from torch import nn

from anabranch.api.operated import first_model
from anabranch.client.agent import Agent
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.operator import OperatorClient
from anabranch.client.run import ClientOptions, run_client
from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.model.params import digest
from anabranch.core.rng import seed_of
from anabranch.core.rules import NEWEST
from anabranch.host.first import FirstModel
from anabranch.server.manifest import read_manifest
from anabranch.testing.federation import config
from anabranch.workloads.app import App
from anabranch.workloads.digits import Digits
from anabranch.workloads.synthetic import Synthetic
from anabranch.workloads.trainer import trainer_for

RAW_BYTES = 4 * 1002
Told = list[tuple[str, dict[str, Any]]]


class Normed(Digits):
    """64-16-10 with a norm, whose state has a number: how many batches it saw."""

    name = "normed-first"

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


class Drawn(Synthetic):
    """The same App, whose weights are drawn otherwise, as by another release of a framework."""

    def model(self, seed: int = 0) -> dict[str, Any]:
        return super().model(seed + 1)


def served(app: App, initial: str, **tables: Any) -> LocalServer:
    return LocalServer.of(app, config(**{"run": {"seed": 3, "initial": initial}} | tables))


def work(server: LocalServer, app: App, folder: Path, name: str = "a", tasks: int = 2) -> tuple[Told, int]:
    """What a device told, and the bytes that it fetched."""
    told: Told = []
    agent = Agent(
        app,
        LocalTransport(server, name),
        name,
        SHARD,
        folder / name,
        tasks_max=tasks,
        seed=7,
        on_event=lambda kind, **fields: told.append((kind, fields)),
    )
    return told, agent.run().downlink_bytes


def kinds(told: Told) -> list[str]:
    return [kind for kind, _ in told if kind in ("built", "fetched", "fetched_frozen", "failed")]


CASES: dict[str, tuple[type[App], dict[str, Any]]] = {
    "raw": (Synthetic, {}),
    "log": (Synthetic, {"downlink": {"codec": "log(1)"}}),
    "chain": (Synthetic, {"downlink": {"codec": "int8(64)"}}),
    "stochastic chain": (Synthetic, {"downlink": {"codec": "topk(0.5)|int4(64)"}}),
    "mixing, log": (Synthetic, {"downlink": {"codec": "log(2)"}, "strategy": {"name": "fedasync"}}),
    "sub-models": (Synthetic, {"strategy": {"name": "asyncdrop"}}),
    "sub-models, log": (Synthetic, {"strategy": {"name": "asyncdrop"}, "downlink": {"codec": "log(1)"}}),
    "frozen": (Head, {}),
    "torch, buffers, log": (Normed, {"downlink": {"codec": "log(1)"}}),
}


@pytest.mark.parametrize(("kind", "tables"), CASES.values(), ids=CASES.keys())
def test_the_run_is_that_of_who_fetches(kind: type[App], tables: dict[str, Any], tmp_path: Path) -> None:
    """To the bit, and without the bytes of version 0."""
    models, came = [], []
    for initial in ("sent", "built"):
        server, app = served(kind(), initial, **tables), kind()
        told, size = work(server, app, tmp_path / initial, tasks=3)
        assert ("built" in kinds(told)) == (initial == "built")
        assert "failed" not in kinds(told)
        first = [f["version"] for k, f in told if k == "fetched"]
        assert first[0] == (0 if initial == "sent" else 1)
        models.append({n: a.tobytes() for n, a in server.model().items()})
        came.append((size, sum(f["size_bytes"] for k, f in told if (k, f.get("version")) == ("fetched", 0))))
    assert models[0] == models[1]
    if kind is not Head:
        assert came[1][0] == came[0][0] - came[0][1]


def test_what_is_told_is_of_what_the_engine_has() -> None:
    for codec in ("raw", "log(1)", "int8(64)"):
        server = served(Synthetic(), "built", downlink={"codec": codec}, strategy={"name": "fedasync"})
        tensors, engine = trainer_for(Synthetic()).initial(seed_of(3, "initial")), server.engine
        vector = np.concatenate([tensors[t.name].ravel() for t in server.spec.tensors])
        if engine.broadcast is not None:
            replica = engine.broadcast.replica(engine.broadcast_state, 0)
            assert replica is not None
            vector = replica
        seed = seed_of(3, "initial")
        assert server.first is not None
        said = server.first.codec.partition("(")[0], server.first.seed, server.first.sha256
        assert said == (codec.partition("(")[0], seed, hashlib.sha256(vector.tobytes()).hexdigest()), codec
    assert served(Synthetic(), "sent").first is None


@pytest.mark.parametrize("rules", [0, NEWEST])
def test_who_builds_has_what_a_run_of_those_rules_serves(rules: int, tmp_path: Path) -> None:
    """An older run rounds `sr` by fewer bits, which no device does: who builds finds out and fetches."""
    models = []
    for initial in ("sent", "built"):
        tables = {
            "run": {"seed": 3, "initial": initial, "rules": rules},
            "downlink": {"codec": "int8(64,sr)"},
        }
        server = served(Synthetic(), initial, **tables, strategy={"name": "fedasync"})
        engine = server.engine
        assert engine.broadcast is not None
        replica = engine.broadcast.replica(engine.broadcast_state, 0)
        assert replica is not None
        if server.first is not None:
            assert server.first.sha256 == hashlib.sha256(replica.tobytes()).hexdigest()
        told, _ = work(server, Synthetic(), tmp_path / initial)
        built = ["built"] if rules else ["failed", "fetched"]
        assert kinds(told) == [*(["fetched"] if initial == "sent" else built), "fetched"]
        models.append(digest(server.engine.vector))
    assert models[0] == models[1]


def test_who_comes_late_takes_the_steps_of_the_log(tmp_path: Path) -> None:
    """From version 0 on, instead of a snapshot."""
    sizes = {}
    for initial in ("sent", "built"):
        server = served(Synthetic(), initial, downlink={"codec": "log(2)"})
        work(server, Synthetic(), tmp_path / initial, "a", tasks=2)
        told, _ = work(server, Synthetic(), tmp_path / initial, "b", tasks=1)
        (fetched,) = [fields for kind, fields in told if kind == "fetched"]
        assert fetched["from_version"] == (0 if initial == "built" else None)
        sizes[initial] = fetched["size_bytes"]
    assert sizes["built"] < sizes["sent"]


def test_what_is_frozen_is_built_as_well(tmp_path: Path) -> None:
    told, size = work(served(Head(), "built"), Head(), tmp_path, tasks=2)
    assert (kinds(told), size) == (["built", "fetched"], 4 * HEAD_SIZE)
    told, size = work(served(Head(), "built"), Head(seed=9), tmp_path / "other", tasks=2)
    assert (kinds(told), size) == (["built", "fetched_frozen", "fetched"], BASE_BYTES + 4 * HEAD_SIZE)


def test_a_device_whose_app_builds_other_weights_fetches(tmp_path: Path) -> None:
    """It says so once, and the run is what it is where everybody fetches."""
    models = []
    for initial, wanted in (("sent", ["fetched"] * 2), ("built", ["failed", "fetched", "fetched"])):
        server = served(Synthetic(), initial)
        told, size = work(server, Drawn(), tmp_path / initial)
        assert (kinds(told), size) == (wanted, 2 * RAW_BYTES)
        models.append(digest(server.engine.vector))
    failed = dict(told)["failed"]
    assert (failed["call"], failed["again"]) == ("build", False)
    assert "is not version 0: its SHA-256 differs" in failed["detail"]
    assert models[0] == models[1]


def test_a_device_that_has_a_version_builds_none(tmp_path: Path) -> None:
    server = served(Synthetic(), "built")
    assert kinds(work(server, Synthetic(), tmp_path, tasks=1)[0]) == ["built"]
    assert kinds(work(server, Synthetic(), tmp_path, tasks=1)[0]) == ["fetched"]


def test_weights_without_a_seed_are_refused() -> None:
    first = trainer_for(Synthetic()).initial(0)
    with pytest.raises(ConfigError, match=r"run.initial = 'built': the first weights were given"):
        LocalServer(first, config(run={"initial": "built"}))
    with pytest.raises(ConfigError, match=r"run.initial must be one of sent, built, not 'guessed'"):
        config(run={"initial": "guessed"})


def test_other_weights_are_not_taken_for_version_0() -> None:
    trainer = trainer_for(Synthetic())
    spec, own = trainer.spec, trainer.initial(4)
    first = FirstModel.of(spec, own, 4, "raw")
    assert np.array_equal(first.read(spec, own), spec.flatten(own))
    other = {name: array.copy() for name, array in own.items()}
    other["output.bias"][-1] = np.nextafter(other["output.bias"][-1], np.float32(1))
    with pytest.raises(InvalidUpdate, match="is not version 0: its SHA-256 differs"):
        first.read(spec, other)


@pytest.mark.parametrize("connection", ["calls", "stream"])
@pytest.mark.parametrize("codec", ["raw", "log(2)"])
def test_over_the_wire(connection: str, codec: str, tmp_path: Path) -> None:
    """A server that starts again, a device that does, and one that is new then."""
    client = {"steps": 3, "connection": connection}
    settings = config(client=client, downlink={"codec": codec}, run={"initial": "built"})
    first = trainer_for(Synthetic()).initial(11)
    told: dict[str, Told] = {}

    def joined(name: str, life: str, address: str) -> None:
        heard = told.setdefault(life, [])
        options = ClientOptions("synthetic", address, name, state_dir=tmp_path / name, tasks_max=1)
        run_client(options, lambda kind, **fields: heard.append((kind, fields)), Synthetic())

    with live_server(tmp_path, first, settings, seed=11) as info:
        joined("a", "first", info.address)
        with OperatorClient(info.admin_address) as operator:
            assert operator.status().downlink_bytes == 0
    assert json.loads((tmp_path / "data" / "manifest" / "manifest.json").read_text())["seed"] == 11
    with live_server(tmp_path, first, settings, seed=11) as info:
        joined("a", "again", info.address)
        joined("b", "new", info.address)
    assert [kinds(told[life]) for life in ("first", "again")] == [["built"], ["fetched"]]
    assert kinds(told["new"]) == ["built", "fetched"]
    led = [fields["from_version"] for kind, fields in told["new"] if kind == "fetched"]
    assert led == [0 if codec == "log(2)" else None]


def test_a_server_in_python_knows_the_seed(tmp_path: Path) -> None:
    written = first_model(Synthetic(), config(run={"seed": 5}), tmp_path / "model")
    assert written.seed == read_manifest(tmp_path / "model").seed == seed_of(5, "initial")


def test_a_server_of_given_weights_does_not_start(tmp_path: Path) -> None:
    first = trainer_for(Synthetic()).initial(11)
    settings = config(run={"initial": "built"})
    with (
        pytest.raises(ConfigError, match=r"without --weights, or set run.initial = 'sent'"),
        live_server(tmp_path, first, settings),
    ):
        pass
    assert not (tmp_path / "data" / "manifest").exists()
