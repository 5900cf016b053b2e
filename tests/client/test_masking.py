"""A device masks for the keepers that its people have told it, and sends nothing in the clear beside."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from guarded import issued
from keepers import HEAD, MODEL, terms_of

from anabranch.client.masking import Masker
from anabranch.client.outbox import UpdateEntry
from anabranch.client.transfer import signed_record
from anabranch.client.trust import KeeperTrust, trusted
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import AnabranchError, ConfigError, InvalidUpdate, NotAuthenticated
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import Coordinates
from anabranch.core.model.updates import LocalPlan, Task
from anabranch.core.secagg.cohort import Cohort, CohortMember
from anabranch.core.secagg.plans import plan_digest
from anabranch.core.secagg.terms import Terms
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind, certificate_der
from anabranch.identity.keepers import Masking
from anabranch.identity.seals import read_box, seal_info, unseal
from anabranch.identity.signatures import update_message
from anabranch.keeper.keeper import Keeper, Unmasked
from anabranch.keeper.papers import Floors, KeeperPapers, make_papers
from anabranch.keeper.store import KeeperStore

DELTA = np.array([0.5, -0.25, 0.1, 0.0, 0.3], np.float32)
PLAN = LocalPlan(learning_rate=0.25)
SPEC = ParamSpec.of({"w": np.zeros(5, np.float32)})


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Authority]:
    with Authority.create(tmp_path / "ca") as made:
        yield made


@pytest.fixture
def papers(authority: Authority, tmp_path: Path) -> list[KeeperPapers]:
    """Of two keepers."""
    return [make_papers(tmp_path / name, authority.pem, Floors(3), authority.now()) for name in ("k0", "k1")]


def masking_of(papers: list[KeeperPapers], **others: Any) -> Masking:
    terms = terms_of(*(p.name for p in papers), **others)
    return Masking(terms, [p.statement() for p in papers])


def task_of() -> Task:
    """One that a server may give."""
    return Task("t", "d0", 0, 0.0, 9.0, 9.0, 1, PLAN, "ring(32,12)")


def mask(seed: bytes, size: int) -> Any:
    """By RFC 8439 alone."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(4 * size)), "<u4").astype(np.int64)


def test_with_all_its_keepers_an_update_is_itself_to_a_step(papers: list[KeeperPapers]) -> None:
    """s = (2^11 - 1) / R, R = C = 1 as 16 / sqrt(5) > 1: a step of a value is 1 / 2047."""
    masker = Masker(masking_of(papers), "run", "d0")
    payload, seals = masker.masked(DELTA, "u-1", 7, HEAD, MODEL)
    left = np.frombuffer(payload, "<u4").astype(np.int64)
    sha256, digest = hashlib.sha256(payload).hexdigest(), masker.masking.terms.digest
    for keeper in papers:
        info = seal_info("run", keeper.name, "u-1", "d0", 7, HEAD, sha256, digest)
        content = unseal(keeper.box_key, read_box(seals[keeper.name]), info)
        assert content[32:].hex() == MODEL
        left -= mask(content[:32], 5)
    signed = (left + 2**31) % 2**32 - 2**31
    assert np.abs(signed - DELTA * 2047).max() < 1 + 1e-6
    assert sorted(seals) == sorted(p.name for p in papers)


def opened(masker: Masker, keeper: KeeperPapers, delta: Any) -> Any:
    """The whole numbers under the mask of its only keeper."""
    payload, seals = masker.masked(delta, "u-1", 0, "", MODEL)
    sha256, digest = hashlib.sha256(payload).hexdigest(), masker.masking.terms.digest
    info = seal_info("run", keeper.name, "u-1", "d0", 0, "", sha256, digest)
    seed = unseal(keeper.box_key, read_box(seals[keeper.name]), info)[:32]
    return (np.frombuffer(payload, "<u4").astype(np.int64) - mask(seed, 5) + 2**31) % 2**32 - 2**31


def test_a_long_update_is_cut_to_the_clip(papers: list[KeeperPapers]) -> None:
    masker = Masker(masking_of(papers[:1]), "run", "d0")
    found = opened(masker, papers[0], 100 * DELTA)
    assert np.abs(found - DELTA / np.linalg.norm(DELTA) * 2047).max() < 1 + 1e-6
    with pytest.raises(InvalidUpdate, match="diverged"):
        masker.masked(np.full(5, np.nan, np.float32), "u-1", 0, "", MODEL)


def test_each_value_is_rounded_by_a_draw_of_its_own(papers: list[KeeperPapers]) -> None:
    """Halfway between two steps: one in 16 times all five go the same way."""
    masker = Masker(masking_of(papers[:1]), "run", "d0")
    halves = np.full(5, 100.5 / 2047)
    found = [opened(masker, papers[0], halves) for _ in range(20)]
    assert {value for values in found for value in values.tolist()} == {100, 101}
    assert any(len(set(values.tolist())) == 2 for values in found)


