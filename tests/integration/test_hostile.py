"""A real server and hostile devices: quarantine, rollback, and what a restart and `verify` make of both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from wire import Served, server_config

from anabranch.api.live_result import report_of_data
from anabranch.core.errors import ConfigError, UnknownVersion
from anabranch.core.model.params import digest
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.manifest import Manifest
from anabranch.server.verify import verify
from anabranch.simulation.replay import replay_run

BUFFER = {"name": "fedbuff", "buffer_size": 2, "staleness": {"name": "constant"}}
GOOD = ("good-1", "good-2")


@pytest.fixture(params=["", "postgresql"], ids=["sqlite", "postgresql"])
def buffered(request: Any, tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    """A server that takes the mean of two updates."""
    database = request.getfixturevalue("postgresql_url") if request.param else ""
    config = server_config(
        tmp_path / "data", strategy=BUFFER, robust={"flaws_max": 2}, server={"database": database}
    )
    with Served(config, manifest) as server:
        yield server


def poisoned(served: Served) -> int:
    """Three rounds of two good devices and a bad one; the version after the first."""
    values = {"good-1": 2.0, "good-2": 4.0, "bad": -100.0}
    for client in ("good-1", "good-2"):
        served.device(client).work(values[client])
    for _ in range(3):
        for client, value in values.items():
            served.device(client).work(value)
    return 1


# --- quarantine ----------------------------------------------------------------------------------


def test_a_client_in_quarantine_is_told_so_even_after_a_restart(buffered: Served, manifest: Manifest) -> None:
    device = buffered.device("bad")
    task = device.task()
    with buffered.admin() as admin:
        admin.quarantine("bad", "sends noise")
        assert admin.status().quarantined == {"bad": "sends noise"}
    (notice,) = device.heartbeat(task.task_id).notices
    assert notice.kind == devices.NOTICE_KIND_CANCEL
    with pytest.raises(grpc.RpcError) as raised:
        device.answer(task)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    _is_barred(buffered)
    buffered.close()
    with Served(buffered.config, manifest) as again:
        _is_barred(again)
        with again.admin() as admin:
            assert admin.release("bad")
            assert not admin.release("bad")
        assert again.device("bad").task()


def _is_barred(served: Served) -> None:
    refusal = served.device("bad").ask().refusal
    assert (refusal.reason, refusal.detail, refusal.final) == ("quarantined", "sends noise", False)
    assert served.device("good-1").task()


def test_flaws_put_a_device_into_quarantine(buffered: Served) -> None:
    device, _ = buffered.device("bad"), buffered.device("good")
    for _ in range(2):
        task = device.task()
        with pytest.raises(grpc.RpcError):
            device.answer(task, np.nan)
    refusal = device.ask().refusal
    assert refusal.reason == "quarantined"
    assert refusal.detail == "sent 2 updates in a row that cannot be used, the last: invalid"


def test_the_clients_are_listed_with_the_most_suspicious_first(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", robust={"clip": 2.0, "flaws_max": 3})
    with Served(config, manifest) as served, served.admin() as admin:
        for _ in range(6):
            for client in GOOD:
                served.device(client).work(1.0)
        long, noise = served.device("long"), served.device("noise")
        for _ in range(2):
            assert long.work(50.0).decision.detail.startswith("shortened to 0.04")
        with pytest.raises(grpc.RpcError):
            noise.answer(noise.task(), np.inf)
        admin.quarantine("noise", "sends noise")
        found = [(c.client_id, c.updates_taken, c.flaws, c.shortened, c.quarantined) for c in admin.clients()]
        assert found[:2] == [("long", 2, 0, 2, ""), ("noise", 0, 1, 0, "sends noise")]
        assert [row[:4] for row in found[2:]] == [(client, 6, 0, 0) for client in GOOD]
        assert [c.client_id for c in admin.clients(limit=1)] == ["long"]


# --- rollback ------------------------------------------------------------------------------------


def test_a_rollback_takes_the_poison_out_and_loses_nothing_else(
    buffered: Served, manifest: Manifest, tmp_path: Path
) -> None:
    to = poisoned(buffered)
    under_way = buffered.device("good-1")
    task = under_way.task()
    before = float(buffered.model()[0])
    assert before < -50
    with buffered.admin() as admin:
        version, left_out = admin.rollback(to, ["bad"])
        assert (version, left_out) == (admin.status().version, 3)
        assert "bad" in admin.status().quarantined
    # (2 + 4) / 2 at first and in each of three rounds.
    assert (buffered.model() == 12.0).all()
    answer = under_way.answer(task, 2.0)
    assert (answer.decision.verdict, answer.decision.staleness) == ("held", 1)
    buffered.device("good-2").work(4.0)
    assert (buffered.model() == 15.0).all()
    buffered.close()
    found = verify(tmp_path / "data", buffered.config.server.database)
    assert found.problems == ()
    assert found.version == version + 1
    with Served(buffered.config, manifest) as again:
        assert digest(again.model()) == found.model_sha256


def test_a_crash_right_after_a_rollback_folds_the_log_again(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", strategy=BUFFER)
    with Served(config, manifest) as served:
        to = poisoned(served)
        with served.admin() as admin:
            version, _ = admin.rollback(to, ["bad"])
    for snapshot in (tmp_path / "data" / "snapshots").iterdir():
        snapshot.unlink()
    with Served(config, manifest) as again:
        assert again.info is not None
        assert again.info.version == version
        assert again.info.replayed > 0
        assert (again.model() == 12.0).all()
        assert again.device("bad").ask().refusal.reason == "quarantined"


def test_rollbacks_add_up_on_the_server_too(buffered: Served, tmp_path: Path) -> None:
    poisoned(buffered)
    with buffered.admin() as admin:
        admin.rollback(1, ["bad"])
        admin.rollback(1, ["good-2"])
    # What is left after version 1: three updates of 2, of which two make a version.
    assert (buffered.model() == 5.0).all()
    buffered.close()
    assert verify(tmp_path / "data", buffered.config.server.database).problems == ()


def test_a_run_with_a_rollback_is_exported_and_replays(tmp_path: Path, manifest: Manifest) -> None:
    with Served(server_config(tmp_path / "data", strategy=BUFFER), manifest) as served:
        to = poisoned(served)
        with served.admin() as admin:
            admin.rollback(to, ["bad"])
        model = digest(served.model())
    result = report_of_data(tmp_path / "data", "", tmp_path / "run")
    assert result.model_sha256 == model
    assert replay_run(tmp_path / "run").matches


def test_what_cannot_be_rolled_back_says_why_and_changes_nothing(buffered: Served) -> None:
    poisoned(buffered)
    before = digest(buffered.model())
    with buffered.admin() as admin:
        for to, without, error, words in [
            (99, ["bad"], UnknownVersion, "version 99 is not published"),
            (1, [], ConfigError, "name a client"),
            (1, ["nobody"], ConfigError, "'nobody' is not enrolled"),
        ]:
            with pytest.raises(error, match=words):
                admin.rollback(to, without)
        assert admin.status().quarantined == {}
    assert digest(buffered.model()) == before


def test_rounds_cannot_be_rolled_back(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", strategy={"name": "fedavg"})
    with Served(config, manifest) as served, served.admin() as admin:
        served.device("a")
        with pytest.raises(ConfigError, match="'fedavg' works in rounds"):
            admin.rollback(0, ["a"])


def test_the_command_line_orders_it(tmp_path: Path, manifest: Manifest) -> None:
    with Served(server_config(tmp_path / "data", strategy=BUFFER), manifest) as served:
        to = poisoned(served)
        assert served.info is not None
        address = served.info.admin_address

        def said(*words: str) -> str:
            command = [sys.executable, "-m", "anabranch.cli.main", "admin", *words, "--admin", address]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def admin(*words: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(said(*words, "--json").strip().splitlines()[-1])
            return found

        assert admin("quarantine", "good-2", "--why", "noise")["quarantined"] is True
        assert admin("release", "good-2")["released"] is True
        found = admin("rollback", "--to", str(to), "--without", "bad", "--without", "good-2")
        assert found["updates_left_out"] == 6
        assert set(admin("status")["quarantined"]) == {"bad", "good-2"}
        assert "  1 rollback: 6 of the updates applied are left out since\n" in said("status")
