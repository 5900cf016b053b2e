"""The authority's folder comes from a backup, is replaced under a server, or is lost."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from commands import anabranch, answer
from guarded import Federation, federation, issued

from anabranch.client.agent import Agent
from anabranch.core.errors import ConfigError, NotAuthenticated, StoreError, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.identity.authority import DAY_S, REGISTER, Authority
from anabranch.identity.certificates import Kind, new_key, signing_request
from anabranch.testing.federation import BASE, first_weights
from anabranch.workloads.app import Shard
from anabranch.workloads.synthetic import Synthetic


def take_back(guarded: Federation, backup: Path) -> None:
    """Put the register back as it was in a backup, as a file of its own."""
    register = guarded.folder / "ca" / REGISTER
    shutil.copy(backup, register.with_name("copy"))
    register.with_name("copy").replace(register)


def test_a_server_does_not_start_on_an_older_register(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded:
        token = guarded.authority.invite("device-1", DAY_S)
        guarded.joined("device-1", token)
        backup = shutil.copy(guarded.folder / "ca" / REGISTER, tmp_path / "backup")
        guarded.authority.revoke("device-1")
        guarded.served.close()
        take_back(guarded, Path(backup))
        with pytest.raises(ConfigError, match="older than this server has seen it"), guarded.started_again():
            pass
        answer(anabranch(tmp_path, "admin", "ca", "restored", "--folder", "ca", "--json"))
        answer(anabranch(tmp_path, "admin", "revoke", "device-1", "--folder", "ca", "--json"))
        with guarded.started_again(), Authority.open(tmp_path / "ca") as authority:
            with pytest.raises(NotAuthenticated, match="was revoked"):
                authority.admit(token, signing_request(new_key()), DAY_S)
            wallet = issued(authority, Kind.DEVICE, "device-2", tmp_path / "device-2")
            guarded.device(wallet).enrol()


def test_a_register_that_is_away_for_a_while_costs_no_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder was moved, or is on a disk that was gone: a device gave its result up, and ended."""
    with federation(tmp_path, first_weights(), DEFAULT_LIMITS, **BASE) as guarded:
        register = guarded.folder / "ca" / REGISTER
        away = register.with_name("away")
        heard: list[str] = []

        def on_event(kind: str, **data: Any) -> None:
            if kind == "trained" and not heard:
                register.rename(away)
            elif kind == "failed":
                heard.append(data["error"])
                if away.exists():
                    away.rename(register)

        wallet, shard = guarded.joined("device-1"), Shard("train", 0, 4)
        agent = Agent(
            Synthetic(),
            guarded.transport(wallet),
            "device-1",
            shard,
            tmp_path / "device",
            tasks_max=2,
            on_event=on_event,
        )
        done = agent.run()
        assert set(heard) == {"Unavailable"}
        assert done.answered == guarded.operators(guarded.operator()).status().updates_applied == 2
    (said,) = [line for line in caplog.messages if "come again" in line]
    assert "register.db is gone" in said


def test_a_register_that_is_replaced_under_a_server_lets_nobody_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with federation(tmp_path) as guarded:
        device = guarded.device(guarded.joined("device-1"))
        device.enrol()
        operator = guarded.operator()
        backup = shutil.copy(guarded.folder / "ca" / REGISTER, tmp_path / "backup")
        take_back(guarded, Path(backup))
        with pytest.raises(grpc.RpcError, match="the server's store cannot do it now; its log says why"):
            device.ask()
        assert any("was replaced: restart the server" in line for line in caplog.messages)
        with pytest.raises(StoreError, match="was replaced: restart the server"):
            guarded.operators(operator).status()
        with guarded.started_again():
            guarded.device(device.wallet).enrol()


