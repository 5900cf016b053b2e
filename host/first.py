"""Version 0, where devices build it themselves: `[run] initial = "built"`.

An App and a seed make the first weights, so whoever has both need not fetch them. A device is told the seed,
the codec of the way that version 0 would have come, and a digest:

    w_0 = initial(seed)        the App's model
    p_0 = replica of w_0       what that codec makes of it: `compress.broadcast.first_replica`
    SHA-256 of p_0 and of the frozen tensors that come with each version, raw

Where its own w_0 gives another digest, because its torch draws other numbers, version 0 is fetched. So
it is where a run goes by older `rules` (`core/rules.py`) and its codec by them makes something else of w_0:
devices go by the newest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from anabranch.compress.broadcast import first_replica
from anabranch.compress.codec import Raw
from anabranch.compress.model import encode_model
from anabranch.core.config.ranges import BUILT
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.model.params import ParamSpec, Tensors, Vector
from anabranch.core.rules import NEWEST
from anabranch.host.build import Blueprint


@dataclass(frozen=True)
class FirstModel:
    """What version 0 is built from. `sha256` and `head` are hex, `head` empty where it is not known."""

    seed: int
    codec: str
    sha256: str
    head: str = ""

    @classmethod
    def of(
        cls, spec: ParamSpec, tensors: Tensors, seed: int, codec: str, head: str = "", rules: int = NEWEST
    ) -> FirstModel:
        """Of the first weights `tensors`, by name, which the App builds from `seed`; `rules`: the run's."""
        return cls(seed, codec, _replica(spec, tensors, codec, rules)[1], head)

    def read(self, spec: ParamSpec, tensors: Tensors) -> Vector:
        """What a device has of version 0, (spec.size,), once it has built `tensors`, by name.

        Raises `InvalidUpdate` where they are other weights than the run's, and `UnknownCodec`.
        """
        vector, sha256 = _replica(spec, tensors, self.codec, NEWEST)
        if sha256 != self.sha256:
            raise InvalidUpdate(
                f"what this App builds from seed {self.seed} is not version 0: its SHA-256 differs, as where "
                "the run's first weights were built by another release of torch, or of the App, or the run "
                "was begun by an older release of Anabranch"
            )
        return vector


def first_model(
    blueprint: Blueprint, tensors: Tensors, seed: int | None, head: str = ""
) -> FirstModel | None:
    """What devices may build version 0 from; None where they are to fetch it.

    Raises as `check_built`, where `seed` is not known.
    """
    check_built(blueprint.config, seed)
    run = blueprint.config.run
    if run.initial != BUILT or seed is None:
        return None
    return FirstModel.of(blueprint.spec, tensors, seed, blueprint.codec_at(0), head, run.rules)


def check_built(config: Config, seed: int | None) -> None:
    """Raises `ConfigError` where devices shall build version 0 and no `seed` is known that leads to it."""
    if config.run.initial == BUILT and seed is None:
        raise ConfigError(
            "run.initial = 'built': the first weights were given, or an earlier release wrote them, so no "
            "device can build them from a seed: write the model again with `anabranch init APP`, without "
            "--weights, or set run.initial = 'sent'"
        )


def _replica(spec: ParamSpec, tensors: Tensors, codec: str, rules: int) -> tuple[Vector, str]:
    """Version 0 as devices have it, and the SHA-256 (hex) of that with what comes with each version."""
    frozen, vector = spec.frozen(tensors), first_replica(spec, codec, spec.flatten(tensors), rules)
    return vector, hashlib.sha256(encode_model(Raw(), spec, vector, frozen)).hexdigest()
