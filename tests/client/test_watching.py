"""A watch whose connections break, by an operator's client."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest

from anabranch.client.operator import AGAIN_S, OperatorClient
from anabranch.core.errors import Unavailable
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.protos.v1.operators_pb2_grpc import OperatorsServicer, add_OperatorsServicer_to_server

LOOKS = 2


class NoStreams(OperatorsServicer):
    """Behind what lets no stream through; it says how it stands so many times, and is gone then."""

    def __init__(self) -> None:
        self.watches = self.looks = 0

    def Watch(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.watches += 1
        context.abort(grpc.StatusCode.UNAVAILABLE, "no streams")

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.looks += 1
        if self.looks > LOOKS:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return operators.GetStatusResponse()


def test_a_server_that_refuses_each_watch_is_not_asked_without_a_pause() -> None:
    server, servicer = grpc.server(ThreadPoolExecutor(2)), cast("type[Any]", NoStreams)()
    add_OperatorsServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    began = time.monotonic()
    try:
        with OperatorClient(f"127.0.0.1:{port}") as operator, pytest.raises(Unavailable, match="gone"):
            list(operator.watch())
    finally:
        server.stop(None).wait()
    assert (servicer.watches, servicer.looks) == (LOOKS + 1, LOOKS + 1)
    assert time.monotonic() - began >= LOOKS * AGAIN_S