def test_nothing_is_ever_masked_alike(papers: list[KeeperPapers]) -> None:
    masker = Masker(masking_of(papers), "run", "d0")
    made = [masker.masked(DELTA, "u-1", 0, HEAD, MODEL) for _ in range(50)]
    assert len({payload for payload, _ in made}) == 50
    assert len({box for _, seals in made for box in seals.values()}) == 100


def test_keepers_take_what_devices_send(
    authority: Authority, papers: list[KeeperPapers], tmp_path: Path
) -> None:
    """Signed as it is on the wire: a keeper that knows the authority gives the sum of the masks."""
    masking = masking_of(papers[:1])
    total, members, sent = masking.terms.ring.empty(), [], []
    for i in range(3):
        wallet = issued(authority, Kind.DEVICE, f"d{i}", tmp_path / f"d{i}")
        delta = DELTA * (i - 1)
        payload, seals = Masker(masking, "run", wallet.name).masked(delta, f"u-{i}", 2, HEAD, MODEL)
        entry = UpdateEntry(
            f"u-{i}", f"t-{i}", SPEC.layout_hash, 2, 10, 1, masking.terms.codec, payload, 5,
            base_head=HEAD, seals=seals,
        )  # fmt: skip
        message = update_message("run", signed_record(entry, wallet.name, SPEC))
        der = certificate_der(wallet.certificate)
        members.append(CohortMember(message, wallet.sign(message), der, HEAD, 3, masking.terms.weight(1)))
        total += np.frombuffer(payload, "<u4") * np.uint32(3)
        sent.append(delta)
    with closing(KeeperStore(tmp_path / "keeper.db")) as store:
        keeper = Keeper(papers[0], store, authority.now)
        answer = keeper.unmask(Cohort("run", 1, 3, masking.terms, tuple(members)))
    assert isinstance(answer, Unmasked), answer
    found = masking.terms.ring.unmasked(total, [np.frombuffer(answer.numbers, "<u4")])
    assert np.abs(found - 3 * np.sum(sent, axis=0) * 2047).max() < 3 * 3 + 1e-6


@pytest.mark.parametrize("uplink", ["raw", "int8", "ring(32,13)", "ring(16,12)", "ef(0.9)|topk(0.1)"])
def test_a_task_in_the_clear_is_refused(papers: list[KeeperPapers], uplink: str) -> None:
    masker = Masker(masking_of(papers, plan=plan_digest(PLAN, ClientTable(), "average", "")), "run", "d0")
    masker.check(task_of())
    with pytest.raises(NotAuthenticated, match="nothing is sent in the clear"):
        masker.check(replace(task_of(), uplink=uplink))


