"""Certificates that change while work goes on: the device's, the server's, and no update is lost."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from guarded import federation, shown_serial

from anabranch.client.agent import Agent
from anabranch.client.link import Link
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import NotAuthenticated
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.identity.wallet import read_wallet
from anabranch.server.verify import verify
from anabranch.testing.federation import BASE, first_weights
from anabranch.workloads.app import Shard
from anabranch.workloads.synthetic import Synthetic


class Watcher:
    """Stops an agent once it, and the server, have had so many certificates."""

    def __init__(self, transport: GrpcTransport, join_address: str, certificates: int) -> None:
        self.transport, self.join_address, self.wanted = transport, join_address, certificates
        self.own: set[str] = set()
        self.servers: set[int] = set()
        self.agent: Agent | None = None

    def __call__(self, kind: str, **_: Any) -> None:
        """An `OnEvent`: look at the certificates of the moment."""
        if kind != "granted":
            return
        wallet = self.transport._link.wallet
        assert wallet is not None
        assert self.agent is not None
        self.own.add(wallet.peer.serial)
        self.servers.add(shown_serial(self.join_address))
        if min(len(self.own), len(self.servers)) >= self.wanted:
            self.agent.stop()


@pytest.mark.parametrize("push", ["task", "overlap"])
def test_no_update_is_lost_while_certificates_change(tmp_path: Path, push: str) -> None:
    tables = {**BASE, "identity": {"certificate_s": 12.0}, "client": {**BASE["client"], "push": push}}
    tables["server"] = {**BASE["server"], "tasks_per_client": 2}
    with federation(tmp_path, first_weights(), DEFAULT_LIMITS, **tables) as guarded:
        wallet = guarded.joined("device-1")
        transport = guarded.transport(wallet)
        watcher = Watcher(transport, guarded.join_address, certificates=3)
        shard = Shard("train", 0, 4)
        agent = Agent(
            Synthetic(), transport, "device-1", shard, tmp_path / "device", step_time_s=0.05, on_event=watcher
        )
        watcher.agent = agent
        done = agent.run()
        status = guarded.operators(guarded.operator()).status()
        assert (done.failures, done.rejected) == (0, 0)
        # When it stops, one may be on its way: the server has it, and the outbox until it is answered.
        assert 3 < done.answered <= status.updates_applied <= done.answered + 1
        kept = read_wallet(wallet.folder)
        assert kept is not None
        assert kept.peer.serial in watcher.own - {wallet.peer.serial}
    report = verify(guarded.data_dir, ca_sha256=guarded.authority.sha256)
    assert (report.problems, report.signed) == ((), status.updates_applied)


def test_an_evaluator_is_told_once_that_its_certificate_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No server renews an operator's: asked to, it said every half a minute, for a month, `join again`."""
    with federation(tmp_path, first_weights()) as guarded:
        peer = (wallet := guarded.operator("alice")).peer
        hours = [peer.not_after - left_s for left_s in (0.2, 0.1, 0.05, -1.0)]
        clock = [peer.not_before + 400.0, *hours]
        link = Link(guarded.address, wallet=wallet, now=lambda: clock[0])
        try:
            with caplog.at_level(logging.WARNING):
                link.stub()
                assert not caplog.messages, "it is not due"
                for _ in hours[:-1]:
                    del clock[0]
                    link.stub()
            del clock[0]
            with pytest.raises(NotAuthenticated, match="have others made by `anabranch admin operator`"):
                link.stub()
        finally:
            link.close()
    (told,) = caplog.messages
    assert told.startswith("the certificate of operator 'alice' counts until ")
    assert told.endswith(
        ", and no server renews it: before then, have others made by `anabranch admin operator`"
    )
