"""The processes of a demo: none is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anabranch.cli import processes
from anabranch.cli.processes import FleetProcesses
from anabranch.core.config.tables import Config
from anabranch.core.errors import Unavailable


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_init_that_takes_too_long_is_told_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SERVER_READY_S", 0.0)
    fleet = FleetProcesses(tmp_path, Config(), "synthetic")
    with pytest.raises(Unavailable, match=r"init has not ended within 0 s"), fleet:
        fleet.start_server()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(tmp_path) not in command.read_text(errors="replace"), "it goes on without its demo"
        except (FileNotFoundError, ProcessLookupError):
            continue
