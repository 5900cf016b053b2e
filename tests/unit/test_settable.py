"""Settings that change while a run goes on: which may, what becomes of them, and of a run that had ended."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from machines import SPEC, Bench, decision, vector
from rollbacks import CLIENTS, World, seq_of_version

from anabranch.core import events as ev
from anabranch.core.config.tables import TABLES, Config, merge
from anabranch.core.effects import Finished, Granted, Refused, Reopened, SettingsSet
from anabranch.core.engine.changes import Changes, StartSettings
from anabranch.core.engine.settable import (
    FIXED,
    SETTABLE,
    as_started,
    check_settable,
    differences,
    in_force,
    typed,
    value_in_force,
    value_of,
    why_fixed,
    with_values,
)
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.errors import ConfigError
from anabranch.core.journal import from_record, line, to_record
from anabranch.core.model.params import digest
from anabranch.core.model.updates import Reason
from anabranch.core.rules import NEWEST
from anabranch.core.snapshot import restore, state_digest, take_snapshot

ALICE = "operator 'alice'"
EVERY = [f"{t}.{f.name}" for t, cls in TABLES.items() for f in fields(cls)]
# Other values than the defaults', in their ranges, whatever else is as it was.
OTHERS: dict[str, Any] = {
    **{path: 7 for path in SETTABLE if isinstance(value_of(Config(), path), int)},
    **{path: 11.5 for path in SETTABLE if isinstance(value_of(Config(), path), float | str)},
    "client.momentum": 0.5,
    "server.retry_after_min_s": 1.5,
}


def change(bench: Bench, now: float = 5.0, **values: Any) -> list[Any]:
    """An operator sets something; `run__updates_max=5` is `run.updates_max`."""
    given = {name.replace("__", "."): value for name, value in values.items()}
    return bench.do(ev.SettingsChanged(now, given, ALICE))


# --- the table -----------------------------------------------------------------------------------


def test_every_setting_may_change_or_has_a_reason() -> None:
    assert set(SETTABLE) <= set(EVERY)
    assert not [path for path in EVERY if path not in SETTABLE and not why_fixed(path)]
    assert not set(SETTABLE) & set(FIXED)
    assert {path.partition(".")[0] for path in FIXED} == set(TABLES)


def test_a_run_has_the_rule_that_it_was_started_with_unless_another_is_asked_for() -> None:
    older = Config.from_json({"submodel": {"name": "heterofl"}})
    said = {"submodel": {"name": "heterofl"}}
    restarted = as_started(older, merge([("a file", said)]))
    assert (restarted.submodel.step_time, restarted.run.rules) == ("proportional", 0)
    assert list(differences(older, restarted)) == []
    said["submodel"]["step_time"] = "linear"
    asked = as_started(older, merge([("a file", said)]))
    assert list(differences(older, asked)) == [("submodel.step_time", "proportional", "linear")]
    newer = Config.from_json(merge([("a file", {})]).to_json())
    started = as_started(newer, merge([]))
    assert (started.submodel.step_time, started.run.rules) == ("linear", NEWEST)


@pytest.mark.parametrize("path", [path for path in EVERY if path not in SETTABLE])
def test_what_may_not_change_is_refused_with_the_reason(path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        typed(Config(), {"run.updates_max": 5, path: value_of(Config(), path)})
    assert str(refused.value) == f"{path} cannot be changed in a run: {why_fixed(path)}"


@pytest.mark.parametrize("path", SETTABLE)
def test_what_may_change_is_what_the_engine_goes_by(path: str) -> None:
    config = Config()
    values = typed(config, {path: OTHERS[path]})
    changed = with_values(config, values)
    assert value_of(changed, path) == OTHERS[path] != value_of(config, path)
    found = in_force(EngineSettings.of(config), values)
    assert found == EngineSettings.of(changed), "as of a run that was started so"
    assert value_in_force(found, path) == OTHERS[path]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"run.update_max": 5}, "did you mean 'run.updates_max'"),
        ({"updates_max": 5}, "there is no setting 'updates_max'"),
        ({"nothing.at_all": 5}, "there is no setting 'nothing.at_all'"),
        ({"run.updates_max": "many"}, "run.updates_max must be int"),
        ({"run.updates_max": -1}, "run.updates_max must not be negative"),
        ({"server.lease_min_s": 9999}, "server.lease_min_s must not be over lease_max_s"),
        ({"robust.clip": "never"}, "robust.clip must be 'auto' or a number"),
        ({"strategy.buffer_size": 5}, "strategy.buffer_size cannot be changed in a run"),
    ],
)
def test_nonsense_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        typed(Config(), values)


def test_values_are_of_their_settings_types() -> None:
    found = typed(Config(), {"server.lease_s": 30, "robust.clip": 2})
    assert json.dumps(found) == '{"server.lease_s": 30.0, "robust.clip": 2.0}'
    check_settable(found)


# --- the machine ---------------------------------------------------------------------------------


def test_a_larger_budget_lets_an_ended_run_go_on() -> None:
    bench = Bench(buffer_size=1, updates_max=2)
    bench.enrol("a", "b")
    bench.work("a", "t1")
    bench.ask("b", "late")
    bench.work("a", "t2", now=2.0)
    assert bench.engine.finished == "the run ended after 2 updates, its budget"
    (refused,) = bench.ask("a", "t3", now=3.0)
    assert (refused.reason, refused.final) == (Reason.RUN_FINISHED, True)

    told, reopened = change(bench, run__updates_max=4)
    assert isinstance(reopened, Reopened)
    (made,) = told.changes
    assert (made.path, made.was, made.value, made.by, made.at) == ("run.updates_max", 2, 4, ALICE, 5.0)
    assert not bench.engine.finished
    assert decision(bench.push("b", "late", now=6.0)).reason is Reason.NONE, "who waited is taken as ever"
    effects = bench.ask("a", "t4", now=6.0) and bench.push("a", "t4", now=7.0)
    assert [e.why for e in effects if isinstance(e, Finished)] == [
        "the run ended after 4 updates, its budget"
    ]
    assert bench.engine.counters.applied == 4


def test_a_budget_that_is_still_used_up_changes_only_the_reason() -> None:
    bench = Bench(buffer_size=1, updates_max=2, versions_max=2)
    bench.enrol("a")
    bench.work("a", "t1")
    bench.work("a", "t2")
    assert bench.engine.finished == "the run ended at version 2, its budget"
    assert [type(e) for e in change(bench, run__versions_max=9)] == [SettingsSet]
    assert bench.engine.finished == "the run ended after 2 updates, its budget"
    assert [type(e) for e in change(bench, run__updates_max=0)] == [SettingsSet, Reopened]


def test_a_smaller_budget_ends_a_run_at_once() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a")
    bench.work("a", "t1")
    _, finished = change(bench, run__updates_max=1)
    assert finished == Finished("the run ended after 1 updates, its budget", given_up=False)


def test_a_run_that_was_given_up_goes_on_with_a_larger_bound() -> None:
    bench = Bench(buffer_size=1, rejections_max=1)
    bench.enrol("a")
    bench.ask("a", "t1")
    bench.push("a", "t1", flaw="it has values that are not finite")
    assert bench.engine.finished
    assert isinstance(change(bench, run__rejections_max=3)[-1], Reopened)


def test_whoever_trains_on_after_the_end_is_in_the_round_that_goes_on() -> None:
    bench = Bench("fedavg", clients_per_round=2, over_selection=1.0, deadline_s=0.0, updates_max=1)
    bench.enrol("a", "b")
    for client in "ab":
        bench.ask(client, f"t-{client}")
    bench.push("a", "t-a")
    assert bench.engine.finished
    change(bench, now=2.0, run__updates_max=9)
    bench.enrol("c")
    assert isinstance(bench.ask("c", "t-c", now=2.0)[-1], Refused), "both places are taken"
    bench.push("b", "t-b", now=3.0)
    assert bench.engine.version == 1


def test_rounds_go_on_without_those_who_were_lost_after_the_end() -> None:
    """While a run is over nobody tells the strategy who is lost: their places are free in the end."""
    bench = Bench("fedavg", clients_per_round=2, over_selection=1.0, deadline_s=0.0, updates_max=3)
    bench.enrol(*"abc")
    for task, client in enumerate("ab"):
        bench.work(client, f"t{task}")
    first, second = bench.engine.state.cohort
    bench.ask(second, "lost", now=2.0)
    bench.work(first, "t3", now=3.0)
    assert bench.engine.finished
    bench.push(second, "lost", now=4.0)  # the run had ended: it does not count
    assert second in bench.engine.state.members
    change(bench, now=5.0, run__updates_max=9)
    assert isinstance(bench.ask(second, "again", now=6.0)[-1], Granted)
    bench.push(second, "again", now=7.0)
    assert bench.engine.version == 2, "the round comes to its end"


def test_leases_rates_and_local_training_are_of_the_next_task() -> None:
    bench = Bench(lease_s=60.0)
    bench.enrol("a", "b")
    (before,) = bench.ask("a", "t1")
    change(bench, server__lease_s=5.0, client__learning_rate=0.5, client__epochs=3)
    change(bench, robust__tasks_per_minute=1.0)
    (after,) = bench.ask("b", "t2", now=6.0)
    assert (before.task.lease_s, after.task.lease_s) == (60.0, 5.0)
    assert before.task.local == replace(after.task.local, learning_rate=0.05, epochs=1)
    assert (after.task.local.learning_rate, after.task.local.epochs) == (0.5, 3)
    assert bench.engine.ledger.tasks["t1"].lease_s == 60.0
    bench.push("b", "t2", now=7.0)
    (refused,) = bench.ask("b", "t3", now=8.0)
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.TOO_FAST


def test_a_lower_cap_is_kept_by_those_who_come() -> None:
    bench = Bench(concurrency=3, tasks_per_client=2)
    bench.enrol(*"abcd")
    for client in "abc":
        bench.ask(client, f"t-{client}")
    change(bench, server__concurrency=1, server__tasks_per_client=1)  # which checks every invariant
    (refused,) = bench.ask("d", "t-d", now=6.0)
    assert refused.reason is Reason.AT_CAPACITY


def test_a_clip_cuts_from_then_on() -> None:
    bench = Bench(buffer_size=1, server_lr=1.0, clip=100.0)
    bench.enrol("a")
    for number in range(12):
        bench.work("a", f"t{number}", (1, 0, 0, 0))
    assert not bench.work("a", "long", (50, 0, 0, 0)).detail
    change(bench, robust__clip=2.0)
    assert bench.work("a", "cut", (50, 0, 0, 0)).detail.startswith("shortened to 0.04")


# --- records ---------------------------------------------------------------------------------------


def test_a_snapshot_and_the_journal_have_it() -> None:
    bench = Bench(buffer_size=1, updates_max=2)
    bench.enrol("a")
    plain = state_digest(bench.engine)
    assert "changes" not in take_snapshot(bench.engine).meta
    change(bench, run__updates_max=4, server__lease_s=9.0)
    assert state_digest(bench.engine) != plain
    snapshot = json.loads(json.dumps(take_snapshot(bench.engine).meta))
    again = restore(
        replace(take_snapshot(bench.engine), meta=snapshot),
        SPEC,
        bench.engine.strategy,
        EngineSettings(updates_max=2),
    )
    assert (again.settings, again.changes) == (bench.engine.settings, bench.engine.changes)
    assert state_digest(again) == state_digest(bench.engine)
    event = bench.log[-1]
    record = json.loads(line(to_record(event)))
    assert record["kind"] == "settings_changed"
    assert from_record(record, SPEC, lambda *_: vector()) == event


def test_a_rollback_keeps_what_was_set() -> None:
    """What was set after the version that is gone back to stays, and bounds do not bind the fold."""
    world = World("fedbuff", {"buffer_size": 2}, {})
    world.enrol()
    script = [(CLIENTS[n % 4], n % 3, float(1 + n % 5)) for n in range(40)]
    world.play(script)
    values = {"robust.clip": 0.5, "server.lease_s": 7.0, "robust.flaws_max": 3, "server.staleness_max": 30}
    world.do(ev.SettingsChanged(500.0, {**values, "run.updates_max": 1000}, ALICE))
    world.play(script)
    settings = world.engine.settings
    world.roll_back(4, seq_of_version(world, 4), "c")
    assert world.engine.settings == settings
    assert (settings.clip, settings.updates_max) == (0.5, 1000)
    again = world.fresh()
    for seq, record in world.records():
        event = from_record(record, world.spec, world.load)
        again.handle(world.refold(event, seq, again) if isinstance(event, ev.RolledBack) else event)
    assert state_digest(again) == state_digest(world.engine)


def test_a_fold_clips_as_the_run_did() -> None:
    world = World("fedasync", {}, {})
    world.enrol()
    world.play([(CLIENTS[n % 3], 0, float(1 + n % 2)) for n in range(30)])
    world.do(ev.SettingsChanged(900.0, {"robust.clip": 0.25}, ALICE))
    world.play([(CLIENTS[n % 3], 0, float(1 + n % 2)) for n in range(30)])
    before = digest(world.engine.vector)
    world.roll_back(0, 0, "d")  # who has sent nothing
    assert digest(world.engine.vector) == before


# --- a start ------------------------------------------------------------------------------------------


def config(**run: Any) -> Config:
    """A file that says this of `[run]`."""
    return merge([("run.toml", {"run": run})])


def after(*events: ev.SettingsChanged) -> Changes:
    """What these events have made."""
    changes, settings = Changes(), EngineSettings.of(config(updates_max=10))
    for event in events:
        changes, settings, _ = changes.take(event, settings)
    return changes


def operator(value: int, at: float = 1.0) -> ev.SettingsChanged:
    """An operator's word."""
    return ev.SettingsChanged(at, {"run.updates_max": value}, ALICE)


