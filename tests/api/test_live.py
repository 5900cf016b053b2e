"""A server and devices in one process: with a network and without, sync and async, and what goes wrong."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anabranch as ab
from anabranch.api.background import Background
from anabranch.api.live import InProcessServer
from anabranch.core.errors import AppError, ConfigError, ManifestMismatch, PortInUse, Unavailable
from anabranch.core.model.params import digest
from anabranch.workloads.digits import Digits
from anabranch.workloads.synthetic import Synthetic

FEW: dict[str, Any] = {"strategy": "fedasync", "training": ab.Training(steps=3, batch_size=8)}
LONG_S = 600.0


def test_a_federation_over_the_network_comes_to_a_run_that_replays() -> None:
    with ab.Server("synthetic", **FEW, until=ab.Until(updates=12)) as server:
        with ab.Client("synthetic", server, id="device-0"), ab.Client(Synthetic, server, id="device-1"):
            server.wait(LONG_S)
        status, weights = server.status(), server.weights()
        assert (status.version, status.updates_applied) == (12, 12)
    run = server.report()
    assert (run.result.kind, run.result.versions, run.result.workload) == ("live", 12, "synthetic")
    assert digest(server_spec().flatten(weights)) == run.result.model_sha256 == run.replay().model_sha256
    assert {row["client"] for row in run.events("decided")} <= {"device-0", "device-1"}
    assert np.array_equal(run.weights()["hidden.weight"], weights["hidden.weight"])


def server_spec() -> Any:
    return InProcessServer("synthetic").local.spec


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tasks_max": -1}, "tasks_max is -1: give a whole number"),
        ({"tasks_max": "1"}, "tasks_max is '1': give a whole number"),
        ({"threads": 1.5}, r"threads is 1\.5: give a whole number"),
        ({"step_time_s": -0.1}, r"step_time_s is -0\.1: give seconds"),
        ({"step_time_s": float("nan")}, "step_time_s is nan: give seconds"),
        ({"options": ["place"]}, "options is a list: give a dict"),
        ({"keepers": "0" * 64}, "keepers is the text '0+': give a list of names"),
        ({"on_event": 3}, r"on_event is a int: give a function of \(kind, \*\*data\)"),
        ({"id": 3}, "id must be text, not 3"),
        ({"app": int}, "int is no App; an App needs model and data"),
    ],
)
def test_what_is_wrong_with_a_device_is_said_before_it_asks(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ab.Client(**{"app": "synthetic", "server": "127.0.0.1:7070", **wrong}).start().wait(LONG_S)


@pytest.mark.parametrize("where", [7070, None])
def test_an_address_is_text(where: Any) -> None:
    with pytest.raises(ConfigError, match=f"address {where}: write host:port as text"):
        ab.Server("synthetic", address=where, **FEW).start()


def test_a_device_takes_its_app_from_a_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from anabranch.workloads.synthetic import Synthetic as App\n")
    with ab.Server.local(Synthetic, **FEW, until=ab.Until(updates=1)) as server:
        with ab.Client(tmp_path / "mine.py", server, id="device-0"):
            server.wait(LONG_S)
        assert server.version == 1


class Failing(Synthetic):
    def train(self, *given: Any) -> Any:
        raise ValueError("a mistake")


@pytest.mark.parametrize("made", [ab.Server, ab.Server.local], ids=["network", "none"])
def test_whoever_waits_for_a_run_hears_of_what_ended_its_last_device(made: Any) -> None:
    with made(Synthetic, **FEW, until=ab.Until(updates=12)) as server:
        with pytest.raises(AppError, match="a mistake"), ab.Client(Failing, server, id="device-0"):
            server.wait()
        with ab.Client(Synthetic, server, id="device-1"):
            server.wait(LONG_S)


def test_whoever_waits_in_a_process_hears_that_its_devices_are_through_before_the_run() -> None:
    with ab.Server.local(Synthetic, **FEW, until=ab.Until(updates=3)) as server:
        with ab.Client(Synthetic, server, id="device-0", tasks_max=2):
            with pytest.raises(Unavailable, match="all of its devices have: start others"):
                server.wait()
            with pytest.raises(Unavailable, match="within 0 s"):
                server.wait(0)
        with ab.Client(Synthetic, server, id="device-1", width_max=np.float32(1)):  # type: ignore[arg-type]
            server.wait()
        assert server.version == 3


def test_a_device_that_fails_beside_others_is_heard_of_in_the_end() -> None:
    with ab.Server(Synthetic, **FEW, until=ab.Until(updates=12)) as server:
        failing = ab.Client(Failing, server, id="device-0")
        with pytest.raises(AppError, match="a mistake"), failing, ab.Client(Synthetic, server, id="device-1"):
            server.wait(LONG_S)
        assert server.status().updates_applied == 12


def test_it_goes_on_from_its_data(tmp_path: Path) -> None:
    def served(updates: int) -> int:
        with ab.Server(
            "synthetic", **FEW, until=ab.Until(updates=updates), data_dir=tmp_path / "data"
        ) as server:
            client = ab.Client("synthetic", server, id="device-0", state_dir=tmp_path / "device")
            with client:
                client.wait(LONG_S)
            return server.status().version

    assert served(5) == 5
    assert served(9) == 9


def test_without_a_network_it_is_the_same_and_async_too() -> None:
    async def federation() -> tuple[int, list[int]]:
        async with ab.Server.local(Synthetic, **FEW, until=ab.Until(updates=10)) as server:
            devices = [ab.Client(Synthetic, server, id=f"device-{i}") for i in range(3)]
            for device in devices:
                device.start()
            await server.wait_async(LONG_S)
            for device in devices:
                await device.wait_async(LONG_S)
            assert server.weights()["hidden.bias"].shape == (32,)
            return server.version, [d.summary.applied for d in devices if d.summary]

    version, applied = asyncio.run(federation())
    assert version == sum(applied) == 10


def test_an_app_may_change_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    class Wanders(Synthetic):
        def data(self, shard: ab.Shard) -> Any:
            os.chdir(elsewhere)
            return super().data(shard)

    monkeypatch.chdir(tmp_path)
    with ab.Server.local(Wanders, strategy="fedasync", until=ab.Until(updates=2)) as server:
        with ab.Client(Wanders, server, id="device-0", state_dir="mine") as device:
            device.wait(LONG_S)
        assert device.summary is not None
        assert device.summary.applied == 2
    monkeypatch.chdir(tmp_path)
    until = ab.Until(updates=2)
    with (
        ab.Server(Synthetic, data_dir="served", until=until, **FEW) as served,
        ab.Client(Wanders, served, id="device-0", state_dir="served-by") as device,
    ):
        served.wait(LONG_S)
        device.wait(LONG_S)
    assert (tmp_path / "served" / "data" / "anabranch.db").exists()
    monkeypatch.chdir(tmp_path)
    run = ab.simulate(Wanders, out="run", fleet=ab.Fleet(clients=2), until=ab.Until(updates=2))
    assert run.weights().keys() == server.weights().keys()
    few: dict[str, Any] = {"fleet": ab.Fleet(clients=2), "until": ab.Until(updates=2), "progress": False}
    tune = partial(ab.tune, trials=2, fresh_seeds=2, extensions=0, defaults=False)
    for out, search in (("swept", ab.sweep), ("tuned", tune)):
        monkeypatch.chdir(tmp_path)
        search(Wanders, {"client.learning_rate": [0.1, 0.2]}, seeds=1, out=out, **few)
        assert list((tmp_path / out).iterdir())
    assert not list(elsewhere.iterdir())


def test_a_server_of_an_event_loop_of_others() -> None:
    async def federation() -> int:
        async with ab.Server(Synthetic, **FEW, until=ab.Until(updates=4)) as server:
            async with ab.Client(Synthetic, server, id="device-0"):
                await server.wait_async(LONG_S)
            return (await asyncio.to_thread(server.status)).version

    assert asyncio.run(federation()) == 4


@pytest.mark.parametrize("kind", ["server", "local", "client"])
def test_what_has_not_begun_is_not_waited_for_and_what_has_does_not_begin_again(
    kind: str, tmp_path: Path
) -> None:
    """A server that nobody had started was waited for without an end."""
    make: dict[str, Callable[[], Background]] = {
        "server": lambda: ab.Server("synthetic", **FEW, until=ab.Until(updates=1)),
        "local": lambda: ab.Server.local("synthetic", **FEW, until=ab.Until(updates=1)),
        "client": lambda: ab.Client("synthetic", "127.0.0.1:1", id="device-0", state_dir=tmp_path),
    }
    thing = make[kind]()
    with pytest.raises(
        ConfigError, match=r"^anabranch-\S+( device-0)? is not running: enter its context, or"
    ):
        thing.wait(0.01)
    thing.stop()
    with thing, pytest.raises(ConfigError, match="has been started before, and once is all: make another"):
        thing.start()
    with pytest.raises(ConfigError, match="has been started before"), thing:
        pass
    thing.wait(LONG_S)


@pytest.mark.parametrize("made", [ab.Server, ab.Server.local], ids=["network", "none"])
def test_settings_that_are_refused_leave_no_folder(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for as long as the error is looked at, as in a notebook."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="nosuch"):
        made("synthetic", settings={"server.nosuch": 1})
    assert list(tmp_path.iterdir()) == []


def test_what_goes_wrong_comes_out() -> None:
    with ab.Server("synthetic", until=ab.Until(updates=4)) as server:
        with pytest.raises(ManifestMismatch, match="another model"):
            ab.Client(Digits, server, id="device-0").start().wait(LONG_S)
        with pytest.raises(ManifestMismatch), ab.Client(Digits, server, id="device-1") as wrong:
            wrong.wait(LONG_S)
        with pytest.raises(PortInUse), ab.Server("synthetic", address=server.address):
            pass
        with pytest.raises(Unavailable, match=r"not ended within 0\.01 s"):
            server.wait(0.01)
        with pytest.raises(ConfigError, match="is running: leave its context"):
            server.report()
    with pytest.raises(ConfigError, match="not running: enter its context"):
        _ = ab.Server("synthetic").address
    with pytest.raises(AppError, match="did you mean 'synthetic'"):
        ab.Server("syntetic")
    for shard in ("0/2", (2, 2)):
        with pytest.raises(ConfigError, match=r"shard is .*: give \(index, count\)"):
            ab.Client("synthetic", "127.0.0.1:1", id="a", shard=shard)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), ab.Server.local("synthetic"):
        raise ZeroDivisionError


def test_a_measurement_as_good_as_the_target_ends_a_live_run() -> None:
    with ab.Server("synthetic", **FEW, until=ab.Until(accuracy=0.9)) as server:
        ab.Client("synthetic", server, id="device-0", tasks_max=2).start().wait(LONG_S)
        with server.operator() as operator:
            operator.report_metrics(1, {"accuracy": 0.5})
            with pytest.raises(Unavailable):
                server.wait(0.01)
            operator.report_metrics(2, {"accuracy": 0.95})
            server.wait(LONG_S)
            assert operator.status().finished == "the run ended after 2 updates, its budget"
    assert server.report().replay().version == 2


def test_a_program_that_ends_without_a_word_to_its_server_was_not_killed(tmp_path: Path) -> None:
    code = 'import anabranch as ab; ab.Server("synthetic", data_dir="served").start()'
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert (done.returncode, "which had it before" in done.stderr) == (0, False), done.stderr
    assert (tmp_path / "served" / "data" / "lock").read_text() == ""


def test_a_device_hears_that_its_split_is_crude_and_another_one_not_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of one process, that is: there are fewer examples of a class than devices."""
    fleet = ab.Fleet(clients=1050, split=ab.Dirichlet(0.3))
    with (
        ab.Server.local(Synthetic, **FEW, fleet=fleet, until=ab.Until(updates=4)) as server,
        ab.Client(Synthetic, server, id="device-0") as one,
        ab.Client(Synthetic, server, id="device-1") as two,
    ):
        for device in (one, two):
            device.wait(LONG_S)
    said = [r.getMessage() for r in caplog.records if "fewer than there are devices" in r.getMessage()]
    assert len(said) == 1
