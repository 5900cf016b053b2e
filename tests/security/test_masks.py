"""Who has masked updates learns sums alone: how they look, and what a keeper or a mask done worse would show.

Each attack is run twice: on what is here, where it finds nothing, and on what it is meant for, where it does.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keepers import MaskingDevice, Sent, cohort_of, devices, terms_of, total_of
from masked_bench import MaskedBench

from anabranch.core.effects import Published
from anabranch.core.model.params import digest
from anabranch.core.secagg.cohort import Cohort
from anabranch.core.secagg.ring import Integers, Numbers, Ring, mask_of
from anabranch.core.secagg.terms import Terms
from anabranch.host.secagg import mask_sum_arrived
from anabranch.identity.authority import Authority
from anabranch.keeper import rules
from anabranch.keeper.keeper import Keeper, Unmasked
from anabranch.keeper.papers import Floors, make_papers
from anabranch.keeper.rules import Opened
from anabranch.keeper.store import KeeperStore

RING = Ring(32, 20, 1.0, 32_768)
SMALL = Ring(32, 12, 1.0, 16)
Mask = Callable[[bytes, int], Numbers]


def ours(seed: bytes, size: int) -> Numbers:
    return mask_of(seed, size, 32)


def folded(seed: bytes, size: int) -> Numbers:
    """As Flower's SecAgg+ makes masks: 256 bits folded to 32, then the Mersenne twister."""
    short = np.bitwise_xor.reduce(np.frombuffer(seed, "<u4"))
    return np.random.RandomState(short).randint(0, 2**32, size, dtype=np.uint32)


def of_16_bits(seed: bytes, size: int) -> Numbers:
    return ours(seed[:2] + bytes(30), size)


