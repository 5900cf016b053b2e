"""Whatever devices do, in whatever order: replay is equal, nothing counts twice, no law breaks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Published
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.invariants import violations
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.journal import JournalDigest, from_record, line, to_record
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import Coordinates
from anabranch.core.model.updates import Ask, Capability, Reason, Update, Verdict
from anabranch.core.snapshot import Snapshot, restore, state_digest, take_snapshot
from anabranch.strategies.registry import make_strategy

SPEC = ParamSpec.of({"w": np.zeros(3, np.float32), "n": np.zeros((), np.int64)})
PHASES: list[dict[str, Any]] = [
    {"strategy": "fedavg", "clients_per_round": 2, "deadline_s": 4.0, "until_updates": 2},
    {"strategy": "fedbuff", "buffer_size": 2, "flush_s": 3.0, "until_versions": 3},
    {"strategy": "fedasync"},
]
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("fedbuff", {"buffer_size": 2, "flush_s": 3.0}),
    ("fedbuff", {"buffer_size": 1, "momentum": 0.5}),
    ("fedbuff", {"buffer_size": 2, "outer": {"name": "nesterov", "lr": 0.5}}),
    ("fedavg", {"clients_per_round": 2, "deadline_s": 4.0, "outer": {"name": "adam", "lr": 0.1}}),
    ("delayed_nesterov", {"buffer_size": 2, "c": 0.25}),
    ("fadas", {"buffer_size": 2, "flush_s": 3.0}),
    ("ca2fl", {"buffer_size": 2, "flush_s": 3.0}),
    ("ace", {}),
    ("aced", {"staleness_max": 2}),
    ("fedcompass", {"steps_min": 1, "steps_max": 3}),
    ("port", {"buffer_size": 2, "flush_s": 3.0}),
    ("annealed", {"buffer_size": 1, "growth": 0.3, "flush_s": 3.0}),
    ("annealed", {"buffer_size": 1, "growth": 0.3, "outer": {"name": "nesterov", "lr": 0.3}}),
    ("fedbuff", {"buffer_size": 2, "flush_s": 3.0, "outer": {"name": "schedule_free", "lr": 0.5}}),
    ("waves", {"share": 0.5, "flush_s": 3.0}),
    ("fedasmu", {"staleness_max": 2}),
    ("fedbuff", {"buffer_size": 2, "scheduler": {"name": "fedluck", "steps_max": 3}}),
    ("fedasync", {"scheduler": {"name": "equal_time", "task_s": 2.0, "steps_max": 3}}),
    ("fedavg", {"clients_per_round": 2, "deadline_s": 4.0, "scheduler": {"name": "capped"}}),
    ("fedfa", {"window_size": 2}),
    ("phased", {"phases": PHASES}),
    ("fedasync", {}),
    ("fedavg", {"clients_per_round": 2, "deadline_s": 4.0}),
    ("fedprox", {"clients_per_round": 1, "over_selection": 2.0}),
]
CLIENTS = st.sampled_from(["a", "a", "b", "c"])
TASKS = st.sampled_from(["t0", "t0", "t1", "t2", "t3"])


@st.composite
def event(draw: Any, now: Any) -> Any:
    client, task = draw(CLIENTS), draw(TASKS)
    often, others = (
        ["ask", "ask", "push", "push", "push"],
        ["tick", "renew", "drop", "enrol", "pause", "back"],
    )
    kind = draw(st.sampled_from([*often, *others]))
    if kind == "ask":
        return ev.TaskAsked(now, Ask(client, task))
    if kind == "push":
        delta = np.asarray(draw(st.lists(st.integers(-4, 4), min_size=3, max_size=3)), np.float32)
        submodel = draw(st.sampled_from([None, None, Coordinates(np.array([0, 2]))]))
        delta = delta if submodel is None else delta[:2]
        update_id = draw(st.sampled_from([f"u-{task}", f"v-{task}"]))
        flaw = draw(st.sampled_from(["", "", "", "delta is broken"]))
        base, examples = draw(st.integers(0, 4)), draw(st.integers(1, 9))
        update = Update(update_id, task, client, base, examples, delta, submodel)
        return ev.UpdateArrived(now, update, ev.Payload(delta.tobytes().hex(), delta.nbytes), flaw)
    return {
        "tick": ev.Ticked(now),
        "renew": ev.LeaseRenewed(now, client, task, now),
        "drop": ev.TaskDropped(now, client, task, "why"),
        "back": ev.Returned(now),
        "enrol": ev.Enrolled(now, client, Capability(examples=3)),
        "pause": draw(st.sampled_from([ev.Paused(now), ev.Resumed(now)])),
    }[kind]


@st.composite
def histories(draw: Any) -> Any:
    moments = np.cumsum(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 6.0]), min_size=1, max_size=40)))
    start = [ev.Enrolled(0.0, c, Capability()) for c in "ab"]
    return start + [draw(event(float(t))) for t in moments]


def new_engine(name: Any, params: Any) -> Any:
    options = EngineSettings(
        concurrency=2, staleness_max=3, lease_s=5.0, lease_min_s=1.0, versions_max=6, any_submodel=True
    )
    return Engine(SPEC, make_strategy(name, params), options, np.ones(3, np.float32))


def load_delta(payload: Any, submodel: Any) -> Any:
    return np.frombuffer(bytes.fromhex(payload.sha256), np.float32)


@settings(max_examples=150)
@given(st.sampled_from(STRATEGIES), histories(), st.integers(0, 40))
def test_journal_and_snapshot_reproduce_the_run(strategy: Any, events: Any, cut: Any) -> None:
    engine, journal = new_engine(*strategy), JournalDigest()
    lines, snapshot = [], None
    applied: dict[str, int] = {}
    for number, e in enumerate(events):
        version, before = engine.version, state_digest(engine)
        lines.append(journal.add(to_record(e)))
        effects = engine.handle(e)
        assert violations(engine) == []
        published = [x for x in effects if isinstance(x, Published)]
        assert engine.version == version + len(published)
        for x in published:
            for update_id in x.update_ids:
                applied[update_id] = applied.get(update_id, 0) + 1
        for x in effects:
            if isinstance(x, Decided) and x.receipt.decision.verdict is Verdict.REJECTED and not x.duplicate:
                assert engine.version == version
                assert state_digest(engine) != before  # the rejection itself is remembered
        if number == cut:
            snapshot = take_snapshot(engine)
            snapshot = Snapshot(json.loads(json.dumps(snapshot.meta)), snapshot.arrays)
    assert all(n == 1 for n in applied.values())

    again, rest = new_engine(*strategy), JournalDigest()
    resumed = None if snapshot is None else restore(snapshot, SPEC, make_strategy(*strategy), again.settings)
    for number, text in enumerate(lines):
        record = json.loads(text)
        assert line(record) == text
        rest.add(record)
        again.handle(from_record(record, again.spec, load_delta))
        if resumed is not None and number > cut:
            resumed.handle(from_record(record, again.spec, load_delta))
    assert rest.hexdigest() == journal.hexdigest()
    assert state_digest(again) == state_digest(engine)
    if resumed is not None:
        assert state_digest(resumed) == state_digest(engine)
        assert resumed.next_deadline() == engine.next_deadline()


@settings(max_examples=60)
@given(st.sampled_from(STRATEGIES), histories())
def test_a_rejection_leaves_every_array_identical(strategy: Any, events: Any) -> None:
    engine = new_engine(*strategy)
    for e in events:
        before = take_snapshot(engine)
        effects = engine.handle(e)
        rejections = [
            x for x in effects if isinstance(x, Decided) and x.receipt.decision.verdict is Verdict.REJECTED
        ]
        if rejections:
            after = take_snapshot(engine)
            if any(x.receipt.decision.reason is Reason.STALE for x in rejections):
                assert len(after.meta["tasks"]) == len(before.meta["tasks"]) - 1
            for name in before.arrays:
                if not name.startswith("history/"):
                    assert np.array_equal(before.arrays[name], after.arrays[name])
