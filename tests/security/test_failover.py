"""A leader and a standby behind TLS: whoever belongs goes on with the other one when the first is gone."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from guarded import Federation, issued
from nursery import COMMAND, PIPE, Process
from ports import free_port

from anabranch.client.health import check_health
from anabranch.client.joining import joined_wallet
from anabranch.client.link import Link
from anabranch.client.run import ClientOptions, run_client
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import Unavailable
from anabranch.core.model.updates import Capability
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import Kind
from anabranch.identity.wallet import read_wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import verify
from anabranch.testing.federation import first_weights

CALL_S = 120.0
BACK_S = 600.0
TASKS = 40


def test_a_device_goes_on_with_the_standby_and_its_memory_of_the_history(
    tmp_path: Path, postgresql_url: str
) -> None:
    write_manifest(tmp_path / "model", "synthetic", first_weights())
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    join_at = f"127.0.0.1:{free_port()}"  # of the one that leads
    with Authority.create(tmp_path / "ca") as authority:
        alice = issued(authority, Kind.OPERATOR, "alice", tmp_path / "alice")
        servers: list[Any] = []
        try:
            for address in addresses:
                servers.append(serve(tmp_path, address, join_at, postgresql_url))
                said = json.loads(servers[-1].stdout.readline())
                assert said["kind"] == ("standby" if len(servers) > 1 else "serving"), said
            assert [check_health(address, wallet=alice) for address in addresses] == [True, False]
            assert not check_health(addresses[1])  # and nothing at all without a certificate
            # Without the lookout it would back off for an hour.
            options = ClientOptions(
                "synthetic",
                ",".join(addresses),
                state_dir=tmp_path / "a",
                tasks_max=TASKS,
                retry_base_s=3600.0,
                retry_cap_s=3600.0,
                token=authority.invite("a", DAY_S),
                ca_sha256=authority.sha256,
                join=f"127.0.0.1:{free_port()},{join_at}",
            )
            told: list[str] = []
            with ThreadPoolExecutor(1) as pool:
                device = pool.submit(run_client, options, lambda kind, **_: told.append(kind))
                while told.count("pushed") < 10 and not device.done():
                    time.sleep(0.01)
                seen = newest_seen(tmp_path / "a")
                refuses(addresses[1], tmp_path / "a")
                servers[0].kill()
                summary = device.result(BACK_S)
            assert (summary.answered, summary.applied) == (TASKS, TASKS)
            assert json.loads(servers[1].stdout.readline())["kind"] == "serving"
            after = newest_seen(tmp_path / "a")
            assert after["version"] > seen["version"] > 0
            assert after["certificate"] != seen["certificate"]  # the other server's: it has signed the head
            assert check_health(addresses[1], wallet=alice)
            token = authority.invite("b", DAY_S)
            assert joined_wallet(tmp_path / "b", [join_at], token, authority.sha256).name == "b"
        finally:
            for server in servers:
                server.terminate()
                server.wait(600)
                server.stdout.close()
    assert verify(tmp_path / addresses[1].replace(":", "-"), postgresql_url).problems == ()


def serve(folder: Path, address: str, join_at: str, database: str) -> Any:
    """`anabranch server --standby` with mutual TLS, as an operator starts it."""
    options = ["--model", str(folder / "model"), "--data-dir", str(folder / address.replace(":", "-"))]
    ports = ["--address", address, "--admin-address", "127.0.0.1:0"]
    settings = {
        "identity.tls": "always",
        "identity.folder": folder / "ca",
        "identity.join_address": join_at,
        "strategy.name": "fedasync",
        "client.steps": 3,
        "client.batch_size": 8,
    }
    rules = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    started = [COMMAND, "server", *options, *ports, "--database", database, "--standby", "--json", *rules]
    with (folder / "log").open("ab") as log:
        return Process(*started, stdout=PIPE, stderr=log)


def newest_seen(state_dir: Path) -> dict[str, Any]:
    """What a device remembers of the one run that it has seen."""
    (seen,) = json.loads((state_dir / "identity" / "history.json").read_bytes()).values()
    assert isinstance(seen, dict)
    return seen


def refuses(address: str, state_dir: Path) -> None:
    """A member that calls the one that stands by is told to go elsewhere."""
    wallet = read_wallet(state_dir / "identity")
    assert wallet is not None
    transport = GrpcTransport(address, "a", wallet=wallet)
    with transport, pytest.raises(Unavailable, match="stands by"):
        transport.enrol(Capability())


def test_a_renewed_certificate_is_shown_to_whichever_server_serves(guarded: Federation) -> None:
    wallet, ahead_s, returned = guarded.joined("device-1"), [0.0], threading.Event()
    gone = f"127.0.0.1:{free_port()}"
    link = Link(f"{gone},{guarded.address}", wallet=wallet, now=lambda: time.time() + ahead_s[0])
    link.servers.returned = returned.set
    request = devices.EnrolRequest(client_id="device-1", protocol_version=1)
    with pytest.raises(Unavailable), link.calling():
        link.stub().Enrol(request, timeout=CALL_S)
    assert returned.wait(BACK_S)  # the lookout has shown the certificate, too
    assert link.address == guarded.address
    before = link.servers.current
    ahead_s[0] = 5 * DAY_S  # of the seven that it is good for
    link.stub().Enrol(request, timeout=CALL_S)
    assert link.wallet is not None
    assert link.wallet.peer.serial != wallet.peer.serial
    assert link.servers.current.address == guarded.address
    assert link.servers.current.channel is not before.channel
    link.close()


def test_a_server_that_is_found_while_the_certificate_is_renewed_gets_the_new_one(
    guarded: Federation,
) -> None:
    link = Link(guarded.address, wallet=guarded.joined("device-1"))
    servers, request = link.servers, devices.EnrolRequest(client_id="device-1", protocol_version=1)
    before = servers.current
    found = servers._find(before, nobody=True)
    assert found is not None
    servers.reconnect()
    servers._adopt(found, before)
    assert servers.current.channel is not found.channel
    link.stub().Enrol(request, timeout=CALL_S)
    link.close()
