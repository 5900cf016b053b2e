"""What operators see of a run: totals by what they count from, who is there, which versions can be had."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import anabranch
from safetensors.numpy import load_file
from wire import Served, server_config

from anabranch.cli.admin import versions
from anabranch.client.operator import OF_THE_RUN, OF_THE_SERVER, OperatorClient, RunStatus
from anabranch.core.errors import ConfigError, InvalidUpdate, Unavailable, UnknownVersion
from anabranch.server.manifest import Manifest, write_manifest


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros(8, np.float32)})


def measured(served: Served, accuracy: float) -> int:
    """An evaluator fetches the newest version and reports; returns which."""
    header, _ = served.device("evaluator").fetch(exact=True)
    with served.admin() as client:
        client.report_metrics(header.version, {"accuracy": accuracy})
    return header.version


def test_the_best_version_stays_and_can_be_exported(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        with served.admin() as client, pytest.raises(UnknownVersion, match="anabranch evaluate"):
            client.export(tmp_path / "none", best=True)
        device = served.device()
        for accuracy in (0.5, 0.9, 0.7):
            device.work()
            measured(served, accuracy)
        for _ in range(12):  # long past what is kept for resumed fetches and for evaluators
            device.work()
            measured(served, 0.1)
        with served.admin() as client:
            held = [row.version for row in client.versions() if row.held]
            assert 2 in held
            assert 1 not in held
            heard: list[tuple[int, int]] = []
            assert client.export(tmp_path / "best", best=True, tell=lambda *how: heard.append(how)) == 2
            size = (tmp_path / "best").stat().st_size
            assert heard[-1] == (size, size)
            assert (client.status().best_version, client.status().best_accuracy) == (2, 0.9)
            with pytest.raises(UnknownVersion):
                client.export(tmp_path / "lost", 1)
    assert load_file(tmp_path / "best")["w"].tolist() == [2.0] * 8
    with Served(config, manifest) as served, served.admin() as client:  # and after a restart
        served.device().work()
        assert client.export(tmp_path / "again", best=True) == 2
    assert (tmp_path / "again").read_bytes() == (tmp_path / "best").read_bytes()


def test_the_newest_version_may_be_the_best_where_the_cache_is_gone(
    tmp_path: Path, manifest: Manifest
) -> None:
    """As it is after a backup was put back: no backup has it."""
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        device = served.device()
        for accuracy in (0.9, 0.5):
            device.work()
            measured(served, accuracy)
    for path in (tmp_path / "data" / "models").rglob("*.bin"):
        path.unlink()
    with Served(config, manifest) as served, served.admin() as client:
        assert client.status().best_version == 2
        served.device().work()
        assert client.export(tmp_path / "best", best=True) == 2


def test_a_call_over_a_connection_that_was_closed_meanwhile(tmp_path: Path, manifest: Manifest) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served:
        client = served.admin()
        client.close()
        with pytest.raises(Unavailable, match="the call was cut off, as its connection was closed"):
            client.status()


@pytest.mark.parametrize("number", [-1, 1 << 64, 10**30])
def test_a_number_that_no_message_holds(tmp_path: Path, manifest: Manifest, number: int) -> None:
    """It ended in a traceback, or it was said that the connection had been closed."""
    with Served(server_config(tmp_path / "data"), manifest) as served, served.admin() as client:
        calls: dict[str, Callable[[], object]] = {
            "version": lambda: client.export(tmp_path / "model", number),
            "stage": lambda: client.export(tmp_path / "model", stage=number),
            "after": lambda: client.versions(number),
            "limit": lambda: client.clients(number),
            "to_version": lambda: client.rollback(number, (), everyone=True),
            "number": lambda: client.drop_sum(number),
            "after_seq": lambda: next(client.watch(number)),
        }
        for name, call in calls.items():
            bits = 32 if name in ("limit", "stage") else 64
            with pytest.raises(ConfigError, match=f"^{name} must be 0 to {2**bits - 1}, not {number}$"):
                call()
        with pytest.raises(ConfigError, match="version must be 0 to"):
            client.report_metrics(number, {"accuracy": 1.0})
        assert client.clients((1 << 32) - 1) == []
        assert client.status().version == 0, "the connection is as it was"


def test_the_best_is_by_what_the_run_is_judged_by(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", run={"metric": "mse", "mode": "min"})
    with Served(config, manifest) as served, served.admin() as client:
        device = served.device()
        for version, mse in enumerate((0.5, 0.2, 0.9), start=1):
            device.work()
            served.device("evaluator").fetch(exact=True)
            client.report_metrics(version, {"mse": mse, "accuracy": mse})
        client.report_metrics(3, {"mae": 0.0})
        with pytest.raises(InvalidUpdate, match="the name of metric 'version' must be another one"):
            client.report_metrics(3, {"version": 0.0})
        status = client.status()
        assert (status.best_version, status.best_metric, status.best_value) == (2, "mse", 0.2)
        assert status.best_accuracy == 0.0, "the accuracy is not what counts"
        assert client.export(tmp_path / "best", best=True) == 2


def test_totals_are_told_from_what_the_server_has_done(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        device = served.device()
        for _ in range(3):
            device.work()
    with Served(config, manifest) as served, served.admin() as client:
        said = client.status().to_json()
    assert said["since_the_run_began"] == {k: said[k] for k in OF_THE_RUN}
    assert said["since_the_run_began"]["updates_applied"] == said["since_the_run_began"]["tasks_granted"] == 3
    assert said["since_the_server_started"]["uplink_bytes"] == 0
    assert not set(OF_THE_RUN) & set(OF_THE_SERVER)
    assert set(OF_THE_RUN) | set(OF_THE_SERVER) <= set(RunStatus.__dataclass_fields__)


def test_who_is_there_and_how_far_behind(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served, served.admin() as client:
        slow, quick = served.device("slow"), served.device("quick")
        slow.task()
        for _ in range(3):
            quick.work()
        found = {row.client_id: row for row in client.clients()}
        assert {name: row.versions_behind for name, row in found.items()} == {"slow": 3, "quick": 1}
        assert all(row.online and row.last_seen_s for row in found.values())
        assert client.status().clients_online == 2
    with Served(config, manifest) as served, served.admin() as client:  # nobody has called this one
        rows = client.clients()
        assert {(row.online, row.last_seen_s, row.versions_behind) for row in rows} == {(False, None, None)}
        assert (client.status().clients_online, client.status().clients) == (0, 2)


def test_who_trains_is_online_for_as_long_as_its_own_lease(tmp_path: Path, manifest: Manifest) -> None:
    """It need not call more often than three times in it, however short the first leases are."""
    with Served(server_config(tmp_path / "data"), manifest) as served, served.admin() as client:
        trains, idle = served.device("trains"), served.device("idle")
        task = trains.task()
        idle.work()
        client.set_settings({"server.lease_min_s": 1e-9, "server.lease_s": 1e-9})
        assert {row.client_id for row in client.clients() if row.online} == {"trains"}
        assert client.status().clients_online == 1
        trains.push(task, np.ones(8, np.float32))
        assert client.status().clients_online == 0


def test_of_several_tasks_each_keeps_a_client_online_and_a_restart_ends_none(
    tmp_path: Path, manifest: Manifest
) -> None:
    config = server_config(tmp_path / "data", server={"tasks_per_client": 2})
    with Served(config, manifest) as served, served.admin() as client:
        device = served.device()
        done, left = device.task(), device.task()
        client.set_settings({"server.lease_min_s": 1e-9, "server.lease_s": 1e-9})
        device.answer(done)
        assert client.status().clients_online == 1, "at the other one"
    with Served(config, manifest) as served, served.admin() as client:
        assert client.status().clients_online == 0, "nobody has called this one"
        served.device().heartbeat(left.task_id)
        assert client.status().clients_online == 1


def test_all_clients_come_page_by_page(tmp_path: Path, manifest: Manifest) -> None:
    names = ["ant", "bee", "cat", "dog", "eel"]
    with Served(server_config(tmp_path / "data"), manifest) as served, served.admin() as client:
        for name in reversed(names):
            served.device(name).task()
        pages = [[c.client_id for c in page] for page in client.pages_of_clients(limit=2)]
        assert pages == [["ant", "bee"], ["cat", "dog"], ["eel"]]
        assert [[c.client_id for c in page] for page in client.pages_of_clients()] == [names]


def test_pages_of_versions_end_though_versions_come_as_quickly(tmp_path: Path, manifest: Manifest) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served, served.admin() as client:
        device, found = served.device(), []
        for _ in range(3):
            device.work()
        for page in client.pages_of_versions(after=1, limit=1):
            found.append([row.version for row in page])
            assert len(found) < 9
            device.work()
        assert found == [[2], [3]]
        assert [row.version for page in client.pages_of_versions() for row in page] == [1, 2, 3, 4, 5]


def test_of_versions_only_those_that_are_held_are_sent_where_only_they_are_wanted(
    tmp_path: Path, manifest: Manifest
) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served, served.admin() as client:
        device = served.device()
        for _ in range(12):
            device.work()
        held = [row for row in client.versions() if row.held]
        assert client.versions(held=True) == held
        assert 1 < len(held) < 12
        first, *others = held
        assert client.versions(first.version, limit=1, held=True) == others[:1]
        pages = list(client.pages_of_versions(limit=1, held=True))
        assert pages == [[row] for row in held]


def test_what_is_held_longer_than_the_log_goes_back_is_no_other_version(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.server.store.segments.TRIMMED_BYTES", 1)
    table = {"keep": "versions:2", "snapshot_every_versions": 2}
    config = server_config(tmp_path / "data", server=table)
    with Served(config, manifest) as served:
        served.device().work()
        assert measured(served, 0.9) == 1
    for _ in range(4):  # each life ends with a snapshot, by which the next one drops what is old
        with Served(config, manifest) as served:
            for _ in range(5):
                served.device().work()
    with Served(config, manifest) as served, served.admin() as client:
        assert client.export(tmp_path / "best", best=True) == 1
        rows = client.versions()
        assert rows[0].version > 1
        held = [row for row in rows if row.held]
        assert client.versions(held=True) == held
        assert client.versions(limit=1, held=True) == held[:1]


def test_a_list_that_has_pages_is_whole_or_says_that_it_is_not(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.server.operators.VERSIONS_MAX", 3)
    monkeypatch.setattr("anabranch.server.operators.CLIENTS_MAX", 2)
    with Served(server_config(tmp_path / "data"), manifest) as served:
        assert served.info is not None
        for name in ("a", "b", "c"):
            for _ in range(3):
                served.device(name).work()
        at = ("--admin", served.info.admin_address)
        for options, first in (
            ((), 1),
            (("--after", 5), 6),
            (("--last", 4), 6),
            (("--last", 4, "--after", 7), 8),
            (("--last", 20), 1),
        ):
            said = anabranch(tmp_path, "admin", "versions", *at, *options, "--json").stdout
            found = [json.loads(line)["version"] for line in said.splitlines()]
            assert found == list(range(first, 10))
        for of_clients, told in (((), True), (("--limit", 3), True), (("--limit", 2), False)):
            done = anabranch(tmp_path, "admin", "clients", *at, *of_clients)
            assert (done.returncode, "2 of 3 clients" in done.stderr) == (0, told)


def test_the_newest_are_no_more_though_versions_come_meanwhile(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served:
        assert served.info is not None
        device, status = served.device(), OperatorClient.status
        for _ in range(4):
            device.work()

        def before_one_more(client: OperatorClient) -> RunStatus:
            found = status(client)
            device.work()
            return found

        monkeypatch.setattr(OperatorClient, "status", before_one_more)
        versions(admin=served.info.admin_address, identity=None, insecure=False, as_json=True, last=2)
    rows = [json.loads(line)["version"] for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2
    assert rows == [rows[0], rows[0] + 1]
    assert rows[0] > 3


def test_a_quarantine_of_nobody_that_is_known_says_so(
    tmp_path: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served:
        served.device("device-7").work()
        with served.admin() as client:
            assert client.quarantine("device-7") == ["device-7"]
            assert "knows no client" not in caplog.text
            assert client.quarantine("devcie-7") == ["devcie-7"]
            assert "devcie-7 is barred, but this run knows no client of that name" in caplog.text
            assert set(client.status().quarantined) == {"device-7", "devcie-7"}
