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
from anabranch.core.model.updates import Ask, Capability, Decision, Update, Verdict
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
CLIENTS = st.sampled_from(["a", "a", "b", "c", "d"])  # of whom d is not enrolled at first
KINDS = [*["push"] * 8, *["ask"] * 6, "tick", "renew", "drop", "enrol", "pause", "back"]
MOSTLY = st.sampled_from([True, True, True, False])


@st.composite
def events_at(draw: Any, now: float, number: int, engine: Engine) -> Any:
    """One more event: most asks are of devices without a task, most results of tasks that devices have."""
    kind, client, base = draw(st.sampled_from(KINDS)), draw(CLIENTS), draw(st.integers(0, 4))
    task = f"t{number}" if draw(MOSTLY) else draw(st.sampled_from(["t3", "t4", "t5"]))
    open_ = list(engine.ledger.tasks.values())
    idle = [c for c in "abc" if all(c != one.client_id for one in open_)]
    if engine.paused and draw(MOSTLY):
        return ev.Resumed(now)
    if kind == "ask" or (kind == "push" and not open_ and draw(MOSTLY)):
        return ev.TaskAsked(now, Ask(draw(st.sampled_from(idle)) if idle and draw(MOSTLY) else client, task))
    if open_ and draw(MOSTLY):
        of = draw(st.sampled_from(open_))
        stranger = kind == "push" and draw(st.integers(0, 7)) == 0
        client, task, base = client if stranger else of.client_id, of.task_id, of.base_version
    if kind == "push":
        delta = np.asarray(draw(st.lists(st.integers(-4, 4), min_size=3, max_size=3)), np.float32)
        submodel = draw(st.sampled_from([None, None, Coordinates(np.array([0, 2]))]))
        delta = delta if submodel is None else delta[:2]
        update_id = f"u-{task}" if draw(MOSTLY) else f"v-{task}"
        flaw = draw(st.sampled_from(["", "", "", "delta is broken"]))
        update = Update(update_id, task, client, base, draw(st.integers(1, 9)), delta, submodel)
        return ev.UpdateArrived(now, update, ev.Payload(delta.tobytes().hex(), delta.nbytes), flaw)
    return {
        "tick": ev.Ticked(now),
        "renew": ev.LeaseRenewed(now, client, task, now),
        "drop": ev.TaskDropped(now, client, task, "why"),
        "back": ev.Returned(now),
        "enrol": ev.Enrolled(now, client, Capability(examples=3)),
        "pause": ev.Resumed(now) if engine.paused else ev.Paused(now),
    }[kind]


@st.composite
def runs(draw: Any) -> Any:
    """A strategy, up to forty events of a run with it, and one of them after which it is begun anew."""
    strategy = draw(st.sampled_from(STRATEGIES))
    engine, now = new_engine(*strategy), 0.0
    events: list[Any] = [ev.Enrolled(0.0, client, Capability()) for client in "abc"]
    for event in events:
        engine.handle(event)
    for number in range(3, 3 + draw(st.integers(1, 40))):
        now += draw(st.sampled_from([0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 6.0]))
        events.append(draw(events_at(now, number, engine)))
        engine.handle(events[-1])
    return strategy, events, draw(st.integers(0, len(events) - 1))


def new_engine(name: Any, params: Any) -> Any:
    options = EngineSettings(
        concurrency=3, staleness_max=1, lease_s=10.0, lease_min_s=1.0, versions_max=6, any_submodel=True
    )
    return Engine(SPEC, make_strategy(name, params), options, np.ones(3, np.float32))


def load_delta(payload: Any, submodel: Any) -> Any:
    return np.frombuffer(bytes.fromhex(payload.sha256), np.float32)


@settings(max_examples=150)
@given(runs())
def test_journal_and_snapshot_reproduce_the_run(run: Any) -> None:
    strategy, events, cut = run
    engine, journal = new_engine(*strategy), JournalDigest()
    lines, snapshot, at_cut = [], None, ""
    counted, decided = list[str](), dict[str, Decision]()
    for number, e in enumerate(events):
        version, before = engine.version, state_digest(engine)
        lines.append(journal.add(to_record(e)))
        effects = engine.handle(e)
        assert violations(engine) == []
        published = [x for x in effects if isinstance(x, Published)]
        assert engine.version == version + len(published)
        counted += [update_id for x in published for update_id in x.update_ids]
        for x in effects:
            if not isinstance(x, Decided):
                continue
            known = decided.get(x.receipt.update_id)
            assert x.duplicate == (known is not None)
            assert x.receipt.decision == decided.setdefault(x.receipt.update_id, x.receipt.decision)
            if x.receipt.decision.verdict is Verdict.REJECTED and not x.duplicate:
                assert engine.version == version
                assert state_digest(engine) != before  # the rejection itself is remembered
        if number == cut:
            snapshot, at_cut = take_snapshot(engine), state_digest(engine)
            snapshot = Snapshot(json.loads(json.dumps(snapshot.meta)), snapshot.arrays)
    assert len(counted) == len(set(counted))
    assert engine.counters.applied == len(counted) + len(engine.pending)

    again, rest = new_engine(*strategy), JournalDigest()
    resumed = None if snapshot is None else restore(snapshot, SPEC, make_strategy(*strategy), again.settings)
    assert resumed is None or state_digest(resumed) == at_cut
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
@given(runs())
def test_a_rejection_leaves_every_array_identical(run: Any) -> None:
    """And the strategy's state, where it does not hear that a task is lost."""
    strategy, events, _ = run
    engine = new_engine(*strategy)
    for e in events:
        before = take_snapshot(engine)
        effects = engine.handle(e)
        if not any(
            isinstance(x, Decided) and not x.duplicate and x.receipt.decision.verdict is Verdict.REJECTED
            for x in effects
        ):
            continue
        after = take_snapshot(engine)
        mine = [t for t in before.meta["tasks"] if t["task_id"] == e.update.task_id]
        owned = [t for t in mine if t["client_id"] == e.update.client_id]
        assert after.meta["tasks"] == [t for t in before.meta["tasks"] if t not in owned]
        assert after.meta["pending"] == before.meta["pending"]
        if not owned:
            assert after.meta["strategy"] == before.meta["strategy"]
            assert after.arrays.keys() == before.arrays.keys()
        for name in before.arrays:
            if not name.startswith("history/"):
                assert np.array_equal(before.arrays[name], after.arrays[name])
