"""Runs with every fault on: one seed, one run; strategies in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleets import config

from anabranch.core.config import Config, merge
from anabranch.core.snapshot import state_digest
from anabranch.simulation.promises import Promises
from anabranch.simulation.run import open_simulation

STRATEGIES = ["fedasync", "fedavg", "fedbuff", "fedprox", "qafel", "asyncdrop", "teasq", "teasq_drop"]
UNTIL_S, ENDS_S = 90.0, 200.0
ALL = {
    "loss": 0.05,
    "duplication": 0.05,
    "reordering": 0.05,
    "delay": 0.1,
    "delay_s": 2.0,
    "timeout_s": 4.0,
    "partition_every_s": 40.0,
    "swizzle_every_s": 30.0,
    "device_crash_every_s": 60.0,
    "server_crash_every_s": 25.0,
    "server_down_s": 3.0,
    "commit_s": 0.05,
    "skew_s": 100.0,
    "drift": 0.05,
    "until_s": UNTIL_S,
}
SHAPES = ["fixed", "uniform", "exponential", "lognormal", "pareto"]


@dataclass(frozen=True)
class Proved:
    """What a run came to."""

    digests: tuple[str, str, str]
    versions: int
    applied: int
    restarts: int
    faults: dict[str, int]


def rough(seed: int, clients: int = 50, **faults: Any) -> Config:
    """Everything goes wrong, and what the seed says besides."""
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    capped = seed // len(STRATEGIES) % 3 == 1
    # Rounds of nearly all devices: whom a round of few asks is left to chance.
    params = {"clients_per_round": clients * 4 // 5} if strategy in ("fedavg", "fedprox") else {}
    base = config(
        strategy,
        run={"seed": seed, "virtual_s_max": ENDS_S},
        fleet={
            "clients": clients,
            "examples_per_client": 32,
            "step_time_s": 1.0,
            "up_mbps": 1.0,
            "availability": 0.8 if seed % 5 == 0 else 1.0,
            "availability_period_s": 40.0,
            "dropout": 0.1 if seed % 4 == 3 else 0.0,
        },
        server={
            "lease_s": 15.0,
            "lease_min_s": 8.0,
            "concurrency": clients // 3 if capped else 0,
            "staleness_max": 20 if seed % 3 == 2 else 0,
            "snapshot_every_updates": 40,
        },
        client={"retry_cap_s": 8.0},
        faults={**ALL, "delay_shape": SHAPES[seed % len(SHAPES)], **faults},
    )
    return merge([("base", base.to_json()), ("strategy", {"strategy": params})])


def prove(settings: Config, every: int = 1) -> Proved:
    """Run, with every promise looked at after every event."""
    with open_simulation(settings) as simulation:
        promises = Promises(simulation, every)
        simulation.run()
        promises.check_end(simulation.clock.now - settings.faults.until_s)
        result, engine = simulation.result(0.0), simulation.engine
        digests = (result.model_sha256, result.journal_sha256, state_digest(engine))
        assert simulation.faults is not None
        faults = dict(simulation.faults.counts)
        return Proved(digests, engine.version, engine.counters.applied, promises.restarts, faults)
