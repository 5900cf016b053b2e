"""The kinds of part that a simulation is made of."""

from __future__ import annotations

import hashlib
from pathlib import Path

from anabranch.compress.registry import CODEC_STAGES
from anabranch.core.config.tables import Config
from anabranch.core.model.chains import parse_chain
from anabranch.host.parts import ENGINE_PARTS
from anabranch.reports.trackers import TRACKERS
from anabranch.simulation.attacks import ATTACKS
from anabranch.simulation.executors.names import EXECUTORS
from anabranch.support.code import source_digests
from anabranch.workloads.app import App
from anabranch.workloads.splits import SPLITS

# Of a run that there is already: nobody is told of it as it went on.
REPLAYED = (*ENGINE_PARTS, SPLITS, ATTACKS, EXECUTORS)
PARTS = (*REPLAYED, TRACKERS)


_TRACE = "fleet.trace = "  # with the file's name, beside the places of code


def trace_digest(config: Config) -> dict[str, str]:
    """The digest of the trace that a run follows, by the setting that names it; empty where none is there."""
    path = Path(config.fleet.trace)
    if not config.fleet.trace or not path.is_file():
        return {}
    return {f"{_TRACE}{str(path)!r}": hashlib.sha256(path.read_bytes()).hexdigest()}


def is_trace(place: str) -> bool:
    """Whether a digest of this name is a trace's."""
    return place.startswith(_TRACE)


def code_digests(config: Config, app: App | None = None) -> dict[str, str]:
    """Of the code of others that a run's results follow from: see `source_digests`. Raises `ConfigError`."""
    kinds = [kind for kind in REPLAYED if kind is not EXECUTORS]
    chains = [parse_chain(text) for text in (config.uplink.codec, config.downlink.codec)]
    stages = [(CODEC_STAGES, stage.name) for chain in chains for stage in chain]
    return source_digests(config, kinds, app, stages)
