"""Nobody gets in who does not belong: every port of a real server, every way but the right one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from guarded import Federation, federation, impostor, issued, shown_serial, yesterday
from wire import CALL_S, QUICK, Device, Served, server_config

from anabranch.client.channel import secure_channel
from anabranch.client.health import check_health
from anabranch.client.joining import join, join_addresses, joined_wallet
from anabranch.client.link import Link
from anabranch.client.run import ClientOptions, device_wallet, run_client
from anabranch.client.state import device_id
from anabranch.core.config.tables import merge
from anabranch.core.errors import ConfigError, NotAuthenticated, NotPermitted, Unavailable
from anabranch.core.model.updates import Capability
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import Kind
from anabranch.identity.tokens import check_token, new_token
from anabranch.identity.wallet import read_wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.protos.v1.operators_pb2_grpc import OperatorsStub
from anabranch.server.manifest import write_manifest
from anabranch.server.tls import ServerIdentity, uses_tls

UNAVAILABLE, DENIED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def code(call: Callable[[], object]) -> grpc.StatusCode:
    """The status that a call fails with."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    found: grpc.StatusCode = refused.value.code()
    return found


def enrols(guarded: Federation, channel: grpc.Channel, name: str = "device-1") -> Callable[[], object]:
    return Device(guarded.served.keep(channel), guarded.served.manifest.spec, name).enrol


# --- the right way ------------------------------------------------------------------------------------


def test_a_device_joins_and_works(guarded: Federation) -> None:
    device = guarded.device(guarded.joined("device-1"))
    device.enrol()
    assert device.work(2.0).decision.verdict == "published"
    operator = guarded.operators(guarded.operator())
    assert (operator.status().version, operator.status().clients) == (1, 1)


def test_an_operator_may_look_on_at_the_devices_port_and_no_more(guarded: Federation) -> None:
    wallet = guarded.operator()
    observer = guarded.device(wallet, "follower-1")
    assert observer.fetch(exact=True)[0].version == 0
    assert code(observer.enrol) is DENIED
    assert code(observer.ask) is DENIED
    assert code(guarded.device(wallet).enrol) is DENIED  # under its own name as well


# --- the handshake ------------------------------------------------------------------------------------


def test_no_certificate(guarded: Federation) -> None:
    channel = secure_channel(guarded.address, QUICK, guarded.authority.pem)
    assert code(enrols(guarded, channel)) is UNAVAILABLE
    stub = OperatorsStub(
        guarded.served.keep(secure_channel(guarded.admin_address, QUICK, guarded.authority.pem))
    )
    assert code(lambda: stub.GetStatus(operators.GetStatusRequest(), timeout=CALL_S)) is UNAVAILABLE


def test_plain_text(guarded: Federation) -> None:
    assert code(guarded.served.device) is UNAVAILABLE
    assert not check_health(guarded.address)
    assert check_health(guarded.address, wallet=guarded.operator())


def test_a_certificate_of_another_authority(guarded: Federation, tmp_path: Path) -> None:
    with Authority.create(tmp_path / "other") as other:
        wallet = issued(other, Kind.DEVICE, "device-1", tmp_path / "wallet")
    _, key, certificate = wallet.credentials()
    channel = secure_channel(guarded.address, QUICK, guarded.authority.pem, key, certificate)
    assert code(enrols(guarded, channel)) is UNAVAILABLE


def test_an_expired_certificate(guarded: Federation, tmp_path: Path) -> None:
    with yesterday(guarded.authority, 8) as late:
        wallet = issued(late, Kind.DEVICE, "device-1", tmp_path / "wallet", life_s=7 * DAY_S)
    channel = secure_channel(guarded.address, QUICK, *wallet.credentials())
    assert code(enrols(guarded, channel)) is UNAVAILABLE
    with pytest.raises(NotAuthenticated, match="expired at"):  # and the device itself knows better
        guarded.transport(wallet).enrol(Capability())


def test_another_devices_certificate_without_its_key(guarded: Federation) -> None:
    mine, other = guarded.joined("mine"), guarded.joined("other")
    ca, key, _ = mine.credentials()
    channel = secure_channel(guarded.address, QUICK, ca, key, other.credentials()[2])
    assert code(enrols(guarded, channel, "other")) is UNAVAILABLE


