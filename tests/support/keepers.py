"""Devices that mask what they send, and a keeper's process or thread: what tests of masked sums stand on."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import signal
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from guarded import issued
from nursery import COMMAND, PIPE, Process

from anabranch.core.secagg.cohort import Cohort, CohortMember
from anabranch.core.secagg.ring import Integers, Numbers, add_weighted
from anabranch.core.secagg.terms import Terms
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind, certificate_der
from anabranch.identity.keepers import KeeperKey
from anabranch.identity.seals import box_text, seal, seal_info, sealed_content
from anabranch.identity.signatures import update_message
from anabranch.identity.wallet import Wallet
from anabranch.keeper.keeper import Keeper
from anabranch.keeper.serving import serve

HEAD = "0a" * 32
PLAN, MODEL = "0c" * 32, "0d" * 32  # digests: of what all devices train by, and of what they train from


def terms_of(*keepers: str, **others: Any) -> Terms:
    """Small ones: sums of 3 to 16 updates of 5 values."""
    plain = Terms(32, 12, 1.0, 5, (4, 3, 2, 1), 16, 3, tuple(sorted(keepers)), plan=PLAN)
    return replace(plain, **others)


@dataclass(frozen=True)
class Sent:
    """What a device has sent: the masked numbers, and what a keeper is shown. The rest it keeps to itself."""

    numbers: Numbers
    member: CohortMember
    integers: Integers
    seeds: Sequence[bytes] = field(repr=False)


class MaskingDevice:
    """A member of a federation who masks for some keepers."""

    def __init__(self, wallet: Wallet, keepers: Sequence[KeeperKey]) -> None:
        self.wallet, self.keepers = wallet, keepers

    def send(
        self,
        run_id: str,
        update_id: str,
        terms: Terms,
        base_version: int = 0,
        arrived_version: int = 0,
        integers: Integers | None = None,
        **words: Any,
    ) -> Sent:
        """An update of drawn values. `words`: seeds, or what is signed or sealed otherwise."""
        ring = terms.ring
        if integers is None:
            integers = np.array([secrets.randbelow(2 * ring.top + 1) - ring.top for _ in range(ring.size)])
        seeds = words.pop("seeds", None) or [secrets.token_bytes(32) for _ in self.keepers]
        numbers, head = ring.masked(integers, seeds), words.pop("base_head", HEAD)
        sha256 = hashlib.sha256(numbers.tobytes()).hexdigest()
        sealed, model = words.pop("sealed", {}), words.pop("model", MODEL)
        seals = {}
        for key, seed in zip(self.keepers, seeds, strict=True):
            said = {
                "run_id": run_id,
                "keeper": key.fingerprint,
                "update_id": update_id,
                "client_id": self.wallet.name,
                "base_version": base_version,
                "base_head": head,
                "payload_sha256": sha256,
                "terms": terms.digest,
            }
            content = sealed_content(seed, model if terms.plan else "")
            seals[key.fingerprint] = box_text(seal(key.public_key, content, seal_info(**{**said, **sealed})))
        record = {
            "base_version": base_version,
            "client_id": self.wallet.name,
            "examples": 1,
            "local_steps": 1,
        }
        record |= {"submodel": None, "task_id": f"t-{update_id}", "update_id": update_id, "seals": seals}
        payload = {"codec": "ring(32,12)", "sha256": sha256, "size_bytes": numbers.nbytes}
        message = update_message(run_id, {**record, "payload": payload, **words})
        weight = terms.weight(max(0, arrived_version - base_version))
        der = certificate_der(self.wallet.certificate)
        member = CohortMember(message, self.wallet.sign(message), der, head, arrived_version, weight)
        return Sent(numbers, member, integers, seeds)


def devices(
    authority: Authority, folder: Path, keepers: Sequence[KeeperKey], count: int
) -> list[MaskingDevice]:
    """So many members of a federation."""
    made = [issued(authority, Kind.DEVICE, f"d{i}", folder / f"d{i}") for i in range(count)]
    return [MaskingDevice(wallet, keepers) for wallet in made]


def cohort_of(run_id: str, terms: Terms, sent: Sequence[Sent], number: int = 1, version: int = 0) -> Cohort:
    """What a server asks of what was sent."""
    return Cohort(run_id, number, version, terms, tuple(s.member for s in sent))


def total_of(terms: Terms, sent: Sequence[Sent]) -> Numbers:
    """Y: what the server adds up."""
    total = terms.ring.empty()
    for one in sent:
        add_weighted(total, one.numbers, one.member.weight)
    return total


def wanted(sent: Sequence[Sent]) -> Any:
    """The sum, by those who know."""
    return np.sum([s.member.weight * s.integers for s in sent], axis=0).tolist()


@contextmanager
def keeper_process(folder: Path, *options: object) -> Iterator[tuple[str, Process]]:
    """`anabranch keeper serve` of a folder, and where it serves. It ends well, unless the test kills it."""
    command = ["keeper", "serve", "--folder", folder, "--listen", "127.0.0.1:0", "--json", *options]
    with Process(COMMAND, *map(str, command), cwd=folder, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        try:
            yield said["address"], process
        finally:
            process.terminate()
            _, err = process.communicate(timeout=600)
            assert process.returncode in (0, -signal.SIGKILL), err


@contextmanager
def keeper_thread(keeper: Keeper, address: str = "127.0.0.1:0") -> Iterator[str]:
    """A keeper of this process, and where it serves."""
    stop, ready = threading.Event(), SimpleQueue[str]()
    served = serve(keeper, address, ready.put, lambda *_: None, stop)
    thread = threading.Thread(target=asyncio.run, args=(served,))
    thread.start()
    try:
        yield ready.get(timeout=600)
    finally:
        stop.set()
        thread.join()


def remembered(folder: Path) -> list[str]:
    """All that a keeper remembers."""
    with closing(sqlite3.connect(f"file:{folder / 'keeper.db'}?mode=ro", uri=True)) as connection:
        return list(connection.iterdump())


def end_here() -> None:
    """SIGKILL, to this process."""
    os.kill(os.getpid(), signal.SIGKILL)
