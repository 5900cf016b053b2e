"""What no honest server says: a device refuses it, and neither spins, nor sleeps for ever, nor breaks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.client.jobs import JobOffice
from anabranch.client.link import Link
from anabranch.client.pulse import Pulse
from anabranch.client.transport import GrpcTransport
from anabranch.client.windows import LATEST_S, window_of
from anabranch.core.effects import Refused
from anabranch.core.errors import (
    ERROR_KEY,
    RETRY_KEY,
    AnabranchError,
    ConfigError,
    InvalidUpdate,
    Overloaded,
    ProtocolError,
    TooLarge,
    Unavailable,
)
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, Capability
from anabranch.protos.convert import manifest_to_proto
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import jobs_pb2 as jobs
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.devices_pb2_grpc import DevicesServicer, add_DevicesServicer_to_server
from anabranch.protos.v1.jobs_pb2_grpc import JobsServicer, add_JobsServicer_to_server

SPEC = ParamSpec.of({"w": np.zeros(4, np.float32)})
NAN, INF = float("nan"), float("inf")
NO_WINDOWS = [
    (NAN, NAN),
    (0.0, NAN),
    (NAN, 1.0),
    (INF, INF),
    (0.0, INF),
    (-5.0, -1.0),
    (-1.0, 2.0),
    (5.0, 1.0),
    (0.0, 0.0),
]
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


RAW, VALUES = model.Encoding(codec="raw"), bytes(range(16))


def header_of(data: bytes) -> devices.ModelHeader | None:
    """What version 1 is said to be, of these bytes."""
    sha256 = hashlib.sha256(data).digest()
    return devices.ModelHeader(version=1, part=model.Part(size_bytes=len(data), sha256=sha256, encoding=RAW))


class Server(DevicesServicer, JobsServicer):
    """Says what it is told to."""

    def __init__(self) -> None:
        self.config, self.window, self.retry = "{}", (1.0, 2.0), ""
        self.task: devices.Task | None = None
        self.size_bytes, self.job = 16, "ward"
        self.header, self.chunks = header_of(VALUES), list[tuple[int, bytes]]()

    def Enrol(self, request: Any, context: Any) -> devices.EnrolResponse:  # noqa: N802 - gRPC's name
        return devices.EnrolResponse(run_id="r", manifest=manifest_to_proto(SPEC), config_json=self.config)

    def AskTask(self, request: Any, context: Any) -> devices.AskTaskResponse:  # noqa: N802
        if self.retry:
            context.set_trailing_metadata(((RETRY_KEY, self.retry), (ERROR_KEY, "Overloaded")))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "wait")
        if self.task is not None:
            return devices.AskTaskResponse(task=self.task)
        return devices.AskTaskResponse(refusal=devices.Refusal(reason="paused", retry_after=self._window))

    def FetchModel(self, request: Any, context: Any) -> Iterator[devices.FetchModelResponse]:  # noqa: N802
        if not self.chunks:
            part = model.Part(size_bytes=self.size_bytes, sha256=bytes(32), encoding=RAW)
            part.part_id = request.part_id
            yield devices.FetchModelResponse(header=devices.ModelHeader(part=part), data=bytes(16))
        header = self.header
        for at, data in [(at, data) for at, data in self.chunks if at >= request.offset] or [(16, b"")]:
            yield devices.FetchModelResponse(header=header, offset=at, data=data)
            header = None

    def ListJobs(self, request: Any, context: Any) -> jobs.ListJobsResponse:  # noqa: N802
        return jobs.ListJobsResponse(jobs=[jobs.Job(name=self.job)], look_again=self._window)

    @property
    def _window(self) -> model.RetryWindow:
        return model.RetryWindow(earliest_s=self.window[0], latest_s=self.window[1])


@contextmanager
def serving(servicer: Server) -> Iterator[str]:
    """Its address."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_DevicesServicer_to_server(servicer, server)
    add_JobsServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


