"""Masked updates on a device: cut to a length, made whole numbers, masked, and the masks' seeds sealed.

Every box is bound to the update, to the model that it was trained from, and to the run's terms: keepers that
are told others cannot open it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anabranch.core.content import content_digest
from anabranch.core.errors import NotAuthenticated
from anabranch.core.model.params import Vector
from anabranch.core.secagg.ring import SEED_BYTES
from anabranch.identity.keepers import Masking
from anabranch.identity.seals import box_text, seal, seal_info


@dataclass(frozen=True)
class Masker:
    """Masks what one device sends in one run."""

    masking: Masking
    run_id: str
    client_id: str

    @property
    def codec(self) -> str:
        """What a task's updates travel as."""
        return self.masking.terms.codec

    def check(self, uplink: str) -> None:
        """Raises `NotAuthenticated` for a task that would have values sent in the clear."""
        if uplink != self.codec:
            raise NotAuthenticated(
                f"a task of a run with masked sums wants codec {uplink!r}: nothing is sent in the clear"
            )

    def masked(
        self, delta: Vector, update_id: str, base_version: int, base_head: str
    ) -> tuple[bytes, Mapping[str, str]]:
        """The payload of a delta, (d,), and its seals: keepers to boxes, base64.

        The boxes are bound to the payload's SHA-256. The seeds are forgotten with this call. Raises
        `InvalidUpdate` where the delta is not finite.
        """
        terms = self.masking.terms
        ring, keys = terms.ring, self.masking.by_name
        uniforms = np.random.default_rng().random(delta.size)  # of the operating system's entropy
        seeds = {keeper: secrets.token_bytes(SEED_BYTES) for keeper in terms.keepers}
        payload = ring.sent(delta, uniforms, seeds.values()).tobytes()
        digest = content_digest(payload)

        def box(keeper: str, seed: bytes) -> str:
            update = update_id, self.client_id, base_version, base_head, digest
            info = seal_info(self.run_id, keeper, *update, terms.digest)
            return box_text(seal(keys[keeper].public_key, seed, info))

        return payload, {keeper: box(keeper, seed) for keeper, seed in seeds.items()}
