"""What a device costs that is connected and does nothing: the memory of a real server process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
import pytest
from commands import anabranch, answer, serving
from guarded import issued
from wire import CALL_S

from anabranch.client.channel import secure_channel
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind
from anabranch.identity.wallet import Wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub

OWN_POOL = (("grpc.use_local_subchannel_pool", 1),)
FIRST, CONNECTIONS, EACH_BYTES_MAX = 50, 1_000, 100 * 1000


def connected(address: str, wallet: Wallet) -> grpc.Channel:
    """A connection of a device of its own, which has made a call and rests."""
    channel = secure_channel(address, OWN_POOL, *wallet.credentials())
    request = devices.QueryUploadRequest(client_id=wallet.name, update_id="none")
    assert DevicesStub(channel).QueryUpload(request, timeout=CALL_S).received_bytes == 0
    return channel


def resident_bytes(pid: int) -> int:
    """What a process has in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@pytest.mark.prove
def test_a_thousand_idle_devices_take_less_than_100_kb_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    answer(anabranch(tmp_path, "admin", "ca", "init", "--json"))
    with Authority.open(tmp_path / "anabranch-identity") as authority:
        names = [f"device-{n}" for n in range(FIRST + CONNECTIONS)]
        wallets = [issued(authority, Kind.DEVICE, name, tmp_path / "of" / name) for name in names]
    always = ("--set", 'identity.tls="always"')
    addresses = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0", "--data-dir", "data")
    with serving(tmp_path, "--model", "model", *addresses, *always) as said:
        channels = [connected(said["address"], wallet) for wallet in wallets[:FIRST]]
        before = resident_bytes(said["pid"])
        channels += [connected(said["address"], wallet) for wallet in wallets[FIRST:]]
        each = (resident_bytes(said["pid"]) - before) / CONNECTIONS
        with capsys.disabled():
            sys.stdout.write(f"\n{CONNECTIONS} idle connections, mutual TLS: {each / 1000:.1f} kB each\n")
        assert each <= EACH_BYTES_MAX
        for channel in channels:
            channel.close()