@pytest.fixture
def hostile() -> Iterator[tuple[Server, GrpcTransport, JobOffice]]:
    """A server, and what a device speaks to it with."""
    servicer = Server()  # type: ignore[abstract] # it answers some of the calls
    with serving(servicer) as address:
        transport, link = GrpcTransport(address, "d"), Link(address)
        yield servicer, transport, JobOffice(link, "d")
        transport.close()
        link.close()


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ("{", ProtocolError, "config_json"),
        ("[1]", ProtocolError, "config_json"),
        ("[" * 100_000, ProtocolError, "config_json"),
        ('{"run": {"seed": %s}}' % ("9" * 5000), ProtocolError, "config_json"),
        ('{"run": "x"}', ProtocolError, "config_json"),
        ('{"limits": {"quick_chunk_bytes_max": -1}}', ConfigError, "limits.chunk_bytes_max = -1"),
        ('{"limits": {"payload_bytes_max": "x"}}', ConfigError, "limits.payload_bytes_max = 'x'"),
        ('{"limits": {"payload_bytes_max": NaN}}', ConfigError, "limits.payload_bytes_max = nan"),
        ('{"limits": {"frozen_bytes_max": true}}', ConfigError, "limits.frozen_bytes_max = True"),
    ],
)
def test_settings_that_are_none_are_named(
    hostile: Any, config: str, error: type[AnabranchError], words: str
) -> None:
    servicer, transport, _ = hostile
    servicer.config = config
    with pytest.raises(error, match=words):
        transport.enrol(Capability())


@pytest.mark.parametrize("window", NO_WINDOWS, ids=str)
def test_nobody_asks_without_end_or_never_again(hostile: Any, window: tuple[float, float]) -> None:
    servicer, transport, office = hostile
    servicer.window = window
    refused = transport.ask(Ask("d", "t"), SPEC)
    assert isinstance(refused, Refused)
    for low, high in (refused.retry_after_s, office.listing().look_again_s):
        assert 0.5 <= low <= high <= 60
    servicer.retry = f"{window[0]},{window[1]}"
    with pytest.raises(Overloaded) as overloaded:
        transport.ask(Ask("d", "t"), SPEC)
    assert overloaded.value.retry_after_s == (1.0, 5.0), "as if it had said nothing"


def test_a_window_is_believed_up_to_a_day(hostile: Any) -> None:
    servicer, transport, office = hostile
    for said, believed in (
        ((1.0, 2.0), (1.0, 2.0)),
        ((0.0, 0.5), (0.0, 0.5)),
        ((3.0, 1e300), (3.0, LATEST_S)),
    ):
        servicer.window, servicer.retry = said, ""
        assert transport.ask(Ask("d", "t"), SPEC).retry_after_s == believed
        assert office.listing().look_again_s == believed
        servicer.retry = f"{said[0]},{said[1]}"
        with pytest.raises(Overloaded) as overloaded:
            transport.ask(Ask("d", "t"), SPEC)
        assert overloaded.value.retry_after_s == believed


@given(NUMBERS, NUMBERS)
def test_a_window_is_one_or_none(earliest_s: float, latest_s: float) -> None:
    found = window_of(earliest_s, latest_s)
    if found is not None:
        low, high = found
        assert 0 <= low <= high <= LATEST_S
        assert high > 0
    assert (found is None) == (not (0 <= earliest_s <= latest_s < INF) or latest_s == 0)


@pytest.mark.parametrize("lease_s", [NAN, INF, 0.0, -1.0])
def test_a_task_without_a_lease_is_no_task(hostile: Any, lease_s: float) -> None:
    servicer, transport, _ = hostile
    servicer.task = devices.Task(task_id="t", base_kind=model.BASE_KIND_VERSION, lease_s=lease_s)
    with pytest.raises(InvalidUpdate, match="lease_s must be above 0 and finite"):
        transport.ask(Ask("d", "t"), SPEC)


