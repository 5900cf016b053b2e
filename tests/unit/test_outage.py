"""What devices are told of a store that fails, and what the log says of it."""

from __future__ import annotations

import pytest
from virtual import VirtualTime

from anabranch.core.errors import (
    AnabranchError,
    InvalidUpdate,
    LeadershipLost,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnreachable,
    Unavailable,
    outcome_of,
)
from anabranch.server.outage import SAY_AGAIN_S, Outage
from anabranch.server.store.base import DiskFailed


def outage(time: VirtualTime) -> tuple[Outage, list[BaseException]]:
    """One, and what the server was given up for."""
    ended: list[BaseException] = []
    return Outage(ended.append, time.now), ended


@pytest.mark.parametrize("kind", [StoreError, StoreUnreachable, StoreCorrupt, DiskFailed])
def test_a_device_comes_again(kind: type[StoreError]) -> None:
    made, ended = outage(VirtualTime())
    told = made.told(error := kind("user fleet at db.internal"))
    assert isinstance(told, Unavailable)
    assert outcome_of(told).retryable
    assert told.retry_after_s == (1.0, 5.0), "as docs/protocol.md says"
    assert str(told) == "the server's store cannot do it now; its log says why", "no host, user or file"
    assert ended == ([error] if kind is DiskFailed else [])


def test_a_want_of_room_stays_one_and_names_no_file() -> None:
    made, ended = outage(VirtualTime())
    told = made.told(StoreFull("spooling an upload to /var/lib/fleet: no space left on the disk"))
    assert isinstance(told, StoreFull)
    assert "/var/lib/fleet" not in str(told)
    assert "its log says why" in str(told)
    assert outcome_of(told).retryable
    assert ended == []


@pytest.mark.parametrize("error", [LeadershipLost("b"), InvalidUpdate("c"), ValueError("d")])
def test_what_names_its_window_or_is_not_the_stores_stays(error: Exception) -> None:
    made, ended = outage(VirtualTime())
    assert made.told(error) is error
    assert ended == []


def test_what_lasts_is_said_after_pauses_that_double(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever file each device is told of."""
    time = VirtualTime()
    made, _ = outage(time)
    said = []
    for second in range(1000):
        for device in range(3):
            made.told(StoreError(f"spooling upload {device}+{second}"))
        said += [second] * len(caplog.records)
        caplog.clear()
        time.pass_s(1.0)
    assert said == [0, 60, 120, 240, 480, 960]


def test_each_kind_is_said_by_itself_and_what_was_over_anew(caplog: pytest.LogCaptureFixture) -> None:
    time = VirtualTime()
    made, _ = outage(time)
    errors: list[AnabranchError] = [StoreError("one"), StoreUnreachable("two"), StoreError("three")]
    for error in errors:
        made.told(error)
    assert [record.args for record in caplog.records] == [(errors[0],), (errors[1],)]
    time.pass_s(SAY_AGAIN_S + 1.0)
    made.told(errors[2])
    assert [record.args for record in caplog.records][2:] == [(errors[2],)]
    assert {record.levelname for record in caplog.records} == {"ERROR"}
