"""A keeper: exact sums over gRPC, every refusal with its memory unchanged, kills, noise, who it is."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import re
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import pytest
from commands import anabranch, answer
from guarded import issued, yesterday
from keepers import (
    MaskingDevice,
    Sent,
    cohort_of,
    devices,
    keeper_process,
    keeper_thread,
    remembered,
    terms_of,
    total_of,
    wanted,
)
from left import FREED

from anabranch.core.errors import (
    ConfigError,
    InvalidSignature,
    InvalidUpdate,
    NotAuthenticated,
    PortInUse,
    StoreError,
    TooLarge,
    Unavailable,
)
from anabranch.core.limits import COHORT_BYTES_MAX, COHORT_MAX, COHORT_MEMBER_BYTES_MAX
from anabranch.core.secagg.cohort import COHORT_HEAD_BYTES, Cohort, member_bytes_max
from anabranch.core.secagg.ring import Numbers
from anabranch.core.secagg.terms import Terms
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind, certificate_pem, public_key_of
from anabranch.identity.keepers import KeeperKey, sum_message
from anabranch.identity.signatures import check_signature
from anabranch.keeper.keeper import Keeper, Unmasked
from anabranch.keeper.papers import Floors, KeeperPapers, make_papers, read_papers
from anabranch.keeper.rules import Declined, Why
from anabranch.keeper.serving import serve
from anabranch.keeper.store import KeeperStore, open_memory
from anabranch.protos.convert import cohort_to_proto
from anabranch.protos.v1 import keepers_pb2 as keepers
from anabranch.server.keeper_link import KeeperLink, KeeperRefusal
from anabranch.server.ports import why_not_served

ROOT = Path(__file__).parents[2]


class Link(Protocol):
    """How a keeper is asked."""

    def key(self) -> KeeperKey: ...

    def unmask(self, cohort: Cohort) -> Numbers | KeeperRefusal: ...


class Direct:
    """To a keeper of this process."""

    def __init__(self, papers: KeeperPapers, store: KeeperStore) -> None:
        self._papers, self._keeper = papers, Keeper(papers, store, time.time)

    def key(self) -> KeeperKey:
        return self._papers.statement()

    def unmask(self, cohort: Cohort) -> Numbers | KeeperRefusal:
        found = self._keeper.unmask(cohort)
        if isinstance(found, Declined):
            return KeeperRefusal(found.why.value, found.detail)
        sha256, name = hashlib.sha256(found.numbers).hexdigest(), self._papers.name
        message = sum_message(cohort.run_id, cohort.number, name, cohort.digest, sha256)
        check_signature(public_key_of(self._papers.certificate), found.signature, message)
        assert (found.cohort_sha256, found.sha256) == (cohort.digest, sha256)
        return np.frombuffer(found.numbers, cohort.terms.ring.dtype)


class Place:
    """An authority, its devices, and a keeper that is asked by `link`."""

    def __init__(self, authority: Authority, folder: Path, papers: KeeperPapers, link: Link) -> None:
        self.authority, self.folder, self.papers, self.link = authority, folder, papers, link
        self.key = link.key()
        self.devices = devices(authority, folder / "devices", [self.key], 8)
        self.terms = terms_of(papers.name)
        self.runs = 0

    def run(self) -> str:
        """A run that nobody has heard of."""
        self.runs += 1
        return f"run-{self.runs}"

    def sent(
        self, run: str, count: int = 4, terms: Terms | None = None, prefix: str = "u", **words: Any
    ) -> list[Sent]:
        """An update of each of the first devices."""
        those = self.devices[:count]
        return [d.send(run, f"{prefix}{i}", terms or self.terms, **words) for i, d in enumerate(those)]

    def summed(self, cohort: Cohort, sent: list[Sent]) -> Any:
        """The sum that the server gets."""
        masks = self.link.unmask(cohort)
        assert not isinstance(masks, KeeperRefusal), masks
        return cohort.terms.ring.unmasked(total_of(cohort.terms, sent), [masks]).tolist()


class Remote(Place):
    """With the keeper in a process of its own."""

    def __init__(self, authority: Authority, folder: Path, papers: KeeperPapers, link: KeeperLink) -> None:
        super().__init__(authority, folder, papers, link)
        self.wire, self.address = link, link.address


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    folder = tmp_path_factory.mktemp("keeper")
    with Authority.create(folder / "ca") as authority:
        papers = make_papers(folder / "keeper", authority.pem, Floors(3), time.time())
        with keeper_process(folder / "keeper") as (at, _), KeeperLink(at, papers.name) as link:
            yield Remote(authority, folder, papers, link)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Without a process and a wire: what the keeper itself does."""
    folder = tmp_path_factory.mktemp("here")
    with Authority.create(folder / "ca") as authority:
        papers = make_papers(folder / "keeper", authority.pem, Floors(3), time.time())
        with closing(KeeperStore(papers.folder / "keeper.db")) as store:
            yield Place(authority, folder, papers, Direct(papers, store))


