"""A plausible small run, fed to a recorder event by event."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from anabranch.core.config.goal import Goal
from anabranch.core.model.updates import Decision, Reason, Verdict
from anabranch.core.rules import NEWEST
from anabranch.reports.recorder import Recorder
from anabranch.reports.result import Kind, Result

Record = Callable[..., Result]
REASONS = (Reason.STALE, Reason.DUPLICATE_TASK, Reason.INVALID)


def record_run(
    strategy: str = "fedbuff",
    seed: int = 0,
    updates: int = 60,
    clients: tuple[str, ...] = ("a", "b", "c"),
    target: float = 0.6,
    kind: Kind = "simulated",
    buffer_size: int = 3,
    evaluate: bool = True,
    config: dict[str, object] | None = None,
) -> Result:
    """Every seventh update is rejected; every `buffer_size`th applied one publishes and is evaluated."""
    rng = random.Random(seed)
    # What an older record does not say, and a page then does.
    of_today = {"server": {"lapsed": "turns", "windows": "places"}, "submodel": {"step_time": "linear"}}
    settings = {"run": {"seed": seed, "rules": NEWEST}, **of_today} if config is None else config
    recorder = Recorder(strategy, "synthetic", seed, Goal(target=target or None), settings, kind)
    now, version, applied = 0.0, 0, 0
    for i in range(updates):
        now += rng.expovariate(1.0)
        client = clients[i % len(clients)]
        recorder.granted(now, client, f"t{i}", version)
        recorder.downloaded(now, client, 1000)
        if i % 7 == 6:
            refusal = Decision(Verdict.REJECTED, 9, None, REASONS[i % 3])
            recorder.decided(now, client, version, refusal, 500, 10)
            continue
        applied += 1
        publishes = applied % buffer_size == 0
        verdict = Verdict.PUBLISHED if publishes else Verdict.HELD
        version += publishes
        recorder.decided(now, client, version, Decision(verdict, i % 4, 1.0), 500, 10)
        if publishes:
            recorder.published(now, version)
            if evaluate:
                recorder.evaluated(
                    now + 2.0,
                    version,
                    {"accuracy": 0.9 - 0.8 * math.exp(-applied / 20), "loss": 1.0 / version},
                )
    return recorder.result("0" * 64, "f" * 64, 1.5)


@pytest.fixture
def record() -> Record:
    """The function that makes the run."""
    return record_run
