"""What the log says of calls that are sent away."""

from __future__ import annotations

import pytest
from virtual import VirtualTime

from anabranch.server.shedding import Shedding

WHY = "AskTask: the queue is full"
FIRST = f"calls are sent away, to come again: {WHY}"


def test_calls_that_are_sent_away_are_said_at_once_and_after_pauses_that_double(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time = VirtualTime()
    shedding = Shedding(time.now)
    for _ in range(250):  # one a second
        shedding.heard("AskTask", "the queue is full")
        if time.now() % 10 == 0:
            shedding.heard("PushUpdate", "too many uploads")
        time.pass_s(1.0)
    assert caplog.messages == [
        FIRST,
        *(
            f"calls are sent away, for {lasted} by now (AskTask {asks}, PushUpdate {more}); the newest: {WHY}"
            for lasted, asks, more in (("60.0 s", 61, 6), ("2.00 min", 121, 12), ("4.00 min", 241, 24))
        ),
    ]
    caplog.clear()
    time.pass_s(61.0)
    shedding.heard("AskTask", "the queue is full")
    assert caplog.messages == [FIRST]
    time.pass_s(60.0)
    shedding.heard("AskTask", "the queue is full")
    assert caplog.messages[1].startswith("calls are sent away, for 60.0 s by now (AskTask 2); ")
