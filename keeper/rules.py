"""When a keeper answers: what it checks of a cohort by itself. What it must remember for is in `store.py`.

The server is not believed. What a member is, whose, of which version and with which boxes, its device has
signed, under the authority of which the keeper has a copy; and a box opens only under the terms that the
device knew. What the server alone says is when an update came: that decides its weight.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from anabranch.core.config.privacy import epsilon_text
from anabranch.core.errors import InvalidSignature, NotAuthenticated
from anabranch.core.privacy.accountant import epsilon_of, sensitivity
from anabranch.core.secagg.cohort import Cohort, CohortMember
from anabranch.core.secagg.ring import MODEL_BYTES, SEED_BYTES
from anabranch.core.secagg.terms import STEEPEST, Terms
from anabranch.identity.certificates import Kind, Peer, is_issued_by, peer_of, time_text
from anabranch.identity.seals import read_box, seal_info, unseal
from anabranch.identity.signatures import DOMAIN, check_signature
from anabranch.keeper.papers import KeeperPapers

TEXT_CHARS_MAX = 128


class Why(StrEnum):
    """Why a keeper does not answer."""

    TOO_FEW = "too_few"
    TOO_MANY = "too_many"
    TWICE = "twice"
    OTHER_KEEPERS = "other_keepers"
    TOO_LITTLE_NOISE = "too_little_noise"
    WEIGHT = "weight"
    VERSIONS = "versions"
    UNREADABLE = "unreadable"
    OTHER_RUN = "other_run"
    CERTIFICATE = "certificate"
    REVOKED = "revoked"
    SIGNATURE = "signature"
    BOX = "box"
    NUMBER = "number"
    OTHER_TERMS = "other_terms"
    OTHER_MODEL = "other_model"
    SEED_USED = "seed_used"
    UPDATE_USED = "update_used"
    PARTICIPATIONS = "participations"
    SEPARATION = "separation"


@dataclass(frozen=True)
class Declined:
    """No answer, and why."""

    why: Why
    detail: str


@dataclass(frozen=True)
class Opened:
    """A member whose box has been opened.

    `model_sha256`: of what it was trained from, as its device says in the box; of older releases' runs empty.
    """

    update_id: str
    client_id: str
    base_version: int
    base_head: str
    weight: int
    seed: bytes = field(repr=False)
    model_sha256: str = ""

    @property
    def model(self) -> str:
        """What is remembered of the model that it was trained from: the head, and the digest."""
        return f"{self.base_head} {self.model_sha256}".strip()

    @property
    def seed_sha256(self) -> str:
        """What is remembered of the seed."""
        return hashlib.sha256(self.seed).hexdigest()


def open_cohort(cohort: Cohort, papers: KeeperPapers, now: float | None) -> list[Opened] | Declined:
    """The members with their seeds, where nothing is wrong with any of them.

    `now`: seconds since 1970; None for a cohort that was admitted before: certificates may have ended since,
    and devices may have been revoked.
    """
    for problem in _problems(cohort, papers):
        return problem
    found: list[Opened] = []
    revoked = frozenset() if now is None else papers.revoked()
    for member in cohort.members:
        opened = _opened(cohort, member, papers, revoked, now)
        if isinstance(opened, Declined):
            return opened
        found.append(opened)
    names, seeds = Counter(m.client_id for m in found), Counter(m.seed for m in found)
    updates = Counter(m.update_id for m in found)
    if len(names) < len(found) or len(seeds) < len(found) or len(updates) < len(found):
        return Declined(Why.TWICE, "a device, an update or a seed is in the cohort more than once")
    return found


def _problems(cohort: Cohort, papers: KeeperPapers) -> Iterator[Declined]:
    """What can be seen before any box is opened."""
    terms, floors, count = cohort.terms, papers.floors, len(cohort.members)
    if papers.name not in terms.keepers:
        yield Declined(Why.OTHER_KEEPERS, f"the terms name other keepers than {papers.name}")
    if count < (needed := max(floors.cohort_min, terms.cohort_min)):
        yield Declined(Why.TOO_FEW, f"{count} updates: a sum needs {needed}")
    if count > terms.cohort:
        yield Declined(Why.TOO_MANY, f"{count} updates: the terms say {terms.cohort}")
    weights = [member.weight for member in cohort.members] or [0]
    if max(weights) > STEEPEST * min(weights):
        yield Declined(
            Why.WEIGHT,
            f"the weights go from {min(weights)} to {max(weights)}: an update with more than {STEEPEST} "
            "times the weight of others could be read in the sum",
        )
    if terms.noise < floors.noise_min:
        yield Declined(
            Why.TOO_LITTLE_NOISE, f"noise of {terms.noise:g} clips: here it is {floors.noise_min:g}"
        )
    if 0 < floors.epsilon_max < (epsilon := _epsilon(terms, floors.delta)):
        yield Declined(
            Why.TOO_LITTLE_NOISE,
            f"a device may be in {terms.participations or 'any number of'} sums, which comes to an epsilon "
            f"of {epsilon_text(epsilon)} at delta {floors.delta:g}: here {floors.epsilon_max:g} is the most",
        )


def _epsilon(terms: Terms, delta: float) -> float:
    """What all the sums come to that one device may be in, by the noise of this keeper alone."""
    if not terms.noise:
        return math.inf
    try:
        return epsilon_of(sensitivity(1, terms.participations) / terms.noise, delta)
    except OverflowError:  # somebody has said any number
        return math.inf


def _opened(
    cohort: Cohort, member: CohortMember, papers: KeeperPapers, revoked: frozenset[str], now: float | None
) -> Opened | Declined:
    said = _said(member.signed)
    if said is None:
        return Declined(Why.UNREADABLE, "what a device has signed is not the message of an update")
    who = f"update {said['update_id']!r} of {said['client_id']!r}"
    if said["run_id"] != cohort.run_id:
        return Declined(Why.OTHER_RUN, f"{who} is of run {said['run_id']!r}")
    if not said["base_version"] <= member.arrived_version <= cohort.version:
        return Declined(Why.VERSIONS, f"{who}: trained from a version after that at which it came")
    if member.weight != (weight := cohort.terms.weight(member.arrived_version - said["base_version"])):
        return Declined(Why.WEIGHT, f"{who}: the weight is {member.weight}, by its age it is {weight}")
    if (wrong := _papers_problem(member, said, papers, now)) is not None:
        return Declined(wrong.why, f"{who}: {wrong.detail}")
    if said["client_id"] in revoked:
        return Declined(Why.REVOKED, f"{who}: the device was revoked here")
    info = seal_info(
        cohort.run_id,
        papers.name,
        said["update_id"],
        said["client_id"],
        said["base_version"],
        member.base_head,
        said["payload"]["sha256"],
        cohort.terms.digest,
    )
    try:
        content = unseal(papers.box_key, read_box(said["seals"].get(papers.name, "")), info)
    except InvalidSignature as error:
        return Declined(Why.BOX, f"{who}: {error}")
    wanted = SEED_BYTES + (MODEL_BYTES if cohort.terms.plan else 0)
    if len(content) != wanted:
        return Declined(Why.BOX, f"{who}: {len(content)} bytes are in its box, where {wanted} should be")
    return Opened(
        said["update_id"],
        said["client_id"],
        said["base_version"],
        member.base_head,
        member.weight,
        content[:SEED_BYTES],
        content[SEED_BYTES:].hex(),
    )


def _said(signed: bytes) -> dict[str, Any] | None:
    """What a device has signed of its update; None where that is something else."""
    if not signed.startswith(DOMAIN):
        return None
    try:
        said = json.loads(signed.removeprefix(DOMAIN))
        texts = [said["update_id"], said["client_id"], said["run_id"], said["payload"]["sha256"]]
        seals = said.get("seals", {})
        texts += [*seals, *seals.values()]
        whole = type(said["base_version"]) is int and said["base_version"] >= 0
        whole = whole and all(type(text) is str for text in texts) and all(map(_is_short, texts[:4]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return {**said, "seals": seals} if whole else None


def _is_short(text: str) -> bool:
    """As ids and digests are: what is not would fill a log, or be no text that SQLite takes."""
    return len(text) <= TEXT_CHARS_MAX and text.isprintable()


def _papers_problem(
    member: CohortMember, said: dict[str, Any], papers: KeeperPapers, now: float | None
) -> Declined | None:
    """What is wrong with its certificate or its signature."""
    try:
        peer: Peer = peer_of(member.certificate)
        if not is_issued_by(peer.certificate, papers.authority):
            return Declined(Why.CERTIFICATE, "its certificate is not of the authority that this keeper knows")
        if (peer.kind, peer.name) != (Kind.DEVICE, said["client_id"]):
            return Declined(Why.CERTIFICATE, f"its certificate is of {peer.kind} {peer.name!r}")
        if now is not None and not peer.not_before <= now < peer.not_after:
            counts = f"from {time_text(peer.not_before)} to {time_text(peer.not_after)}"
            here = f"by this keeper's clock it is {time_text(now)}"
            return Declined(Why.CERTIFICATE, f"its certificate counts {counts}, and {here}")
        check_signature(peer.key, member.signature, member.signed)
    except NotAuthenticated as error:
        return Declined(Why.CERTIFICATE, str(error))
    except InvalidSignature as error:
        return Declined(Why.SIGNATURE, str(error))
    return None