@pytest.fixture(params=["place", "here"])
def either(request: pytest.FixtureRequest) -> Place:
    """Over gRPC, and in this process."""
    found: Place = request.getfixturevalue(request.param)
    return found


def test_a_sum_is_exact_and_given_again_alike(either: Place) -> None:
    run = either.run()
    sent = [
        device.send(run, f"u{i}", either.terms, base_version=i, arrived_version=4)
        for i, device in enumerate(either.devices[:5])
    ]
    cohort = cohort_of(run, either.terms, sent, version=6)
    assert [s.member.weight for s in sent] == [1, 1, 2, 3, 4]
    assert either.summed(cohort, sent) == wanted(sent)
    before = remembered(either.papers.folder)
    assert either.summed(cohort, sent) == wanted(sent)
    assert remembered(either.papers.folder) == before
    later = either.sent(run, prefix="v")
    assert either.summed(cohort_of(run, either.terms, later, number=2), later) == wanted(later)


def test_what_one_keeper_answers_is_not_enough_of_two(place: Place, tmp_path: Path) -> None:
    papers = make_papers(tmp_path / "other", place.authority.pem, Floors(3), time.time())
    terms, run = terms_of(place.papers.name, papers.name), place.run()
    for device in place.devices:
        device.keepers = [place.key, papers.statement()]
    sent = place.sent(run, terms=terms)
    for device in place.devices:
        device.keepers = [place.key]
    cohort = cohort_of(run, terms, sent)
    first = place.link.unmask(cohort)
    store = KeeperStore(tmp_path / "other" / "keeper.db")
    second = Keeper(papers, store, time.time).unmask(cohort)
    store.close()
    assert isinstance(second, Unmasked)
    assert not isinstance(first, KeeperRefusal)
    other = np.frombuffer(second.numbers, terms.ring.dtype)
    total = total_of(terms, sent)
    assert terms.ring.unmasked(total, [first, other]).tolist() == wanted(sent)
    assert terms.ring.unmasked(total, [first]).tolist() != wanted(sent)


# --- refusals ------------------------------------------------------------------------------------

Asked = Callable[[Place, str], Cohort]


def changed(**words: Any) -> Asked:
    """A cohort with something of its first member said otherwise by the server."""

    def asked(place: Place, run: str) -> Cohort:
        cohort = cohort_of(run, place.terms, place.sent(run))
        return replace(cohort, members=(replace(cohort.members[0], **words), *cohort.members[1:]))

    return asked


def sealed(**words: Any) -> Asked:
    """A cohort whose first device has sealed its box for something else."""

    def asked(place: Place, run: str) -> Cohort:
        first = place.devices[0].send(run, "u0", place.terms, sealed=words)
        return cohort_of(run, place.terms, [first, *place.sent(run)[1:]])

    return asked


def signed(**words: Any) -> Asked:
    """A cohort whose first device has signed something else."""

    def asked(place: Place, run: str) -> Cohort:
        first = place.devices[0].send(run, "u0", place.terms, **words)
        return cohort_of(run, place.terms, [first, *place.sent(run)[1:]])

    return asked


def of_a_stranger(place: Place, run: str) -> Cohort:
    with Authority.create(place.folder / f"{run}-ca") as authority:
        wallet = issued(authority, Kind.DEVICE, "d0", place.folder / f"{run}-d0")
    first = MaskingDevice(wallet, [place.key]).send(run, "u0", place.terms)
    return cohort_of(run, place.terms, [first, *place.sent(run)[1:]])


def of_an_operator(place: Place, run: str) -> Cohort:
    wallet = issued(place.authority, Kind.OPERATOR, "d0", place.folder / f"{run}-op")
    first = MaskingDevice(wallet, [place.key]).send(run, "u0", place.terms)
    return cohort_of(run, place.terms, [first, *place.sent(run)[1:]])


def of_yesterday(place: Place, run: str) -> Cohort:
    with yesterday(place.authority, 2.0) as authority:
        wallet = issued(authority, Kind.DEVICE, "old", place.folder / f"{run}-old")
    first = MaskingDevice(wallet, [place.key]).send(run, "u0", place.terms)
    return cohort_of(run, place.terms, [first, *place.sent(run)[1:]])


def of_a_revoked_one(place: Place, run: str) -> Cohort:
    (place.papers.folder / "revoked.txt").write_text("somebody\nd0\n")
    return cohort_of(run, place.terms, place.sent(run))


def of_two_of_one_device(place: Place, run: str) -> Cohort:
    return cohort_of(run, place.terms, [*place.sent(run), place.devices[0].send(run, "again", place.terms)])


def of_one_seed_twice(place: Place, run: str) -> Cohort:
    seed = [bytes(range(32))]
    two = [place.devices[i].send(run, f"u{i}", place.terms, seeds=seed) for i in (0, 1)]
    return cohort_of(run, place.terms, [*two, *place.sent(run)[2:]])