def start(value: int, at: float = 1.0) -> ev.SettingsChanged:
    """A start's word."""
    return ev.SettingsChanged(at, {"run.updates_max": value}, "the server's start", at_start=True)


@pytest.mark.parametrize(
    ("before", "file", "new"),
    [
        ((), 10, None),
        ((), 20, 20),
        ((), None, None),  # nobody names it any more
        ((operator(15),), 10, None),  # the file says what it said: the operator's word stays
        ((operator(15),), 20, 20),
        ((operator(15),), 15, 15),  # no other value; but the file has said so from now on
        ((start(20),), 20, None),
        ((start(20),), 10, 10),  # back to what it was
        ((start(20), operator(15)), 20, None),
        ((operator(15), start(20)), 10, 10),
        ((start(15, 1.0), operator(30, 2.0)), 10, 10),
    ],
)
def test_a_start_takes_what_its_files_say_otherwise(
    before: tuple[ev.SettingsChanged, ...], file: int | None, new: int | None
) -> None:
    given = merge([]) if file is None else config(updates_max=file)
    said = StartSettings.of(config(updates_max=10), given, after(*before))
    assert said.new == ({} if new is None else {"run.updates_max": new})


def test_a_start_takes_what_a_program_says_that_names_no_file() -> None:
    plain = merge([])
    given = replace(plain, run=replace(plain.run, updates_max=20))
    assert "run.updates_max" not in given.sources
    assert StartSettings.of(config(updates_max=10), given, after()).new == {"run.updates_max": 20}


