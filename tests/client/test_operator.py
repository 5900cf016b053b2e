"""What an operator's client writes down of a version, and says of orders that nobody has answered."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from anabranch.client.operator import MAY_YET, OperatorClient
from anabranch.core.errors import ERROR_KEY, AnabranchError, InvalidUpdate, Unavailable
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.protos.v1.operators_pb2_grpc import OperatorsServicer, add_OperatorsServicer_to_server

WHOLE = [(0, b"1234"), (4, b"5678")]


class Ended(grpc.Status):
    """A call is cut off, or the server itself says so."""

    code, details = grpc.StatusCode.UNAVAILABLE, "Socket closed"

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.trailing_metadata = metadata


class Operated(OperatorsServicer):
    """Sends version 3, of eight bytes, in these chunks; all else it leaves unanswered, or refuses."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, bytes]] = []
        self.refusal: tuple[tuple[str, str], ...] = ()

    def Pause(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        context.abort_with_status(Ended(self.refusal))

    GetStatus = Pause

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        for offset, data in self.chunks:
            yield operators.ExportResponse(version=3, size_bytes=8, offset=offset, data=data)


@pytest.fixture
def operated() -> Iterator[tuple[Operated, OperatorClient]]:
    server, servicer = grpc.server(ThreadPoolExecutor(1)), cast("type[Any]", Operated)()
    add_OperatorsServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with OperatorClient(f"127.0.0.1:{port}") as operator:
            yield servicer, operator
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("chunks", "error", "words"),
    [
        ([], Unavailable, "the export ended after 0 of 0 bytes"),
        (WHOLE[:1], Unavailable, "the export ended after 4 of 8 bytes"),
        ([*WHOLE, (8, b"9")], Unavailable, "the export ended after 9 of 8 bytes"),
        (WHOLE[1:], InvalidUpdate, "a chunk at 4: expected 0"),
        ([WHOLE[0], WHOLE[0]], InvalidUpdate, "a chunk at 0: expected 4"),
    ],
    ids=["nothing", "cut", "too long", "without its beginning", "twice"],
)
def test_a_part_of_an_export_takes_the_place_of_no_file(
    operated: tuple[Operated, OperatorClient],
    chunks: list[tuple[int, bytes]],
    error: type[AnabranchError],
    words: str,
    tmp_path: Path,
) -> None:
    (servicer, operator), path = operated, tmp_path / "model.safetensors"
    path.write_bytes(b"the one before")
    servicer.chunks = chunks
    with pytest.raises(error, match=words):
        operator.export(path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"the one before")]
    servicer.chunks = WHOLE
    assert operator.export(path) == 3
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"12345678")]


def test_an_order_that_was_cut_off_may_be_carried_out_and_one_that_was_refused_is_not(
    operated: tuple[Operated, OperatorClient],
) -> None:
    servicer, operator = operated
    with pytest.raises(Unavailable, match=f"Socket closed.*; {MAY_YET}$"):
        operator.pause()
    with pytest.raises(Unavailable) as looked:
        operator.status()
    servicer.refusal = ((ERROR_KEY, "Unavailable"),)
    with pytest.raises(Unavailable) as refused:
        operator.pause()
    assert MAY_YET not in f"{looked.value} {refused.value}"
