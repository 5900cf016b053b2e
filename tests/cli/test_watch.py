"""What a watch of a server ends with, and what it does not end with: as a script has it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from commands import anabranch, killable_saying
from flaky_proxy import FlakyProxy
from nursery import COMMAND, PIPE, Process

from anabranch.client.operator import OperatorClient
from anabranch.core.errors import OUTCOMES, Unavailable

GONE = OUTCOMES[Unavailable].exit_code
LOCAL = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")


@contextmanager
def watched(folder: Path) -> Iterator[tuple[Process, OperatorClient, FlakyProxy, Process]]:
    """A server, its operator, and somebody who watches it over a line that can be cut."""
    assert anabranch(folder, "init", "synthetic", "--out", "model").returncode == 0
    with (
        killable_saying(folder, "--model", "model", *LOCAL) as (said, server),
        OperatorClient(said["admin_address"]) as operator,
        FlakyProxy(said["admin_address"], []) as line,
    ):
        operator.quarantine("the-first")
        words = ("admin", "watch", "--after", 0, "--admin", line.address, "--json")
        with Process(COMMAND, *words, cwd=folder, stdout=PIPE, stderr=PIPE) as watch:
            try:
                assert told(watch) == "the-first"
                yield server, operator, line, watch
            finally:
                watch.kill()


def told(watch: Process) -> str:
    """Of whom the next line is."""
    assert watch.stdout is not None
    return str(json.loads(watch.stdout.readline())["client_id"])


def test_a_connection_that_breaks_ends_no_watch_and_loses_nothing(tmp_path: Path) -> None:
    """The server itself ends each when it is half an hour old."""
    with watched(tmp_path) as (server, operator, line, watch):
        for number in range(3):
            line.cut()
            operator.quarantine(f"unheard-{number}")
            operator.quarantine(f"unheard-{number}-too")
            assert [told(watch), told(watch)] == [f"unheard-{number}", f"unheard-{number}-too"]
        server.send_signal(signal.SIGTERM)
        rest, said = watch.communicate(timeout=600)
    assert (watch.returncode, rest, "stopped serving" in said) == (0, "", True), said


@pytest.mark.parametrize(("by", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, GONE)])
def test_a_watch_ends_with_its_server_and_says_how(by: signal.Signals, code: int, tmp_path: Path) -> None:
    with watched(tmp_path) as (server, _, _, watch):
        server.send_signal(by)
        _, said = watch.communicate(timeout=600)
    assert (watch.returncode, "stopped serving" in said) == (code, code == 0), said


def test_a_server_that_fails_has_not_stopped_in_order(tmp_path: Path) -> None:
    with watched(tmp_path) as (server, operator, _, watch):
        (tmp_path / "anabranch-data").rename(tmp_path / "moved")
        with suppress(Unavailable):
            while server.poll() is None:
                operator.quarantine("another")
        _, said = watch.communicate(timeout=600)
        assert server.wait(600) != 0
    assert (watch.returncode, "stopped serving" in said) == (GONE, False), said
