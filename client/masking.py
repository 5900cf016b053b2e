"""Masked updates on a device: cut to a length, made whole numbers, masked, and the masks' seeds sealed.

Every box is bound to the update, to the version that it was trained from, and to the run's terms: keepers
that are told others cannot open it. The terms have the plan that all devices train by, the box itself says
what the model of that version was, to the bit: so no device can be given others than its neighbours in a sum.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from anabranch.compress.model import frozen_tail
from anabranch.core.config.tables import ClientTable
from anabranch.core.content import content_digest
from anabranch.core.engine.buffers import AVERAGE
from anabranch.core.errors import NotAuthenticated
from anabranch.core.model.arrays import to_bytes
from anabranch.core.model.params import ParamSpec, Tensors, Vector
from anabranch.core.model.updates import Task
from anabranch.core.secagg.plans import plan_digest
from anabranch.core.secagg.ring import SEED_BYTES
from anabranch.identity.keepers import Masking
from anabranch.identity.seals import box_text, seal, seal_info, sealed_content


@dataclass(frozen=True)
class Masker:
    """Masks what one device sends in one run.

    `client`, `buffers`, `layout_hash`: what the device was told of the run when it joined.
    `frozen_sha256`: of the frozen tensors that travel apart, which it has checked.
    """

    masking: Masking
    run_id: str
    client_id: str
    client: ClientTable = field(default_factory=ClientTable)
    buffers: str = AVERAGE
    layout_hash: str = ""
    frozen_sha256: str = ""

    @property
    def codec(self) -> str:
        """What a task's updates travel as."""
        return self.masking.terms.codec

    def check(self, task: Task) -> None:
        """Raises `NotAuthenticated` for a task by which values would be in the clear, or alone in a sum."""
        if task.uplink != self.codec:
            raise NotAuthenticated(
                f"a task of a run with masked sums wants codec {task.uplink!r}: nothing is sent in the clear"
            )
        plan = plan_digest(task.local, self.client, self.buffers, self.layout_hash)
        if task.submodel is not None or plan != self.masking.terms.plan:
            raise NotAuthenticated(
                "the task's plan is not that of the run's terms: where devices trained by other plans, a sum "
                "would show single updates. A server that keeps to the protocol gives all of them the same; "
                "one of an older or newer release than this device may have another digest of it"
            )

    def model_sha256(self, spec: ParamSpec, vector: Vector, frozen: Tensors) -> str:
        """Of all that a training starts from: values, and what is frozen, with each version or apart."""
        found = hashlib.sha256(to_bytes(vector))
        found.update(frozen_tail(spec, frozen))
        found.update(bytes.fromhex(self.frozen_sha256))
        return found.hexdigest()

    def masked(
        self, delta: Vector, update_id: str, base_version: int, base_head: str, model_sha256: str
    ) -> tuple[bytes, Mapping[str, str]]:
        """The payload of a delta, (d,), and its seals: keepers to boxes, base64.

        The boxes are bound to the payload's SHA-256, and have `model_sha256`, of what it was trained from.
        The seeds are forgotten with this call. Raises `InvalidUpdate` where the delta is not finite.
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
            return box_text(seal(keys[keeper].public_key, sealed_content(seed, model_sha256), info))

        return payload, {keeper: box(keeper, seed) for keeper, seed in seeds.items()}