@pytest.mark.parametrize("kind", [Kind.DEVICE, Kind.OPERATOR])
def test_a_member_cannot_pass_for_the_server(guarded: Federation, tmp_path: Path, kind: Kind) -> None:
    member = issued(guarded.authority, kind, "member", tmp_path / "member")
    device = guarded.joined("device-1")
    _, key, certificate = member.credentials()
    with impostor([(key, certificate)]) as address:
        transport = Link(address, reconnect_max_s=0.2, wallet=device)
        request = devices.EnrolRequest(client_id="device-1")
        assert code(lambda: transport.stub().Enrol(request, timeout=CALL_S)) is UNAVAILABLE
        transport.close()


# --- the call -----------------------------------------------------------------------------------------


def test_a_revoked_device_is_out_at_its_next_call(guarded: Federation) -> None:
    device = guarded.device(guarded.joined("device-1"))
    device.enrol()
    task = device.task()
    guarded.authority.revoke("device-1")
    for call in (device.enrol, device.ask, lambda: device.answer(task), device.fetch):
        assert code(call) is UNAUTHENTICATED
    assert code(lambda: device.heartbeat(task.task_id)) is UNAUTHENTICATED
    again = guarded.device(guarded.joined("device-1"))
    assert again.answer(task).decision.verdict == "published"  # its task is still its own


def test_a_revoked_operator_is_out_at_the_next_call(guarded: Federation) -> None:
    operator = guarded.operators(guarded.operator())
    operator.pause()
    guarded.authority.revoke("alice")
    with pytest.raises(NotAuthenticated, match="is revoked"):
        operator.resume()


def test_nobody_speaks_for_another_device(guarded: Federation) -> None:
    victim, thief = guarded.device(guarded.joined("victim")), guarded.joined("thief")
    victim.enrol()
    task = victim.task()
    forged = guarded.device(thief, "victim")
    calls: list[Callable[[], object]] = [
        forged.enrol,
        forged.ask,
        forged.fetch,
        lambda: forged.answer(task),
        lambda: forged.query("update-1"),
        lambda: forged.heartbeat(task.task_id),
        lambda: forged.stub.DropTask(devices.DropTaskRequest(client_id="victim", task_id=task.task_id)),
    ]
    assert {code(call) for call in calls} == {DENIED}
    assert victim.answer(task).decision.verdict == "published"


def test_the_operators_port_is_for_operators(guarded: Federation) -> None:
    operator = guarded.operators(guarded.joined("device-1"))
    for call in (operator.status, operator.pause, operator.resume, operator.versions):
        with pytest.raises(NotPermitted, match="not for devices"):
            call()
    with pytest.raises(NotPermitted):
        operator.report_metrics(0, {"accuracy": 1.0})
    with pytest.raises(NotPermitted):
        next(iter(operator.watch()))
    with pytest.raises(NotPermitted):
        operator.export(guarded.folder / "stolen.safetensors")
    assert not (guarded.folder / "stolen.safetensors").exists()


# --- joining ------------------------------------------------------------------------------------------


def test_a_token_is_used_once(guarded: Federation, tmp_path: Path) -> None:
    token, sha256 = guarded.authority.invite("device-1", DAY_S), guarded.authority.sha256
    first = join(tmp_path / "a", guarded.join_address, token, sha256)
    with pytest.raises(NotAuthenticated, match="used before"):
        join(tmp_path / "b", guarded.join_address, token, sha256)
    guarded.device(first).enrol()  # who has joined is not disturbed


def test_a_join_whose_answer_was_lost_is_repeated(guarded: Federation, tmp_path: Path) -> None:
    token, sha256 = guarded.authority.invite("device-1", DAY_S), guarded.authority.sha256
    key_before = join(tmp_path / "a", guarded.join_address, token, sha256)
    # As it was before the answer: reading a key from the file of all papers takes the first, the key.
    (tmp_path / "a" / "identity.pem").rename(tmp_path / "a" / "joining.pem")
    again = join(tmp_path / "a", guarded.join_address, token, sha256)
    assert again.key.private_numbers() == key_before.key.private_numbers()
    guarded.device(again).enrol()


def test_a_device_that_has_joined_keeps_its_papers(guarded: Federation, tmp_path: Path) -> None:
    token, sha256 = guarded.authority.invite("device-1", DAY_S), guarded.authority.sha256
    first = joined_wallet(tmp_path / "a", [guarded.join_address], token, sha256)
    again = joined_wallet(tmp_path / "a", ["127.0.0.1:1"], token, sha256)  # nobody is asked
    assert again.peer.serial == first.peer.serial
    newer = guarded.authority.invite("device-2", DAY_S)
    assert (
        joined_wallet(tmp_path / "a", ["127.0.0.1:1", guarded.join_address], newer, sha256).name == "device-2"
    )


