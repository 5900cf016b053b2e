"""Runs for reports: a plausible small one, fed to a recorder event by event, and some with chosen figures."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from anabranch.core.config.goal import Goal
from anabranch.core.model.updates import Decision, Reason, Verdict
from anabranch.core.rules import NEWEST
from anabranch.reports.recorder import Recorder
from anabranch.reports.result import ClientShare, Kind, Point, Result, Staleness

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


def figured_run() -> Result:
    """A run with figures of which no two are the same."""
    measured = ((3, 0.5, 0.7), (6, 0.9, 0.2), (9, 0.81, 0.4))
    shares = ((9, 4), (11, 6), (10, 0), (0, 0))
    return replace(
        record_run(),
        versions=9,
        updates_applied=30,
        updates_rejected=10,
        uplink_bytes=80_000,
        uplink_bytes_raw=240_000,
        downlink_bytes=4_000,
        downlink_bytes_full_equivalent=4_000,
        final_accuracy=0.81,
        best_accuracy=0.9,
        final_value=0.81,
        best_value=0.9,
        time_to_target_s=83.1,
        bytes_to_target=50_000,
        rejections={"invalid": 4, "duplicate_task": 6},
        staleness=Staleness(1.5, 1, 4, 7, {0: 9, 1: 11, 4: 8, 7: 2}),
        clients={f"d{i}": ClientShare(*share, 0, 0.0, 0, 0) for i, share in enumerate(shares)},
        history=tuple(
            Point(10.0 * v, v, 3 * v, accuracy, loss, 1000 * v, 10 * v) for v, accuracy, loss in measured
        ),
        wall_s=1.5,
        virtual_s=600.0,
    )


def two_seeds() -> list[Result]:
    """And one of another seed: it sends twice as much, and has not come to the target."""
    first = figured_run()
    measured = ((0.4, 0.8), (0.5, 0.6), (0.55, 0.5))
    history = zip(first.history, measured, strict=True)
    other = replace(
        first,
        seed=1,
        versions=11,
        updates_applied=34,
        uplink_bytes=84_000,
        downlink_bytes=6_000,
        final_accuracy=0.55,
        best_accuracy=0.55,
        final_value=0.55,
        best_value=0.55,
        time_to_target_s=None,
        bytes_to_target=None,
        staleness=replace(first.staleness, mean=2.5),
        history=tuple(
            replace(p, accuracy=accuracy, loss=loss, uplink_bytes=2 * p.uplink_bytes)
            for p, (accuracy, loss) in history
        ),
        wall_s=2.5,
    )
    return [first, other]
