"""Two servers on one PostgreSQL, whatever becomes of the leader: nothing acknowledged lost, nothing twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psycopg
import pytest
from failover import LOST, NOT_SERVING, Federation, federation, health
from nursery import COMMAND, PIPE, Process
from ports import free_port
from postgres_gate import PostgresGate
from server_process import SERVING, Plan, ServerProcess
from wire import QUICK, Device, Served, server_config

from anabranch.client.run import ClientOptions, run_client
from anabranch.core.errors import ConfigError, StoreLocked
from anabranch.core.model.params import ParamSpec
from anabranch.server.app import serve
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import verify
from anabranch.testing.federation import first_weights

pytestmark = pytest.mark.slow
HANGS_S = 600.0  # on a machine at rest it is seconds; how long a takeover took is a figure of the long form


def kill(run: Federation) -> None:
    """SIGKILL: the other one takes over at once."""
    leader, began = run.leader(), time.monotonic()
    leader.kill()
    run.hand_over(leader, began)
    run.restart(leader)


def wake(leader: ServerProcess) -> None:
    """SIGCONT: it finds that it leads no more."""
    leader.signal(signal.SIGCONT)
    assert leader.ended(HANGS_S) == LOST


def outlive(run: Federation, leader: ServerProcess) -> None:
    """A leader that was paused goes on and ends; its successor takes updates, and all is sound in the end."""
    wake(leader)
    run.await_updates(20)
    run.restart(leader)
    assert run.finish() == []


def pause(run: Federation) -> None:
    """SIGSTOP for longer than the lease, then SIGCONT: the old leader finds that it leads no more."""
    leader, began = run.leader(), time.monotonic()
    leader.signal(signal.SIGSTOP)
    run.hand_over(leader, began)
    wake(leader)
    assert "leads this run now" in leader.log_tail()
    run.restart(leader)


def kill_both(run: Federation) -> None:
    """The standby too: whichever starts first leads."""
    leader = run.leader()
    leader.kill()
    run.other(leader).kill()
    leader.launch()
    run.other(leader).launch()
    deadline = time.monotonic() + HANGS_S
    while sorted(str(health(s.address)) for s in run.servers) != sorted(map(str, (SERVING, NOT_SERVING))):
        assert time.monotonic() < deadline, [s.log_tail() for s in run.servers]
        time.sleep(0.05)


def drain(run: Federation) -> None:
    """SIGTERM: the leader ends in order, the other one goes on."""
    leader, began = run.leader(), time.monotonic()
    assert leader.drain() == 0
    run.hand_over(leader, began)
    run.restart(leader)


@pytest.mark.parametrize(
    "remembering", [pytest.param(False, marks=pytest.mark.prove), True], ids=["", "remembering"]
)
def test_the_leader_is_killed_paused_drained_and_both_are_killed(
    remembering: bool, tmp_path: Path, postgresql_url: str
) -> None:
    """What is remembered of devices is the other one's as well: they share no disk."""
    with federation(tmp_path, postgresql_url, seed=31, remembering=remembering) as run:
        for misfortune in (kill, pause, drain, kill_both, kill):
            run.await_updates(20)
            misfortune(run)
        assert run.finish() == []
        assert run.acknowledged > 100
        assert sum(writer.resent for writer in run.writers) > 0


def test_a_leader_that_is_cut_off_from_the_database_stops(tmp_path: Path, postgresql_url: str) -> None:
    with (
        PostgresGate(postgresql_url) as gate,
        federation(tmp_path, postgresql_url, seed=32, databases=(gate.url, "")) as run,
    ):
        run.await_updates(20)
        leader, began = run.servers[0], time.monotonic()
        gate.shut()
        run.hand_over(leader, began)
        assert leader.ended(HANGS_S) == LOST
        assert "s (silence): another server may lead by now" in leader.log_tail()
        gate.open()
        run.restart(leader)
        run.await_updates(20)
        assert run.finish() == []


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("batch_taken", marks=pytest.mark.prove),
        "rows_written",
        pytest.param("committed", marks=pytest.mark.prove),
        pytest.param("answers_ready", marks=pytest.mark.prove),
    ],
)
def test_a_leader_that_is_paused_within_a_commit_finishes_none_after_it(
    moment: str, tmp_path: Path, postgresql_url: str
) -> None:
    with federation(tmp_path, postgresql_url, seed=33, failpoint=f"{moment}:40:stop") as run:
        leader, began = run.servers[0], time.monotonic()
        run.hand_over(leader, began)
        run.await_updates(20)
        outlive(run, leader)


@contextmanager
def leading(server: ServerProcess, name: str, spec: ParamSpec) -> Iterator[Device]:
    """A device of this name, enrolled with a server that leads until the end of it."""
    server.start()
    with grpc.insecure_channel(server.address, options=QUICK) as channel:
        device = Device(channel, spec, name)
        device.enrol()
        yield device
    assert server.drain() == 0


