"""Who knows only the sums can play a server's whole world: so it has learned nothing else from it.

A real server process is run twice by one script. The first time devices mask and a keeper unmasks. The
second time nobody has a value: what devices send is drawn, and the keeper answers what makes the sums of the
first run of it. Both times the server publishes the same versions, bit for bit. (`test_masks.py` has the same
of the engine alone.)
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from commands import anabranch, answer
from keepers import MODEL, keeper_thread
from masked_fleet import MaskedFleet

from anabranch.client.joining import join
from anabranch.client.masking import Masker
from anabranch.client.messages import Enrolment, GrantedTask
from anabranch.client.outbox import UpdateEntry
from anabranch.client.transport import GrpcTransport
from anabranch.compress.registry import BOUND_MASKING, MASKING
from anabranch.core.errors import Unavailable
from anabranch.core.model.updates import Ask, Capability, Verdict
from anabranch.core.secagg.cohort import Cohort
from anabranch.core.secagg.ring import Integers, Numbers, add_weighted
from anabranch.identity.keepers import sum_message
from anabranch.identity.seals import box_text, seal, seal_info
from anabranch.keeper.keeper import Keeper, Unmasked
from anabranch.keeper.papers import read_papers
from anabranch.keeper.rules import Declined
from anabranch.keeper.store import KeeperStore

# Who asks before each sum, and who sends for it: the last two have an update from a version before.
SCRIPT = (("abcd", "abc"), ("abc", "abd"), ("ab", "abc"))
Sums = Mapping[int, Integers]


@dataclass
class Book:
    """What was sent, by the digest of its bytes, and what each sum was: no process knows all of it."""

    sent: dict[str, Numbers] = field(default_factory=dict)
    sums: dict[int, Integers] = field(default_factory=dict)
    weights: set[int] = field(default_factory=set)

    def total(self, cohort: Cohort) -> Numbers:
        """Y of a cohort."""
        total = cohort.terms.ring.empty()
        for member in cohort.members:
            (numbers,) = (y for sha256, y in self.sent.items() if sha256.encode() in member.signed)
            add_weighted(total, numbers, member.weight)
            self.weights.add(member.weight)
        return total


class Unmasks:
    """Devices that mask, and a keeper that unmasks: what the sums are is noted."""

    def __init__(self, book: Book) -> None:
        self.book, self._values = book, np.random.default_rng(7)

    def update(
        self, enrolment: Enrolment, name: str, update_id: str, task: GrantedTask
    ) -> tuple[bytes, Mapping[str, str]]:
        """A payload and its seals."""
        assert enrolment.masking is not None
        delta = self._values.normal(size=enrolment.spec.size)
        masker = Masker(enrolment.masking, enrolment.run_id, name)
        return masker.masked(delta, update_id, task.base_version, task.base_head, MODEL)

    def unmask(self, keeper: Keeper, cohort: Cohort) -> Unmasked | Declined:
        """As a keeper does."""
        found = keeper.unmask(cohort)
        assert isinstance(found, Unmasked), found
        ring = cohort.terms.ring
        mask_sum = np.frombuffer(found.numbers, ring.dtype)
        self.book.sums[cohort.number] = ring.unmasked(self.book.total(cohort), [mask_sum])
        return found


class Plays:
    """Nobody has values: what is sent is drawn, and a keeper's word is what makes the sums of it."""

    def __init__(self, book: Book, sums: Sums) -> None:
        self.book, self._sums = book, sums

    def update(
        self, enrolment: Enrolment, name: str, update_id: str, task: GrantedTask
    ) -> tuple[bytes, Mapping[str, str]]:
        """As `Unmasks` has it; the boxes are of seeds that have masked nothing."""
        assert enrolment.masking is not None
        terms = enrolment.masking.terms
        payload = secrets.token_bytes(terms.ring.empty().nbytes)
        update = update_id, name, task.base_version, task.base_head, hashlib.sha256(payload).hexdigest()
        seals = {}
        for keeper, key in enrolment.masking.by_name.items():
            info = seal_info(enrolment.run_id, keeper, *update, terms.digest)
            seals[keeper] = box_text(seal(key.public_key, secrets.token_bytes(64), info))
        return payload, seals

    def unmask(self, keeper: Keeper, cohort: Cohort) -> Unmasked | Declined:
        """M = Y - S, signed: the keeper's store and its boxes are not opened."""
        total, papers = self.book.total(cohort), keeper.papers
        numbers = (total - cohort.terms.ring.numbers(self._sums[cohort.number])).tobytes()
        sha256 = hashlib.sha256(numbers).hexdigest()
        message = sum_message(cohort.run_id, cohort.number, papers.name, cohort.digest, sha256)
        return Unmasked(cohort.digest, numbers, sha256, papers.sign(message), again=False)


