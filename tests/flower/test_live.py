"""A Flower app live: a real server, devices in processes of their own, one of which dies and comes back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

import commands
import telling_device
from commands import serving
from flower_apps import COUNTING, write_app
from live_server import live_server
from nursery import Process
from telling_device import told

from anabranch.api.configuration import load_model_run, load_run
from anabranch.client.operator import OperatorClient
from anabranch.core.config.tables import Config, StrategyTable
from anabranch.core.errors import OUTCOMES, ConfigError
from anabranch.core.model.params import Tensors
from anabranch.reports.journal_files import JournalReader
from anabranch.server.manifest import read_manifest


def anabranch(*arguments: str, cwd: Path) -> str:
    done = commands.anabranch(cwd, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def device(app: Path, address: str, folder: Path, shard: int, *death: Any, **options: Any) -> Process:
    more = {"app": f"flower:{app}", "client_id": f"d{shard}", "shard": (shard, 2), **options}
    return telling_device.device(address, folder / f"d{shard}", *death, **more)


def prepared(app: Path, folder: Path) -> tuple[Tensors, Config]:
    """What `anabranch init` makes of the app, and a run of it."""
    anabranch("init", "--flower", str(app), "--out", str(folder / "model"), cwd=folder)
    brought = json.loads((folder / "model" / "settings.json").read_text())
    tables = {"uplink": {"codec": "int8"}, "strategy": {"name": "fedasync"}, "client": {"retry_base_s": 0.05}}
    settings = Config.from_json(
        {**brought, **tables, "run": {"workload": "counting"}, "fleet": {"clients": 2}}
    )
    return read_manifest(folder / "model").tensors, settings


def test_two_devices_work_on_and_the_state_of_one_survives_its_death(tmp_path: Path) -> None:
    its_own = ' "site": context.node_config["site"], "tasks": len(context.state)'
    app = write_app(tmp_path, COUNTING.replace('"tasks": len(context.state)', its_own))
    tensors, settings = prepared(app, tmp_path)
    with live_server(tmp_path / "server", tensors, settings) as info:
        first = device(app, info.address, tmp_path, 0, "trained", 3)
        other = device(app, info.address, tmp_path, 1, tasks_max=4)
        died, lived = told(first), told(other)
        again = told(device(app, info.address, tmp_path, 0, tasks_max=3))
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
        evaluated = json.loads(
            anabranch(
                *("evaluate", "--flower", str(app), "--server", info.address),
                *("--admin", info.admin_address, "--once", "--json", "--option", "site=7"),
                cwd=tmp_path,
            ).splitlines()[-1]
        )
    tasks = [e["metrics"]["tasks"] for e in [*died, *again] if e["kind"] == "trained"]
    assert tasks == [1, 2, 3, 4, 5]  # the third result was sent after the death, none was made twice
    rounds = [e["metrics"]["round"] for e in lived if e["kind"] == "trained"]
    assert rounds == sorted(rounds)
    assert status.updates_applied == 9
    assert evaluated["version"] == status.version
    assert evaluated["site"] == 7, "in the node config of whoever judges"
    assert evaluated["accuracy"] == pytest.approx(0.1 * 20 / 30)
    assert evaluated["round"] == status.version  # as in Flower: a round's evaluation is of what came of it


def test_a_device_starts_again_from_the_model_that_it_has(tmp_path: Path) -> None:
    """Its counters, arrays of shape (), are in the message that its ClientApp gets as they were."""
    app = write_app(tmp_path)
    tensors, settings = prepared(app, tmp_path)
    settings = replace(settings, strategy=StrategyTable("fedbuff", {"buffer_size": 3}))
    with live_server(tmp_path / "server", tensors, settings) as info:
        for _ in range(2):
            life = told(device(app, info.address, tmp_path, 0, tasks_max=1))
            assert [e["kind"] for e in life].count("pushed") == 1
    assert not any(e["kind"] == "fetched" for e in life), "it had the version on its disk"


def test_a_server_is_started_of_an_app_and_brings_its_settings(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    settings = json.loads(anabranch("config", "show", "--json", cwd=tmp_path))
    assert settings["flower.train"]["value"] == {}
    anabranch(
        *("demo", "--flower", str(app), "--clients", "2", "--strategy", "fedasync", "--out", "run"),
        *("--set", "run.updates_max=6", "--set", "fleet.step_time_s=0.01"),
        *("--set", "flower.run_config={ learning-rate = 0.25 }"),
        cwd=tmp_path,
    )
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["updates_applied"] == 6
    assert found["config"]["flower"]["train"]["records"]["config"]["lr"] == 0.25
    # A device that starts late may find the run over.
    worked = {client: share for client, share in found["clients"].items() if share["updates"]}
    shares = {client: share["examples"] // share["updates"] for client, share in worked.items()}
    assert shares
    assert shares.items() <= {"device-0": 10, "device-1": 20}.items()


def test_a_server_takes_a_folder_as_it_is_written(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    given = ["--data-dir", "data", "--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"]
    given += ["--set", "strategy.name=fedasync"]
    for _ in range(2):  # the second finds the model that the first has made
        with serving(tmp_path, "--flower", app.name, *given) as info:
            trained = anabranch(
                *("client", "--flower", app.name, "--server", info["address"], "--tasks-max", "2", "--json"),
                cwd=tmp_path,
            )
        assert json.loads(trained.splitlines()[-1])["answered"] == 2
    other = write_app(tmp_path)
    refused = commands.anabranch(tmp_path, "server", "--flower", other.name, *given)
    assert refused.returncode == OUTCOMES[ConfigError].exit_code
    assert "name another --model DIR" in refused.stderr


def run_file(folder: Path, name: str, app: Path, **run_config: float) -> Path:
    """Settings of a run of the app, with this in its run config."""
    told = ", ".join(f"{key.replace('_', '-')} = {value}" for key, value in run_config.items())
    file = folder / name
    file.write_text(f"run.workload = 'flower:{app}'\nflower.run_config = {{ {told} }}\n")
    return file


def rates(config: Config) -> tuple[Any, Any]:
    """The learning rate that ClientApps have in their run config, and the one that messages tell them."""
    return config.flower.run_config.get("learning-rate"), config.flower.train["records"]["config"]["lr"]


def test_the_run_config_of_a_file_is_what_the_devices_of_a_server_are_told(tmp_path: Path) -> None:
    """As in a simulation of the file; also where the server makes the model itself, which it finds again."""
    app = write_app(tmp_path)
    file, other = (
        run_file(tmp_path, name, app, learning_rate=rate) for name, rate in (("a.toml", 2), ("b.toml", 3))
    )
    assert rates(load_run(file)) == (2, 2)
    anabranch("init", str(file), "--out", "model", cwd=tmp_path)
    assert rates(load_model_run(tmp_path / "model", f"flower:{app}", file)) == (2, 2)
    assert rates(load_model_run(tmp_path / "model", f"flower:{app}", None)) == (2, 2), "it brings it along"
    with pytest.raises(ConfigError, match=r"is \{'learning-rate': 3\}, but .*model was made with .*: 2\}"):
        load_model_run(tmp_path / "model", f"flower:{app}", other)
    ports = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
    for _ in range(2):
        with serving(tmp_path, str(file), "--flower", str(app), *ports):
            pass
    anabranch("report", "anabranch-data", cwd=tmp_path)
    assert rates(JournalReader(tmp_path / "anabranch-data" / "run").config) == (2, 2)
    refused = commands.anabranch(tmp_path, "server", str(other), "--flower", str(app), *ports)
    assert refused.returncode == OUTCOMES[ConfigError].exit_code
    printed = re.search(r"`anabranch (init .* --out NEW)`", " ".join(refused.stderr.split()))
    assert printed is not None, refused.stderr
    anabranch(*printed[1].split(), cwd=tmp_path)
    assert rates(load_model_run(tmp_path / "NEW", f"flower:{app}", other)) == (3, 3)


def test_a_model_that_an_earlier_release_made_is_served_as_it_was(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    anabranch("init", "--flower", str(app), "--out", "model", cwd=tmp_path)
    brought = tmp_path / "model" / "settings.json"
    tables = json.loads(brought.read_text())
    del tables["flower"]["run_config"]
    brought.write_text(json.dumps(tables))
    file = run_file(tmp_path, "run.toml", app, learning_rate=2)
    assert rates(load_model_run(tmp_path / "model", f"flower:{app}", file)) == (2, 0.5)


def test_a_simulation_of_an_app_is_the_same_in_worker_processes(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    asked = ["simulate", "--flower", str(app), "--set", "run.updates_max=12", "--set", "fleet.clients=3"]
    asked += ["--set", "fleet.dropout=0.2", "--set", "strategy.name='fedasync'"]
    anabranch(*asked, "--out", "one", cwd=tmp_path)
    anabranch(*asked, "--out", "two", "--workers", "2", cwd=tmp_path)
    one, two = (json.loads((tmp_path / n / "result.json").read_text()) for n in ("one", "two"))
    assert one["model_sha256"] == two["model_sha256"]
    assert one["journal_sha256"] == two["journal_sha256"]
    journal = [json.loads(line) for line in (tmp_path / "one" / "journal.jsonl").read_text().splitlines()]
    tasks: dict[str, list[float]] = {}
    for record in journal:
        if record["kind"] == "update":
            tasks.setdefault(record["client_id"], []).append(record["metrics"]["tasks"])
    assert all(found == list(range(1, len(found) + 1)) for found in tasks.values())
    assert "replayed 12 versions" in anabranch("replay", "one", cwd=tmp_path)
