"""The units of deploy/systemd, by systemd's own checks; and what the server tells a service manager."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import anabranch, answer
from nursery import COMMAND, PIPE, Process

from anabranch.core.errors import (
    OUTCOMES,
    AppError,
    ConfigError,
    DataError,
    LogLost,
    ReplayMismatch,
    StoreCorrupt,
    StoreNewer,
)
from anabranch.support.stop_signals import call_on_signals, stop_signals

UNITS = Path(__file__).parents[2] / "deploy/systemd"
INSTALLED = "/opt/anabranch/bin/anabranch"
EXPOSURE_MAX = {
    "anabranch-server.service": 1.5,
    "anabranch-client@.service": 2.0,
    "anabranch-keeper.service": 1.5,
}  # of 10, as systemd rates it
PROGRAM = str(Path(sys.executable).with_name("anabranch"))
ANALYZE = shutil.which("systemd-analyze")
WITH_SYSTEMD = pytest.mark.skipif(ANALYZE is None, reason="no systemd here: its own checks are not made")
PATIENCE_S = 600.0


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with the program of this environment."""
    folder = tmp_path / "units"
    folder.mkdir()
    for path in UNITS.glob("*.service"):
        (folder / path.name).write_text(path.read_text().replace(INSTALLED, PROGRAM))
    return folder


def analyze(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ANALYZE), *map(str, words)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@WITH_SYSTEMD
@pytest.mark.parametrize("name", EXPOSURE_MAX)
def test_systemd_has_nothing_against_a_unit(name: str, units: Path) -> None:
    done = analyze("verify", "--man=no", "--recursive-errors=no", units / name)
    assert (done.returncode, done.stderr) == (0, "")


@WITH_SYSTEMD
def test_systemd_finds_a_slip(units: Path) -> None:
    path = units / "anabranch-server.service"
    path.write_text(path.read_text().replace("ProtectSystem=strict", "ProtectSystem=sometimes"))
    assert "sometimes" in analyze("verify", "--man=no", "--recursive-errors=no", path).stderr


@WITH_SYSTEMD
@pytest.mark.parametrize("name", EXPOSURE_MAX)
def test_a_unit_may_do_little(name: str, units: Path) -> None:
    done = analyze("security", "--offline=true", units / name)
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= EXPOSURE_MAX[name]


def test_no_unit_gives_up_on_what_may_mend_itself() -> None:
    """By default systemd starts nothing a sixth time within ten seconds, and then never again."""
    for path in UNITS.glob("*.service"):
        text = path.read_text()
        assert re.findall(r"^StartLimit\w+=.*$", text, re.M) == ["StartLimitIntervalSec=0"], path.name
        (pause,) = re.findall(r"^RestartSec=(\d+)$", text, re.M)
        assert int(pause) >= 5, f"{path.name}: a start costs a second of a core"


def test_the_units_name_exit_codes_that_there_are() -> None:
    codes = {outcome.exit_code for outcome in OUTCOMES.values()}
    for path in UNITS.glob("*.service"):
        (listed,) = re.findall(r"^RestartPreventExitStatus=(.*)$", path.read_text(), re.M)
        assert set(map(int, listed.split())) <= codes, path.name


def test_a_server_is_not_started_again_where_a_start_mends_nothing() -> None:
    """Settings, code, damaged or lost data, a history that a replay does not come to: a person is wanted."""
    errors = ConfigError, AppError, DataError, StoreCorrupt, StoreNewer, LogLost, ReplayMismatch
    text = (UNITS / "anabranch-server.service").read_text()
    (listed,) = re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.M)
    assert sorted(map(int, listed.split())) == sorted(OUTCOMES[error].exit_code for error in errors)


# --- what the server says --------------------------------------------------------------------------------


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """A service manager's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(PATIENCE_S)
        yield end


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_server_tells_its_manager_how_it_is(
    tmp_path: Path, manager: socket.socket, end: signal.Signals
) -> None:
    (tmp_path / "run.toml").write_text('[run]\nname = "told"\nworkload = "synthetic"\n')
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000", "PATH": "/usr/bin:/bin"}
    ports = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
    words = ("server", "run.toml", "--model", "model", *ports)
    with Process(COMMAND, *words, cwd=tmp_path, stdout=PIPE, stderr=PIPE, env=env) as process:
        said = [manager.recv(4096).decode() for _ in range(5)]
        (ready,) = (text for text in said if text.startswith("READY=1"))
        assert ready.startswith("READY=1\nSTATUS=serving told on 127.0.0.1:")
        assert [text for text in said if text != ready] == ["WATCHDOG=1"] * 4
        process.send_signal(end)
        while (text := manager.recv(4096).decode()) == "WATCHDOG=1":
            pass
        assert text == "STOPPING=1"
        process.communicate(timeout=PATIENCE_S)
        assert process.wait(PATIENCE_S) == 0


def test_a_server_under_nohup_outlives_its_terminal() -> None:
    async def handlers() -> tuple[bool, bool]:
        call_on_signals(asyncio.Event().set, *stop_signals())
        return (
            signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        )

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(handlers()) == (True, False)
    finally:
        signal.signal(signal.SIGHUP, before)