def after_one(cohort: Callable[[Place, str, list[Sent]], Cohort]) -> Asked:
    """What is asked after a cohort that was answered."""

    def asked(place: Place, run: str) -> Cohort:
        before = place.sent(run)
        first = cohort_of(run, place.terms, before, number=5)
        assert place.summed(first, before) == wanted(before)
        return cohort(place, run, before)

    return asked


def with_one_less(place: Place, run: str, before: list[Sent]) -> Cohort:
    """The difference of two such sums is one update."""
    return cohort_of(run, place.terms, before[1:], number=6)


def in_other_order(place: Place, run: str, before: list[Sent]) -> Cohort:
    return cohort_of(run, place.terms, before[::-1], number=5)


def of_used_seeds(place: Place, run: str, before: list[Sent]) -> Cohort:
    """A device that seals a seed again, for another update."""
    first = place.devices[0].send(run, "new", place.terms, seeds=before[0].seeds)
    return cohort_of(run, place.terms, [first, *place.sent(run, prefix="v")[1:]], number=6)


def of_used_updates(place: Place, run: str, before: list[Sent]) -> Cohort:
    return cohort_of(run, place.terms, place.sent(run), number=6)


def of_no_higher_number(place: Place, run: str, before: list[Sent]) -> Cohort:
    return cohort_of(run, place.terms, place.sent(run, prefix="v"), number=5)


def under_other_terms(place: Place, run: str, before: list[Sent]) -> Cohort:
    terms = replace(place.terms, clip=2.0)
    return cohort_of(run, terms, place.sent(run, terms=terms, prefix="v"), number=6)


def of_another_model(place: Place, run: str, before: list[Sent]) -> Cohort:
    return cohort_of(run, place.terms, place.sent(run, prefix="v", base_head="0b" * 32), number=6)


def of_two_models(place: Place, run: str) -> Cohort:
    first = place.devices[0].send(run, "u0", place.terms, base_head="0b" * 32)
    return cohort_of(run, place.terms, [first, *place.sent(run)[1:]])


def of_two_models_of_one_name(place: Place, run: str) -> Cohort:
    """One version and one head for all, and yet another model for one."""
    first = place.devices[0].send(run, "u0", place.terms, model="0e" * 32)
    return cohort_of(run, place.terms, [first, *place.sent(run)[1:]])


def of_another_model_of_the_name(place: Place, run: str, before: list[Sent]) -> Cohort:
    return cohort_of(run, place.terms, place.sent(run, prefix="v", model="0e" * 32), number=6)


def of_a_box_without_a_model(place: Place, run: str) -> Cohort:
    first = place.devices[0].send(run, "u0", place.terms, model="")
    return cohort_of(run, place.terms, [first, *place.sent(run)[1:]])


def of_another_plan(place: Place, run: str) -> Cohort:
    """One device was told another plan than the others, in the terms as in its task."""
    terms = replace(place.terms, plan="0e" * 32)
    first = place.devices[0].send(run, "u0", terms)
    return cohort_of(run, place.terms, [first, *place.sent(run)[1:]])


def begun_before(place: Place, run: str, terms: Terms) -> None:
    """The run's first sum was unmasked by a keeper of an older release."""
    with closing(sqlite3.connect(place.papers.folder / "keeper.db")) as memory, memory:
        memory.execute("INSERT INTO runs VALUES (?, ?, 1)", (run, terms.digest))


def of_an_older_release(place: Place, run: str) -> Cohort:
    terms, older = replace(place.terms, plan=""), f"{run}-older"
    return cohort_of(older, terms, place.sent(older, terms=terms))


def of_an_older_release_with_steep_weights(place: Place, run: str) -> Cohort:
    terms, older = replace(place.terms, plan="", weights=(5, 1)), f"{run}-older"
    begun_before(place, older, terms)
    late = place.devices[0].send(older, "u0", terms, arrived_version=1)
    return cohort_of(older, terms, [late, *place.sent(older, terms=terms)[1:]], number=2, version=1)


def of_other_terms_than_sealed(place: Place, run: str) -> Cohort:
    return cohort_of(run, replace(place.terms, clip=2.0), place.sent(run))


def of_other_keepers(place: Place, run: str) -> Cohort:
    terms = terms_of("ab" * 32)
    return cohort_of(run, terms, place.sent(run, terms=terms))


def too_few(cohort_min: int, count: int) -> Asked:
    """A cohort of so many under terms that want so many."""

    def asked(place: Place, run: str) -> Cohort:
        terms = replace(place.terms, cohort_min=cohort_min)
        return cohort_of(run, terms, place.sent(run, count, terms))

    return asked


def too_many(place: Place, run: str) -> Cohort:
    terms = replace(place.terms, cohort=3)
    return cohort_of(run, terms, place.sent(run, terms=terms))


