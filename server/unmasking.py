"""How a live run gets its masked sums: each keeper is asked, cohort after cohort, for what its masks come to.

One task for each address, so that a keeper that is away holds up nobody but the sums. What is wanted is read
of the engine, so a server that was killed goes on: what was asked twice a keeper answers alike. Who a keeper
is, only its certificate says; the addresses may be in any order.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anabranch.core.effects import CohortLost, Effect, MaskSumWanted
from anabranch.core.engine.cohorts import MaskedUpdate, WaitingCohort
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import AnabranchError, InvalidSignature, Unavailable
from anabranch.core.secagg.cohort import Cohort, CohortMember
from anabranch.core.secagg.ring import Numbers
from anabranch.core.secagg.terms import Terms
from anabranch.host.secagg import mask_sum_arrived
from anabranch.identity.files import write_private
from anabranch.identity.keepers import KeeperKey, Masking
from anabranch.identity.signatures import update_message
from anabranch.server.failpoints import reach
from anabranch.server.keeper_link import KeeperLink, KeeperRefusal
from anabranch.server.writer import Writer

log = logging.getLogger(__name__)

KEYS_FILE = "keepers.json"  # what the keepers have said of themselves: public, and here while they are away
AGAIN_S = 2.0  # until one that could not be asked is asked again
REFUSED_AGAIN_S = 30.0  # until one that has refused is: its people may have changed their minds

# Refusals that say something of one update, whose device comes into the next sum with the same.
OF_ONE = ("box", "signature", "revoked")

T = TypeVar("T")


@dataclass
class AskedKeeper:
    """How a keeper stands. `trouble`: why it has not answered; `answered`: sums since the server started."""

    address: str
    name: str = ""
    trouble: str = ""
    answered: int = 0


class Unmasking:
    """Asks the keepers of one run. For the event loop's thread; `folder`: where their keys are kept."""

    def __init__(
        self, terms: Terms, run_id: str, writer: Writer, addresses: Sequence[str], folder: Path
    ) -> None:
        self.terms, self.standings = terms, [AskedKeeper(address) for address in addresses]
        self._run_id, self._writer, self._file = run_id, writer, folder / KEYS_FILE
        self._keys = {key.fingerprint: key for key in kept_keys(self._file)}
        self._news = asyncio.Event()

    async def ask(self) -> None:
        """Ask until it is cancelled, which cuts off what is under way."""
        await asyncio.gather(*(self._keep_asking(one) for one in self.standings))

    def hear(self, effects: Sequence[Effect]) -> None:
        """A sum is wanted, or is not any more."""
        if any(isinstance(effect, MaskSumWanted | CohortLost) for effect in effects):
            self._wake()

    def masking(self) -> Masking:
        """What devices are told. Raises `Unavailable` until every keeper has been reached once."""
        if missing := [keeper for keeper in self.terms.keepers if keeper not in self._keys]:
            raise Unavailable(f"keeper {missing[0]} has not been reached yet: its key is not known")
        return Masking(self.terms, [self._keys[keeper] for keeper in self.terms.keepers])

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _keep_asking(self, one: AskedKeeper) -> None:
        thread = ThreadPoolExecutor(1, "anabranch-keeper")
        try:
            while True:
                try:
                    await self._connected(thread, one)
                except AnabranchError as error:
                    self._say(one, str(error))
                await asyncio.sleep(AGAIN_S)
        finally:
            thread.shutdown(wait=False)

    async def _connected(self, thread: ThreadPoolExecutor, one: AskedKeeper) -> None:
        """Ask at this address as long as it goes. Raises what stands in the way."""
        link = await _in(thread, KeeperLink, one.address, *self.terms.keepers)
        with link:  # what the thread waits for then ends as well
            one.name = link.keeper
            self._learn(await _in(thread, link.key))
            await self._ask(link, thread, one)

    async def _ask(self, link: KeeperLink, thread: ThreadPoolExecutor, one: AskedKeeper) -> None:
        """Have this keeper's sums, one after the other. Raises what stands in the way.

        It answers once it has answered: that it can be reached is no news to who waits for a sum.
        """
        while True:
            news, wanted = self._news, await self._writer.look(partial(_wanted, keeper=link.keeper))
            if not wanted:
                self._say(one, "")
                await news.wait()
                continue
            cohort = self._cohort(wanted[0])
            answer = await _in(thread, _sum_of, link, cohort)
            reach("sum_came")
            if isinstance(answer, KeeperRefusal):
                refused = f"sum {cohort.number}: {answer.reason}: {answer.detail}"
                self._say(one, refused + _advice(answer, wanted[0]))
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), REFUSED_AGAIN_S)
                continue
            named = cohort.number, link.keeper, answer
            event, data = await _in(thread, mask_sum_arrived, self.terms, 0.0, *named)
            await self._writer.submit(replace(event, now=self._writer.now()), data)
            one.answered += 1
            self._say(one, "")

    def _cohort(self, waiting: WaitingCohort) -> Cohort:
        members = tuple(self._member(member) for member in waiting.members)
        return Cohort(self._run_id, waiting.number, waiting.version, self.terms, members)

    def _member(self, member: MaskedUpdate) -> CohortMember:
        proof = member.record["proof"]
        return CohortMember(
            signed=update_message(self._run_id, member.record),
            signature=base64.b64decode(proof["signature"]),
            certificate=base64.b64decode(proof["certificate"]),
            base_head=member.record.get("base_head", ""),
            arrived_version=member.arrived_version,
            weight=member.weight,
        )

    def _learn(self, key: KeeperKey) -> None:
        """Keep what a keeper says of itself, for devices that come while it is away."""
        if self._keys.get(key.fingerprint) == key:
            return
        self._keys[key.fingerprint] = key
        words = [[base64.b64encode(part).decode() for part in _parts(known)] for known in self._keys.values()]
        write_private(self._file, json.dumps(words).encode())

    def _say(self, one: AskedKeeper, trouble: str) -> None:
        """Note how a keeper stands, and tell it where that is news."""
        if trouble and trouble != one.trouble:
            log.warning("keeper %s: %s", one.address, trouble)
        elif one.trouble and not trouble:
            log.info("keeper %s answers", one.address)
        one.trouble = trouble


