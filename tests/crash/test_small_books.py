"""The power goes after a keeper has admitted a cohort, or a device was revoked: neither is taken back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from keepers import terms_of
from power import Disk, disk

from anabranch.core.secagg.cohort import Cohort
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import new_key, signing_request
from anabranch.keeper.rules import Opened
from anabranch.keeper.store import KeeperStore

TERMS = terms_of("ab" * 32)
UPDATE = Opened("u", "d", 0, "aa", 1, b"d")


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Disk]:
    """A disk of its own."""
    with disk(tmp_path) as made:
        yield made


@contextmanager
def cut_at_the_end(ground: Disk) -> Iterator[None]:
    """What was there before is on the disk; of what is done inside, what was put there by who did it."""
    os.sync()
    yield
    ground.cut()


def power_is_back(ground: Disk) -> None:
    ground.unmount()
    ground.mount()


def test_a_cohort_that_a_keeper_has_admitted(ground: Disk) -> None:
    with closing(KeeperStore(ground.folder / "keeper.db")) as store, cut_at_the_end(ground):
        assert store.admit(Cohort("r", 1, 9, TERMS, ()), [UPDATE]) is None
    power_is_back(ground)
    with closing(KeeperStore(ground.folder / "keeper.db")) as store:
        assert store.knows(Cohort("r", 1, 9, TERMS, ()))


def test_a_revocation(ground: Disk) -> None:
    with Authority.create(ground.folder / "ca") as authority:
        authority.admit(authority.invite("d", 60.0), signing_request(new_key()), 60.0)
        with cut_at_the_end(ground):
            authority.revoke("d")
    power_is_back(ground)
    with Authority.open(ground.folder / "ca") as authority:
        assert [member.revoked for member in authority.members() if member.name == "d"] == [True]
