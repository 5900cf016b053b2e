"""What an operator's client writes down of a version: the whole of it, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from anabranch.client.operator import OperatorClient
from anabranch.core.errors import AnabranchError, InvalidUpdate, Unavailable
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.protos.v1.operators_pb2_grpc import OperatorsServicer, add_OperatorsServicer_to_server

WHOLE = [(0, b"1234"), (4, b"5678")]


class Exporter(OperatorsServicer):
    """Sends version 3, of eight bytes, in these chunks."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, bytes]] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        for offset, data in self.chunks:
            yield operators.ExportResponse(version=3, size_bytes=8, offset=offset, data=data)


@pytest.fixture
def exporter() -> Iterator[tuple[Exporter, OperatorClient]]:
    server, servicer = grpc.server(ThreadPoolExecutor(1)), cast("type[Any]", Exporter)()
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
    exporter: tuple[Exporter, OperatorClient],
    chunks: list[tuple[int, bytes]],
    error: type[AnabranchError],
    words: str,
    tmp_path: Path,
) -> None:
    (servicer, operator), path = exporter, tmp_path / "model.safetensors"
    path.write_bytes(b"the one before")
    servicer.chunks = chunks
    with pytest.raises(error, match=words):
        operator.export(path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"the one before")]
    servicer.chunks = WHOLE
    assert operator.export(path) == 3
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"12345678")]
