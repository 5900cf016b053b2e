"""Who comes without papers to a guarded port of this machine is told what is missing."""

from __future__ import annotations

import pytest
from guarded import Federation

from anabranch.client.guarded import check_not_guarded
from anabranch.client.operator import OperatorClient
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import NotAuthenticated, Unavailable
from anabranch.core.model.updates import Capability


def test_an_operator_without_papers(guarded: Federation) -> None:
    with OperatorClient(guarded.admin_address) as operator:
        for call in (operator.status, operator.pause, lambda: next(iter(operator.watch()))):
            with pytest.raises(NotAuthenticated, match="--identity"):
                call()
        with pytest.raises(NotAuthenticated, match="--identity"):
            operator.export(guarded.folder / "model.safetensors")


def test_a_device_without_papers(guarded: Federation) -> None:
    with (
        GrpcTransport(guarded.address, "device-1") as transport,
        pytest.raises(NotAuthenticated, match="--token"),
    ):
        transport.enrol(Capability())


def test_nobody_there_is_something_else() -> None:
    check_not_guarded("127.0.0.1:1")
    with OperatorClient("127.0.0.1:1") as operator, pytest.raises(Unavailable):
        operator.status()
