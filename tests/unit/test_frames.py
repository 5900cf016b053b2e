"""Messages of an exchange, with protobuf as the oracle."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from anabranch.protos.frames import Chunk, frame_bytes, push_content, request_frame, response_frame
from anabranch.protos.v1 import devices_pb2 as devices

REQUESTS = st.builds(
    devices.RequestHead,
    ask=st.none() | st.builds(devices.AskTaskRequest, task_id=st.text(max_size=300)),
    offset=st.integers(0, 2**64 - 1),
    more=st.booleans(),
)
DATA = st.binary(max_size=400)


@given(REQUESTS, DATA)
def test_protobuf_writes_and_reads_the_same(head: devices.RequestHead, data: bytes) -> None:
    message = frame_bytes(head, data)
    assert message == devices.ExchangeRequest(head=head, data=data).SerializeToString()
    frame = request_frame(message)
    assert (frame.head, bytes(frame.data)) == (head, data)
    answer = devices.ResponseHead(offset=head.offset, more=head.more)
    said = frame_bytes(answer, memoryview(data))
    assert said == devices.ExchangeResponse(head=answer, data=data).SerializeToString()
    assert (response_frame(said).head, bytes(response_frame(said).data)) == (answer, data)


def test_what_a_message_carries_is_not_copied() -> None:
    message = frame_bytes(devices.RequestHead(offset=7), bytes(1000))
    assert request_frame(message).data.obj is message


@given(REQUESTS, DATA, DATA)
def test_fields_in_another_order_are_read(head: devices.RequestHead, data: bytes, before: bytes) -> None:
    message = b"".join(
        devices.ExchangeRequest(**fields).SerializeToString()  # the last one of a name counts
        for fields in ({"data": before}, {"head": head}, {"data": data or b"0"})
    )
    frame = request_frame(message)
    assert (frame.head, bytes(frame.data)) == (head, data or b"0")


@given(st.binary(max_size=40) | st.binary(max_size=20).map(lambda tail: b"\x0a" + tail))
def test_any_bytes_are_what_protobuf_says_they_are(message: bytes) -> None:
    check(message)


def test_a_message_that_is_cut_off_is_what_is_left_of_it() -> None:
    message = frame_bytes(devices.RequestHead(ask=devices.AskTaskRequest(task_id="t" * 200)), bytes(300))
    for size in range(len(message)):
        check(message[:size])


def check(message: bytes) -> None:
    try:
        expected = devices.ExchangeRequest.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            request_frame(message)
        return
    frame = request_frame(message)
    assert (frame.head, bytes(frame.data)) == (expected.head, expected.data)


HEADERS = st.builds(devices.UpdateHeader, client_id=st.text(max_size=20), examples=st.integers(0, 9))
CHUNKS = st.builds(
    devices.UpdateChunk, offset=st.integers(0, 2**64 - 1), data=DATA, part_id=st.integers(0, 1)
)
PUSHES = st.builds(devices.PushUpdateRequest, header=HEADERS) | st.builds(
    devices.PushUpdateRequest, chunk=CHUNKS
)


@given(PUSHES.map(lambda push: push.SerializeToString()) | st.binary(max_size=40).map(lambda b: b"\x12" + b))
def test_a_push_is_what_protobuf_says_it_is(message: bytes) -> None:
    check_push(message)
    for size in range(min(len(message), 40)):
        check_push(message[:size])


def test_the_bytes_of_a_push_are_not_copied() -> None:
    chunk = devices.UpdateChunk(offset=2**40, data=bytes(1000))
    message = devices.PushUpdateRequest(chunk=chunk).SerializeToString()
    found = push_content(message)
    assert isinstance(found, Chunk)
    assert isinstance(found.data, memoryview)
    assert found.offset == 2**40
    assert found.data.obj is message


def check_push(message: bytes) -> None:
    try:
        expected = devices.PushUpdateRequest.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            push_content(message)
        return
    found = push_content(message)
    if expected.HasField("header"):
        assert found == expected.header
    elif expected.HasField("chunk") and not expected.chunk.part_id:
        assert isinstance(found, Chunk)
        assert (found.offset, bytes(found.data)) == (expected.chunk.offset, expected.chunk.data)
    else:
        assert found is None
