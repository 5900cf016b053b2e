"""A transport of others that fails as code does: what the device is told, and that it goes on if it can."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from email.message import Message
from typing import Any, ClassVar, cast
from urllib.error import HTTPError

import pytest
from own_parts import forgotten

from anabranch.client.local import LocalTransport
from anabranch.client.messages import HeartbeatAnswer, PushAnswer
from anabranch.client.transports import TRANSPORTS, ForeignTransport, open_transport
from anabranch.core.errors import AppError, InvalidUpdate, Unavailable
from anabranch.core.model.updates import Ask, Decision, LocalPlan, Task, Verdict


class LineCut(Exception):
    """As a library has one of its own."""


GATEWAY = HTTPError("http://server/push", 503, "Service Unavailable", Message(), None)
ERRORS: dict[str, BaseException] = {
    "gateway": GATEWAY,
    "end": EOFError(),
    "library": LineCut("no carrier"),
    "leaves": SystemExit("no modem"),
    "connection": ConnectionError("link down"),
    "time": TimeoutError("too slow"),
    "name": OSError(-2, "Name or service not known"),
    "file": FileNotFoundError(2, "No such file or directory", "/dev/modem"),
    "slip": KeyError("speed"),
    "ours": InvalidUpdate("not of this run"),
}


class Shaky(LocalTransport):
    """It raises what its address says, and answers nothing."""

    name: ClassVar[str] = "shaky"

    def __init__(self, address: str) -> None:
        self._address = address.removeprefix("shaky://")

    @classmethod
    def of(cls, address: str, client_id: str, wallet: Any) -> Any:
        if address.endswith("nowhere"):
            raise RuntimeError("no modem")
        return cls(address)

    def enrol(self, capability: Any) -> Any:
        raise ERRORS[self._address]

    def fetch(self, *args: Any, **more: Any) -> Any:
        return None

    def ask(self, ask: Any, spec: Any) -> Any:
        return {"task": 1}

    def drop(self, task_id: str, why: str, diverged: bool = False) -> None:
        pass

    def close(self) -> None:
        raise RuntimeError("closed twice")


@pytest.fixture(autouse=True)
def shaky() -> Iterator[None]:
    with forgotten():
        TRANSPORTS.let_in("shaky.py:Shaky", Shaky)
        yield


@pytest.mark.parametrize(
    ("which", "kind", "said"),
    [
        ("connection", Unavailable, "ConnectionError: link down"),
        ("time", Unavailable, "TimeoutError: too slow"),
        ("name", Unavailable, "Name or service not known"),
        ("gateway", Unavailable, "HTTP Error 503: Service Unavailable"),
        ("end", Unavailable, "EOFError"),
        ("library", AppError, "where a connection has failed raise ConnectionError: that is tried again"),
        ("leaves", AppError, "SystemExit: no modem"),
        ("file", AppError, "FileNotFoundError"),
        ("slip", AppError, "KeyError: 'speed'"),
    ],
)
def test_what_it_raises_is_told_with_its_name_and_a_connection_is_tried_again(
    which: str, kind: type[Exception], said: str
) -> None:
    with open_transport(f"shaky://{which}", "a", None) as transport, pytest.raises(kind) as raised:
        transport.enrol(None)  # type: ignore[arg-type]
    assert type(raised.value) is kind
    assert str(raised.value).startswith("transport shaky.enrol (")
    assert said in str(raised.value)


def test_an_error_of_ours_goes_through_as_it_is() -> None:
    with open_transport("shaky://ours", "a", None) as transport, pytest.raises(InvalidUpdate) as raised:
        transport.enrol(None)  # type: ignore[arg-type]
    assert str(raised.value) == "not of this run"


def test_what_is_no_answer_is_told_at_once() -> None:
    with open_transport("shaky://slip", "a", None) as transport:
        with pytest.raises(AppError, match="transport 'shaky': fetch must give FetchedModel, not None"):
            transport.fetch("")
        with pytest.raises(AppError, match="transport 'shaky': ask must give Task or Refused, not a dict"):
            transport.ask(None, None)  # type: ignore[arg-type]
        transport.drop("task", "why")


DECISION = Decision(Verdict.HELD, 0, 1.0)
TASK = Task("other", "a", 0, 0.0, 60.0, 60.0, 1, LocalPlan())


class Answers(LocalTransport):
    """It answers what it is made of."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def push_and_ask(self, entry: Any, ask: Ask, spec: Any) -> Any:
        return self._answer

    ask = push = heartbeat = push_and_ask  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("push", PushAnswer(cast("Any", "held"), 1), "PushAnswer whose decision is Decision, not a str"),
        ("push", PushAnswer(DECISION, cast("Any", "1")), "PushAnswer whose version is int, not a str"),
        ("heartbeat", HeartbeatAnswer(9.0, 1, cast("Any", None)), "notices is Sequence, not None"),
        ("ask", TASK, "ask must give the task that was asked for, 'mine', not 'other'"),
        ("push_and_ask", PushAnswer(DECISION, 1, next=TASK), "asked for, 'mine', not 'other'"),
    ],
)
def test_an_answer_with_something_else_in_it_is_told_by_its_method(
    method: str, answer: Any, said: str
) -> None:
    transport = ForeignTransport("mine", lambda: Answers(answer))
    with pytest.raises(AppError, match=re.escape(said)) as raised:
        getattr(transport, method)(None, Ask("a", "mine"), None)
    assert str(raised.value).startswith(f"transport 'mine': {method} must give ")


def test_an_answer_that_is_one_goes_through() -> None:
    for answer in (PushAnswer(DECISION, 1), PushAnswer(DECISION, 1, next=replace(TASK, task_id="mine"))):
        transport = ForeignTransport("mine", lambda answer=answer: Answers(answer))  # type: ignore[misc]
        assert transport.push_and_ask(None, Ask("a", "mine"), None) is answer
    beats = HeartbeatAnswer(9, 1, cast("Any", []))
    assert ForeignTransport("mine", lambda: Answers(beats)).heartbeat(None, 1.0, None) is beats


def test_what_closing_it_raises_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with open_transport("shaky://slip", "a", None):
        pass
    (said,) = caplog.messages
    assert "transport shaky.close" in said
    assert "RuntimeError: closed twice" in said


def test_one_that_cannot_be_made_is_told_with_its_name() -> None:
    with pytest.raises(AppError, match=r"transport shaky\.of .*RuntimeError: no modem"):
        open_transport("shaky://nowhere", "a", None)
