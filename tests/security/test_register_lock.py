"""Another process holds the members' register locked: who is in notices nothing, who wants in waits."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from guarded import Federation, issued
from wire import CALL_S

from anabranch.client.joining import join
from anabranch.core.errors import NotPermitted, StoreError, StoreFull
from anabranch.identity.authority import DAY_S, REGISTER, Authority
from anabranch.identity.certificates import Kind, certificate_pem
from anabranch.identity.standings import Standings
from anabranch.identity.wallet import Wallet
from anabranch.server.gate import Caller, Gate, Scope
from anabranch.server.members import Members

LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
connection.execute("UPDATE changes SET count = count + 1")
print("locked", flush=True)
sys.stdin.read()
connection.execute("COMMIT")
"""


@contextmanager
def locked(register: Path) -> Iterator[None]:
    """Another process writes there and takes its time."""
    command = [sys.executable, "-c", LOCK, str(register)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield
        process.communicate()


def test_who_is_in_is_answered_while_the_register_is_locked(guarded: Federation) -> None:
    known = [guarded.joined(f"device-{n}") for n in range(3)]
    devices = [guarded.device(wallet) for wallet in known]
    token = guarded.authority.invite("late", DAY_S)
    devices[0].enrol()  # with it the register is looked at
    happened: list[str] = []

    def come_late() -> None:
        join(guarded.folder / "late", guarded.join_address, token, guarded.authority.sha256)
        happened.append("joined")

    late = threading.Thread(target=come_late)
    with locked(guarded.folder / "ca" / REGISTER):
        late.start()
        for device in devices:  # two of them for the first time
            device.enrol()
            device.work()
            happened.append("worked")
        assert late.is_alive()
    late.join(CALL_S)
    assert happened == ["worked"] * 3 + ["joined"]


def test_a_revocation_counts_although_the_register_is_locked_after_it(guarded: Federation) -> None:
    good, bad = (guarded.device(guarded.joined(name)) for name in ("good", "bad"))
    good.enrol()
    bad.enrol()
    guarded.authority.revoke("bad")
    answered: list[str] = []

    def call(device: object) -> None:
        try:
            device.enrol()  # type: ignore[attr-defined]
            answered.append("in")
        except grpc.RpcError as error:
            answered.append(error.code().name)

    with locked(guarded.folder / "ca" / REGISTER):
        thread = threading.Thread(target=call, args=(bad,))
        thread.start()
        assert guarded.served.exit_code is None
    thread.join(CALL_S)
    assert answered == ["UNAUTHENTICATED"]
    good.enrol()


def test_what_was_read_holds_until_somebody_commits(authority: Authority, tmp_path: Path) -> None:
    register = authority.folder / REGISTER
    first, second = (issued(authority, Kind.DEVICE, n, tmp_path / n).peer.serial for n in ("a", "b"))
    with closing(Standings(register)) as standings:
        standings.read_ahead(0.0)
        with locked(register):
            assert standings.of([first, second, "1f"]) == {first: "good", second: "good", "1f": None}
        assert standings.of(["1f"]) == {"1f": "unknown"}  # it has committed, and the rest is looked up again
        assert standings.behind == 0
        authority.revoke("a")
        with locked(register):  # a commit that was not looked at: nobody is known any more
            assert standings.of([first, second]) == {first: None, second: None}
        assert standings.of([first]) == {first: "revoked"}
        third = issued(authority, Kind.DEVICE, "c", tmp_path / "c").peer.serial
        assert standings.of([third, second]) == {third: "good", second: "good"}


def test_what_is_at_hand_is_known_as_of_the_newest_commit(authority: Authority, tmp_path: Path) -> None:
    register = authority.folder / REGISTER
    first, second = (issued(authority, Kind.DEVICE, n, tmp_path / n).peer.serial for n in "ab")
    with closing(Standings(register)) as standings:
        assert standings.at_hand(first) is None, "nothing was looked at yet"
        standings.read_ahead(0.0)
        assert [standings.at_hand(serial) for serial in (first, second, "1f")] == ["good", "good", None]
        with locked(register):  # nothing is committed
            assert standings.at_hand(first) == "good"
        assert standings.at_hand(first) is None, "something was"
        standings.of([first])
        assert [standings.at_hand(serial) for serial in (first, second)] == ["good", "good"]
        authority.revoke("a")
        assert [standings.at_hand(serial) for serial in (first, second)] == [None, None]
        standings.of([second])
        assert [standings.at_hand(serial) for serial in (first, second)] == ["revoked", "good"]
        register.rename(register.with_name("gone"))
        assert standings.at_hand(second) is None, "another file may take its place"


def test_what_was_not_looked_up_since_a_commit_is_not_at_hand(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.identity.standings.AGAIN_AT_ONCE", 0)
    first, second = (issued(authority, Kind.DEVICE, n, tmp_path / n).peer.serial for n in "ab")
    with closing(Standings(authority.folder / REGISTER)) as standings:
        standings.of([first, second])
        authority.revoke("a")
        standings.of([second])  # the commit was seen, but of the other one nothing was read
        assert [standings.at_hand(serial) for serial in (first, second)] == [None, "good"]


class Call:
    """What a port asks a call of a device for."""

    def __init__(self, wallet: Wallet) -> None:
        self._shown = certificate_pem(wallet.certificate)

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._shown]}

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


def test_a_register_that_has_no_room_is_no_want_of_room_for_updates(authority: Authority) -> None:
    """`Room`, which logs that, hears of no register: devices were sent to a log that said nothing."""
    why = "register.db: no space left on the disk"

    class Full(Authority):
        def admit(self, *_: object) -> NoReturn:
            raise StoreFull(why)

    async def joins() -> None:
        with Full.open(authority.folder) as full:
            members = Members(full)
            with pytest.raises(StoreError, match=why) as refused:
                await members.admit("a.b", b"", DAY_S)
            members.close()
        assert not isinstance(refused.value, StoreFull)

    asyncio.run(joins())


def test_who_waits_for_the_register_is_of_the_scope_that_holds_behind_the_wait(
    authority: Authority, tmp_path: Path
) -> None:
    members, scopes = Members(authority), [Scope(("lab-1",))]
    gate = Gate(members, [Kind.DEVICE], scope=lambda: scopes[-1])
    callers = [Call(issued(authority, Kind.DEVICE, name, tmp_path / name)) for name in ("lab-1", "ward-1")]

    async def call() -> list[Caller | BaseException]:
        with locked(authority.folder / REGISTER):
            calls = [asyncio.create_task(gate.caller(caller)) for caller in callers]
            done, _ = await asyncio.wait(calls, timeout=0)
            assert not done, "the register cannot tell of them yet"
            scopes.append(Scope(("ward-*",)))
        found = await asyncio.gather(*calls, return_exceptions=True)
        members.close()
        return found

    lab, ward = asyncio.run(call())
    assert isinstance(lab, NotPermitted)
    assert isinstance(ward, Caller)
    assert ward.scope == scopes[-1], "by which later requests of its stream are judged"


def test_a_register_without_its_table_says_so(authority: Authority) -> None:
    register = authority.folder / REGISTER
    with closing(Standings(register)) as standings:
        with closing(sqlite3.connect(register)) as connection:
            connection.execute("DROP TABLE certificates")
        with pytest.raises(StoreError, match="cannot be read"):
            standings.of(["1f"])
