"""Who waits for a server says so, at once and then ever more rarely."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import pytest
from nursery import COMMAND, PIPE, Process
from ports import free_port

import anabranch as ab
from anabranch.client.channel import NO_CONNECTION, error_of
from anabranch.client.operator import OperatorClient
from anabranch.client.waiting import OWN_DISK, WaitingNotice
from anabranch.core.errors import ERROR_KEY, Unavailable


def test_it_is_said_at_once_and_after_pauses_that_double(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = 100.0
    waiting = WaitingNotice("host:1", lambda: now)
    said: list[float] = []
    for tenth in range(3000):
        now = 100.0 + tenth / 10
        waiting.failed(Unavailable("host:1: nobody answers"))
        said += [now - 100.0] if caplog.records else []
        caplog.clear()
    assert said == [0.0, 2.0, 6.0, 14.0, 30.0, 62.0, 122.0, 182.0, 242.0]
    waiting.failed(Unavailable("no"))
    waiting.answered()
    assert caplog.messages == ["host:1 answers"]
    waiting.answered()
    waiting.failed(Unavailable("gone again"))
    assert caplog.messages == ["host:1 answers", "waiting for host:1: gone again"]


def test_a_device_of_which_nobody_hears_says_that_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    waiting = WaitingNotice("host:1")
    waiting.hear("failed", call="push", error="UnknownTask", detail="gone", again=False)
    waiting.hear("waiting", seconds=2.0)
    assert caplog.messages == [], "the next ask is another one"
    waiting.hear("failed", call="enrol", error="Overloaded", detail="wait")
    waiting.hear("enrolled", run="a")
    waiting.hear("failed", call="ask", error="Unavailable", detail="host:1: nobody answers", again=True)
    waiting.hear("granted", task="a")
    assert caplog.messages == [
        "waiting for host:1: wait",
        "host:1 answers",
        "waiting for host:1: nobody answers",
        "host:1 answers",
    ]


def test_what_holds_a_device_up_until_somebody_ends_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    waiting = WaitingNotice("host:1")
    waiting.hear("refused", reason="not_selected", detail="not among the 3 devices of round 7")
    assert caplog.messages == [], "which ends by itself"
    waiting.hear("refused", reason="paused", detail="the run is paused by its operator")
    assert caplog.messages == ["waiting for host:1: the run is paused by its operator"]


def test_whose_disk_is_full_is_said(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device's own, nobody waits for the server, and nothing has to be started again."""
    model, syncing, full = {"w": np.zeros(3)}, os.fsync, [True]

    def no_room(handle: int) -> None:
        if "outbox" in os.readlink(f"/proc/self/fd/{handle}") and full and full.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        syncing(handle)

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(os, "fsync", no_room)
    with ab.Server(model, strategy="fedasync", until=ab.Until(updates=1)) as server:
        fed = ab.join(server.address, model, id="script", state_dir=tmp_path)
        for _ in fed:
            fed.push(examples=1)
    told = [record.getMessage() for record in caplog.records if record.name.endswith("waiting")]
    (entry,) = {text.split(": ")[1] for text in told[:1]}
    assert entry.startswith(f"{tmp_path}/outbox/")
    assert told == [
        f"waiting for {OWN_DISK}: {entry}: no space left on the disk: make room",
        f"{OWN_DISK} takes results",
    ]


def test_a_wait_for_something_else_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    waiting = WaitingNotice("host:1", lambda: 100.0)
    failed: dict[str, Any] = {"call": "push", "detail": "no space left", "again": True}
    waiting.hear("failed", error="StoreFull", own_disk=False, **failed)
    waiting.hear("failed", error="StoreFull", own_disk=True, **failed)
    waiting.hear("failed", error="StoreFull", own_disk=True, **failed)
    waiting.hear("granted", task="another")  # as the server answers, what is trained for it has no room yet
    waiting.hear("pushed")
    assert caplog.messages == [
        "waiting for host:1: no space left",
        f"waiting for {OWN_DISK}: no space left",
        f"{OWN_DISK} takes results",
    ]