REFUSALS: list[tuple[str, Asked]] = [
    ("too_few", lambda place, run: cohort_of(run, place.terms, place.sent(run, 2))),
    ("too_few", too_few(2, 2)),
    ("too_few", too_few(5, 4)),
    ("too_many", too_many),
    ("twice", of_two_of_one_device),
    ("twice", of_one_seed_twice),
    ("other_keepers", of_other_keepers),
    ("weight", changed(weight=0)),
    ("weight", changed(weight=5)),
    ("weight", of_an_older_release_with_steep_weights),
    ("versions", changed(arrived_version=1, weight=3)),
    ("versions", signed(base_version=1)),
    ("unreadable", changed(signed=b"")),
    ("unreadable", changed(signed=b"anabranch update 1\n{}")),
    ("unreadable", changed(signed=b"anabranch update 1\n" + b"[" * 9999)),
    ("unreadable", signed(base_version=-(10**30))),
    ("unreadable", signed(client_id="x" * 129)),
    ("unreadable", signed(client_id="\ud800")),
    ("other_run", lambda place, run: cohort_of(f"{run}x", place.terms, place.sent(run))),
    ("certificate", of_a_stranger),
    ("certificate", of_an_operator),
    ("certificate", of_yesterday),
    ("certificate", changed(certificate=b"none")),
    ("revoked", of_a_revoked_one),
    ("signature", changed(signature=b"none")),
    ("box", of_other_terms_than_sealed),
    ("box", changed(base_head="0b" * 32)),
    ("box", sealed(run_id="another")),
    ("box", sealed(update_id="another")),
    ("box", sealed(client_id="d1")),
    ("box", sealed(keeper="ab" * 32)),
    ("box", sealed(base_version=9)),
    ("box", sealed(payload_sha256="ab" * 32)),
    ("box", signed(seals={})),
    ("box", of_a_box_without_a_model),
    ("box", of_another_plan),
    ("number", after_one(of_no_higher_number)),
    ("number", after_one(in_other_order)),
    ("other_terms", after_one(under_other_terms)),
    ("other_terms", of_an_older_release),
    ("other_model", after_one(of_another_model)),
    ("other_model", of_two_models),
    ("other_model", after_one(of_another_model_of_the_name)),
    ("other_model", of_two_models_of_one_name),
    ("seed_used", after_one(with_one_less)),
    ("seed_used", after_one(of_used_seeds)),
    ("update_used", after_one(of_used_updates)),
]


@pytest.mark.parametrize(("reason", "asked"), REFUSALS)
def test_it_refuses_and_remembers_nothing_of_it(either: Place, reason: str, asked: Asked) -> None:
    run = either.run()
    try:
        cohort = asked(either, run)
        before = remembered(either.papers.folder)
        found = either.link.unmask(cohort)
    finally:
        (either.papers.folder / "revoked.txt").unlink(missing_ok=True)
    assert isinstance(found, KeeperRefusal)
    assert found.reason == reason
    assert remembered(either.papers.folder) == before
    sent = either.sent(run, prefix="good")  # nothing is spoiled for who keeps to the rules
    assert either.summed(cohort_of(run, either.terms, sent, number=7), sent) == wanted(sent)


def test_what_an_older_release_has_begun_goes_on(either: Place) -> None:
    """Its terms have no plan, its boxes seeds alone; and its weights are steeper than the sums that come."""
    terms, run = replace(either.terms, plan="", weights=(16, 4, 1)), either.run()
    begun_before(either, run, terms)
    for number in (2, 3):
        late = either.devices[0].send(run, f"late-{number}", terms, arrived_version=1)
        sent = [late, *either.sent(run, terms=terms, prefix=f"n{number}-")[1:]]
        cohort = cohort_of(run, terms, sent, number, version=1)
        assert [member.weight for member in cohort.members] == [4, 16, 16, 16]
        assert either.summed(cohort, sent) == wanted(sent)


def test_terms_with_steep_weights_are_none(place: Remote) -> None:
    terms, run = replace(place.terms, weights=(5, 1)), place.run()
    with pytest.raises(ConfigError, match="weights of masked sums go from 1 to 5"):
        place.link.unmask(cohort_of(run, terms, place.sent(run, terms=terms)))


def test_versions_are_of_one_model_each_over_all_sums(either: Place) -> None:
    """Devices of other versions have other models; what one version's was is remembered."""
    run = either.run()

    def asked(number: int, *models: str) -> str:
        sent = [
            device.send(run, f"n{number}-{version}", either.terms, version, 2, model=model * 32)
            for device, (version, model) in zip(either.devices, enumerate(models), strict=False)
        ]
        found = either.link.unmask(cohort_of(run, either.terms, sent, number, version=2))
        return found.reason if isinstance(found, KeeperRefusal) else ""

    assert [asked(1, "0a", "0b", "0c"), asked(2, "0a", "0c", "0c"), asked(3, "0a", "0b", "0c")] == [
        "",
        "other_model",
        "",
    ]