@pytest.mark.parametrize("values", [3, 300_000], ids=["small", "no-digest-on-record"])
def test_a_version_of_a_lost_history_is_none_of_its_successors(
    values: int, tmp_path: Path, postgresql_url: str
) -> None:
    """The database is put back by its own means, beside folders that are not, and one server goes past it."""
    plan = Plan(database=postgresql_url, standby=True)
    spec = write_manifest(tmp_path / "model", "test", {"w": np.zeros(values, np.float32)}).spec
    one, two = (ServerProcess(tmp_path, plan, data_dir=tmp_path / name / "data") for name in ("one", "two"))
    with leading(one, "a", spec) as device:
        device.work(1.0)
    name = psycopg.conninfo.conninfo_to_dict(postgresql_url)["dbname"]
    with psycopg.connect(postgresql_url, dbname="postgres", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}_early TEMPLATE {name}".encode())
        with leading(two, "a", spec) as device:
            device.work(1.0)
            assert set(np.frombuffer(device.fetch(exact=True)[1], np.float32)) == {2}
        admin.execute(f"DROP DATABASE {name}".encode())
        admin.execute(f"ALTER DATABASE {name}_early RENAME TO {name}".encode())
    with leading(one, "b", spec) as device:
        device.work(10.0)
    with leading(two, "b", spec) as device:
        task = device.task()
        header, model = device.fetch(version=task.base_version)
    assert header.version == 2
    assert set(np.frombuffer(model, np.float32)) == {11}


def newest_snapshot(url: str) -> int:
    """The version of the newest one that is named."""
    with psycopg.connect(url) as admin:
        ((version,),) = admin.execute(b"SELECT COALESCE(max(version), 0) FROM snapshots").fetchall()
        return int(version)


@pytest.mark.parametrize(
    "moment",
    [
        "shelf_put:3",
        *(
            pytest.param(m, marks=pytest.mark.prove)
            for m in ("snapshot_written:3", "shelf_written:40", "shelf_flushed:3", "shelf_cleared:2")
        ),
    ],
)
def test_a_leader_that_is_paused_while_it_remembers_takes_nothing_from_its_successor(
    moment: str, tmp_path: Path, postgresql_url: str
) -> None:
    """Neither what the successor remembers nor its turn, and it holds up none of its snapshots."""
    with federation(tmp_path, postgresql_url, seed=34, failpoint=f"{moment}:stop", remembering=True) as run:
        leader, began = run.servers[0], time.monotonic()
        run.hand_over(leader, began)
        before = newest_snapshot(postgresql_url)
        while newest_snapshot(postgresql_url) == before:
            run.await_updates(10)
        outlive(run, leader)


@pytest.mark.parametrize("database", ["", "memory"])
def test_a_standby_needs_a_database_that_can_be_shared(database: str, tmp_path: Path) -> None:
    settings = server_config(tmp_path / "data", server={"standby": True, "database": database})
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(3, np.float32)})
    with pytest.raises(ConfigError, match=r"server.standby .* PostgreSQL"):
        asyncio.run(serve(settings, manifest))


def test_a_second_server_on_sqlite_is_refused_at_once(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(3, np.float32)})
    settings = server_config(tmp_path / "data")
    with Served(settings, manifest), pytest.raises(StoreLocked, match="in use by process"):
        asyncio.run(serve(settings, manifest))


def test_a_device_goes_on_with_the_standby(tmp_path: Path, postgresql_url: str) -> None:
    write_manifest(tmp_path / "model", "synthetic", first_weights())
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    servers = []
    try:
        for address in addresses:
            servers.append(serve_by_command(tmp_path, address, postgresql_url))
            said = json.loads(servers[-1].stdout.readline())
            assert said["kind"] == ("standby" if len(servers) > 1 else "serving"), said
        told: list[str] = []
        # Without the lookout it would back off for an hour.
        options = ClientOptions(
            "synthetic",
            ",".join(addresses),
            "a",
            state_dir=tmp_path / "a",
            tasks_max=40,
            retry_base_s=3600.0,
            retry_cap_s=3600.0,
        )
        with ThreadPoolExecutor(1) as pool:
            device = pool.submit(run_client, options, lambda kind, **_: told.append(kind))
            while told.count("pushed") < 10 and not device.done():
                time.sleep(0.01)
            servers[0].kill()
            summary = device.result(120)
        assert (summary.answered, summary.applied) == (40, 40)
        assert json.loads(servers[1].stdout.readline())["kind"] == "serving"
    finally:
        for server in servers:
            server.terminate()
            server.wait(600)
            server.stdout.close()
    assert verify(tmp_path / addresses[1].replace(":", "-"), postgresql_url).problems == ()


def serve_by_command(folder: Path, address: str, database: str) -> Any:
    """`anabranch server --standby`, as an operator starts it."""
    options = ["--model", str(folder / "model"), "--data-dir", str(folder / address.replace(":", "-"))]
    ports = ["--address", address, "--admin-address", "127.0.0.1:0"]
    started = [COMMAND, "server", *options, *ports, "--database", database, "--standby", "--json"]
    rules = ["--set", "strategy.name=fedasync", "--set", "client.steps=3", "--set", "client.batch_size=8"]
    log = (folder / "log").open("ab")
    with log:
        return Process(*started, *rules, stdout=PIPE, stderr=log)


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(41, 44))
def test_twenty_misfortunes_in_any_order(
    seed: int, tmp_path: Path, postgresql_url: str, figure: Callable[[str], None]
) -> None:
    chance = random.Random(seed)
    with federation(tmp_path, postgresql_url, seed=seed) as run:
        for _ in range(20):
            run.await_updates(chance.randrange(1, 200))
            chance.choice((kill, kill, pause, drain, kill_both))(run)
        assert run.finish() == []
    taken = sorted(run.takeovers_s)
    middle, longest = taken[len(taken) // 2], taken[-1]
    figure(f"{run.acknowledged} updates, takeovers: median {middle:.2f} s, longest {longest:.2f} s")
