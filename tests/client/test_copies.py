"""Two processes of one device, from copies of its folder, and a real server: one works, the other waits."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server
from telling_device import device

from anabranch.client.operator import OperatorClient
from anabranch.testing.federation import config, first_weights


class Talk:
    """What the processes have told, all of them."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self._news = threading.Condition()

    def add(self, event: dict[str, Any]) -> None:
        """One more event."""
        with self._news:
            self.told.append(event)
            self._news.notify_all()

    def count(self, kind: str, **data: Any) -> int:
        """How many events there are of this kind and with these data."""
        return sum({**e, "kind": kind, **data} == e for e in self.told)

    def await_more(self, kind: str, more: int, **data: Any) -> None:
        """So many more of them than there are now."""
        with self._news:
            target = self.count(kind, **data) + more
            assert self._news.wait_for(lambda: self.count(kind, **data) >= target, 300), self.told


class Copy:
    """A device process."""

    def __init__(self, address: str, folder: Path, tasks_max: int, talk: Talk) -> None:
        self.process = device(address, folder, client_id="a", tasks_max=tasks_max, step_time_s=0.02)
        self._talk = talk
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def ended(self) -> int:
        """The exit code, once everything is told."""
        with self.process:
            code = self.process.wait(300)
            self._thread.join(300)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._talk.add(json.loads(line))


@contextmanager
def copy(address: str, folder: Path, tasks_max: int, talk: Talk) -> Iterator[Copy]:
    """A process that is killed at the end, if it still runs."""
    running = Copy(address, folder, tasks_max, talk)
    try:
        yield running
    finally:
        running.process.kill()
        running.ended()


def test_a_copied_folder_costs_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    settings, talk = config(client={"steps": 40}, server={"lease_s": 20.0, "lease_min_s": 20.0}), Talk()
    with (
        live_server(tmp_path, first_weights(), settings) as info,
        OperatorClient(info.admin_address) as server,
    ):
        with copy(info.address, tmp_path / "one", 1, talk) as first:
            assert first.ended() == 0
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        with (
            copy(info.address, tmp_path / "one", 0, talk) as one,
            copy(info.address, tmp_path / "two", 0, talk) as two,
        ):
            talk.await_more("refused", 1, reason="another_session")
            talk.await_more("pushed", 3)
            assert server.status().run_twice == ["a"]
            for process in (one, two):
                talk.await_more("pushed", 1)  # by whichever is left
                process.process.terminate()
                assert process.ended() == 0
        status = server.status()
    assert talk.count("cancelled") + talk.count("failed") == 0
    assert talk.count("trained") - talk.count("pushed") <= 2, "what each was at when it was stopped"
    # One that was stopped on a slow machine while it pushed has not told of it.
    assert talk.count("pushed") <= status.updates_applied <= talk.count("trained")
    refused = next(e for e in talk.told if e["kind"] == "refused")
    assert refused["detail"].startswith("another process runs as 'a' and has its task: stop one of them")
    assert sum("a is run by two processes at a time" in record.getMessage() for record in caplog.records) == 1
