"""The downlink of a run, from its configuration."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.compress.delta_log import FIRST_PLACES, PLACES, DeltaLog
from anabranch.compress.direct import DirectDownlink
from anabranch.compress.registry import codec_of, make_codec
from anabranch.core.engine.broadcast import Broadcast
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO, RAW, StageText, parse_chain
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.rules import NEWEST

LOG = "log"
FAR = 1 << 30  # a version that no schedule changes after


def downlink_at(strategy: Strategy, codec: str) -> Callable[[int], str]:
    """The codec of a version's way to the devices; `codec` is what `[downlink]` says."""
    return strategy.downlink if codec == AUTO else lambda _: codec


def is_exact(codec_at: Callable[[int], str]) -> bool:
    """Whether every version travels as it is."""
    return codec_at(0) == codec_at(FAR) == RAW


def make_broadcast(
    spec: ParamSpec, strategy: Strategy, codec: str, every: int = 1, rules: int = NEWEST
) -> Broadcast | None:
    """What `[downlink]` means for a model; None: versions travel as they are. `every`-th are published.

    `rules`: the run's (`core/rules.py`). Raises `ConfigError` or `UnknownCodec`.
    """
    codec_at = downlink_at(strategy, codec)
    first, last = codec_at(0), codec_at(FAR)
    if not (isinstance(first, str) and isinstance(last, str)):
        raise ConfigError(
            f"strategy {strategy.name!r}: downlink must return a codec, such as 'raw', for any version"
        )
    stages = parse_chain(first)
    if stages[0].name == LOG:
        step, versions_max, places = _log_arguments(stages)
        return DeltaLog(spec, step, versions_max, strategy.needs_base, every, places, rules)
    if every > 1:
        raise ConfigError(
            f"downlink.publish_every_versions = {every} is for the delta log, and the downlink is {first!r}: "
            "set downlink.codec = 'log(2)', or publish_every_versions = 1"
        )
    if is_exact(codec_at):
        return None
    for text in (first, last):
        make_codec(text)
    return DirectDownlink(spec, codec_at, strategy.needs_base, rules)


def first_replica(spec: ParamSpec, codec: str, vector: Vector, rules: int = NEWEST) -> Vector:
    """What devices have of version 0, (spec.size,), where that is `vector` and its downlink `codec`.

    `rules`: as of `make_broadcast`. Raises `UnknownCodec` where a stage of it is not here.
    """
    if codec == RAW:
        return vector
    if (stages := parse_chain(codec))[0].name == LOG:
        return DeltaLog(spec, places=_log_arguments(stages)[2], rules=rules).first_replica(vector)
    return DirectDownlink(spec, lambda _: codec, keeps_replicas=False, rules=rules).first_replica(vector)


def check_downlink(codec: str) -> None:
    """Raises `ConfigError` where `[downlink] codec` says nothing that is known."""
    with codec_of("downlink.codec", codec):
        stages = parse_chain(codec)
        if stages[0].name == LOG:
            _log_arguments(stages)
        elif codec != AUTO:
            make_codec(codec)


def _log_arguments(stages: tuple[StageText, ...]) -> tuple[float, int, int]:
    """The step, the messages that the log may have, and the places of a lineage's first version."""
    arguments = stages[0].arguments
    try:
        step = float(arguments[0]) if arguments else 1.0
        versions_max = int(arguments[1]) if len(arguments) > 1 else 128
        places = int(arguments[2]) if len(arguments) > 2 else FIRST_PLACES
    except ValueError:
        step, versions_max, places = 0.0, 0, 0
    if len(stages) > 1 or len(arguments) > 3 or not 0 < step <= 2 or versions_max < 1 or places not in PLACES:
        raise ConfigError(
            "downlink.codec: write log, log(step), log(step,versions) or log(step,versions,places), with a "
            f"step in (0, 2] and {PLACES.start} to {PLACES.stop - 1} places, such as log(1,128,6); it stands "
            "alone"
        )
    return step, versions_max, places
