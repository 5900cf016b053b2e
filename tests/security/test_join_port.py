"""The port to join is open to strangers: what they send costs little, and keeps nobody out for long."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from guarded import TENSORS, Federation, federation, issued
from hypothesis import given
from hypothesis import strategies as st
from wire import CALL_S, QUICK

from anabranch.client.channel import error_of, secure_channel
from anabranch.client.joining import join
from anabranch.core.engine.rates import Rates
from anabranch.core.errors import AnabranchError, NotAuthenticated, Overloaded, Unavailable
from anabranch.core.limits import KIB, Limits
from anabranch.identity.authority import DAY_S, REGISTER
from anabranch.identity.certificates import Kind, new_key, signing_request
from anabranch.protos.v1 import identity_pb2 as identity
from anabranch.protos.v1.identity_pb2_grpc import JoiningStub
from anabranch.server.joining import source_of

JOIN = "/anabranch.v1.Joining/Join"


def stranger(guarded: Federation) -> grpc.Channel:
    """A connection to the port to join, by somebody who has no certificate."""
    channel = secure_channel(guarded.join_address, QUICK, guarded.authority.pem)
    return guarded.served.keep(channel)


def refusal(stub: JoiningStub, token: str, request: bytes) -> AnabranchError:
    """What joining fails with."""
    with pytest.raises(grpc.RpcError) as refused:
        stub.Join(identity.JoinRequest(token=token, signing_request=request), timeout=CALL_S)
    return error_of(refused.value, "join")


def test_who_fails_too_often_is_not_listened_to(tmp_path: Path) -> None:
    with federation(tmp_path, TENSORS, Limits(join_failures_per_minute=5.0)) as guarded:
        stub, request = JoiningStub(stranger(guarded)), signing_request(new_key())
        token = guarded.authority.invite("device-1", DAY_S)
        found = [refusal(stub, f"{token[:8]}.guess-{n}", request) for n in range(20)]
        assert [type(e) for e in found[:5]] == [NotAuthenticated] * 5
        assert {type(e) for e in found[6:]} == {Overloaded}
        last = found[-1]
        assert last.retry_after_s is not None
        assert 0 < last.retry_after_s[0] <= last.retry_after_s[1] <= 60
        with pytest.raises(Overloaded):  # from the same address: even with the token, for as long
            join(tmp_path / "a", guarded.join_address, token, guarded.authority.sha256)
        member = guarded.device(issued(guarded.authority, Kind.DEVICE, "device-2", tmp_path / "b"))
        member.enrol()  # who is in notices nothing
        assert member.work().decision.verdict == "published"


@pytest.mark.parametrize(
    ("token", "size", "why"),
    [
        ("", 900 * KIB, f"has {900 * KIB} bytes, 4096 are the most"),
        ("", 4097, "has 4097 bytes, 4096 are the most"),
        ("x" * 900 * KIB, 0, "the token is not known here"),
        ("a." + "b" * 200, 0, "the token is not known here"),
    ],
    ids=["request", "request, just", "token", "token, just"],
)
def test_what_is_too_large_is_refused_unread(guarded: Federation, token: str, size: int, why: str) -> None:
    """That no look is taken for such a token: test_authority.py."""
    good, request = guarded.authority.invite("device-1", DAY_S), signing_request(new_key())
    found = refusal(JoiningStub(stranger(guarded)), token or good, b"\x30" * size or request)
    assert isinstance(found, NotAuthenticated)
    assert why in str(found)
    assert len(str(found)) < 200
    assert guarded.joined("device-1", good).name == "device-1"  # the token was not used up


def test_strangers_hear_nothing_of_the_servers_folders(
    guarded: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    register = guarded.authority.folder / REGISTER
    with closing(sqlite3.connect(register)) as damaged:
        damaged.execute("ALTER TABLE tokens RENAME TO gone")
        damaged.commit()
    found = refusal(JoiningStub(stranger(guarded)), "a.guess", signing_request(new_key()))
    assert isinstance(found, Unavailable)
    assert str(register) not in str(found)
    (line,) = [record.getMessage() for record in caplog.records if "devices are told" in record.msg]
    assert f"{register} cannot be written: " in line


def silent(guarded: Federation, over: threading.Event) -> Any:
    """The call of a stranger of which no request comes until the event."""

    def silence() -> Iterator[Any]:
        over.wait(CALL_S)
        yield from ()

    return stranger(guarded).stream_unary(JOIN).future(silence())


def test_who_calls_and_sends_nothing_is_cut_off(tmp_path: Path) -> None:
    limits = Limits(joins_at_once_max=4, join_connection_s_max=4.0)  # which is time enough to join
    with federation(tmp_path, TENSORS, limits) as guarded:
        over = threading.Event()
        for call in [silent(guarded, over) for _ in range(8)]:  # each ends, though its caller does nothing
            assert call.exception(CALL_S) is not None
        over.set()
        assert guarded.joined("device-1").name == "device-1"


def test_few_join_at_a_time(tmp_path: Path) -> None:
    limits = Limits(joins_at_once_max=2, join_connection_s_max=600.0, join_failures_per_minute=1e6)
    with federation(tmp_path, TENSORS, limits) as guarded:
        over, ended = threading.Event(), threading.Semaphore(0)
        calls = [silent(guarded, over) for _ in range(4)]
        for call in calls:
            call.add_done_callback(lambda _: ended.release())
        assert all(ended.acquire(timeout=CALL_S) for _ in range(2))
        refused = [call for call in calls if call.done()]
        assert [call.code() for call in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        stub, request = JoiningStub(stranger(guarded)), signing_request(new_key())
        assert isinstance(refusal(stub, "a.guess", request), Overloaded)
        for call in calls:
            call.cancel()
        over.set()
        while isinstance(refusal(stub, "a.guess", request), Overloaded):  # until the server hears of that
            pass
        assert guarded.joined("device-1").name == "device-1"


# So short on the average that a bucket fills, and some that let much out.
GAPS_S = st.sampled_from([*[0.0] * 6, 1.0, 3.0, 6.1, 20.0])


@given(st.lists(st.tuples(st.sampled_from("aab"), GAPS_S), min_size=60, max_size=100))
def test_a_source_may_fail_so_often_in_any_minute_and_twice_that(attempts: list[tuple[str, float]]) -> None:
    failures, now, heard = Rates(10.0, 10.0), 0.0, []
    for source, passed in attempts:
        now += passed
        if not (wait_s := failures.wait_s(source, now)):
            failures.add(source, now)
            heard.append((source, now))
        else:
            assert not failures.wait_s(source, now + wait_s + 1e-6)
    for source, begin in heard:
        assert sum(s == source and begin <= t <= begin + 60 for s, t in heard) <= 20


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:10.1.2.3:4567", "10.1.2.3"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4567", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2::9]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:4567", "10.1.2.3"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_a_source_is_a_host_or_a_customers_network(peer: str, source: str) -> None:
    assert source_of(peer) == source
