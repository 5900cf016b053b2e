"""Settings of a live run: changed by operators and by restarts, over gRPC, and known ever after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from commands import anabranch
from desks import Desk
from rival_orders import check_one_is_refused
from wire import CALL_S, Served, server_config

from anabranch.api.live_result import report_of_data
from anabranch.client.operator import RunStatus
from anabranch.core import events as ev
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.reports.html import report_html
from anabranch.reports.result import Result
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify
from anabranch.simulation.replay import replay_run


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros(8, np.float32)})


def config(tmp_path: Path, **run: Any) -> Config:
    """A server whose file says this of `[run]`."""
    return server_config(tmp_path / "data", run=run)


def status(served: Served) -> RunStatus:
    """How the run stands."""
    with served.admin() as client:
        return client.status()


def in_force(served: Served) -> int:
    """The budget that the server goes by."""
    budget: int = status(served).config["run"]["updates_max"]
    return budget


def refusal(served: Served) -> str:
    """Why a device gets no task now."""
    reason: str = served.device("asker").ask().refusal.reason
    return reason


def test_an_ended_run_goes_on_by_an_operators_word(tmp_path: Path, manifest: Manifest) -> None:
    with Served(config(tmp_path, updates_max=2), manifest) as served:
        device = served.device()
        for _ in range(2):
            device.work()
        assert refusal(served) == "run_finished"
        with served.admin() as client:
            watched: Iterator[Any] = client.watch(after_seq=1)
            done = client.set_settings({"run.updates_max": 4, "server.lease_s": 30})
            assert (done.reopened, done.finished) == (True, "")
            assert [(c.path, c.was, c.value) for c in done.changes] == [
                ("run.updates_max", 2, 4),
                ("server.lease_s", 60.0, 30.0),
            ]
            kinds = iter(watched)
            told = next(e for e in kinds if e.kind == "settings_changed")
            assert told.data == {
                "by": "somebody on this machine",
                "run.updates_max": 4,
                "server.lease_s": 30.0,
            }
            assert next(kinds).kind == "reopened"
        said = status(served)
        assert (said.config["run"]["updates_max"], said.config["server"]["lease_s"]) == (4, 30.0)
        assert [c.path for c in said.settings_changed] == ["run.updates_max", "server.lease_s"]
        for _ in range(2):
            device.work()
        assert refusal(served) == "run_finished"
        assert status(served).finished == "the run ended after 4 updates, its budget"
    with Served(config(tmp_path, updates_max=2), manifest) as again:  # the file says what it said before
        assert in_force(again) == 4
        assert status(again).settings_changed == said.settings_changed
    assert verify(tmp_path / "data").problems == ()


def test_a_restart_takes_what_its_file_says_otherwise(tmp_path: Path, manifest: Manifest) -> None:
    with Served(config(tmp_path, updates_max=1), manifest) as served:
        served.device().work()
        assert refusal(served) == "run_finished"
    with Served(config(tmp_path, updates_max=3), manifest) as served:
        assert refusal(served) == ""
        (change,) = status(served).settings_changed
        assert (change.path, change.was, change.value) == ("run.updates_max", 1, 3)
        assert change.by == "the server's start (test)"
    with Served(config(tmp_path, updates_max=3), manifest) as served:
        assert status(served).settings_changed == (change,), "once"
        with served.admin() as client:
            client.set_settings({"run.updates_max": 9})
    with Served(config(tmp_path, updates_max=3), manifest) as served:
        assert in_force(served) == 9, "what an operator has set stays"
    with Served(config(tmp_path), manifest) as served:
        assert in_force(served) == 9, "nobody says otherwise"
    with Served(config(tmp_path, updates_max=1), manifest) as served:
        assert (in_force(served), status(served).finished[:13]) == (1, "the run ended")
    assert verify(tmp_path / "data").problems == ()


def test_a_run_keeps_its_name(tmp_path: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture) -> None:
    """One name, wherever it is told: by the server's own line, to operators, to trackers."""
    caplog.set_level("INFO", "anabranch.server.recovery")
    for name in ("first", "second"):
        with Served(config(tmp_path, name=name), manifest) as served:
            assert served.info is not None
            said = status(served)
            assert {served.info.name, said.run, said.config["run"]["name"]} == {"first"}
    assert "run.name stays 'first'" in caplog.text