def test_who_is_killed_once_its_papers_are_there_and_its_token_is_not_noted_starts_as_before(
    guarded: Federation, tmp_path: Path
) -> None:
    """By the same command; it was told to ask for another token, at every start."""
    token, sha256 = guarded.authority.invite("device-1", DAY_S), guarded.authority.sha256
    before = join(tmp_path / "a", guarded.join_address, token, sha256)  # all that comes before the note
    again = joined_wallet(tmp_path / "a", [guarded.join_address], token, sha256)
    assert again.key.private_numbers() == before.key.private_numbers()
    guarded.device(again).enrol()
    assert not (tmp_path / "a" / "joining.pem").exists()
    newer = guarded.authority.invite("device-2", DAY_S)
    other = joined_wallet(tmp_path / "a", [guarded.join_address], newer, sha256)
    assert other.key.private_numbers() != before.key.private_numbers()


def test_a_replayed_token_of_a_revoked_device(guarded: Federation, tmp_path: Path) -> None:
    token, sha256 = guarded.authority.invite("device-1", DAY_S), guarded.authority.sha256
    join(tmp_path / "a", guarded.join_address, token, sha256)
    guarded.authority.revoke("device-1")
    for folder in ("a", "b"):
        with pytest.raises(NotAuthenticated):
            join(tmp_path / folder, guarded.join_address, token, sha256)


def test_the_token_goes_to_no_server_of_another_authority(guarded: Federation, tmp_path: Path) -> None:
    token = guarded.authority.invite("device-1", DAY_S)
    shas = rf"{guarded.authority.sha256}, and .* {'ab' * 32}\."
    told = f"not the server of this federation, or --ca-sha256 .* {shas} `anabranch admin ca show`"
    with pytest.raises(NotAuthenticated, match=told):
        join(tmp_path / "a", guarded.join_address, token, "ab" * 32)
    assert not (tmp_path / "a").exists()
    for wrong in ("abc", "g" * 64):
        with pytest.raises(ConfigError, match=f"64 hexadecimal digits .*ca show.*not '{wrong}'"):
            join(tmp_path / "a", guarded.join_address, token, wrong)
    join(tmp_path / "a", guarded.join_address, token, guarded.authority.sha256)  # it is still good


