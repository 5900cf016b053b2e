"""Masked sums live: real processes of a server, two keepers and devices, and whoever of them is killed."""

from __future__ import annotations

import math
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch, answer
from masked_fleet import LYING, MaskedFleet
from nursery import Process
from server_logs import records_of

from anabranch.core.config.privacy import epsilon_text
from anabranch.core.privacy.accountant import epsilon_of
from anabranch.server.failpoints import MASKED_POINTS, POINTS

PRIVACY = """
[privacy]
clip = 1.0
noise = 0.5
participations = 2
bands = 1
"""
# Of 80 kB an update, and an answer.
WIDE = """
import anabranch
import numpy as np

class Wide(anabranch.App):
    def model(self):
        return {"w": np.zeros(20_000, np.float32)}

    def data(self, shard):
        return anabranch.Examples(np.ones((4, 1), np.float32), np.zeros(4, np.int64))

    def train(self, model, examples, plan, seed):
        model["w"] += np.float32(1e-3)
        return {}

    def evaluate(self, model, examples):
        return {"loss": 0.0}
"""
OF_EVENTS = ("batch_taken", "log_written", "log_flushed", "handled", "marked", "answers_ready", "answered")
KILLED = ("batch_taken", "log_written", "log_flushed", "handled", "answers_ready", "sum_came")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def finished(
    fleet: MaskedFleet, server: Process, devices: list[Process], where: tuple[str, ...] = ("data",)
) -> dict[str, Any]:
    """How the run stands once its devices have ended, and its log is checked."""
    for number, device in enumerate(devices):
        assert device.wait(600) == 0, fleet.said(f"device-{number}")
    status = fleet.status()
    assert status["finished"], status
    server.terminate()
    assert server.wait(600) == 0, fleet.said("server")
    words = ("verify", *where, "--ca-sha256", fleet.ca_sha256, "--json")
    verified = answer(anabranch(fleet.folder, *words))
    assert verified["problems"] == [], verified
    return status


def check_log(fleet: MaskedFleet, versions: int, where: tuple[str, ...] = ("data",)) -> None:
    """Every update is in one sum, each sum has the answer of each keeper once; `where` is `verify`'s."""
    log = records_of(fleet.folder / where[0], where[-1] if "--database" in where else "")
    updates = [r for r in log if r["kind"] == "update" and not r.get("flaw")]
    assert max(Counter(r["update_id"] for r in updates).values()) == 1
    assert len(updates) >= versions * fleet.devices
    for record in updates:
        assert sorted(record["seals"]) == sorted(fleet.names)
        assert record["payload"]["codec"] == "ring(32,20)"
        assert not record["metrics"].keys() - {"train_s"}
    sums = Counter((r["number"], r["keeper"]) for r in log if r["kind"] == "mask_sum")
    assert sums == {(n, keeper): 1 for n in range(1, versions + 1) for keeper in fleet.names}


@pytest.mark.prove
def test_a_fleet_whose_server_sees_only_sums(tmp_path: Path, stack: ExitStack) -> None:
    fleet = MaskedFleet(tmp_path, stack)
    for i in range(2):
        fleet.keeper(i)
    server = fleet.server()
    status = finished(fleet, server, [fleet.device(i) for i in range(4)])
    assert status["version"] == 3
    sums = status["masked_sums"]
    assert sums["waiting"] == []
    assert sorted(keeper["name"] for keeper in sums["keepers"]) == sorted(fleet.names)
    assert [(keeper["answered"], keeper["trouble"]) for keeper in sums["keepers"]] == [(3, ""), (3, "")]
    check_log(fleet, 3)


def held_up_by_a_keeper(fleet: MaskedFleet) -> tuple[Process, list[Process], dict[str, Any]]:
    """A server and four devices whose first sum waits for the keeper 1, which was killed; how they stand."""
    keepers, server = [fleet.keeper(i) for i in range(2)], fleet.server()
    devices = [fleet.device(i) for i in range(3)]
    fleet.until("updates_applied", 3)  # no sum is asked for before the fourth
    keepers[1].kill()
    devices.append(fleet.device(3))
    return server, devices, fleet.until("waiting", 1)


