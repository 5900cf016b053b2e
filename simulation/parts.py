"""The kinds of part that a simulation is made of."""

from __future__ import annotations

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


def code_digests(config: Config, app: App | None = None) -> dict[str, str]:
    """Of the code of others that a run's results follow from: see `source_digests`. Raises `ConfigError`."""
    kinds = [kind for kind in REPLAYED if kind is not EXECUTORS]
    chains = [parse_chain(text) for text in (config.uplink.codec, config.downlink.codec)]
    stages = [(CODEC_STAGES, stage.name) for chain in chains for stage in chain]
    return source_digests(config, kinds, app, stages)