def test_nobody_to_join(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        join(tmp_path, "127.0.0.1:1", f"{'a' * 16}.{'b' * 43}", "ab" * 32)


def test_a_token_that_cannot_be_one_is_told_to_be_mistyped(tmp_path: Path) -> None:
    """Nobody is asked."""
    token = ".".join(new_token())
    for wrong in (token[:-1], token + "x", token.replace(".", ""), f" {token}", f"x{token[1:]}", ""):
        with pytest.raises(
            NotAuthenticated, match=r"the token is mistyped, or not whole: .* `anabranch admin enrol`"
        ):
            join(tmp_path, "127.0.0.1:1", wrong, "ab" * 32)
    check_token(token[8:])  # of the first releases


def test_papers_of_another_authority_are_told_so_and_end_no_device(
    guarded: Federation, tmp_path: Path
) -> None:
    """gRPC says "nobody answers" of it."""
    with Authority.create(tmp_path / "other") as other:
        wallet = issued(other, Kind.DEVICE, "device-1", tmp_path / "device-1")
        operator = issued(other, Kind.OPERATOR, "alice", tmp_path / "alice")
    told = (
        rf"^{guarded.address}: its certificate is of another authority .*identity\.pem, .* {other.sha256}: "
    )
    request = devices.EnrolRequest(client_id="device-1", protocol_version=1)
    link = Link(guarded.address, wallet=wallet)
    with pytest.raises(Unavailable, match=told) as met, link.calling():
        link.stub().Enrol(request)
    link.close()
    assert not met.value.reached
    replaced = "only where the federation's operators say that it has another authority by now, "
    assert (
        f"{replaced}join again with a new token of the authority that takes its place "
        "(`anabranch admin enrol`; then --token and --ca-sha256 here)"
    ) in str(met.value)
    with pytest.raises(Unavailable, match="another federation's server") as told_operator:
        guarded.operators(operator).status()
    assert f"{replaced}have others made by `anabranch admin operator` of" in str(told_operator.value)


def test_where_to_join() -> None:
    assert join_addresses("example.org:7070, b:1") == ["example.org:7072", "b:3"]
    assert join_addresses("[::1]:7070") == ["[::1]:7072"]
    assert join_addresses("example.org:7070", "other:1,another:2") == ["other:1", "another:2"]


# --- no way back to plain text ----------------------------------------------------------------------------


def test_a_device_with_papers_never_speaks_in_the_clear(guarded: Federation, tmp_path: Path) -> None:
    wallet = guarded.joined("device-1")
    config = server_config(tmp_path / "plain")
    manifest = write_manifest(tmp_path / "plain-model", "test", {"w": np.zeros(8, np.float32)})
    with Served(config, manifest) as plain:
        assert plain.info is not None
        link = Link(plain.info.address, reconnect_max_s=0.2, wallet=wallet)
        request = devices.EnrolRequest(client_id="device-1")
        assert code(lambda: link.stub().Enrol(request, timeout=CALL_S)) is UNAVAILABLE
        link.close()
        assert plain.operator().GetStatus(operators.GetStatusRequest()).clients == 0


def test_another_machine_is_not_spoken_to_in_the_clear_by_mistake(
    guarded: Federation, tmp_path: Path
) -> None:
    options = ClientOptions("digits", "10.0.0.1:7070", state_dir=tmp_path / "device")
    with pytest.raises(ConfigError, match="--insecure"):
        device_wallet(options)
    assert device_wallet(ClientOptions("digits", "127.0.0.1:7070", state_dir=tmp_path / "device")) is None
    insecure = ClientOptions("digits", "10.0.0.1:7070", state_dir=tmp_path / "device", insecure=True)
    assert device_wallet(insecure) is None
    wallet = guarded.joined("device-1")
    (tmp_path / "device").mkdir(exist_ok=True)
    wallet.folder.rename(tmp_path / "device" / "identity")
    with pytest.raises(ConfigError, match="has an identity"):
        device_wallet(insecure)
    with pytest.raises(ConfigError, match="'device-1'"):
        device_wallet(ClientOptions("digits", client_id="other", state_dir=tmp_path / "device"))


def test_a_device_that_came_without_its_token_joins_from_the_same_folder(
    guarded: Federation, tmp_path: Path
) -> None:
    """As the error has told it to."""
    options = ClientOptions("synthetic", guarded.address, state_dir=tmp_path / "device")
    with pytest.raises(NotAuthenticated, match="--token"):
        run_client(options)
    token = guarded.authority.invite("device-1", DAY_S)
    sha256 = guarded.authority.sha256
    joins: dict[str, Any] = {"token": token, "ca_sha256": sha256, "join": guarded.join_address}
    wallet = device_wallet(replace(options, **joins))
    assert wallet is not None
    assert device_id(options.state_dir, wallet.name) == "device-1"


def test_a_token_of_another_device_is_not_used_up(guarded: Federation, tmp_path: Path) -> None:
    """By the name that is given, and by the one that the folder has worked under."""
    token, sha256 = guarded.authority.invite("device-1", DAY_S), guarded.authority.sha256
    joins: dict[str, Any] = {"token": token, "ca_sha256": sha256, "join": guarded.join_address}
    options = ClientOptions("synthetic", guarded.address, state_dir=tmp_path / "device", **joins)
    with pytest.raises(ConfigError, match="of 'device-1', and this device is 'device-2'"):
        device_wallet(replace(options, client_id="device-2"))
    device_id(tmp_path / "other", "device-3")
    with pytest.raises(ConfigError, match="of 'device-1', and this device is 'device-3'"):
        device_wallet(replace(options, state_dir=tmp_path / "other"))
    wallet = device_wallet(options)
    assert wallet is not None
    assert wallet.name == "device-1"
    assert device_wallet(replace(options, client_id="device-1")) is not None, "again, as it is"


def test_a_server_that_is_open_though_there_is_an_authority_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(8, np.float32)})
    config = server_config(tmp_path / "data", identity={"folder": str(tmp_path / "ca")})
    for made, told in ((False, False), (True, True)):
        if made:
            Authority.create(tmp_path / "ca").close()
        with caplog.at_level("WARNING", "anabranch.server.app"), Served(config, manifest):
            pass
        assert ("no token is taken" in caplog.text) is told


def test_a_guarded_server_needs_its_authority(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(8, np.float32)})
    for tables in ({"identity": {"tls": "always"}}, {"server": {"address": "0.0.0.0:0"}}):
        folder = {"folder": str(tmp_path / "ca")}
        config = server_config(
            tmp_path / "data", **{**tables, "identity": tables.get("identity", {}) | folder}
        )
        with pytest.raises(ConfigError, match="ca init"), Served(config, manifest):
            pass