def test_a_crash_keeps_what_was_set(tmp_path: Path, manifest: Manifest) -> None:
    """From the log alone: no snapshot was written after it."""
    with Served(config(tmp_path, updates_max=5), manifest) as served:
        with served.admin() as client:
            client.set_settings({"run.updates_max": 7})
        assert served.info is not None
    for snapshot in (tmp_path / "data" / "snapshots").glob("*"):
        snapshot.unlink()
    with Served(config(tmp_path, updates_max=5), manifest) as again:
        assert in_force(again) == 7
        assert again.info is not None
        assert again.info.replayed > 0


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"run": {"seed": 3}}, r"run.seed is 3 \(test\), but this run was started with 0, and every draw"),
        ({"strategy": {"name": "fedasync"}}, "strategy.name is 'fedasync'"),
        ({"model": {"buffers": "local"}}, "model.buffers is 'local'.*what the values of an update mean"),
        ({"robust": {"rule": "median"}}, "robust.rule is 'median'"),
        ({"submodel": {"name": "none"}}, "submodel.name is 'none'"),
        ({"server": {"lease_min_s": 9e9}}, "server.lease_min_s must not be over lease_max_s"),
    ],
)
def test_a_restart_with_what_may_not_change_is_refused_with_the_reason(
    tmp_path: Path, manifest: Manifest, tables: dict[str, Any], words: str
) -> None:
    with Served(config(tmp_path), manifest) as served:
        served.device().work()
    with (
        pytest.raises(ConfigError, match=words),
        Served(server_config(tmp_path / "data", **tables), manifest),
    ):
        pass


def test_an_operator_is_told_why_a_setting_may_not_change(tmp_path: Path, manifest: Manifest) -> None:
    with Served(config(tmp_path), manifest) as served, served.admin() as client:
        for path, words in (("run.seed", "every draw"), ("server.address", "of the server's process")):
            with pytest.raises(ConfigError, match=words):
                client.set_settings({"run.updates_max": 5, path: 1})
        with pytest.raises(ConfigError, match="lease_min_s must not be over"):
            client.set_settings({"server.lease_min_s": 30, "server.lease_max_s": 20})
        with pytest.raises(ConfigError, match="a JSON object"):
            client.set_settings({})
        with pytest.raises(ConfigError, match="epochs must be at most 4294967295"):
            client.set_settings({"client.epochs": 2**64})
        for text in ("[" * 100_000, '{"client.epochs": %s}' % ("9" * 5000)):
            deep = operators.SetSettingsRequest(values_json=text)
            with pytest.raises(grpc.RpcError, match="a JSON object") as refused:
                served.operator().SetSettings(deep, timeout=CALL_S)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert client.status().settings_changed == ()


def test_devices_are_told_what_is_in_force(tmp_path: Path, manifest: Manifest) -> None:
    with Served(config(tmp_path), manifest) as served:
        with served.admin() as client:
            client.set_settings({"client.learning_rate": 0.5, "server.tasks_per_client": 2})
            client.set_settings({"server.upload_now_versions": 1, "server.lease_s": 5})
        device = served.device()
        told = device.enrol().config_json
        assert '"learning_rate": 0.5' in told
        assert '"tasks_per_client": 2' in told
        task = device.task()
        assert (task.local.learning_rate, task.lease_s) == (0.5, 5.0)
        served.device("other").work()
        notices = device.heartbeat(task.task_id).notices
        assert [n.kind for n in notices] == [devices.NOTICE_KIND_UPLOAD_NOW]


def test_the_report_and_the_folder_know_it(tmp_path: Path, manifest: Manifest) -> None:
    with Served(config(tmp_path, updates_max=1), manifest) as served:
        device = served.device()
        device.work()
        with served.admin() as client:
            client.set_settings({"run.updates_max": 3})
        device.work()
        device.work()
    folder = tmp_path / "run"
    result = report_of_data(tmp_path / "data", "", folder)
    (change,) = result.settings_changed
    assert (change.path, change.was, change.value) == ("run.updates_max", 1, 3)
    assert change.by == "somebody on this machine"
    assert (result.status, result.why) == ("finished", "the run ended after 3 updates, its budget")
    assert Result.read(folder) == result
    page = report_html(result)
    assert "somebody on this machine" in page
    assert "anabranch init digits\nanabranch server --set " in page, "how to serve such a run again"
    assert '"settings_changed"' in (folder / "events.jsonl").read_text()
    assert replay_run(folder).matches
    assert report_html(replace(result, settings_changed=())) != page