def test_kills_of_all_three_kinds(tmp_path: Path, stack: ExitStack) -> None:
    """A keeper that is away holds up sums, not devices; what waits outlives the server."""
    fleet = MaskedFleet(tmp_path, stack)
    server, devices, held_up = held_up_by_a_keeper(fleet)
    devices[2].kill()
    server.kill()
    server.wait()  # its lock goes with it
    server, devices[2] = fleet.server(), fleet.device(2)
    still = fleet.until("waiting", 1)
    assert still["masked_sums"]["waiting"][0]["number"] == held_up["masked_sums"]["waiting"][0]["number"]
    fleet.keeper(1)
    assert finished(fleet, server, devices)["version"] == 3
    check_log(fleet, 3)


def test_a_server_whose_database_is_lost(tmp_path: Path, stack: ExitStack) -> None:
    """Made anew of its log, in which are the keepers' answers and a sum that waits for one."""
    fleet = MaskedFleet(tmp_path, stack)
    server, devices, _ = held_up_by_a_keeper(fleet)
    server.kill()
    server.wait()
    for path in (tmp_path / "data").glob("anabranch.db*"):
        path.unlink()
    answer(anabranch(tmp_path, "admin", "rebuild", "--data-dir", "data", "--json"))
    server = fleet.server()
    fleet.keeper(1)
    assert finished(fleet, server, devices)["version"] == 3
    check_log(fleet, 3)


def test_a_standby_takes_over_with_the_sums_that_wait(
    tmp_path: Path, stack: ExitStack, postgresql_url: str
) -> None:
    """It has heard of no keeper before; what the old leader asked is asked again, and answered alike."""
    fleet = MaskedFleet(tmp_path, stack)
    keepers = [fleet.keeper(i) for i in range(2)]
    database = ("--database", postgresql_url, "--standby")
    leader, of_leader = fleet.server("", *database), fleet.admin
    standby, of_standby = fleet.standby(*database), fleet.admin
    devices, fleet.admin = [fleet.device(i) for i in range(3)], of_leader
    fleet.until("updates_applied", 3)  # no sum is asked for before the fourth
    keepers[1].kill()
    devices.append(fleet.device(3))
    held_up = fleet.until("waiting", 1)["masked_sums"]["waiting"][0]["number"]
    leader.kill()
    assert standby.stdout is not None
    assert "serving" in standby.stdout.readline(), fleet.said("standby")
    fleet.admin = of_standby
    assert fleet.until("waiting", 1)["masked_sums"]["waiting"][0]["number"] == held_up
    fleet.keeper(1)
    where = ("standby-data", "--database", postgresql_url)
    assert finished(fleet, standby, devices, where)["version"] == 3
    check_log(fleet, 3, where)


@pytest.mark.prove
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", KILLED)
def test_a_server_that_ends_between_any_two_steps(
    tmp_path: Path, stack: ExitStack, point: str, nth: int
) -> None:
    fleet = MaskedFleet(tmp_path, stack)
    for i in range(2):
        fleet.keeper(i)
    # The first events are enrolments and asks.
    dying = fleet.server(f"{point}:{nth if point == 'sum_came' else 8 * nth}")
    devices = [fleet.device(i) for i in range(4)]
    assert dying.wait(600) == -9
    assert finished(fleet, fleet.server(), devices)["version"] == 3
    check_log(fleet, 3)


@pytest.mark.prove
def test_all_three_kinds_end_at_every_failpoint(
    tmp_path: Path, stack: ExitStack, figure: Callable[[str], None]
) -> None:
    """At each failpoint in turn the server ends, a keeper and a device are killed, and all come again."""
    fleet = MaskedFleet(tmp_path, stack, devices=8, versions=60)
    keepers, server = [fleet.keeper(i) for i in range(2)], fleet.server()
    devices = [fleet.device(i) for i in range(8)]
    fleet.until("version", 1)
    server.kill()
    every = (*POINTS, *MASKED_POINTS)
    order = random.Random(19).sample(every, len(every)) * 2
    for turn, point in enumerate(order):
        # Of what every event meets, not always the first one.
        nth = 1 + turn % 7 if point in OF_EVENTS else 1
        dying = fleet.dying(f"{point}:{nth}", "limits.inline_bytes_max=0", "server.snapshot_every_versions=1")
        assert dying.wait(600) == -9, (point, fleet.said("server"))
        one, other = turn % 2, turn % 8
        keepers[one].kill()
        devices[other].kill()
        keepers[one], devices[other] = fleet.keeper(one), fleet.device(other)
    server = fleet.server()
    before = fleet.status()["version"]
    assert finished(fleet, server, devices)["version"] == 60
    check_log(fleet, 60)
    for number in range(2):
        assert unmasked(fleet, number) == (60, 60 * 8, 60 * 8)
    figure(
        f"{len(order)} kills each of a server, a keeper and a device, the last one at version {before} of 60"
    )


