"""How a server asks its keepers: what it says of one that gives no sums, and how often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.core import events as ev
from anabranch.core.errors import InvalidSignature
from anabranch.identity.keepers import KeeperKey
from anabranch.server import unmasking
from anabranch.server.unmasking import Unmasking


class Books:
    """A run's writer, whose one sum waits until it is answered; `done`: that was noted."""

    def __init__(self) -> None:
        self.waiting, self.done = [SimpleNamespace(number=1)], asyncio.Event()

    async def look(self, read: Callable[[Any], Any]) -> Any:
        if not self.waiting:
            self.done.set()
        return list(self.waiting)

    async def submit(self, event: ev.Event, data: bytes) -> None:
        self.waiting.clear()

    def now(self) -> float:
        return 1.0


class Short:
    """A keeper's connection: its sums are too short but for the last one of `asked`."""

    keeper, asked = "north", 5

    def __init__(self, address: str, *keepers: str) -> None:
        assert (address, keepers) == ("here:1", ("north",))

    def __enter__(self) -> Short:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def key(self) -> KeeperKey:
        return KeeperKey(b"", b"", b"")

    def unmask(self, cohort: Any) -> bytes:
        type(self).asked -= 1
        if self.asked:
            raise InvalidSignature("the keeper at here:1 sent 3996 bytes of a sum of 4000")
        return b"sum"


def test_a_keeper_that_gives_no_sums_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was said to answer, and not to, every two seconds."""
    caplog.set_level(logging.INFO, "anabranch")
    monkeypatch.setattr(unmasking, "KeeperLink", Short)
    monkeypatch.setattr(unmasking, "REFUSED_AGAIN_S", 0.0)
    monkeypatch.setattr(unmasking, "AGAIN_S", 0.0)
    monkeypatch.setattr(unmasking, "mask_sum_arrived", lambda *_: (ev.Ticked(0.0), b""))
    monkeypatch.setattr(Unmasking, "_learn", lambda *_: None)
    monkeypatch.setattr(Unmasking, "_cohort", lambda _, waiting: waiting)

    async def asked() -> None:
        books: Any = Books()
        terms: Any = SimpleNamespace(keepers=("north",))
        asking = Unmasking(terms, "run", books, ["here:1"], tmp_path)
        task = asyncio.ensure_future(asking.ask())
        await books.done.wait()  # after which there is nothing more to be asked
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (asking.standings[0].trouble, asking.standings[0].answered) == ("", 1)

    asyncio.run(asked())
    assert [record.message for record in caplog.records if record.name == unmasking.log.name] == [
        "keeper here:1: sum 1: no sum: the keeper at here:1 sent 3996 bytes of a sum of 4000",
        "keeper here:1 answers",
    ]