def test_a_register_over_which_a_backup_is_copied_lets_nobody_in_who_was_revoked(tmp_path: Path) -> None:
    """The file is the same one, as `cp` leaves it: the server believed what it says by now."""
    with federation(tmp_path) as guarded:
        register = guarded.folder / "ca" / REGISTER
        lost, kept = (guarded.device(guarded.joined(f"device-{n}")) for n in (1, 2))
        operator = guarded.operator()
        backup = register.read_bytes()
        for device in (lost, kept):
            device.enrol()
        guarded.authority.revoke("device-1")
        with pytest.raises(grpc.RpcError, match="is revoked"):
            lost.ask()
        register.write_bytes(backup)
        for device in (lost, kept):
            with pytest.raises(grpc.RpcError, match="the server's store cannot do it now"):
                device.ask()
        with pytest.raises(StoreError, match="was taken back to an older one under the server: stop it"):
            guarded.operators(operator).status()
        with pytest.raises(ConfigError, match="older than this server has seen it"), guarded.started_again():
            pass
        answer(anabranch(tmp_path, "admin", "ca", "restored", "--folder", "ca", "--json"))
        with guarded.started_again():
            guarded.device(kept.wallet).enrol()


def forked(register: Path, backup: bytes) -> None:
    """Copy a backup over a register, and have another process write to it: as often as was lost, and more."""
    register.write_bytes(backup)
    with Authority.open(register.parent) as authority:
        for n in range(3):
            authority.invite(f"later-{n}", DAY_S)


def test_an_older_register_is_noticed_although_it_was_written_to_since(tmp_path: Path) -> None:
    """It had as many changes as the server had seen, and more: whoever had been revoked was let in."""
    with federation(tmp_path) as guarded:
        register = guarded.folder / "ca" / REGISTER
        lost = guarded.joined("device-1")
        backup = register.read_bytes()
        guarded.authority.revoke("device-1")
        with guarded.started_again():
            pass
        forked(register, backup)
        with pytest.raises(ConfigError, match="its change 4 is another one"), guarded.started_again():
            pass
        answer(anabranch(tmp_path, "admin", "ca", "restored", "--folder", "ca", "--json"))
        answer(anabranch(tmp_path, "admin", "revoke", "device-1", "--folder", "ca", "--json"))
        with guarded.started_again():
            with pytest.raises(grpc.RpcError, match="is revoked"):
                guarded.device(lost).ask()
            guarded.device(guarded.joined("device-2")).enrol()
        with guarded.started_again():
            pass