TOLD = ClientTable(), "average", SPEC.layout_hash
Told = tuple[LocalPlan, ClientTable, str, str]
PLANS: dict[str, Any] = {
    "epochs": 2, "steps": 1, "batch_size": 16, "learning_rate": 1e-30, "momentum": 0.9,
    "weight_decay": 1.0, "proximal_mu": 1e30,
}  # fmt: skip
TABLES: dict[str, Any] = {
    "gradient": "zeroth", "gradient_eps": 1e-30, "gradient_max": 1e-30, "gradient_queries": 9,
    "push": "elastic",
}  # fmt: skip
OTHERS: dict[str, Told] = {
    **{name: (replace(PLAN, **{name: value}), *TOLD) for name, value in PLANS.items()},
    **{name: (PLAN, replace(ClientTable(), **{name: value}), *TOLD[1:]) for name, value in TABLES.items()},
    "buffers": (PLAN, TOLD[0], "local", TOLD[2]),
    "layout": (PLAN, *TOLD[:2], "0e" * 32),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_device_trains_by_the_plan_of_the_terms_alone(papers: list[KeeperPapers], name: str) -> None:
    """Whatever of it is another: a device could be the only one that learns, or that does not."""
    masking = masking_of(papers, plan=plan_digest(PLAN, *TOLD))
    local, client, buffers, layout = OTHERS[name]
    Masker(masking, "run", "d0", *TOLD).check(task_of())
    with pytest.raises(NotAuthenticated, match="not that of the run's terms"):
        Masker(masking, "run", "d0", client, buffers, layout).check(replace(task_of(), local=local))


def test_every_field_of_a_plan_has_a_test() -> None:
    assert {field.name for field in fields(LocalPlan)} <= OTHERS.keys()


def test_what_changes_no_training_is_in_no_plan() -> None:
    """What devices of a run may be told otherwise after a restart; and 1 is 1.0, as the wire has it."""
    plan = plan_digest(PLAN, *TOLD)
    table = replace(ClientTable(), push="overlap", retry_base_s=9.0, connection="calls", learning_rate=9.0)
    assert plan_digest(PLAN, table, *TOLD[1:]) == plan
    whole: Any = 1
    assert plan_digest(replace(PLAN, learning_rate=whole), *TOLD) == plan_digest(
        replace(PLAN, learning_rate=1.0), *TOLD
    )


def test_a_task_of_a_part_of_the_model_is_not_masked(papers: list[KeeperPapers]) -> None:
    masker = Masker(masking_of(papers, plan=plan_digest(PLAN, *TOLD)), "run", "d0", *TOLD)
    with pytest.raises(NotAuthenticated, match="the task's plan"):
        masker.check(replace(task_of(), submodel=Coordinates(np.arange(3))))


def test_the_digest_of_a_model_is_of_all_that_a_training_starts_from(papers: list[KeeperPapers]) -> None:
    masking = masking_of(papers)
    counted = ParamSpec.of({"w": np.zeros(5, np.float32), "n": np.zeros(1, np.int64)})

    def found(values: Any = DELTA, count: int = 1, frozen_sha256: str = "") -> str:
        masker = Masker(masking, "run", "d0", *TOLD, frozen_sha256)
        return masker.model_sha256(counted, np.asarray(values, np.float32), {"n": np.array([count])})

    wanted = hashlib.sha256(DELTA.astype("<f4").tobytes() + np.array([1], "<i8").tobytes()).hexdigest()
    assert found() == wanted
    others = [found(-DELTA), found(np.nextafter(DELTA, 1)), found(count=2), found(frozen_sha256="0e" * 32)]
    assert len({wanted, *others}) == 5


def test_a_device_takes_part_as_it_was_told_and_in_no_other_way(papers: list[KeeperPapers]) -> None:
    both, first = (tuple(sorted(p.name for p in some)) for some in (papers, papers[:1]))
    masking = masking_of(papers)
    KeeperTrust().check(None, 5)
    KeeperTrust(both).check(masking, 5)
    KeeperTrust(both, cohort_min=3).check(masking, 5)
    wrong: list[tuple[KeeperTrust, Masking | None, int, type[AnabranchError], str]] = [
        (KeeperTrust(), masking, 5, ConfigError, "say each with --keeper"),
        (KeeperTrust(both), None, 5, NotAuthenticated, "nothing is sent in the clear"),
        (KeeperTrust(first), masking, 5, NotAuthenticated, "it masks for these alone"),
        (KeeperTrust(both), masking_of(papers[:1]), 5, NotAuthenticated, "it masks for these alone"),
        (KeeperTrust(both), masking, 6, NotAuthenticated, "terms are of 5 values"),
        (KeeperTrust(both, cohort_min=4), masking, 5, NotAuthenticated, "--cohort-min"),
        (KeeperTrust(both), replace(masking, keys=masking.keys[:1]), 5, NotAuthenticated, "what key keeper"),
        (KeeperTrust(both), masking_of(papers, weights=(4, 0)), 5, ConfigError, "whole numbers from 1"),
        (KeeperTrust(both), masking_of(papers, weights=(5, 1)), 5, ConfigError, "go from 1 to 5"),
        (KeeperTrust(both), masking_of(papers, plan=""), 5, NotAuthenticated, "begun by an older release"),
    ]
    for trust, offered, size, error, words in wrong:
        with pytest.raises(error, match=words):
            trust.check(offered, size)


def test_a_servers_own_key_does_not_stand_for_a_keepers(papers: list[KeeperPapers]) -> None:
    """Whoever passes on what a keeper says cannot change the key that devices seal for."""
    honest, other = papers[0].statement(), papers[1].statement()
    for forged in (
        replace(honest, public_key=other.public_key),
        replace(honest, public_key=other.public_key, signature=other.signature),
    ):
        offered = Masking(terms_of(papers[0].name), [forged])
        with pytest.raises(AnabranchError, match="signature"):
            KeeperTrust((papers[0].name,)).check(offered, 5)


def test_keepers_are_named_in_full() -> None:
    name = "ab" * 32
    assert trusted([name, "0" * 64, name]) == KeeperTrust(("0" * 64, name))
    assert trusted([name], 5) == KeeperTrust((name,), cohort_min=5)
    assert trusted([]) == KeeperTrust()
    for bad in ("", name[:-1], name.upper(), f"{name}0", "keeper.example.org:7075"):
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            trusted([bad])


def test_terms_of_masked_numbers_say_their_codec() -> None:
    assert Terms(16, 9, 1.0, 5, (1,), 8, 8, ("k",)).codec == "ring(16,9)"
