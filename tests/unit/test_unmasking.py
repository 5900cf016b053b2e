"""How a server asks its keepers: what it says of one that gives no sums, and how often."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anabranch.core import events as ev
from anabranch.core.engine.cohorts import MaskedUpdate, WaitingCohort
from anabranch.core.errors import InvalidSignature, Unavailable
from anabranch.identity.certificates import certificate_der, make_authority, new_key
from anabranch.identity.keepers import KEY_DOMAIN, KeeperKey
from anabranch.identity.signatures import sign
from anabranch.server import unmasking
from anabranch.server.keeper_link import KeeperRefusal
from anabranch.server.unmasking import KEYS_FILE, Unmasking, _advice


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


def keeper_key() -> KeeperKey:
    """What a keeper says of itself."""
    key, public = new_key(), bytes(32)
    return KeeperKey(
        certificate_der(make_authority(key, "keeper", 1e9, 1e9)), public, sign(key, KEY_DOMAIN + public)
    )


def begun(folder: Path, *keys: KeeperKey) -> Unmasking:
    """As at a start of a server whose run has these keepers."""
    terms: Any = SimpleNamespace(keepers=tuple(key.fingerprint for key in keys))
    return Unmasking(terms, "run", None, [], folder)  # type: ignore[arg-type]


def test_a_server_that_starts_while_a_keeper_is_away_knows_what_it_said(tmp_path: Path) -> None:
    north, south = keeper_key(), keeper_key()
    first = begun(tmp_path, north, south)
    first._learn(south)
    with pytest.raises(Unavailable, match=f"keeper {north.fingerprint} has not been reached yet"):
        first.masking()
    first._learn(north)
    assert begun(tmp_path, north, south).masking().keys == [north, south]


@pytest.mark.parametrize("part", range(3))
def test_of_what_is_damaged_nothing_is_known_and_the_keepers_say_it_again(part: int, tmp_path: Path) -> None:
    """A certificate that could not be read ended the start; a key that is another one would be told."""
    key = keeper_key()
    begun(tmp_path, key)._learn(key)
    (words,) = json.loads((tmp_path / KEYS_FILE).read_text())
    data = bytearray(base64.b64decode(words[part]))
    data[len(data) // 2] ^= 1
    words[part] = base64.b64encode(data).decode()
    for damaged in (json.dumps([words]), json.dumps([words[:2]]), "[[", "7"):
        (tmp_path / KEYS_FILE).write_text(damaged)
        again = begun(tmp_path, key)
        with pytest.raises(Unavailable, match="has not been reached yet"):
            again.masking()
    again._learn(key)
    assert begun(tmp_path, key).masking().keys == [key]


@pytest.mark.parametrize(
    ("reason", "detail", "named"),
    [
        ("box", "the box of update 'u-2' does not open", "bad"),
        ("revoked", "update 'u-2' is of a certificate that is revoked", "bad"),
        ("terms", "update 'u-2'", ""),  # which its people have to mend
        ("box", "update 'u-3'", ""),
        ("signature", "those of 'u-1' and 'u-2'", ""),
    ],
)
def test_a_refusal_that_one_device_brings_about_says_what_ends_it(
    reason: str, detail: str, named: str
) -> None:
    members = tuple(MaskedUpdate(f"u-{n}", name, 0, 0, 1) for n, name in ((1, "good"), (2, "bad")))
    cohort: Any = WaitingCohort(1, 0, members, np.zeros(1, np.uint32))
    advice = _advice(KeeperRefusal(reason, detail), cohort)
    assert (f"`anabranch admin secagg drop --of {named}`" in advice) is bool(named)
    assert bool(advice) is bool(named)