def unmasked(fleet: MaskedFleet, number: int) -> tuple[int, int, int]:
    """How many sums, seeds and updates a keeper remembers."""
    with closing(sqlite3.connect(fleet.folder / f"keeper-{number}" / "keeper.db")) as memory:
        sums, seeds, updates = (
            memory.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("cohorts", "seeds", "updates")
        )
    return sums, seeds, updates


def test_a_private_run_is_proved_and_backed_up_with_all_its_answers(tmp_path: Path, stack: ExitStack) -> None:
    """Its noise is the keepers', so no key is needed; its answers lie in the log."""
    (tmp_path / "wide.py").write_text(WIDE)
    fleet = MaskedFleet(tmp_path, stack, versions=2, app="wide.py:Wide")
    run = tmp_path / "run.toml"
    run.write_text(run.read_text().replace("clip = 1.0\n", "") + PRIVACY)
    for i in range(2):
        fleet.keeper(i)
    server = fleet.server()
    finished(fleet, server, [fleet.device(i) for i in range(4)])
    check_log(fleet, 2)
    assert not (tmp_path / "data" / "privacy.key").exists()
    logs = sorted(path.name for path in (tmp_path / "data" / "log").iterdir())
    assert logs
    answer(anabranch(tmp_path, "admin", "backup", "copy", "--data-dir", "data", "--json"))
    assert sorted(path.name for path in (tmp_path / "copy" / "log").iterdir()) == logs
    verified = answer(anabranch(tmp_path, "verify", "copy", "--whole", "--json"))
    assert (verified["problems"], verified["version"]) == ([], 2)
    with closing(sqlite3.connect(tmp_path / "copy" / "anabranch.db")) as rows:
        packed = rows.execute("SELECT pack, pack_offset FROM mask_sums WHERE pack IS NOT NULL").fetchall()
    assert len(packed) == 2 * len(fleet.names)
    restored = anabranch(tmp_path, "admin", "restore", "copy", "--data-dir", "again")
    assert restored.returncode == 2
    assert "a run with masked sums cannot go on from a backup" in restored.stderr
    number, offset = packed[-1]
    path = tmp_path / "data" / "log" / f"{number:06d}.log"
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 1
    path.write_bytes(damaged)
    refused = anabranch(tmp_path, "admin", "backup", "another", "--data-dir", "data")
    assert refused.returncode == 31, refused
    assert not (tmp_path / "another").exists()


def test_who_was_told_other_keepers_or_none_sends_nothing(tmp_path: Path, stack: ExitStack) -> None:
    fleet = MaskedFleet(tmp_path, stack, devices=2)
    for i in range(2):
        fleet.keeper(i)
    fleet.server()
    none = fleet.device(0, "--json")
    other = fleet.device(1, "--keeper", fleet.names[0])
    assert none.wait(600) != 0
    assert other.wait(600) != 0
    assert "--keeper" in fleet.said("device-0")
    assert "it masks for these alone" in fleet.said("device-1")
    assert fleet.status()["updates_applied"] == 0


