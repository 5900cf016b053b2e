"""What masked sums cost, against the same update in the clear, on one core.

    python -m benchmarks.masked_sums

The device: clip, whole numbers, one keeper's mask, digest and box, against raw bytes and their digest. The
server: numbers read and added, against values read, looked at and added. The keeper: an eighth of a cohort of
8 devices that it has seen before, with all its checks and what it writes. Milliseconds of the processor an
update, the least of some repeats.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anabranch.client.masking import Masker
from anabranch.client.outbox import UpdateEntry
from anabranch.client.transfer import signed_record
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.model.params import ParamSpec, Vector, add_scaled, dense
from anabranch.core.model.updates import find_flaw
from anabranch.core.secagg.cohort import Cohort, CohortMember
from anabranch.core.secagg.ring import add_weighted
from anabranch.core.secagg.terms import Terms
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import certificate_der, new_key, signing_request
from anabranch.identity.keepers import Masking
from anabranch.identity.signatures import sign, update_message
from anabranch.keeper.keeper import Keeper, Unmasked
from anabranch.keeper.papers import Floors, KeeperPapers, make_papers
from anabranch.keeper.store import KeeperStore

SIZES = (100_000, 1_000_000, 10_000_000)
VALUE_BITS = {32: 20, 16: 9}
LEVELS = {32: 16, 16: 8}
REPEATS, COHORT = 7, 8
RUN, HEAD = "run", "0a" * 32


@dataclass(frozen=True)
class Costs:
    """Of one size and ring: milliseconds an update, and bytes up."""

    size: int
    bits: int
    device_plain: float
    device: float
    server_plain: float
    server: float
    keeper: float
    bytes_up: int


def least_ms(work: Callable[[], object]) -> float:
    """The least of some repeats, milliseconds of this thread's processor."""
    taken = []
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return 1000 * min(taken)


def measure(size: int, bits: int, papers: KeeperPapers, authority: Authority) -> Costs:
    """An update of so many normal values."""
    weights = tuple(range(LEVELS[bits], LEVELS[bits] // 4 - 1, -1))
    words = bits, VALUE_BITS[bits], 1.0, size, weights, COHORT, COHORT, (papers.name,)
    terms = Terms(*words, plan="0c" * 32)
    masking, spec = Masking(terms, [papers.statement()]), ParamSpec.of({"w": np.zeros(size, np.float32)})
    delta = (np.random.default_rng(size).standard_normal(size) / size**0.5).astype(np.float32)
    layout, raw, ring = Layout.of(spec), make_codec("raw"), make_codec(terms.codec)
    masker = Masker(masking, RUN, "device-0")
    payload, _ = masker.masked(delta, "u", 0, HEAD, HEAD)
    plain, out, total = raw.encode(delta, layout), np.zeros(size, np.float32), terms.ring.empty()

    def fold() -> None:
        values = raw.decode(plain, layout)
        assert find_flaw(spec, values, 1, None) is None
        add_scaled(out, 0.5, values)

    return Costs(
        size,
        bits,
        least_ms(lambda: hashlib.sha256(raw.encode(delta, layout)).digest()),
        least_ms(lambda: _masked(masker, spec, delta)),
        least_ms(fold),
        least_ms(lambda: add_weighted(total, dense(ring.decode(payload, layout)), weights[0])),
        _keeper_ms(spec, masking, delta, papers, authority),
        len(payload),
    )


def _masked(masker: Masker, spec: ParamSpec, delta: Vector) -> None:
    """All that a device does for its masks; what it was trained from has as many values."""
    masker.masked(delta, "u", 0, HEAD, masker.model_sha256(spec, delta, {}))


def _keeper_ms(
    spec: ParamSpec, masking: Masking, delta: Vector, papers: KeeperPapers, authority: Authority
) -> float:
    devices = [_Member(f"of-{spec.size}-{masking.terms.bits}-{i}", authority) for i in range(COHORT)]
    with closing(KeeperStore(papers.folder / f"{spec.size}-{masking.terms.bits}.db")) as store:
        keeper, taken = Keeper(papers, store, authority.now), list[float]()
        for number in range(1, REPEATS + 1):
            members = tuple(device.update(number, spec, masking, delta) for device in devices)
            cohort, began = Cohort(RUN, number, 0, masking.terms, members), time.thread_time()
            answer = keeper.unmask(cohort)
            taken.append(time.thread_time() - began)
            assert isinstance(answer, Unmasked), answer
    return 1000 * min(taken) / COHORT


class _Member:
    """A device that is in every cohort, each time with another update."""

    def __init__(self, name: str, authority: Authority) -> None:
        self._name, self._key = name, new_key()
        token = authority.invite(name, DAY_S)
        self._certificate = certificate_der(authority.admit(token, signing_request(self._key), DAY_S)[1])

    def update(self, number: int, spec: ParamSpec, masking: Masking, delta: Vector) -> CohortMember:
        update_id = f"{self._name}-{number}"
        payload, seals = Masker(masking, RUN, self._name).masked(delta, update_id, 0, HEAD, HEAD)
        words = update_id, f"t-{number}", spec.layout_hash, 0, 1, 1, masking.terms.codec, payload, spec.size
        entry = UpdateEntry(*words, base_head=HEAD, seals=seals)
        message = update_message(RUN, signed_record(entry, self._name, spec))
        signature, weight = sign(self._key, message), masking.terms.weight(0)
        return CohortMember(message, signature, self._certificate, HEAD, 0, weight)


def table(rows: list[Costs]) -> str:
    """As Markdown."""
    head = "| values | ring | device, ms (plain) | server, ms (plain) | keeper, ms | bytes up (plain) |"
    lines = [head, "|---|---|---|---|---|---|"]
    for r in rows:
        device, server = f"{r.device:.2f} ({r.device_plain:.2f})", f"{r.server:.2f} ({r.server_plain:.2f})"
        up = f"{r.bytes_up:,} ({4 * r.size:,})"
        lines.append(f"| {r.size:,} | {r.bits} | {device} | {server} | {r.keeper:.2f} | {up} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder, Authority.create(Path(folder) / "ca") as authority:
        papers = make_papers(Path(folder) / "keeper", authority.pem, Floors(COHORT), authority.now())
        print(table([measure(size, bits, papers, authority) for size in SIZES for bits in (32, 16)]))


if __name__ == "__main__":
    main()
