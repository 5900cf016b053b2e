"""The authority's register as a server asks it: in threads of its own, so that no call waits for another's.

Whether a certificate still counts is looked up for every call (`Gate`). The looks that come while one is
under way go together. What is written there, joins and renewals, has a thread for itself: it may have to wait
for another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from cryptography import x509

from anabranch.core.errors import StoreError, StoreFull
from anabranch.identity.authority import REGISTER, Authority
from anabranch.identity.certificates import Peer
from anabranch.identity.register import BUSY_S, RegisterPoint
from anabranch.identity.standings import Standings

T = TypeVar("T")

LOOK_S = 1.0  # so often there is a look, whoever asks: so that all are known when the register is locked
AGAIN_S = 0.05  # until who cannot be told from a stranger is looked up again


class Members:
    """For the event loop's thread."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self._looks = ThreadPoolExecutor(1, "anabranch-register")
        self._writes = ThreadPoolExecutor(1, "anabranch-joining")
        self._standings = Standings(authority.folder / REGISTER)
        self._standings.read_ahead(authority.now())
        self._asked: dict[str, asyncio.Future[str | StoreError | None]] = {}
        self._called = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def point(self) -> RegisterPoint:
        """How far the register has come, as far as was seen."""
        return self._standings.point

    def have_noted(self, note: Callable[[RegisterPoint], bool]) -> None:
        """Have it noted how far the register has come, before anybody is answered by that (`Standings`)."""
        self._standings.note = note

    async def check(self, peer: Peer) -> None:
        """`Authority.check`, without holding anybody up.

        One that is not known here waits while another process writes to the register, at most `BUSY_S`. Where
        nobody has written since the newest look, that is enough.
        """
        self._begin()
        if (known := self._standings.at_hand(peer.serial)) is not None:
            self.authority.check_as(peer, known)
            return
        try:
            async with asyncio.timeout(BUSY_S):
                standing = await self._insist(peer.serial)
        except TimeoutError:
            raise StoreError("the authority's register is locked by another process: try again") from None
        self.authority.check_as(peer, standing)

    async def admit(
        self, token: str, request: bytes, life_s: float, whose: str = ""
    ) -> tuple[str, x509.Certificate]:
        """`Authority.admit`, when it is its turn."""
        name, made = await self._written(partial(self.authority.admit, token, request, life_s, whose))
        await self._ask(f"{made.serial_number:x}")
        return name, made

    async def renew(self, peer: Peer, request: bytes, life_s: float) -> x509.Certificate:
        """`Authority.renew`, when it is its turn."""
        made = await self._written(partial(self.authority.renew, peer, request, life_s))
        await self._ask(f"{made.serial_number:x}")
        return made

    def close(self) -> None:
        """Wait for what is under way, then let the register go."""
        if self._task is not None:
            self._task.cancel()
        self._looks.shutdown()
        self._writes.shutdown()
        self._standings.close()

    async def _written(self, write: Callable[[], T]) -> T:
        """What a call that writes to the register returns, when it is its turn."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writes, write)
        except StoreFull as full:  # no want of room for updates, of which `Room` tells
            raise StoreError(str(full)) from full

    async def _insist(self, serial: str) -> str:
        """What a look finds, as soon as one can tell."""
        while True:
            if (found := await self._ask(serial)) is not None:
                return found
            await asyncio.sleep(AGAIN_S)

    async def _ask(self, serial: str) -> str | None:
        """What the next look finds."""
        if serial not in self._asked:
            self._asked[serial] = asyncio.get_running_loop().create_future()
        future = self._asked[serial]
        self._called.set()
        self._begin()
        found = await asyncio.shield(future)
        if isinstance(found, StoreError):
            raise found
        return found

    def _begin(self) -> None:
        """Look every now and then, from the first call on."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_looking(), name="anabranch-register")

    async def _keep_looking(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._called.wait()
            self._called.clear()
            await self._look()
            while (behind := self._standings.behind) and not self._called.is_set():
                await self._look()
                if self._standings.behind >= behind:  # the register is locked
                    break

    async def _look(self) -> None:
        asked, self._asked = self._asked, {}
        found: dict[str, str | None] | StoreError
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._looks, self._standings.of, list(asked))
        except StoreError as error:
            found = error
        for serial, future in asked.items():
            future.set_result(found if isinstance(found, StoreError) else found[serial])
