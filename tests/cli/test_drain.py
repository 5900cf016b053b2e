"""How a server ends that is told to twice."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import grpc
from commands import anabranch
from nursery import COMMAND, PIPE, Process
from streams import stream
from wire import CALL_S, Device

from anabranch.client.operator import OperatorClient
from anabranch.server.manifest import read_manifest

WORDS = (
    *("server", "--model", "model", "--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"),
    *(
        "--set",
        "server.drain_s=86400",
        "--set",
        "limits.upload_idle_s=86400",
        "--set",
        "client.connection='auto'",
    ),
)


def test_a_second_interrupt_cuts_off_the_calls_under_way(tmp_path: Path) -> None:
    assert anabranch(tmp_path, "init", "synthetic", "--out", "model").returncode == 0
    spec = read_manifest(tmp_path / "model").spec
    with Process(COMMAND, *WORDS, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        said = (re.search(r"on ([\d.:]+), operators on ([\d.:]+)", line) for line in server.stdout)
        address, admin = next(found for found in said if found).groups()
        with grpc.insecure_channel(address) as channel, stream(channel) as busy:
            device = Device(channel, spec)
            device.enrol()
            task, data = device.task(), bytes(4 * spec.size)
            busy.say(data[:8], push=device.header(task, data, "update-1"), more=True)
            with OperatorClient(admin) as operator:
                while not operator.metrics().uploads_open:
                    pass
            server.send_signal(signal.SIGINT)
            assert any("draining" in line for line in server.stderr)
            server.send_signal(signal.SIGINT)
            assert busy.over()[0] == "UNAVAILABLE"
            _, rest = server.communicate(timeout=CALL_S)
    assert (server.returncode, "drained" in rest) == (0, True)