def test_a_beat_that_is_due_in_a_thousand_years_can_be_waited_for() -> None:
    beaten = threading.Event()
    pulse = Pulse(beaten.set, lambda: 0.0)
    pulse.set(1e300)
    pulse.start()
    pulse.set(1e300)
    pulse.set(-1.0)  # the thread is still there
    assert beaten.wait(600)
    pulse.stop()


def test_a_model_for_which_there_is_no_memory_is_refused(hostile: Any) -> None:
    servicer, transport, _ = hostile
    servicer.config = json.dumps({"limits": {"payload_bytes_max": 2**50, "frozen_bytes_max": 2**50}})
    servicer.size_bytes = 2**49  # more than a processor has addresses for
    transport.enrol(Capability())
    with pytest.raises(TooLarge, match="no memory"):
        transport.fetch(SPEC.layout_hash, part_id=1)


def test_a_model_is_no_longer_than_its_numbers_need(hostile: Any) -> None:
    """A server of a model of 16 bytes has nobody make room for 2 MiB, let alone for all that it may say."""
    servicer, transport, _ = hostile
    servicer.size_bytes = 2 * 2**20
    transport.enrol(Capability())
    with pytest.raises(TooLarge, match="the run's model needs 1048640 at most"):
        transport.fetch(SPEC.layout_hash, 0)


@pytest.mark.parametrize(
    ("chunks", "error", "words"),
    [
        ([(0, VALUES[:8]), (8, bytes(8))], Unavailable, "version 1 was damaged on the way: its SHA-256"),
        ([(0, VALUES[:8])], Unavailable, "ended early"),
        ([(0, VALUES[:8]), (9, VALUES[9:])], InvalidUpdate, "a chunk at 9 of 16 bytes: expected 8"),
        ([(0, VALUES), (16, b"x")], InvalidUpdate, "a chunk at 16 of 16 bytes: expected 16"),
    ],
    ids=["damaged", "short", "with a hole", "too long"],
)
def test_a_model_is_taken_whole_and_as_its_digest_says_or_not_at_all(
    hostile: Any, chunks: list[tuple[int, bytes]], error: type[AnabranchError], words: str
) -> None:
    servicer, transport, _ = hostile
    servicer.chunks = chunks
    with pytest.raises(error, match=words):
        transport.fetch(SPEC.layout_hash, 1)
    servicer.chunks = [(0, VALUES[:8]), (8, VALUES[8:])]
    assert transport.fetch(SPEC.layout_hash, 1).data == VALUES


def test_a_model_without_a_header_is_none(hostile: Any) -> None:
    servicer, transport, _ = hostile
    servicer.header, servicer.chunks = None, [(0, VALUES)]
    with pytest.raises(InvalidUpdate, match="began without a header"):
        transport.fetch(SPEC.layout_hash, 1)


def test_no_model_is_put_together_of_two(hostile: Any) -> None:
    """By what it has of the first a device asks for the rest, and by now the server has another one."""
    servicer, transport, _ = hostile
    servicer.chunks = [(0, VALUES[:8])]
    with pytest.raises(Unavailable, match="ended early"):
        transport.fetch(SPEC.layout_hash, 1)
    servicer.header, servicer.chunks = header_of(VALUES[::-1]), [(0, VALUES[:7:-1]), (8, VALUES[7::-1])]
    with pytest.raises(Unavailable, match="version 1 changed while it was fetched: fetch it anew"):
        transport.fetch(SPEC.layout_hash, 1)
    assert transport.fetch(SPEC.layout_hash, 1).data == VALUES[::-1]


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "..", "a/b", "a,10.0.0.9:7070", "a\n", "-x", "x" * 65])
def test_a_jobs_name_is_a_name(hostile: Any, name: str) -> None:
    """A folder is called so, and it is a part of an address."""
    servicer, _, office = hostile
    servicer.job = name
    with pytest.raises(ConfigError, match="job "):
        office.listing()
    servicer.job = ""
    assert office.listing().jobs[0].name == ""