def test_a_clock_that_is_wrong_can_be_seen_from_what_the_server_is_told(place: Place) -> None:
    """Else somebody drops a sum, and its updates, that the keeper would unmask once its clock is right."""
    found = place.link.unmask(of_yesterday(place, place.run()))
    assert isinstance(found, KeeperRefusal)
    clock = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.search(
        f"counts from {clock} to {clock}, and by this keeper's clock it is {clock}", found.detail
    )


PRIVATE: dict[str, Any] = {"noise": 1.0, "participations": 2, "separation": 3}


def test_a_device_is_in_no_more_sums_than_it_may_nor_sooner(either: Place) -> None:
    terms, run = replace(either.terms, **PRIVATE), either.run()

    def asked(number: int) -> str:
        sent = either.sent(run, terms=terms, prefix=f"n{number}-")
        found = either.link.unmask(cohort_of(run, terms, sent, number))
        return found.reason if isinstance(found, KeeperRefusal) else ""

    assert [asked(number) for number in (1, 3, 4, 7)] == ["", "separation", "", "participations"]


def test_a_keeper_may_want_noise(place: Place, tmp_path: Path) -> None:
    papers = replace(place.papers, floors=Floors(3, noise_min=2.0))
    store = KeeperStore(tmp_path / "keeper.db")
    terms, run = replace(place.terms, **PRIVATE), place.run()
    found = Keeper(papers, store, time.time).unmask(cohort_of(run, terms, place.sent(run, terms=terms)))
    store.close()
    assert isinstance(found, Declined)
    assert found.why is Why.TOO_LITTLE_NOISE


def test_a_keeper_may_bound_what_all_sums_of_a_device_come_to(place: Place, tmp_path: Path) -> None:
    """The noise of one sum says nothing of how many a device is in: that is for the run's terms to say."""
    terms, run = replace(place.terms, **{**PRIVATE, "noise": 2.0, "participations": 4}), place.run()
    # Of four sums with a noise of two clips mu is 1: 4.8866 at 1e-6, by the specification's figures.
    for number, (most, delta, answered) in enumerate(
        [(4.88, 1e-6, False), (4.89, 1e-6, True), (4.89, 1e-9, False), (0.0, 1e-6, True)]
    ):
        papers = replace(place.papers, floors=Floors(3, 0.0, most, delta))
        store = KeeperStore(tmp_path / f"keeper-{number}.db")
        found = Keeper(papers, store, time.time).unmask(cohort_of(run, terms, place.sent(run, terms=terms)))
        store.close()
        assert isinstance(found, Declined) is not answered
        if isinstance(found, Declined):
            assert found.why is Why.TOO_LITTLE_NOISE
            assert "a device may be in 4 sums" in found.detail


@pytest.mark.parametrize("said", [{}, {"noise": 1e-300, "participations": 1}, {"participations": 10**400}])
def test_a_keeper_that_bounds_epsilon_takes_no_terms_without_a_bound(
    said: Any, place: Place, tmp_path: Path
) -> None:
    papers = replace(place.papers, floors=Floors(3, 0.0, 1000.0))
    terms, run = replace(place.terms, **({**PRIVATE, **said} if said else {})), place.run()
    store = KeeperStore(tmp_path / "keeper.db")
    found = Keeper(papers, store, time.time).unmask(cohort_of(run, terms, place.sent(run, terms=terms)))
    store.close()
    assert isinstance(found, Declined)
    assert found.why is Why.TOO_LITTLE_NOISE


def test_rules_of_an_older_release_bound_no_epsilon(tmp_path: Path, place: Place) -> None:
    here = tmp_path / "kept"
    made = make_papers(here, certificate_pem(place.papers.authority), Floors(3, 0.5, 8.0, 1e-5), time.time())
    assert read_papers(here).floors == made.floors == Floors(3, 0.5, 8.0, 1e-5)
    (here / "rules.json").write_text('{"cohort_min": 3, "noise_min": 0.5}')
    assert read_papers(here).floors == Floors(3, 0.5)


def test_every_reason_has_a_test_and_a_row_on_the_page() -> None:
    tested = {reason for reason, _ in REFUSALS} | {"separation", "participations", "too_little_noise"}
    assert tested == {why.value for why in Why}
    page = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    rows = page.partition("### What a keeper refuses")[2].partition("\n\n### ")[0]
    assert {line.split("`")[1] for line in rows.splitlines() if line.startswith("| `")} == tested


def test_the_noise_is_normal_secret_and_the_same_again(either: Place) -> None:
    terms = replace(either.terms, size=4000, value_bits=8, **PRIVATE)
    run = either.run()
    sent = either.sent(run, terms=terms)
    cohort = cohort_of(run, terms, sent)
    first = np.array(either.summed(cohort, sent)) - wanted(sent)
    assert np.array_equal(first, np.array(either.summed(cohort, sent)) - wanted(sent))
    assert first.std() == pytest.approx(terms.deviation, rel=0.08)
    assert abs(first.mean()) < 5 * terms.deviation / 4000**0.5
    other = either.run()
    sent = either.sent(other, terms=terms)
    second = np.array(either.summed(cohort_of(other, terms, sent), sent)) - wanted(sent)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