def _sum_of(link: KeeperLink, cohort: Cohort) -> Numbers | KeeperRefusal:
    """A keeper's answer; one that is none is as good as a no, which is not asked for every moment."""
    try:
        return link.unmask(cohort)
    except InvalidSignature as error:
        return KeeperRefusal("no sum", str(error))


def _advice(refusal: KeeperRefusal, cohort: WaitingCohort) -> str:
    """What ends a refusal that one device brings about, sum after sum.

    Nobody does it unasked: a keeper alone sees whether a box opens, and one that lies, or whose key is
    damaged, would have every device barred and every sum thrown away.
    """
    if refusal.reason not in OF_ONE:
        return ""
    named = [m.client_id for m in cohort.members if repr(m.update_id) in refusal.detail]
    if len(named) != 1:
        return ""
    return (
        f"; if that is the device's doing, `anabranch admin secagg drop --of {named[0]}` bars it and gives "
        "up the sums that it is in"
    )


def kept_keys(file: Path) -> list[KeeperKey]:
    """What is on the disk; nothing where that cannot be read: the keepers say it again."""
    try:
        found = [KeeperKey(*map(base64.b64decode, words)) for words in json.loads(file.read_bytes())]
        for key in found:
            key.check(key.fingerprint)
    except (OSError, ValueError, TypeError, AnabranchError):
        return []
    return found


def _parts(key: KeeperKey) -> tuple[bytes, bytes, bytes]:
    return key.certificate, key.public_key, key.signature


def _wanted(engine: Engine, keeper: str) -> list[WaitingCohort]:
    return [] if engine.cohorts is None else engine.cohorts.wanted(keeper)


async def _in(thread: ThreadPoolExecutor, work: Callable[..., T], *given: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work, *given)