def test_a_sum_that_a_keeper_refuses_is_dropped_by_an_operator(tmp_path: Path, stack: ExitStack) -> None:
    """A device that one keeper's people have revoked: its sum waits, and all after it, until it is given up.

    The other keeper has answered by then: a smaller sum of the rest would show that device to the server.
    """
    fleet = MaskedFleet(tmp_path, stack, keepers=2, versions=2)
    run = tmp_path / "run.toml"
    private = PRIVACY.replace("participations = 2", "participations = 3")
    run.write_text(run.read_text().replace("clip = 1.0\n", "") + private)
    (tmp_path / "keeper-0" / "revoked.txt").write_text("device-3\n")
    for i in range(2):
        fleet.keeper(i)
    server = fleet.server()
    devices = [fleet.device(i) for i in range(4)]
    while True:
        standings = fleet.until("waiting", 1)["masked_sums"]["keepers"]
        answers, refuses = sorted(standings, key=lambda one: str(one["trouble"]))
        if refuses["trouble"] and answers["answered"]:
            break
    assert refuses["trouble"].startswith("sum 1: revoked: update ")
    assert (refuses["answered"], answers["trouble"]) == (0, "")
    operator = ("--admin", fleet.admin, "--identity", "alice")
    assert anabranch(tmp_path, "admin", "secagg", "drop", 7, *operator).returncode != 0
    dropped = answer(anabranch(tmp_path, "admin", "secagg", "drop", 1, *operator, "--json"))
    assert dropped == {"number": 1, "updates_lost": 4}
    # Not before: the server asks again and again, and the sum would be answered before it is dropped.
    (tmp_path / "keeper-0" / "revoked.txt").write_text("")
    assert devices[0].wait(600) == 0, fleet.said("device-0")
    said = anabranch(tmp_path, "admin", "status", *operator).stdout
    status = finished(fleet, server, devices)
    assert (status["version"], status["updates_applied"], status["masked_sums"]["lost"]) == (2, 8, 1), (
        "those of the sum that was lost are in none"
    )
    spent = epsilon_text(epsilon_of(math.sqrt(3) / 0.5, 1e-6))
    assert f"epsilon {spent} ({spent} so far)" in said, "the other keeper has unmasked it"


def test_a_device_whose_boxes_no_keeper_opens_is_barred_with_all_its_sums(
    tmp_path: Path, stack: ExitStack
) -> None:
    """It would be in every sum, and sums that wait for nothing keep all devices from their tasks."""
    fleet = MaskedFleet(tmp_path, stack, versions=2)
    for i in range(2):
        fleet.keeper(i)
    server = fleet.server()
    devices = [fleet.device(i) for i in range(3)]
    liar = fleet.device(3, program=LYING)
    while not all(one["trouble"] for one in fleet.until("waiting", 2)["masked_sums"]["keepers"]):
        pass
    for one in fleet.status()["masked_sums"]["keepers"]:
        assert one["trouble"].startswith("sum 1: box: update ")
        assert "`anabranch admin secagg drop --of device-3` bars it" in one["trouble"]
    assert "secagg drop --of device-3" in fleet.said("server")
    operator = ("--admin", fleet.admin, "--identity", "alice")
    for wrong in ((), (1, "--of", "device-3"), ("--of", "devcie-3")):
        assert anabranch(tmp_path, "admin", "secagg", "drop", *wrong, *operator).returncode == 2
    order = ("admin", "secagg", "drop", "--of", "device-3", *operator, "--json")
    dropped = answer(anabranch(tmp_path, *order))
    assert dropped["numbers"][:2] == [1, 2]
    assert dropped["updates_lost"] >= 8
    after = fleet.status()["masked_sums"]
    assert (after["waiting"], after["lost"]) == ([], len(dropped["numbers"]))
    assert answer(anabranch(tmp_path, *order))["numbers"] == [], "it comes into no other sum"
    liar.terminate()
    devices.append(fleet.device(4))
    fleet.until("version", 2)
    assert finished(fleet, server, devices)["masked_sums"]["lost"] == len(dropped["numbers"])


def test_devices_without_certificates_have_no_masked_sums(tmp_path: Path, stack: ExitStack) -> None:
    """A port in the clear for devices, though that of operators has mutual TLS: keepers would not answer."""
    MaskedFleet(tmp_path, stack, devices=2)
    plain = ("--set", "identity.tls=auto", "--admin-address", "0.0.0.0:0")
    done = anabranch(tmp_path, "server", "run.toml", "--model", "model", *plain)
    assert done.returncode == 2
    assert "needs devices with certificates" in done.stderr
    assert not (tmp_path / "data" / "anabranch.db").exists()