def test_which_ports_are_guarded() -> None:
    auto, always = merge([]), merge([("test", {"identity": {"tls": "always"}})])
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        assert not uses_tls(address, auto, insecure=False)
        assert uses_tls(address, always, insecure=False)
    others = ("127.0.0.1.example.org:1", "localhost.example.org:1", "[::ffff:10.0.0.1]:1")
    for address in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", *others):
        assert uses_tls(address, auto, insecure=False)
        assert not uses_tls(address, auto, insecure=True)
    with pytest.raises(ConfigError, match="contradict"):
        uses_tls("127.0.0.1:1", always, insecure=True)


# --- certificates that end ----------------------------------------------------------------------------


def test_a_device_renews_its_certificate_by_itself(guarded: Federation) -> None:
    wallet, ahead_s = guarded.joined("device-1"), [0.0]
    link = Link(guarded.address, wallet=wallet, now=lambda: time.time() + ahead_s[0])
    request = devices.EnrolRequest(client_id="device-1", protocol_version=1)
    link.stub().Enrol(request, timeout=CALL_S)
    assert link.wallet == wallet
    ahead_s[0] = 5 * DAY_S  # of the seven that it is good for
    link.stub().Enrol(request, timeout=CALL_S)
    assert link.wallet is not None
    assert link.wallet.peer.serial != wallet.peer.serial
    on_disk = read_wallet(wallet.folder)
    assert on_disk is not None
    assert on_disk.peer.serial == link.wallet.peer.serial
    link.close()


def test_a_renewal_that_fails_is_tried_again(guarded: Federation) -> None:
    wallet, ahead_s = guarded.joined("device-1"), [5 * DAY_S]
    link = Link("127.0.0.1:1", wallet=wallet, reconnect_max_s=0.2, now=lambda: time.time() + ahead_s[0])
    for _ in range(2):  # the second is too early for another attempt
        link.stub()
    assert link.wallet == wallet
    ahead_s[0] = 8 * DAY_S
    with pytest.raises(NotAuthenticated, match="expired at"):
        link.stub()
    link.close()


def test_the_server_shows_another_certificate_before_the_old_one_ends(tmp_path: Path) -> None:
    ahead_s = [0.0]
    with Authority.create(tmp_path / "ca", now=lambda: time.time() + ahead_s[0]) as authority:
        identity = ServerIdentity(authority, DAY_S)
        first = identity.configuration()
        assert identity.configuration() is first
        ahead_s[0] = 0.9 * DAY_S
        second = identity.configuration()
        assert second is not first
        assert identity.configuration() is second


def test_a_connection_outlives_the_servers_certificate(tmp_path: Path) -> None:
    serials: set[int] = set()
    with federation(tmp_path, identity={"certificate_s": 8.0}) as guarded:
        wallet = issued(guarded.authority, Kind.DEVICE, "device-1", tmp_path / "wallet")
        device, until = guarded.device(wallet), time.monotonic() + 600
        device.enrol()
        while len(serials) < 3 and time.monotonic() < until:
            serials.add(shown_serial(guarded.join_address))
            assert device.work().decision.verdict == "published"
    assert len(serials) == 3


# --- what is said and kept ----------------------------------------------------------------------------


def test_no_secret_is_in_the_log_or_in_an_error(
    guarded: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token, sha256 = guarded.authority.invite("device-1", DAY_S), guarded.authority.sha256
    wallet = join(tmp_path / "a", guarded.join_address, token, sha256)
    said = []
    for wrong in (token, token[:-1] + "x", f"{token[:16]}.{'g' * 43}"):
        with pytest.raises(NotAuthenticated) as refused:
            join(tmp_path / "b", guarded.join_address, wrong, sha256)
        said.append(str(refused.value))
    device = guarded.device(wallet)
    device.enrol()
    device.work()
    said += [caplog.text, repr(wallet), repr(ClientOptions("digits", token=token))]
    secret = token.partition(".")[2]
    assert "has joined" in caplog.text
    assert all(secret not in text and "PRIVATE KEY" not in text for text in said)
    assert str(wallet.key.private_numbers().private_value) not in "".join(said)


def test_nothing_secret_is_in_the_data_directory(guarded: Federation) -> None:
    token = guarded.authority.invite("device-1", DAY_S)
    wallet = guarded.joined("device-1", token)
    device = guarded.device(wallet)
    device.enrol()
    device.work()
    guarded.served.close()
    secret = token.partition(".")[2].encode()
    for path in guarded.data_dir.rglob("*"):
        data = b"" if path.is_dir() else path.read_bytes()
        assert secret not in data, path
        assert b"PRIVATE KEY" not in data, path
