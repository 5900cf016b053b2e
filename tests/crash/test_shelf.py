"""Devices are remembered on the disk: kills, power cuts, damage, a backup; the bits stay those of memory.

What all of it must come to is what the same log comes to where everything is remembered in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import power
import pytest
from crash import remembered, run, write_model
from crash_writer import VALUES
from server_process import SERVING_S, Plan, ServerProcess
from wire import QUICK, Device

from anabranch.core.errors import StoreCorrupt
from anabranch.core.model.params import ParamSpec, digest
from anabranch.server.backup import back_up, put_back
from anabranch.server.failpoints import SHARED_SHELF_POINTS, SHELF_POINTS
from anabranch.server.verify import verify

PLAN = Plan(remembering=True)
FIRST = np.full(VALUES, 10, np.float32)
AROUND = ("handled", "snapshot_written", "snapshot_named", "snapshots_cleared")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """Its address."""
    return request.getfixturevalue("postgresql_url") if request.param == "postgresql" else ""


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.prove)], indirect=True
)
def test_kills_at_random(tmp_path: Path, database: str) -> None:
    outcome = run(tmp_path, Plan(seed=31, kills=3, updates=150, remembering=True, database=database))
    assert outcome.problems == []
    assert outcome.acknowledged == 150


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
def test_a_kill_at_every_failpoint_of_the_shelf(tmp_path: Path, database: str) -> None:
    """Those around snapshots with one of the databases: they come in the same order with the other."""
    kill_at((*SHELF_POINTS, *(SHARED_SHELF_POINTS if database else AROUND)), tmp_path, database)


@pytest.mark.prove
def test_a_kill_around_snapshots_that_are_in_a_database(tmp_path: Path, postgresql_url: str) -> None:
    kill_at(AROUND, tmp_path, postgresql_url)


def kill_at(points: tuple[str, ...], tmp_path: Path, database: str) -> None:
    """At each of them in its turn."""
    plan = Plan(seed=32, updates=100_000, failpoints=points, remembering=True, database=database)
    outcome = run(tmp_path, plan)
    assert outcome.problems == []
    assert outcome.acknowledged > 0


@pytest.mark.prove
def test_power_cuts(tmp_path: Path, figure: Callable[[str], None]) -> None:
    plan = Plan(seed=33, kills=20, updates=2_000, remembering=True)
    outcome = power.run(tmp_path, plan)
    figure(f"{len(outcome.restarts_s)} cuts in {outcome.acknowledged} updates, {outcome.problems} broken")
    assert outcome.problems == []
    assert outcome.acknowledged == plan.updates


@contextmanager
def fleet(server: ServerProcess, spec: ParamSpec, names: str = "abcd") -> Iterator[dict[str, Device]]:
    with grpc.insecure_channel(server.address, options=QUICK) as channel:
        found = {name: Device(channel, spec, name) for name in names}
        for device in found.values():
            device.enrol()
        yield found


def files(server: ServerProcess) -> list[Path]:
    """The rows of a server's devices."""
    return sorted(path for path in (server.data_dir / "shelf").rglob("*") if path.is_file())


@pytest.fixture
def served(tmp_path: Path) -> tuple[ServerProcess, ParamSpec]:
    """A server that has stopped after eight updates of four devices: value n of update n."""
    spec = write_model(tmp_path, FIRST, PLAN)
    server = ServerProcess(tmp_path, PLAN)
    server.start()
    with fleet(server, spec) as devices:
        for number in range(8):
            device = devices["abcd"[number % 4]]
            answer = device.answer(device.task(), float(number))
            assert (answer.decision.verdict, answer.version) == ("published", number + 1)
    assert server.drain() == 0
    return server, spec


def sound(server: ServerProcess, spec: ParamSpec, version: int) -> None:
    """The log comes to the versions on record, and to those of a memory."""
    report = verify(server.data_dir, whole=True)
    assert report.problems == ()
    assert report.version == version
    assert report.model_sha256 == digest(remembered(server.data_dir, spec, FIRST))
    again = verify(server.data_dir)
    assert (again.problems, again.proved_from) == ((), 0)  # a server goes on: nothing that it has is a proof


def test_the_newest_update_of_each_device_has_a_file(served: tuple[ServerProcess, ParamSpec]) -> None:
    server, spec = served
    values = []
    for path in files(server):
        data = path.read_bytes()
        assert path.name == hashlib.sha256(data).hexdigest()
        assert path.parent.name == path.name[:2]
        assert path.stat().st_mode & 0o777 == 0o600
        values.append(np.frombuffer(data[32:], "<f4").tolist())
    assert sorted(v[0] for v in values) == [4.0, 5.0, 6.0, 7.0]
    assert {len(set(v)) for v in values} == {1}
    (snapshot, *_) = sorted((server.data_dir / "snapshots").iterdir())
    assert snapshot.stat().st_size < 20 * 1024
    sound(server, spec, 8)


def test_a_backup_has_what_its_snapshots_name(
    served: tuple[ServerProcess, ParamSpec], tmp_path: Path
) -> None:
    server, spec = served
    server.start()
    back_up(server.data_dir, tmp_path / "backup")
    server.kill()
    put_back(tmp_path / "backup", tmp_path / "elsewhere", None)
    again = ServerProcess(tmp_path, PLAN, data_dir=tmp_path / "elsewhere")
    assert [path.name for path in files(again)] == [path.name for path in files(server)] != []
    again.start()
    with fleet(again, spec) as devices:
        answer = devices["a"].answer(devices["a"].task(), 9.0)
        assert answer.version == 9
    assert again.drain() == 0
    sound(again, spec, 9)


def test_a_damaged_row_ends_the_server_and_is_made_again(served: tuple[ServerProcess, ParamSpec]) -> None:
    """That of "a", whose next update needs it. The update is in the log, and counts after all."""
    server, spec = served
    (path,) = [path for path in files(server) if np.frombuffer(path.read_bytes()[32:], "<f4")[0] == 4.0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (problem,) = verify(server.data_dir, whole=True).problems
    assert str(path) in problem
    assert "Remove that file, if it is there, and start again" in problem
    server.start()
    with fleet(server, spec, "a") as devices:
        task = devices["a"].task()
        with pytest.raises(grpc.RpcError):
            devices["a"].answer(task, 9.0, update_id="needs-the-row")
    assert server.ended(SERVING_S) > 0
    assert f"{path} has the SHA-256" in server.log_tail()
    path.unlink()
    server.start()
    with fleet(server, spec, "a") as devices:
        answer = devices["a"].answer(task, 9.0, update_id="needs-the-row")
        assert (answer.decision.verdict, answer.version) == ("published", 9)
    assert server.drain() == 0
    sound(server, spec, 9)


def test_a_shelf_that_is_lost_is_made_again_from_the_log(served: tuple[ServerProcess, ParamSpec]) -> None:
    server, spec = served
    before = [path.name for path in files(server)]
    for path in files(server):
        path.unlink()
    assert len(verify(server.data_dir, whole=True).problems) == len(before)
    with pytest.raises(StoreCorrupt, match=r"shelf/.* is not there"):
        back_up(server.data_dir, server.data_dir.with_name("backup"))
    server.start()
    assert server.drain() == 0
    assert [path.name for path in files(server)] == before
    sound(server, spec, 8)