def test_a_watch_after_0_has_all_that_is_kept(tmp_path: Path, manifest: Manifest) -> None:
    with Served(config(tmp_path), manifest) as served:
        served.device().work()
        with served.admin() as client:
            kinds = iter(client.watch(after_seq=0))
            assert [next(kinds).kind for _ in range(3)] == ["granted", "decided", "published"]
            client.set_settings({"server.lease_s": 9.0})
            assert next(kinds).kind == "settings_changed", "and then what comes"


def test_what_is_so_already_is_no_change(tmp_path: Path, manifest: Manifest) -> None:
    """`status` goes on saying what a value was before somebody changed it."""
    with Served(config(tmp_path, updates_max=9), manifest) as served, served.admin() as client:
        client.set_settings({"server.lease_s": 5.0})
        assert client.set_settings({"server.lease_s": 5}).changes == ()
        both = client.set_settings({"server.lease_s": 5.0, "run.updates_max": 8}).changes
        assert [(c.path, c.was, c.value) for c in both] == [("run.updates_max", 9, 8)]
        found = {c.path: (c.was, c.value) for c in client.status().settings_changed}
        assert found == {"server.lease_s": (60.0, 5.0), "run.updates_max": (9, 8)}


def test_of_two_orders_at_once_that_do_not_agree_one_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    """A run that had both was refused by the next start of its server."""
    with Served(config(tmp_path), manifest) as served, served.admin() as one, served.admin() as other:
        check_one_is_refused(one, other)


def test_a_start_is_not_refused_for_what_the_log_has(tmp_path: Path, manifest: Manifest) -> None:
    """Of an older release, which took two such orders at once."""
    values = {"server.retry_after_min_s": 1.5, "server.retry_after_max_s": 1.0}
    desk = Desk(open_store("", tmp_path / "data"), tmp_path / "data", config(tmp_path))
    desk.tell(ev.SettingsChanged(desk.tick(), values, "two of them"))
    desk.close()
    with Served(config(tmp_path), manifest) as served, served.admin() as client:
        assert client.status().config["server"]["retry_after_max_s"] == 1.0
        client.set_settings({"server.retry_after_max_s": 2.0})
    with Served(config(tmp_path), manifest) as served:
        assert status(served).config["server"]["retry_after_max_s"] == 2.0


def test_tasks_keep_a_use_whatever_is_set(tmp_path: Path, manifest: Manifest) -> None:
    """As at a start: where every fifth version is published, tasks start up to four behind."""
    tables = {"downlink": {"codec": "log(2)", "publish_every_versions": 5}}
    with Served(server_config(tmp_path / "data", **tables), manifest) as served, served.admin() as client:
        with pytest.raises(ConfigError, match=r"staleness_max must be 0 or at least .*, 5, not 2"):
            client.set_settings({"server.staleness_max": 2})
        assert client.set_settings({"server.staleness_max": 5}).warnings == ()


def test_who_sets_a_bound_by_which_the_run_waits_without_an_end_is_told(
    tmp_path: Path, manifest: Manifest
) -> None:
    tables: dict[str, Any] = {"strategy": {"name": "fedbuff", "buffer_size": 10}, "fleet": {"clients": 4}}
    with Served(server_config(tmp_path / "data", **tables), manifest) as served:
        assert served.info is not None
        for share, words in (("1", "set it higher, or to 0"), ("3", "")):
            order = ("admin", "set", f"robust.buffer_max={share}", "--admin", served.info.admin_address)
            done = anabranch(tmp_path, *order)
            assert done.returncode == 0, done.stderr
            assert (words in done.stderr, not done.stderr) == (True, not words)


def test_devices_that_have_come_fill_a_buffer_as_well(tmp_path: Path, manifest: Manifest) -> None:
    """How many the file says is what a run begins with."""
    tables: dict[str, Any] = {"strategy": {"name": "fedbuff", "buffer_size": 3}, "fleet": {"clients": 1}}
    with Served(server_config(tmp_path / "data", **tables), manifest) as served, served.admin() as client:
        for i in range(2):
            served.device(f"device-{i}").enrol()
        assert client.set_settings({"robust.buffer_max": 1}).warnings
        served.device("device-2").enrol()
        client.set_settings({"robust.buffer_max": 0})
        assert not client.set_settings({"robust.buffer_max": 1}).warnings