# --- what is not a cohort --------------------------------------------------------------------------


def headed(terms: str) -> keepers.UnmaskRequest:
    """The head of a cohort with no members."""
    return keepers.UnmaskRequest(head=keepers.CohortHead(run_id="r", terms_json=terms))


def heavy() -> Iterator[keepers.UnmaskRequest]:
    """A cohort of few members so far, each of the most bytes that one may have."""
    yield keepers.UnmaskRequest(head=keepers.CohortHead(run_id="r", terms_json="{}", members=COHORT_MAX))
    member = keepers.CohortMember(signed=bytes(COHORT_MEMBER_BYTES_MAX - 16))
    for _ in range(COHORT_BYTES_MAX // COHORT_MEMBER_BYTES_MAX + 2):
        yield keepers.UnmaskRequest(members=[member])


@pytest.mark.parametrize(
    ("requests", "error"),
    [
        (lambda cohort: heavy(), TooLarge),
        (lambda cohort: [], InvalidUpdate),
        (lambda cohort: list(cohort_to_proto(cohort))[1:], InvalidUpdate),
        (lambda cohort: list(cohort_to_proto(cohort))[:1], InvalidUpdate),
        (lambda cohort: [*cohort_to_proto(cohort), *list(cohort_to_proto(cohort))[1:]], TooLarge),
        (lambda cohort: [headed("{")], InvalidUpdate),
        (lambda cohort: [headed("{}")], ConfigError),
    ],
)
def test_what_is_no_cohort_is_an_error(place: Remote, requests: Any, error: type[Exception]) -> None:
    run = place.run()
    cohort = cohort_of(run, place.terms, place.sent(run))
    with pytest.raises(grpc.RpcError) as found:
        list(place.wire._stub.Unmask(iter(requests(cohort))))
    said = {entry.key: str(entry.value) for entry in found.value.trailing_metadata()}
    assert said["anabranch-error"] == error.__name__


def test_no_member_has_more_bytes_than_a_run_reckons_with(authority: Authority, tmp_path: Path) -> None:
    """By that a run knows whether keepers take its sums; it is no great deal more either."""
    longest = "x" * 64
    for count in (1, 5):
        papers = [make_papers(tmp_path / f"{count}-{i}", authority.pem, Floors(), 1e9) for i in range(count)]
        wallet = issued(authority, Kind.DEVICE, longest, tmp_path / f"d-{count}")
        names = tuple(sorted(p.name for p in papers))
        terms = Terms(32, 12, 1.0, 4, tuple(range(1024, 0, -1)), 9, 8, names, plan="0c" * 32)
        device = MaskingDevice(wallet, [p.statement() for p in papers])
        sent = device.send(longest, longest, terms, base_version=10**9, arrived_version=10**9)
        head, *rest = cohort_to_proto(cohort_of(longest, terms, [sent] * 9, version=10**9))
        bytes_each = sum(request.ByteSize() for request in rest) / 9
        assert 0.6 * member_bytes_max(count) < bytes_each <= member_bytes_max(count)
        assert head.ByteSize() <= COHORT_HEAD_BYTES


# --- who it is, and where its key is -----------------------------------------------------------------


def test_another_keeper_is_not_asked(place: Remote) -> None:
    with pytest.raises(NotAuthenticated, match="not abab"):
        KeeperLink(place.address, "ab" * 32)
    with pytest.raises(Unavailable, match="no keeper at"):
        KeeperLink("127.0.0.1:1", place.papers.name)


class Damaging(Keeper):
    """One whose answers come otherwise than it has made them."""

    damage: Callable[[Unmasked], Unmasked]

    def unmask(self, cohort: Cohort) -> Unmasked | Declined:
        found = super().unmask(cohort)
        assert isinstance(found, Unmasked)
        return self.damage(found)


def test_an_answer_that_is_not_the_keepers_own_is_no_sum(here: Place, tmp_path: Path) -> None:
    run = here.run()
    sent = here.sent(run)
    cohort = cohort_of(run, here.terms, sent)

    def of_the_next_sum(found: Unmasked) -> Unmasked:
        message = sum_message(run, cohort.number + 1, here.papers.name, cohort.digest, found.sha256)
        return replace(found, signature=here.papers.sign(message))

    damages: dict[str, Callable[[Unmasked], Unmasked]] = {
        "changed": lambda found: replace(found, numbers=bytes([found.numbers[0] ^ 1]) + found.numbers[1:]),
        "cut": lambda found: replace(found, numbers=found.numbers[:-4]),
        "longer": lambda found: replace(found, numbers=found.numbers + bytes(4)),
        "nothing": lambda found: replace(found, numbers=b""),
        "unsigned": lambda found: replace(found, signature=b""),
        "of the next sum": of_the_next_sum,
    }
    with closing(KeeperStore(tmp_path / "store")) as store:
        keeper = Damaging(here.papers, store, time.time)
        with keeper_thread(keeper) as address, KeeperLink(address, here.papers.name) as link:
            for name, keeper.damage in damages.items():
                with pytest.raises(InvalidSignature):
                    pytest.fail(f"{name}: {link.unmask(cohort)}")
            keeper.damage = lambda found: found
            masks = link.unmask(cohort)
    assert not isinstance(masks, KeeperRefusal)
    assert cohort.terms.ring.unmasked(total_of(cohort.terms, sent), [masks]).tolist() == wanted(sent)


def test_a_keeper_asks_itself_and_no_other_whether_it_serves(place: Remote) -> None:
    """`anabranch keeper health`, which probes and containers go by."""
    asked = anabranch(
        place.folder, "keeper", "health", place.address, "--folder", place.papers.folder, "--json"
    )
    assert answer(asked) == {"serving": True}
    make_papers(place.folder / "another", place.authority.pem, Floors(), time.time())
    for folder, address in ((place.folder / "another", place.address), (place.papers.folder, "127.0.0.1:1")):
        refused = anabranch(place.folder, "keeper", "health", address, "--folder", folder)
        assert refused.returncode == 24, refused
        assert "does not serve" in refused.stderr


def test_a_keeper_whose_port_is_in_use_says_so_and_is_freed(here: Place, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, closing(KeeperStore(tmp_path / "store")) as store:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        keeper = Keeper(here.papers, store, time.time)
        with pytest.raises(PortInUse, match=f"^{address} cannot be served: another process has the port"):
            asyncio.run(serve(keeper, address, pytest.fail, lambda *_: None, threading.Event()))
    gc.collect()
    assert not FREED.taken(), "gRPC has what it takes to free a server"


def test_a_keeper_that_cannot_say_where_it_serves_leaves_no_port_open(here: Place, tmp_path: Path) -> None:
    """As where its line goes to a disk that is full."""
    told: list[str] = []

    def tell(address: str) -> None:
        told.append(address)
        raise OSError("no room for the line")

    with closing(KeeperStore(tmp_path / "store")) as store:
        keeper = Keeper(here.papers, store, time.time)
        with pytest.raises(OSError, match="no room"):
            asyncio.run(serve(keeper, "127.0.0.1:0", tell, lambda *_: None, threading.Event()))
    gc.collect()
    assert not FREED.taken(), "gRPC has what it takes to free a server"
    assert why_not_served(told[0]) == ""


def test_a_keeper_is_made_once_and_its_key_is_in_one_file_alone(place: Place) -> None:
    folder = place.papers.folder
    with pytest.raises(ConfigError, match="has a keeper already"):
        make_papers(folder, place.authority.pem, Floors(), time.time())
    assert read_papers(folder).name == place.papers.name
    run = place.run()
    sent = place.sent(run)
    place.summed(cohort_of(run, place.terms, sent), sent)
    secret = place.papers.box_key.private_bytes_raw()
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        data = path.read_bytes()
        assert not any(seed in data or seed.hex().encode() in data for s in sent for seed in s.seeds)
        assert secret not in data
        assert secret.hex().encode() not in data
        assert (b"PRIVATE KEY" in data) == (path.name == "keeper.pem")


def test_damaged_papers_are_said(tmp_path: Path, place: Place) -> None:
    with pytest.raises(ConfigError, match="keeper init"):
        read_papers(tmp_path)
    make_papers(tmp_path / "k", place.authority.pem, Floors(), time.time())
    whole = (tmp_path / "k" / "keeper.pem").read_bytes()
    for damaged in (b"", whole[:300], whole[300:]):
        (tmp_path / "k" / "keeper.pem").write_bytes(damaged)
        with pytest.raises(ConfigError):
            read_papers(tmp_path / "k")


def test_a_keeper_without_its_memory_does_not_start(tmp_path: Path, place: Place) -> None:
    """What is kept elsewhere of it are its keys: with a new memory it would unmask a part of a sum again."""
    folder = tmp_path / "k"
    papers = make_papers(folder, place.authority.pem, Floors(), time.time())
    open_memory(papers).close()
    (folder / "keeper.db").unlink()
    for words in (("serve", "--listen", "127.0.0.1:0"), ("show",)):
        done = anabranch(tmp_path, "keeper", *words, "--folder", folder)
        assert (done.returncode, "keeper.db is gone" in done.stderr) == (2, True), done.stderr
    assert not (folder / "keeper.db").exists()
    rules = json.loads((folder / "rules.json").read_text())
    assert rules.pop("memory")
    (folder / "rules.json").write_text(json.dumps(rules))  # an older release makes it at its first start
    open_memory(read_papers(folder)).close()
    assert (folder / "keeper.db").exists()


# --- kills -----------------------------------------------------------------------------------------

KILLED = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from keepers import end_here
from anabranch.keeper.keeper import Keeper
from anabranch.keeper.papers import read_papers
from anabranch.keeper.store import KeeperStore, open_memory
from anabranch.protos.convert import cohort_from_proto
from anabranch.protos.v1 import keepers_pb2
folder = Path({folder!r})
requests = [keepers_pb2.UnmaskRequest.FromString(bytes.fromhex(line)) for line in sys.stdin.read().split()]
cohort = cohort_from_proto(requests[0].head, [m for r in requests for m in r.members])
Keeper(read_papers(folder), KeeperStore(folder / "keeper.db"), time.time, end_here).unmask(cohort)
"""


def test_killed_between_its_memory_and_its_answer_it_gives_the_same_answer_and_no_other(
    place: Place, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    papers = make_papers(folder, place.authority.pem, Floors(3), time.time())
    members = [MaskingDevice(d.wallet, [papers.statement()]) for d in place.devices]
    terms = terms_of(papers.name)
    sent = [d.send("r", f"u{i}", terms) for i, d in enumerate(members)]
    cohort = cohort_of("r", terms, sent)
    code = KILLED.format(paths=sys.path, folder=str(folder))
    lines = "\n".join(r.SerializeToString().hex() for r in cohort_to_proto(cohort))
    done = subprocess.run([sys.executable, "-c", code], input=lines, text=True, timeout=600)
    assert done.returncode == -9
    with keeper_process(folder) as (address, process):
        with KeeperLink(address, papers.name) as link:
            less = link.unmask(cohort_of("r", terms, sent[1:], number=2))
            assert isinstance(less, KeeperRefusal)
            assert less.reason == "seed_used"
            masks = link.unmask(cohort)
            assert not isinstance(masks, KeeperRefusal)
            assert terms.ring.unmasked(total_of(terms, sent), [masks]).tolist() == wanted(sent)
        process.kill()
        process.communicate(timeout=600)
    with keeper_process(folder) as (address, _), KeeperLink(address, papers.name) as link:
        again = link.unmask(cohort)
        assert not isinstance(again, KeeperRefusal)
        assert np.array_equal(again, masks)


def test_what_it_answers_it_remembers_before(here: Place, tmp_path: Path) -> None:
    run, known = here.run(), list[bool]()
    sent = here.sent(run)
    cohort = cohort_of(run, here.terms, sent)
    with closing(KeeperStore(tmp_path / "keeper.db")) as store:
        keeper = Keeper(here.papers, store, time.time, lambda: known.append(store.knows(cohort)))
        found = [keeper.unmask(cohort) for _ in range(2)]
    assert known == [True, True]
    assert [one.again for one in found if isinstance(one, Unmasked)] == [False, True]


def test_a_cohort_that_was_answered_is_answered_though_a_member_was_revoked_since(
    place: Place,
) -> None:
    run = place.run()
    sent = place.sent(run)
    cohort = cohort_of(run, place.terms, sent)
    assert place.summed(cohort, sent) == wanted(sent)
    revoked = place.papers.folder / "revoked.txt"
    revoked.write_text("d1")
    try:
        assert place.summed(cohort, sent) == wanted(sent)
    finally:
        revoked.unlink()


def test_the_people_of_a_keeper_whose_disk_fails_are_told_once_each_time(
    place: Place, tmp_path: Path
) -> None:
    papers = make_papers(tmp_path / "keeper", place.authority.pem, Floors(3), time.time())
    members = [MaskingDevice(d.wallet, [papers.statement()]) for d in place.devices]
    terms = terms_of(papers.name)
    sent = [d.send("r", f"u{i}", terms) for i, d in enumerate(members)]
    cohort, unreadable = cohort_of("r", terms, sent), papers.folder / "revoked.txt"
    with keeper_process(papers.folder) as (address, process):
        with KeeperLink(address, papers.name) as link:
            for number in (1, 2):
                unreadable.mkdir()
                for _ in range(2):
                    with pytest.raises(StoreError, match=r"revoked\.txt"):
                        link.unmask(replace(cohort, number=2))
                unreadable.rmdir()
                assert not isinstance(link.unmask(cohort), KeeperRefusal), number
        process.send_signal(signal.SIGHUP)  # its terminal is closed
        _, said = process.communicate(timeout=600)
    assert said.count("no sum can be answered") == 2, said
    assert process.returncode == 0


def test_the_command_makes_and_shows_one(place: Place, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(place.authority.pem)
    made = answer(anabranch(tmp_path, "keeper", "init", "--ca", "ca.pem", "--cohort-min", 20, "--json"))
    shown = answer(anabranch(tmp_path, "keeper", "show", "--json"))
    assert shown["keeper"] == made["keeper"] == read_papers(tmp_path / "anabranch-keeper").name
    assert (shown["cohort_min"], shown["cohorts"], shown["ca_sha256"]) == (20, 0, place.authority.sha256)
    assert anabranch(tmp_path, "keeper", "init", "--ca", "none.pem").returncode == 2
    assert anabranch(tmp_path, "keeper", "init", "--ca", "ca.pem", "--cohort-min", 1).returncode == 2
    assert anabranch(tmp_path, "keeper", "show", "--folder", "none").returncode == 2