def test_what_a_start_passes_over_is_known() -> None:
    said = StartSettings.of(config(updates_max=10), config(updates_max=10), after(operator(15)))
    assert (said.new, said.passed_over) == ({}, {"run.updates_max": 10})


def test_a_standby_does_not_take_back_what_was_said_since_it_waits() -> None:
    """Its file was read before: whoever spoke last counts."""
    stored, old = config(updates_max=10), config(updates_max=12)
    assert StartSettings.of(stored, old, after(), read_at=5.0).new == {"run.updates_max": 12}
    for later in (operator(30, at=6.0), start(30, at=6.0), operator(30, at=5.0)):
        said = StartSettings.of(stored, old, after(later), read_at=5.0)
        assert (said.new, said.passed_over) == ({}, {"run.updates_max": 12})
    assert StartSettings.of(stored, old, after(operator(30, at=4.0)), read_at=5.0).new == {
        "run.updates_max": 12
    }


def test_a_run_of_before_whose_tasks_have_no_use_may_still_change_the_rest() -> None:
    """An older release took such an order; what is in force is read by devices and observers too."""
    stale = merge([("", {"downlink": {"codec": "log(2)", "publish_every_versions": 5}})])
    stale = replace(stale, server=replace(stale.server, staleness_max=2))
    assert typed(stale, {"server.lease_s": 5}) == {"server.lease_s": 5.0}
    assert Config.from_json(stale.to_json()).server.staleness_max == 2
    with pytest.raises(ConfigError, match="staleness_max must be 0 or at least"):
        typed(stale, {"server.staleness_max": 4})
