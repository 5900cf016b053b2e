"""Masked sums live: real processes of a server, two keepers and devices, and whoever of them is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch, answer
from masked_fleet import MaskedFleet
from nursery import Process

from anabranch.core.journal import Record
from anabranch.server.store.factory import open_store

KILLED = ("batch_taken", "rows_written", "committed", "handled", "answers_ready", "sum_came")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def finished(fleet: MaskedFleet, server: Process, devices: list[Process]) -> dict[str, Any]:
    """How the run stands once its devices have ended, and its log is checked."""
    for number, device in enumerate(devices):
        assert device.wait(600) == 0, fleet.said(f"device-{number}")
    status = fleet.status()
    assert status["finished"], status
    server.terminate()
    assert server.wait(600) == 0, fleet.said("server")
    words = ("verify", "data", "--ca-sha256", fleet.ca_sha256, "--json")
    verified = answer(anabranch(fleet.folder, *words))
    assert verified["problems"] == [], verified
    return status


def records(fleet: MaskedFleet) -> list[Record]:
    """The log, read when nobody writes it."""
    store = open_store("", fleet.folder / "data")
    try:
        return [record for _, record in store.records()]
    finally:
        store.close()


def check_log(fleet: MaskedFleet, versions: int) -> None:
    """Every update is in one sum, each sum has the answer of each keeper once."""
    log = records(fleet)
    updates = [r for r in log if r["kind"] == "update" and not r.get("flaw")]
    assert max(Counter(r["update_id"] for r in updates).values()) == 1
    assert len(updates) >= versions * fleet.devices
    for record in updates:
        assert sorted(record["seals"]) == sorted(fleet.names)
        assert record["payload"]["codec"] == "ring(32,20)"
        assert not record["metrics"].keys() - {"train_s"}
    sums = Counter((r["number"], r["keeper"]) for r in log if r["kind"] == "mask_sum")
    assert sums == {(n, keeper): 1 for n in range(1, versions + 1) for keeper in fleet.names}


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


def test_kills_of_all_three_kinds(tmp_path: Path, stack: ExitStack) -> None:
    """A keeper that is away holds up sums, not devices; what waits outlives the server."""
    fleet = MaskedFleet(tmp_path, stack)
    keepers, server = [fleet.keeper(i) for i in range(2)], fleet.server()
    devices = [fleet.device(i) for i in range(4)]
    fleet.until("version", 1)
    keepers[1].kill()
    held_up = fleet.until("waiting", 1)
    devices[2].kill()
    server.kill()
    server, devices[2] = fleet.server(), fleet.device(2)
    still = fleet.until("waiting", 1)
    assert still["masked_sums"]["waiting"][0]["number"] == held_up["masked_sums"]["waiting"][0]["number"]
    fleet.keeper(1)
    assert finished(fleet, server, devices)["version"] == 3
    check_log(fleet, 3)


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
    """A device that a keeper's people have revoked: the sum it is in waits until an operator gives it up."""
    fleet = MaskedFleet(tmp_path, stack, keepers=1, versions=2)
    (tmp_path / "keeper-0" / "revoked.txt").write_text("device-3\n")
    fleet.keeper(0)
    server = fleet.server()
    devices = [fleet.device(i) for i in range(4)]
    while not (trouble := fleet.until("waiting", 1)["masked_sums"]["keepers"][0]["trouble"]):
        pass
    assert trouble.startswith("sum 1: revoked: update ")
    operator = ("--admin", fleet.admin, "--identity", "alice")
    assert anabranch(tmp_path, "admin", "secagg", "drop", 7, *operator).returncode != 0
    (tmp_path / "keeper-0" / "revoked.txt").write_text("")
    dropped = answer(anabranch(tmp_path, "admin", "secagg", "drop", 1, *operator, "--json"))
    assert dropped == {"number": 1, "updates_lost": 4}
    assert finished(fleet, server, devices)["version"] == 2


def test_devices_without_certificates_have_no_masked_sums(tmp_path: Path, stack: ExitStack) -> None:
    """A port in the clear for devices, though that of operators has mutual TLS: keepers would not answer."""
    MaskedFleet(tmp_path, stack, devices=2)
    plain = ("--set", "identity.tls=auto", "--admin-address", "0.0.0.0:0")
    done = anabranch(tmp_path, "server", "run.toml", "--model", "model", *plain)
    assert done.returncode == 2
    assert "needs devices with certificates" in done.stderr
    assert not (tmp_path / "data" / "anabranch.db").exists()