def test_a_register_with_a_backup_over_it_that_was_written_to_lets_nobody_in(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded:
        register = guarded.folder / "ca" / REGISTER
        lost = guarded.device(guarded.joined("device-1"))
        backup = register.read_bytes()
        guarded.authority.revoke("device-1")
        with pytest.raises(grpc.RpcError, match="is revoked"):
            lost.ask()
        forked(register, backup)
        with pytest.raises(grpc.RpcError, match="the server's store cannot do it now"):
            lost.ask()
        with pytest.raises(ConfigError, match="older than this server has seen it"), guarded.started_again():
            pass


def test_a_server_that_is_killed_has_noted_how_far_the_register_was(tmp_path: Path) -> None:
    """What it noted is taken away as it ran: no end of its own could have written it."""
    with federation(tmp_path) as guarded:
        register, noted = guarded.folder / "ca" / REGISTER, guarded.data_dir / "register.json"
        lost = guarded.device(guarded.joined("device-1"))
        backup = register.read_bytes()
        guarded.authority.revoke("device-1")
        with pytest.raises(grpc.RpcError, match="is revoked"):
            lost.ask()
        at_the_kill = noted.read_bytes()
        guarded.served.close()
        noted.write_bytes(at_the_kill)
        register.write_bytes(backup)
        with pytest.raises(ConfigError, match="older than this server has seen it"), guarded.started_again():
            pass


def test_a_note_that_cannot_be_written_keeps_nobody_out_and_is_made_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with federation(tmp_path) as guarded:
        noted = guarded.data_dir / "register.json"
        assert not noted.exists()
        (guarded.data_dir / "register.json.tmp").mkdir()  # where it is written first
        wallets = [guarded.joined(f"device-{n}") for n in (1, 2)]
        for wallet in wallets:
            guarded.device(wallet).enrol()
        guarded.authority.revoke("device-1")
        with pytest.raises(grpc.RpcError, match="is revoked"):
            guarded.device(wallets[0]).ask()
        assert not noted.exists()
        (guarded.data_dir / "register.json.tmp").rmdir()
        guarded.joined("device-3")
        (point,) = json.loads(noted.read_bytes()).values()
        assert point[0] == guarded.authority.point.changes
    said = [line for line in caplog.messages if "would not be noticed after a crash" in line]
    assert len(said) == 1


def test_a_register_and_a_note_of_an_earlier_program_go_on(tmp_path: Path) -> None:
    """That has no marks, and notes the number of changes alone."""
    with federation(tmp_path) as guarded:
        register, noted = guarded.folder / "ca" / REGISTER, guarded.data_dir / "register.json"
        device = guarded.device(guarded.joined("device-1"))
        guarded.served.close()
        with closing(sqlite3.connect(register)) as connection:
            connection.execute("DROP TABLE marks")
        sha256, changes = guarded.authority.sha256, guarded.authority.point.changes
        assert guarded.authority.point.mark == ""
        noted.write_text(json.dumps({sha256: changes}))
        with guarded.started_again():
            guarded.device(device.wallet).enrol()
            backup = register.read_bytes()
            guarded.authority.revoke("device-1")
            with pytest.raises(grpc.RpcError, match="is revoked"):
                guarded.device(device.wallet).ask()
        forked(register, backup)
        with (
            pytest.raises(ConfigError, match=f"its change {changes + 1} is another one"),
            guarded.started_again(),
        ):
            pass
        noted.write_text(json.dumps({sha256: changes + 100}))
        with (
            pytest.raises(ConfigError, match=f"has {changes + 3} of {changes + 100} changes"),
            guarded.started_again(),
        ):
            pass


def test_a_register_that_is_said_to_be_restored_lets_nobody_in_before_a_start(tmp_path: Path) -> None:
    """The server had not looked at it in between, and whoever was revoked is not revoked again yet."""
    with federation(tmp_path) as guarded:
        register = guarded.folder / "ca" / REGISTER
        device = guarded.device(guarded.joined("device-1"))
        device.enrol()
        backup = register.read_bytes()
        guarded.authority.revoke("device-1")
        guarded.authority.invite("device-2", DAY_S)
        with pytest.raises(grpc.RpcError, match="is revoked"):
            device.ask()
        register.write_bytes(backup)
        answer(anabranch(tmp_path, "admin", "ca", "restored", "--folder", "ca", "--json"))
        with pytest.raises(grpc.RpcError, match="the server's store cannot do it now"):
            device.ask()
        with guarded.started_again():
            guarded.device(device.wallet).enrol()


def test_data_that_are_moved_away_under_a_server_are_what_it_says(tmp_path: Path) -> None:
    """And not what else is noted beside them, of a register that has changed since."""
    with federation(tmp_path) as guarded:
        operators = guarded.operators(guarded.operator())
        guarded.data_dir.rename(tmp_path / "elsewhere")
        with pytest.raises(Unavailable):
            operators.pause()
        error = guarded.served.failure()
        assert isinstance(error, StoreError)
        assert "is not what this server has locked" in str(error)


def test_a_restore_counts_every_time(authority: Authority) -> None:
    ages = []
    for _ in range(3):
        authority.declare_restored()
        ages.append(authority.point.changes)
    assert ages == sorted(set(ages))
    before = authority.point.changes
    authority.invite("a", DAY_S)
    assert authority.point.changes == before + 1


def test_with_a_new_authority_everybody_joins_anew_and_the_run_goes_on(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded:
        device = guarded.device(guarded.joined("device-1"))
        device.enrol()
        device.work()
        guarded.served.close()
        shutil.rmtree(tmp_path / "ca")  # the key is lost
        with Authority.create(tmp_path / "ca") as other:
            guarded.authority = other
            with guarded.started_again():
                with pytest.raises(grpc.RpcError):
                    guarded.device(device.wallet).enrol()
                joined = guarded.device(guarded.joined("device-1"))
                joined.enrol()
                assert joined.work().version == 2
