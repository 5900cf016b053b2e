"""What one party says begins no line of what another one reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import anabranch
from nursery import COMMAND, PIPE, Process
from wire import CALL_S, Served, server_config

from anabranch.cli.live import _teller
from anabranch.cli.output import Output
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.manifest import write_manifest

SAID = "tired\nFORGED \x1b[2J"
SHOWN = r"tired\nFORGED \x1b[2J"


def test_what_a_server_says_is_in_the_line_of_a_devices_step(capsys: pytest.CaptureFixture[str]) -> None:
    tell = _teller(Output())
    tell("stopped", why=SAID)
    tell("enrolled", run=SAID, version=3)
    assert capsys.readouterr().out.splitlines() == [
        f"stopped why={SHOWN}",
        f"enrolled run={SHOWN} version=3",
    ]


def test_no_line_of_a_watch_or_a_status_is_anothers(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(4, np.float32)})
    with Served(server_config(tmp_path / "data"), manifest) as served:
        assert served.info is not None
        admin = ("--admin", served.info.admin_address)
        bar = operators.QuarantineRequest(client_id="device-1", why=SAID)
        served.operator().Quarantine(bar, timeout=CALL_S)
        watch = ["admin", "watch", "--after", "0", *admin]
        with Process(COMMAND, *watch, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            process.kill()
        assert SHOWN in line
        status = anabranch(tmp_path, "admin", "status", *admin)
        assert f"({SHOWN})" in status.stdout
