"""Who may make a call, and how many at a time, asked of the gate and its places themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from guarded import issued

from anabranch.core.errors import AnabranchError, ConfigError, NotAuthenticated, NotPermitted, Overloaded
from anabranch.identity.addresses import JOB_KEY
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind, Peer, certificate_pem, peer_of
from anabranch.server.gate import EVERYBODY, Caller, Gate, Scope
from anabranch.server.members import Members
from anabranch.server.places import Places
from anabranch.support.tracing import TRACEPARENT

WARDS = Scope(("ward-*",))
PORT = "ipv4:127.0.0.1:1"


class Call:
    """As gRPC tells of one: what it said of its job, the certificate that it came with, when it is over."""

    def __init__(self, job: str = "", pem: bytes = b"", trace: str = "") -> None:
        self._said = {"other": "x", JOB_KEY: job, TRACEPARENT: trace}
        self._pem = pem
        self._heard: list[Callable[[Call], None]] = []

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._pem]} if self._pem else {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple((key, value) for key, value in self._said.items() if value)

    def peer(self) -> str:
        return PORT

    def add_done_callback(self, heard: Callable[[Call], None]) -> None:
        self._heard.append(heard)

    def end(self) -> None:
        for heard in self._heard:
            heard(self)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Authority, dict[str, bytes]]]:
    """An authority, and the certificates of two devices and an operator."""
    folder = tmp_path_factory.mktemp("papers")
    with Authority.create(folder / "ca") as authority:
        kinds = {"ward-1": Kind.DEVICE, "lab-1": Kind.DEVICE, "alice": Kind.OPERATOR}
        wallets = {name: issued(authority, kind, name, folder / name) for name, kind in kinds.items()}
        yield authority, {name: certificate_pem(wallet.certificate) for name, wallet in wallets.items()}


def peers(papers: tuple[Authority, dict[str, bytes]]) -> dict[str, Peer]:
    return {name: peer_of(pem) for name, pem in papers[1].items()}


def told(made: Callable[[], object]) -> type[AnabranchError] | None:
    try:
        made()
    except AnabranchError as error:
        return type(error)
    return None


def test_a_caller_speaks_for_itself(papers: tuple[Authority, dict[str, bytes]]) -> None:
    found = peers(papers)
    nobody, device, operator = Caller(), Caller(found["ward-1"]), Caller(found["alice"])
    assert told(lambda: nobody.check_name("whoever")) is None
    assert told(lambda: device.check_name("ward-1")) is None
    assert told(lambda: device.check_name("ward-2")) is NotPermitted
    assert told(lambda: operator.check_name("alice")) is NotPermitted, "an operator is no device of its name"
    assert told(lambda: Caller(scope=WARDS).check_name("lab-1")) is NotPermitted
    assert told(lambda: Caller(scope=WARDS).check_name("ward-9")) is None
    with pytest.raises(NotPermitted, match=r"^device 'ward-1' may not speak for 'ward-2': use its own name$"):
        device.check_name("ward-2")
    assert [str(caller) for caller in (nobody, device, operator)] == [
        "somebody on this machine",
        "device 'ward-1'",
        "operator 'alice'",
    ]


def test_an_operator_may_look_on_and_a_device_as_itself(papers: tuple[Authority, dict[str, bytes]]) -> None:
    found = peers(papers)
    assert told(lambda: Caller(found["alice"], scope=WARDS).check_observer("lab-1")) is None
    assert told(lambda: Caller(scope=WARDS).check_observer("lab-1")) is None, "without TLS nobody is known"
    assert told(lambda: Caller(found["ward-1"]).check_observer("ward-1")) is None
    assert told(lambda: Caller(found["ward-1"]).check_observer("lab-1")) is NotPermitted


def test_a_call_is_of_the_run_that_the_port_is_of() -> None:
    async def asked(gate: Gate, job: str) -> Caller:
        return await gate.caller(Call(job))

    def outcome(gate: Gate, job: str) -> type[AnabranchError] | None:
        return told(lambda: asyncio.run(asked(gate, job)))

    only, wards, every = Gate(), Gate(job="wards"), Gate(job=None)
    assert [outcome(only, job) for job in ("", "wards")] == [None, ConfigError]
    assert [outcome(wards, job) for job in ("", "wards", "labs")] == [ConfigError, None, ConfigError]
    assert [outcome(every, job) for job in ("", "wards")] == [None, None]
    with pytest.raises(ConfigError, match="no jobs: leave /wards out of its address"):
        asyncio.run(asked(only, "wards"))
    assert asyncio.run(asked(only, "")).scope is EVERYBODY
    caller = asyncio.run(asked(Gate(scope=lambda: WARDS), ""))
    assert (caller.address, caller.peer, caller.members, caller.scope) == (PORT, None, None, WARDS)


def test_a_guarded_port_lets_its_kinds_in_and_devices_of_its_scope(
    papers: tuple[Authority, dict[str, bytes]],
) -> None:
    authority, pems = papers

    async def asked() -> dict[str, type[AnabranchError] | Caller]:
        members = Members(authority)
        both = Gate(members, (Kind.DEVICE, Kind.OPERATOR), scope=lambda: WARDS)
        calls = {name: (both, pem) for name, pem in pems.items()}
        calls |= {"a device": (Gate(members, [Kind.OPERATOR]), pems["ward-1"]), "no papers": (both, b"")}
        found: dict[str, type[AnabranchError] | Caller] = {}
        for name, (gate, pem) in calls.items():
            try:
                found[name] = await gate.caller(Call(pem=pem))
            except AnabranchError as error:
                found[name] = type(error)
        authority.revoke("ward-1")
        ward = found["ward-1"]
        assert isinstance(ward, Caller)
        peer = ward.peer
        assert peer is not None
        for name, still in {"still": ward.check_still, "gate": lambda: both.check(peer)}.items():
            with pytest.raises(NotAuthenticated):
                await still()
            found[name] = NotAuthenticated
        members.close()
        return found

    found = asyncio.run(asked())
    ward, alice = found.pop("ward-1"), found.pop("alice")
    assert isinstance(ward, Caller)
    assert isinstance(alice, Caller), "a scope is of devices"
    assert (ward.peer, ward.address, ward.scope) == (peer_of(pems["ward-1"]), PORT, WARDS)
    assert ward.members is not None
    assert found == {
        "lab-1": NotPermitted,
        "a device": NotPermitted,
        "no papers": NotAuthenticated,
        "still": NotAuthenticated,
        "gate": NotAuthenticated,
    }


@pytest.mark.parametrize("name", ["", "lab-1"])
def test_who_traces_hears_of_the_call_that_the_caller_is_in(
    name: str, papers: tuple[Authority, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, pems = papers

    async def asked() -> str:
        members = Members(authority) if name else None
        caller = await Gate(members, [Kind.DEVICE]).caller(Call(pem=pems.get(name, b""), trace="00-1-2-01"))
        if members is not None:
            members.close()
        return caller.trace

    assert asyncio.run(asked()) == "", "nobody traces"
    monkeypatch.setattr("anabranch.server.gate.is_tracing", lambda: True)
    assert asyncio.run(asked()) == "00-1-2-01"


def test_a_place_is_given_back_when_gRPC_has_done_with_the_call(  # noqa: N802 - so it is called
    papers: tuple[Authority, dict[str, bytes]],
) -> None:
    found, places = peers(papers), Places(2)
    calls = [Call() for _ in range(4)]
    places.take(found["ward-1"], calls[0])
    places.take(found["ward-1"], calls[1])
    with pytest.raises(Overloaded, match=r"^device 'ward-1' has 2 calls under way.*member_calls_max"):
        places.take(found["ward-1"], calls[2])
    places.take(found["lab-1"], calls[3])  # each by itself
    calls[2].end()  # of which nothing was taken
    assert told(lambda: places.take(found["ward-1"], Call())) is Overloaded
    calls[0].end()
    places.take(found["ward-1"], calls[2])
    assert told(lambda: places.take(found["ward-1"], Call())) is Overloaded
    for call in (calls[1], calls[2], calls[3]):
        call.end()
    assert not places._taken, "nothing is kept of who has no call"
