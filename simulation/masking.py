"""Masked updates of simulated devices: cut, made whole numbers and masked as live ones are.

Every draw follows of the run's seed, so that a simulation repeats itself. On a live device seeds are of the
operating system, and travel sealed; here a keeper draws those of a task as its device did.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.core.config.tables import Config
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.updates import Task
from anabranch.core.rng import stream
from anabranch.core.secagg.ring import SEED_BYTES
from anabranch.core.secagg.terms import Terms
from anabranch.host.secagg import terms_of
from anabranch.strategies.registry import strategy_of


def mask_seed(seed: int, task_id: str, keeper: str) -> bytes:
    """Of the mask that the result of a task has for a keeper; `seed` is the run's."""
    return stream(seed, "mask", task_id, keeper).bytes(SEED_BYTES)


@dataclass(frozen=True)
class SimulatedMasker:
    """Masks what the devices of a run send; `seed` is the run's."""

    terms: Terms
    seed: int

    @classmethod
    def of(cls, config: Config, spec: ParamSpec) -> SimulatedMasker | None:
        """That of a run; None where nothing is masked. Raises `ConfigError`."""
        if not config.secagg.on:
            return None
        return cls(terms_of(config, spec, strategy_of(config)), config.run.seed)

    def payload(self, delta: Vector, task: Task) -> bytes:
        """Of a delta, (size,). Raises `InvalidUpdate` where it is not finite."""
        uniforms = stream(task.seed, "rounding").random(delta.size)
        seeds = [mask_seed(self.seed, task.task_id, keeper) for keeper in self.terms.keepers]
        return self.terms.ring.sent(delta, uniforms, seeds).tobytes()