def p_of_bytes(data: bytes) -> float:
    """How likely a histogram of bytes as uneven as this is (Wilson and Hilferty's normal of chi-square)."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    chi2, freedom = float(((counts - expected) ** 2 / expected).sum()), 255.0
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return math.erfc(z / math.sqrt(2)) / 2


def test_masked_updates_look_alike_whatever_is_in_them() -> None:
    """Two fleets with one sum: in the first all send nothing, in the second as much as they may.

    The seeds are the same in every run: of drawn ones some would look uneven once in a thousand runs.
    """
    nothing = np.zeros(RING.size, np.int64)
    much = np.full(RING.size, RING.top)
    for name, fleet in (("nothing", [nothing] * 8), ("much", [much, -much] * 4)):
        seeds = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(8)]
        sent = [RING.masked(integers, [seed]) for integers, seed in zip(fleet, seeds, strict=True)]
        data = b"".join(y.tobytes() for y in sent)
        assert len(data) > 10**6
        assert p_of_bytes(data) > 1e-4
        assert p_of_bytes(data[::4]) > 1e-4
        assert abs(np.corrcoef(sent[0].astype(float), sent[1].astype(float))[0, 1]) < 0.05
        assert all(p_of_bytes((sent[0] - y).tobytes()) > 1e-4 for y in sent[1:])
    assert p_of_bytes(RING.masked(much, []).tobytes()) < 1e-4


def test_a_mask_that_is_used_twice_is_noticed() -> None:
    integers = [np.arange(RING.size) % 7, np.arange(RING.size) % 5]
    seed = [secrets.token_bytes(32)]
    twice = [RING.masked(q, seed) for q in integers]
    assert p_of_bytes((twice[0] - twice[1]).tobytes()) < 1e-4
    assert RING.unmasked(twice[0], [twice[1]]).tolist() == (integers[0] - integers[1]).tolist()


def tried(y: Numbers, mask: Mask) -> Integers | None:
    """The update behind a masked one, by all seeds of 16 bits."""
    for number in range(2**16):
        found = SMALL.unmasked(y, [mask(number.to_bytes(2, "little") + bytes(30), SMALL.size)])
        if np.abs(found).max() <= SMALL.top:
            return found
    return None


def test_short_seeds_are_found_by_trying() -> None:
    integers = np.arange(SMALL.size) - 8
    seed = secrets.token_bytes(32)
    short = SMALL.numbers(integers) + of_16_bits(seed, SMALL.size)
    found = tried(short, of_16_bits)
    assert found is not None
    assert found.tolist() == integers.tolist()
    assert tried(SMALL.masked(integers, [seed]), of_16_bits) is None


def test_seeds_that_fold_alike_have_other_masks() -> None:
    first = secrets.token_bytes(32)
    other = first[4:8] + first[:4] + first[8:]
    assert folded(first, 8).tolist() == folded(other, 8).tolist()
    assert not (ours(first, 8) == ours(other, 8)).any()
    flipped = bytes([first[0] ^ 1]) + first[1:]
    assert not (ours(first, 8) == ours(flipped, 8)).any()


# --- keepers that do less -----------------------------------------------------------------------------


class Forgetful(KeeperStore):
    """Without a list of what was used."""

    def admit(self, cohort: Cohort, members: object) -> None:
        return None


@dataclass
class Ward:
    """Devices, and how to open a keeper for them."""

    members: list[MaskingDevice]
    terms: Terms
    keeper: Callable[[type[KeeperStore]], Keeper]

    def sent(self, prefix: str = "u", arrived: int = 0) -> list[Sent]:
        """An update of each; the first comes at once, the others `arrived` versions late."""
        return [
            device.send("r", f"{prefix}{i}", self.terms, arrived_version=arrived if i else 0)
            for i, device in enumerate(self.members)
        ]


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Ward]:
    with Authority.create(tmp_path / "ca") as authority:
        papers = make_papers(tmp_path / "keeper", authority.pem, Floors(3), time.time())
        members = devices(authority, tmp_path, [papers.statement()], 5)
        stores: list[KeeperStore] = []

        def keeper(kind: type[KeeperStore]) -> Keeper:
            stores.append(kind(tmp_path / f"{len(stores)}.db"))
            return Keeper(papers, stores[-1], time.time)

        yield Ward(members, terms_of(papers.name), keeper)
        for store in stores:
            store.close()


def asked(keeper: Keeper, cohort: Cohort, sent: list[Sent]) -> Integers | None:
    """The sum that a server gets; None where it is refused."""
    found = keeper.unmask(cohort)
    if not isinstance(found, Unmasked):
        return None
    ring = cohort.terms.ring
    return ring.unmasked(total_of(cohort.terms, sent), [np.frombuffer(found.numbers, ring.dtype)])


def difference(ward: Ward, keeper: Keeper) -> Integers | None:
    """What two sums show that differ by the first update."""
    sent = ward.sent()
    whole = asked(keeper, cohort_of("r", ward.terms, sent), sent)
    less = asked(keeper, cohort_of("r", ward.terms, sent[1:], number=2), sent[1:])
    assert whole is not None
    if less is None:
        return None
    found = (whole - less) // sent[0].member.weight
    assert found.tolist() == sent[0].integers.tolist()
    return found


def test_two_sums_that_differ_by_one_update_show_it_where_nothing_is_remembered(ward: Ward) -> None:
    assert difference(ward, ward.keeper(Forgetful)) is not None
    assert difference(ward, ward.keeper(KeeperStore)) is None


def test_a_weight_of_zero_shows_the_others(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fresh update among late ones: with a last weight of zero the sum is that update.

    A keeper that bounds how unequal weights are would refuse these: it is one without that bound.
    """
    monkeypatch.setattr(rules, "STEEPEST", math.inf)

    def shown() -> bool:
        sent = ward.sent(secrets.token_hex(4), arrived=3)
        cohort = cohort_of("r", ward.terms, sent, number=time.time_ns(), version=3)
        found = asked(ward.keeper(KeeperStore), cohort, sent)
        assert found is not None
        return np.array_equal(found // 4, sent[0].integers)

    assert not shown()
    monkeypatch.setattr(Terms, "weight", lambda self, staleness: 0 if staleness else 4)
    assert shown()


def test_steep_weights_show_a_fresh_update(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    """What late ones add is less than half of the fresh one's weight, so rounding takes it away."""
    steep = replace(ward.terms, value_bits=6, weights=(1024, 1))

    def shown(terms: Terms) -> bool | None:
        run = secrets.token_hex(4)
        sent = [
            device.send(run, f"u{i}", terms, arrived_version=3 if i else 0)
            for i, device in enumerate(ward.members)
        ]
        cohort = cohort_of(run, terms, sent, number=time.time_ns(), version=3)
        found = asked(ward.keeper(KeeperStore), cohort, sent)
        if found is None:
            return None
        return np.array_equal(np.rint(found / terms.weights[0]), sent[0].integers)

    assert shown(steep) is None
    assert not shown(replace(steep, weights=(4, 1)))
    monkeypatch.setattr(rules, "STEEPEST", math.inf)
    assert shown(steep)


def test_another_model_for_all_the_others_shows_an_update(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They learn nothing from a model of the server's own, under the version's number and its head."""

    def shown() -> bool | None:
        run, zeros = secrets.token_hex(4), np.zeros(5, np.int64)
        sent = [ward.members[0].send(run, "u0", ward.terms)]
        dead: dict[str, Any] = {"integers": zeros, "model": "ee" * 32}
        sent += [d.send(run, d.wallet.name, ward.terms, **dead) for d in ward.members[1:]]
        found = asked(ward.keeper(KeeperStore), cohort_of(run, ward.terms, sent), sent)
        return None if found is None else np.array_equal(found // 4, sent[0].integers)

    assert shown() is None
    monkeypatch.setattr(Opened, "model", property(attrgetter("base_head")))
    assert shown()


def same_training(ward: Ward) -> tuple[list[Integers], list[Integers]]:
    """What five devices learn, and what a server finds out that has them train the same five times.

    It says that these are other versions. Each sum leaves another device out. Nothing is there twice, so a
    keeper that remembers all answers.
    """
    learned = [np.arange(5) + 5 * i - 12 for i in range(5)]
    keeper, sums = ward.keeper(KeeperStore), []
    for turn in range(5):
        words: dict[str, Any] = {"base_version": turn, "arrived_version": turn, "base_head": f"{turn:064x}"}
        sent = [
            device.send("r", f"u{turn}-{i}", ward.terms, integers=learned[i], **words)
            for i, device in enumerate(ward.members)
            if i != turn
        ]
        found = asked(keeper, cohort_of("r", ward.terms, sent, number=turn + 1, version=turn), sent)
        assert found is not None
        sums.append(found // ward.terms.weight(0))
    whole = sum(sums) // 4
    return learned, [whole - one for one in sums]


def test_who_has_devices_train_the_same_again_finds_single_updates_and_noise_hides_them(ward: Ward) -> None:
    """What masks do not promise (docs/privacy.md): a keeper knows no models, and nothing is used twice."""
    learned, found = same_training(ward)
    assert [one.tolist() for one in found] == [one.tolist() for one in learned]
    ward.terms = replace(ward.terms, noise=1.0, participations=9)
    learned, found = same_training(ward)
    assert all(np.abs(one - other).max() > 0 for one, other in zip(found, learned, strict=True))


def test_noise_stands_between_the_sum_and_who_knows_all_others(ward: Ward) -> None:
    """With all but one update of a cohort a server has the last one, unless there is noise."""
    plain = ward.sent("p")
    found = asked(ward.keeper(KeeperStore), cohort_of("r", ward.terms, plain), plain)
    others = sum(s.member.weight * s.integers for s in plain[1:])
    assert found is not None
    assert ((found - others) // 4).tolist() == plain[0].integers.tolist()
    ward.terms = replace(ward.terms, noise=1.0, participations=9)
    noised = ward.sent("n")
    found = asked(ward.keeper(KeeperStore), cohort_of("r", ward.terms, noised), noised)
    others = sum(s.member.weight * s.integers for s in noised[1:])
    assert found is not None
    assert np.abs(found - others - 4 * noised[0].integers).max() > ward.terms.deviation / 10


def played(draw: np.random.Generator, sums: list[list[int]] | None = None) -> tuple[list[str], list[Any]]:
    """A run of four cohorts: the digests of its versions, and what its sums came to.

    Without `sums` its devices mask and its keeper unmasks. With them nobody has any values: what is sent is
    drawn, and the keeper says what makes these sums of it.
    """
    run, digests, found = MaskedBench(), [], []
    run.enrol("a", "b", "c")
    ring, values = run.cohorts.terms.ring, np.random.default_rng(5)
    for number, pair in enumerate(("ab", "ca", "bc", "ab"), 1):
        for client in pair:
            integers = values.integers(-200, 200, ring.size).tolist()
            run.ask(client, f"{client}-{number}", number)
            drawn = draw.integers(0, 2**ring.bits, ring.size).astype(ring.dtype)
            told = {} if sums is None else {"numbers": drawn}
            run.send(client, f"{client}-{number}", integers, number, **told)
        (cohort,) = run.cohorts.waiting
        if sums is None:
            published = run.answer(number)
            weighted = [np.array(run.integers[m.update_id]) * m.weight for m in cohort.members]
            found.append(np.sum(weighted, axis=0).tolist())
        else:
            wanted = cohort.total - ring.numbers(np.array(sums[number - 1]))
            answer, _ = mask_sum_arrived(run.cohorts.terms, 2.0, number, "north", wanted)
            published = run.do(answer)
        (version,) = (e for e in published if isinstance(e, Published))
        digests.append(digest(version.vector))
    return digests, found


def test_who_knows_only_the_sums_can_play_all_that_the_server_sees() -> None:
    """So the server learns nothing else: what devices send is drawn, what the keeper says follows of it."""
    versions, sums = played(np.random.default_rng(1))
    assert len(set(versions)) == 4
    for seed in range(2, 6):
        assert played(np.random.default_rng(seed), sums) == (versions, [])