@pytest.mark.parametrize("joins", [False, True])
def test_a_device_of_a_program_says_that_it_waits(joins: bool, caplog: pytest.LogCaptureFixture) -> None:
    address, model = f"127.0.0.1:{free_port()}", {"w": np.zeros(3)}
    said = threading.Event()

    def hear(record: logging.LogRecord) -> bool:
        said.set()
        return True

    caplog.set_level(logging.WARNING)  # with --log-level=DEBUG others come first
    with ExitStack() as stack, TemporaryDirectory() as folder:
        caplog.handler.addFilter(hear)  # which outlives this test
        stack.callback(caplog.handler.removeFilter, hear)
        if joins:
            fed = ab.join(address, model, id="script", state_dir=folder)
            looping = threading.Thread(target=list, args=(fed,))
            looping.start()
            stack.callback(looping.join)
            stack.callback(fed.close)
        else:
            stack.enter_context(ab.Client("synthetic", address, id="a-1", state_dir=folder))
        assert said.wait(600)
    assert caplog.messages[0].startswith(f"waiting for {address}: nobody answers (")


def test_a_script_that_runs_twice_under_one_name_says_that_it_is_held_up(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """On two machines, say: each has a folder of its own, and the server gives one of them its tasks."""
    model, said = {"w": np.zeros(3)}, threading.Event()

    def hear(record: logging.LogRecord) -> bool:
        if "another process runs as 'script'" in record.getMessage():
            said.set()
        return True

    caplog.set_level(logging.WARNING)
    with ExitStack() as stack, ab.Server(model, strategy="fedasync", until=ab.Until(updates=2)) as server:
        caplog.handler.addFilter(hear)  # which outlives this test
        stack.callback(caplog.handler.removeFilter, hear)
        first = ab.join(server.address, model, id="script", state_dir=tmp_path / "a")
        stack.callback(first.close)
        assert next(iter(first)).version == 0  # it has a task
        second = ab.join(server.address, {"w": np.zeros(3)}, id="script", state_dir=tmp_path / "b")
        looping = threading.Thread(target=list, args=(second,))
        looping.start()
        stack.callback(looping.join)
        stack.callback(second.close)
        assert said.wait(600)


def test_nobody_there_is_said_without_the_words_of_grpc() -> None:
    address = f"127.0.0.1:{free_port()}"
    with OperatorClient(address) as operator, pytest.raises(Unavailable) as found:
        operator.status()
    assert str(found.value).startswith(f"{address}: nobody answers (")
    assert not found.value.reached
    assert "addresses" not in str(found.value)
    assert "ipv4" not in str(found.value)


class Failed(grpc.RpcError):
    def __init__(self, *said: Any) -> None:
        self.said = *said, None

    def code(self) -> Any:
        return self.said[0]

    def details(self) -> Any:
        return self.said[1]

    def trailing_metadata(self) -> Any:
        return self.said[2]


@pytest.mark.parametrize(
    ("status", "details", "said"),
    [
        (grpc.StatusCode.ABORTED, "Odd", "host:1: ABORTED: Odd"),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded",
            "host:1: no answer in time: ",
        ),
    ],
)
def test_other_statuses_are_said_with_what_they_mean(
    status: grpc.StatusCode, details: str, said: str
) -> None:
    assert str(error_of(Failed(status, details), "host:1")).startswith(said)


@pytest.mark.parametrize(
    ("failed", "unanswered"),
    [
        (Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), True),
        (Failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"), True),
        (Failed(grpc.StatusCode.UNAVAILABLE, f"{NO_CONNECTION}; last error: x: refused"), False),
        (Failed(grpc.StatusCode.UNAVAILABLE, "it goes down", [(ERROR_KEY, "Unavailable")]), False),
    ],
)
def test_whether_the_server_may_be_at_work_at_a_call_is_no_matter_of_words(
    failed: Failed, unanswered: bool
) -> None:
    found = error_of(failed, "host:1")
    assert isinstance(found, Unavailable)
    assert found.unanswered is unanswered


@pytest.mark.parametrize("admin", [False, True])
def test_evaluate_says_that_it_waits(admin: bool) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = ["evaluate", "synthetic", "--server", address, "--json", *(["--admin", address] if admin else [])]
    with Process(COMMAND, *words, stdout=PIPE, stderr=PIPE) as process:
        assert process.stderr is not None
        first, second = (json.loads(process.stderr.readline()) for _ in range(2))
        process.terminate()
        out, rest = process.communicate(timeout=600)
    assert first["text"].startswith(f"waiting for {address}: nobody answers")
    assert (first["level"], first["address"], first["error"]) == ("WARNING", address, "Unavailable")
    assert second["seconds"] > first["seconds"] == 0
    assert (out, [line for line in rest.splitlines() if not line.startswith("{")]) == ("", [])