class WatchedKeeper(Keeper):
    """One whose answers are another's."""

    way: Unmasks | Plays

    def unmask(self, cohort: Cohort) -> Unmasked | Declined:
        """See `Keeper`."""
        return self.way.unmask(Keeper(self.papers, self.store, self._now), cohort)


@contextmanager
def serving(folder: Path, address: str, way: Unmasks | Plays) -> Iterator[None]:
    """The keeper of a folder, in a thread."""
    with closing(KeeperStore(folder / "keeper.db")) as store:
        keeper = WatchedKeeper(read_papers(folder), store, time.time)
        keeper.way = way
        with keeper_thread(keeper, address):
            yield


@dataclass
class HandledDevice:
    """A device that asks and sends when it is told to."""

    name: str
    transport: GrpcTransport
    enrolment: Enrolment
    task: GrantedTask | None = None

    def ask(self, number: int) -> None:
        """For a task."""
        task_id = f"{self.name}-{number}"
        task = self.transport.ask(Ask(self.name, task_id), self.enrolment.spec)
        assert isinstance(task, GrantedTask), task
        self.task = task

    def send(self, way: Unmasks | Plays) -> None:
        """The update of its task."""
        assert self.task is not None
        assert self.enrolment.masking is not None
        update_id, spec, terms = f"u-{self.task.task_id}", self.enrolment.spec, self.enrolment.masking.terms
        payload, seals = way.update(self.enrolment, self.name, update_id, self.task)
        way.book.sent[hashlib.sha256(payload).hexdigest()] = np.frombuffer(payload, terms.ring.dtype)
        entry = UpdateEntry(
            update_id, self.task.task_id, spec.layout_hash, self.task.base_version, 40, 1, terms.codec,
            payload, spec.size, base_head=self.task.base_head, seals=seals,
        )  # fmt: skip
        assert self.transport.push(entry).decision.verdict is Verdict.HELD


def joined(fleet: MaskedFleet, name: str, stack: ExitStack) -> HandledDevice:
    """A device of the federation that knows the run, once the server knows its keeper."""
    token = answer(anabranch(fleet.folder, "admin", "enrol", name, "--json"))["token"]
    wallet = join(fleet.folder / name, fleet.join, token, fleet.ca_sha256)
    transport = stack.enter_context(GrpcTransport(fleet.address, name, wallet=wallet))
    while True:
        try:
            return HandledDevice(
                name, transport, transport.enrol(Capability(codecs=(MASKING, BOUND_MASKING)))
            )
        except Unavailable:
            assert fleet.status()["masked_sums"]["keepers"][0]["trouble"] == ""


def published(folder: Path, way: Unmasks | Plays) -> list[str]:
    """The digests of a run's versions."""
    digests = []
    with ExitStack() as stack:
        fleet = MaskedFleet(folder, stack, devices=3, keepers=1, versions=len(SCRIPT))
        stack.enter_context(serving(folder / "keeper-0", fleet.addresses[0], way))
        fleet.server()
        devices = {name: joined(fleet, name, stack) for name in "abcd"}
        for version, (asking, sending) in enumerate(SCRIPT, 1):
            for name in asking:
                devices[name].ask(version)
            for name in sending:
                devices[name].send(way)
            fleet.until("version", version)
            observer = devices["a"]
            found = observer.transport.fetch(observer.enrolment.spec.layout_hash, version, exact=True)
            assert found.version == version
            digests.append(hashlib.sha256(found.data).hexdigest())
    return digests


def test_who_knows_only_the_sums_can_play_all_that_a_server_process_sees(tmp_path: Path) -> None:
    for name in ("masked", "played", "others"):
        (tmp_path / name).mkdir()
    real = Unmasks(Book())
    versions = published(tmp_path / "masked", real)
    assert len(set(versions)) == len(SCRIPT)
    assert len(real.book.weights) == 2, "updates of two ages"
    assert published(tmp_path / "played", Plays(Book(), real.book.sums)) == versions
    other = {number: sums + 1 for number, sums in real.book.sums.items()}
    assert not set(published(tmp_path / "others", Plays(Book(), other))) & set(versions)
