"""Runs of many devices whose events are drawn, not trained: what the cockpit is looked at with."""

from __future__ import annotations

import heapq
import math
import random
from pathlib import Path

from anabranch.core.config.goal import Goal
from anabranch.core.model.updates import Decision, Reason, Verdict
from anabranch.reports.recorder import Recorder
from anabranch.reports.result import Result

VERSIONS_EACH = 25  # in a large fleet, while each device trains once
STALE_MAX = 40
EXAMPLES, MODEL_BYTES = 120, 80_000
LOST, INVALID = 0.02, 0.01  # shares of the tasks
PART = 0.2834  # of the model's numbers
SLOWER_MAX = 8.0  # times as slow as the fastest is the slowest


def made_run(folder: Path, devices: int, updates: int, seed: int = 0, parts: bool = False) -> Result:
    """Writes `events.jsonl` and `result.json` of a fleet of unequal devices, as a simulation would.

    `parts`: tasks of the slower ones are of `PART` of the model.
    """
    draw = random.Random(seed)
    goal = Goal(metric="accuracy", mode="max", target=0.8)
    config = {"run": {"seed": seed, "workload": "made"}, "strategy": {"name": "fedbuff"}}
    with Recorder("fedbuff", "made", seed, goal, config, "simulated", folder / "events.jsonl") as recorder:
        _drawn(recorder, draw, devices, updates, parts)
        result = recorder.result("0" * 64, "0" * 64, 1.0)
    result.write(folder)
    return result


def _drawn(recorder: Recorder, draw: random.Random, devices: int, updates: int, parts: bool) -> None:
    names = [f"device-{i:0{len(str(devices - 1))}d}" for i in range(devices)]
    pace = {name: 4.0 * SLOWER_MAX ** draw.random() for name in names}
    buffer = max(1, devices // VERSIONS_EACH)
    waiting = [(draw.random() * 4.0, i, name) for i, name in enumerate(names)]
    heapq.heapify(waiting)
    out: list[tuple[float, str, str, int]] = []
    version = decided = tasks = 0
    recorder.compressed(0.0, 0, "topk(0.05)+q8", "delta+q8")
    recorder.evaluated(0.0, 0, {"accuracy": 0.1, "loss": 2.3})
    while decided < updates:
        if waiting and (not out or waiting[0][0] <= out[0][0]):
            now, _, name = heapq.heappop(waiting)
            tasks += 1
            is_slow = parts and pace[name] > 4.0 * math.sqrt(SLOWER_MAX)
            recorder.granted(now, name, f"task-{tasks}", version, PART if is_slow else None)
            recorder.downloaded(now, name, MODEL_BYTES // 4, MODEL_BYTES)
            took = pace[name] * draw.lognormvariate(0.0, 0.25)
            heapq.heappush(out, (now + took, name, f"task-{tasks}", version))
            continue
        now, name, task, base = heapq.heappop(out)
        heapq.heappush(waiting, (now + 0.3 + 0.4 * draw.random(), tasks, name))
        if draw.random() < LOST:
            recorder.note(now, "lease_ended", client=name, task=task)
            continue
        decision = _decision(draw, version - base, (decided + 1) % buffer == 0)
        version += decision.verdict is Verdict.PUBLISHED
        decided += decision.verdict is not Verdict.REJECTED
        training = {"loss": 2.3 * math.exp(-decided / updates) * draw.uniform(0.8, 1.2)}
        recorder.decided(now, name, version, decision, MODEL_BYTES // 20, EXAMPLES, MODEL_BYTES, training)
        if decision.verdict is Verdict.PUBLISHED:
            recorder.published(now, version)
            if version % max(1, updates // buffer // 40) == 0:
                learnt = 1 - math.exp(-3.2 * decided / updates)
                measured = {
                    "accuracy": 0.1 + 0.78 * learnt + draw.gauss(0, 0.008),
                    "loss": 2.3 - 1.9 * learnt,
                }
                recorder.evaluated(now, version, measured)
    recorder.finished(now, f"{updates} updates were applied")


def _decision(draw: random.Random, staleness: int, last_of_buffer: bool) -> Decision:
    if staleness > STALE_MAX:
        return Decision(Verdict.REJECTED, staleness, None, Reason.STALE)
    if draw.random() < INVALID:
        return Decision(Verdict.REJECTED, staleness, None, Reason.INVALID)
    verdict = Verdict.PUBLISHED if last_of_buffer else Verdict.HELD
    return Decision(verdict, staleness, (1 + staleness) ** -0.5)
