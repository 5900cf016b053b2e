"""The engine's books of tasks, clients and receipts: what is kept, for how long, and for whom."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from machines import Bench, decision, vector

from anabranch.core import events as ev
from anabranch.core.effects import Granted, Published, Refused
from anabranch.core.engine.ledger import (
    CAPABILITIES_KEPT,
    STEP_S_MAX,
    STEP_S_MIN,
    TRAIN_S,
    ClientRecord,
    Ledger,
    Touched,
    Unsaved,
)
from anabranch.core.model.updates import (
    Capability,
    Decision,
    LocalPlan,
    Reason,
    Receipt,
    Task,
    TaskState,
    Update,
    Verdict,
)
from anabranch.core.snapshot import restore, take_snapshot


def receipt(update_id: str, task_id: str) -> Receipt:
    return Receipt(update_id, task_id, 1, Decision(Verdict.HELD, 0, 1.0))


def task(task_id: str, client: str = "a", base: int = 0) -> Task:
    return Task(task_id, client, base, 0.0, 10.0, 10.0, 1, LocalPlan())


def update(of: Task, steps: int = 0, **metrics: float) -> Update:
    return Update(
        f"of {of.task_id}",
        of.task_id,
        of.client_id,
        of.base_version,
        1,
        vector(0, 0, 0, 0),
        local_steps=steps,
        metrics=metrics,
    )


def seed(bench: Bench, client: str, task: str) -> int:
    (granted,) = bench.ask(client, task)
    assert isinstance(granted, Granted)
    return granted.task.seed


def test_every_task_trains_with_a_seed_of_its_own_and_the_same_in_every_replay() -> None:
    found = []
    for _ in range(2):
        bench = Bench(buffer_size=1)
        bench.enrol("a", "b")
        seeds = []
        for n in range(6):
            client, task = "ab"[n % 2], f"t{n}"
            seeds.append(seed(bench, client, task))
            bench.push(client, task)
        found.append(seeds)
    assert len(set(found[0])) == 6
    assert found[0] == found[1]


def test_a_strangers_flawed_update_costs_a_member_of_a_round_nothing() -> None:
    bench = Bench("fedavg", clients_per_round=1, over_selection=1.0)
    bench.enrol("member", "stranger")
    bench.ask("member", "its")
    told = decision(bench.push("stranger", "its", flaw="delta has 4 values that are not finite"))
    assert told.verdict is Verdict.REJECTED
    (refused,) = bench.ask("stranger", "place")
    assert isinstance(refused, Refused), "the round is full as before"
    effects = bench.push("member", "its", update_id="good")
    assert decision(effects).verdict is Verdict.PUBLISHED
    assert any(isinstance(e, Published) for e in effects)


def test_the_bound_on_staleness_is_the_last_that_is_taken() -> None:
    for strategy, options in (
        ("fedbuff", {"buffer_size": 1}),
        ("teasq", {"cache_size": 1, "concurrency_fraction": 1.0, "kept": 1.0, "bits": 32}),
    ):
        bench = Bench(strategy, staleness_max=2, **options)
        bench.enrol("late", "later", "fast")
        bench.ask("late", "at 2")
        bench.ask("later", "at 3")
        bench.work("fast", "f0")
        bench.work("fast", "f1")
        told = decision(bench.push("late", "at 2"))
        assert (told.verdict, told.staleness) == (Verdict.PUBLISHED, 2), strategy
        told = decision(bench.push("later", "at 3"))
        assert (told.verdict, told.reason, told.staleness) == (Verdict.REJECTED, Reason.STALE, 3), strategy
        assert told.weight is None
        assert "3 is over the bound of 2" in told.detail


def test_a_receipt_that_leaves_takes_no_answer_of_another_update_with_it() -> None:
    ledger = Ledger(receipts_max=2)
    ledger.file(receipt("a stranger's", "t"), answers_task=False)
    ledger.file(receipt("its own", "t"), answers_task=True)
    ledger.file(receipt("another", "t2"), answers_task=True)
    assert list(ledger.receipts) == ["its own", "another"]
    found = ledger.receipt_of_task("t")
    assert found is not None
    assert found.update_id == "its own"
    ledger.file(receipt("one more", "t3"), answers_task=True)
    assert ledger.receipt_of_task("t") is None, "its own has left, too"


def test_a_receipt_that_comes_and_one_that_leaves_are_changes_of_the_books() -> None:
    ledger = Ledger(receipts_max=1)
    ledger.file(receipt("first", "t0"), answers_task=True)
    ledger.touched = Touched()
    ledger.file(receipt("second", "t1"), answers_task=True)
    assert ledger.touched == Touched(updates={"first", "second"})


def test_what_is_over_leaves_nothing_in_the_indices() -> None:
    bench = Bench(buffer_size=1, lease_s=5.0, lease_min_s=5.0)
    for n in range(50):
        client = f"c{n}"
        bench.enrol(client)
        bench.ask(client, client, now=float(n))
        if n % 5:
            bench.push(client, client, now=float(n))
    bench.tick(1000.0)
    for n in range(0, 50, 5):
        bench.push(f"c{n}", f"c{n}", now=1001.0)  # late, and welcome
    ledger = bench.engine.ledger
    assert (ledger.tasks, dict(ledger.bases), ledger._by_client) == ({}, {}, {})


def test_what_a_device_says_of_itself_now_is_what_counts_and_is_kept_once() -> None:
    bench = Bench()
    for client in ("a", "b"):
        bench.do(ev.Enrolled(0.0, client, Capability(accelerator="cpu", memory_bytes=1 << 30)))
    bench.work("a", "t")
    bench.do(ev.Enrolled(1.0, "a", Capability(accelerator="cuda", memory_bytes=1 << 30)))
    e = bench.engine
    for ledger in (e.ledger, restore(take_snapshot(e), e.spec, e.strategy, e.settings).ledger):
        assert list(ledger.clients) == ["a", "b"]
        assert [client.capability.accelerator for client in ledger.clients.values()] == ["cuda", "cpu"]
        assert [client.accepted for client in ledger.clients.values()] == [1, 0]

    ledger = Ledger(receipts_max=2)
    kinds = [Capability(accelerator="".join(("c", "pu"))) for _ in range(3)]
    ledger.enrol("x", kinds[0])
    ledger.enrol("y", kinds[1])
    ledger.restore({"z": ClientRecord(kinds[2]), "w": ClientRecord(kinds[2], 1)}, (), ())
    assert len({id(client.capability) for client in ledger.clients.values()}) == 1
    assert ledger.clients["x"] is ledger.clients["y"] is ledger.clients["z"]
    assert ledger.clients["w"].accepted == 1


def test_answers_and_refusals_are_counted_for_each_device() -> None:
    bench = Bench(buffer_size=1, staleness_max=1)
    bench.enrol("a", "b")
    bench.ask("b", "late")
    bench.work("a", "t0")
    bench.work("a", "t1")
    assert decision(bench.push("b", "late")).verdict is Verdict.REJECTED
    counts = {name: (c.accepted, c.rejected) for name, c in bench.engine.ledger.clients.items()}
    assert counts == {"a": (2, 0), "b": (0, 1)}


def test_the_mean_time_of_a_device_follows_its_newest_tasks() -> None:
    bench = Bench(lease_s=1000.0)
    bench.enrol("a")
    means = []
    for n, took_s in enumerate((10.0, 20.0, 40.0)):
        bench.ask("a", f"t{n}", now=100.0 * n)
        bench.push("a", f"t{n}", now=100.0 * n + took_s, local_steps=2)
        client = bench.engine.ledger.clients["a"]
        means.append((client.task_s_ewma, client.step_s))
    assert means == [(10.0, 5.0), (pytest.approx(13.0), 6.5), (pytest.approx(21.1), 11.0)]
    assert bench.engine.ledger.slowness("a") == 0.5, "nobody else to compare with"


def test_what_is_in_no_snapshot_is_noted_once_somebody_saves_the_books() -> None:
    ledger = Ledger(receipts_max=10)
    ledger.enrol("a", Capability())
    ledger.file(receipt("u0", "t0"), answers_task=True)
    assert [ledger.unsaved] == [None]
    ledger.track(saved=False)
    assert ledger.unsaved == Unsaved(["a"], {"a"}, 1)
    ledger.track(saved=True)
    assert ledger.unsaved == Unsaved([], set(), 0)
    ledger.enrol("a", Capability(examples=3))
    ledger.enrol("b", Capability())
    for n in (1, 2, 3):
        ledger.file(receipt(f"u{n}", f"t{n}"), answers_task=True)
    assert ledger.unsaved == Unsaved(["b"], {"a", "b"}, 3)
    ledger.unsaved_after_all(Unsaved(["c"], {"c"}, 2))  # of a snapshot that came to nothing
    assert ledger.unsaved == Unsaved(["c", "b"], {"a", "b", "c"}, 5)
    assert [r.update_id for r in ledger.newest_receipts(3)] == ["u1", "u2", "u3"]
    assert [r.update_id for r in ledger.newest_receipts(9)] == ["u0", "u1", "u2", "u3"]


def test_ranks_follow_the_devices_after_a_restore_as_well() -> None:
    """Each time is forgotten as soon as its device has another one, whoever counted it."""
    bench = Bench("fedasync", lease_s=100.0)
    took_s = {"a": 1.0, "b": 5.0, "c": 5.0, "d": 20.0}
    bench.enrol(*took_s)
    now = 0.0

    def work(client: str, seconds: float) -> None:
        nonlocal now
        bench.ask(client, f"at {now}", now=now)
        bench.push(client, f"at {now}", now=now + seconds, local_steps=1, metrics={TRAIN_S: seconds})
        now += seconds

    for client, seconds in took_s.items():
        work(client, seconds)
    e = bench.engine
    bench.engine = restore(take_snapshot(e), e.spec, e.strategy, e.settings)
    for client, seconds in (("b", 100.0), ("d", 0.1), ("a", 50.0), ("c", 100.0)):
        work(client, seconds)
        ledger = bench.engine.ledger
        times = {c: record.step_s for c, record in ledger.clients.items()}
        for one, own_s in times.items():
            assert own_s is not None
            faster = sum(other < own_s for other in times.values() if other is not None)
            slower = sum(other > own_s for other in times.values() if other is not None)
            assert ledger.slowness(one) == faster / (faster + slower)


def test_how_many_live_tasks_started_from_each_version_is_known() -> None:
    ledger = Ledger(receipts_max=1)
    tasks = [task("t0"), task("t1"), task("t2", base=3), task("t3", "b", base=3)]
    for one in tasks:
        ledger.open(one)
    assert (ledger.live, dict(ledger.bases), ledger.holders) == (4, {0: 2, 3: 2}, {"a", "b"})
    ledger.replace(replace(tasks[1], state=TaskState.EXPIRED))
    ledger.replace(replace(tasks[2], expires_at=99.0))
    ledger.close(tasks[3])
    assert (ledger.live, dict(ledger.bases), ledger.holders) == (2, {0: 1, 3: 1}, {"a"})
    assert [t.task_id for t in ledger.live_of("a")] == ["t0", "t2"]
    assert [t.task_id for t in ledger.expired_of("a")] == ["t1"]
    assert (ledger.live_of("b"), ledger.expired_of("b"), ledger.has_open("b")) == ([], [], False)
    ledger.close(tasks[1])
    assert (ledger.live, dict(ledger.bases), ledger.has_open("a")) == (2, {0: 1, 3: 1}, True)


def test_who_has_answered_is_saved_anew_and_nobody_else() -> None:
    ledger = Ledger(receipts_max=9)
    for client in "ab":
        ledger.enrol(client, Capability())
    ledger.track(saved=True)
    ledger.open(task("t0"))
    ledger.finished_task(task("t0"), 4.0, update(task("t0")), rejection=False)
    ledger.close(task("t0"))
    assert ledger.unsaved == Unsaved([], {"a"}, 0)


def test_what_changes_the_books_is_noted_for_those_who_show_them() -> None:
    ledger = Ledger(receipts_max=9)
    ledger.enrol("before", Capability())
    ledger.touched = Touched()
    ledger.enrol("a", Capability())
    assert ledger.touched == Touched(clients={"a"})
    for change in (ledger.open, ledger.replace, ledger.close):
        ledger.touched = Touched()
        change(task("t0"))
        assert ledger.touched == Touched(tasks={"t0"})
    expired = replace(task("t1"), state=TaskState.EXPIRED)
    ledger.open(task("t1"))
    ledger.replace(expired)
    ledger.touched = Touched()
    ledger.close(expired)
    assert ledger.touched == Touched(tasks={"t1"}), "one that was not live as well"


def test_a_fleet_of_endless_kinds_does_not_fill_the_memory() -> None:
    ledger = Ledger(receipts_max=1)
    most = 0
    for n in range(CAPABILITIES_KEPT + 2):
        ledger.enrol(f"c{n}", Capability(examples=n))
        most = max(most, len(ledger._kinds))
    assert most == CAPABILITIES_KEPT
    assert len(ledger._kinds) == 2, "begun anew"
    assert all(
        ledger.clients[f"c{n}"] == ClientRecord(Capability(examples=n)) for n in (0, 9, most, most + 1)
    )


@pytest.mark.parametrize(
    ("steps", "train_s", "step_s"),
    [
        (1, 8.0, 8.0),
        (4, 8.0, 2.0),
        (4, None, 5.0),  # the time from grant to answer stands in
        (0, 8.0, None),  # of no step
        (1, STEP_S_MIN, STEP_S_MIN),
        (1, STEP_S_MAX, STEP_S_MAX),
        (1, math.nextafter(STEP_S_MIN, 0.0), None),
        (1, math.nextafter(STEP_S_MAX, math.inf), None),
    ],
)
def test_the_time_of_a_step_is_that_of_the_training_where_it_is_one(
    steps: int, train_s: float | None, step_s: float | None
) -> None:
    ledger = Ledger(receipts_max=1)
    ledger.enrol("a", Capability())
    metrics = {} if train_s is None else {TRAIN_S: train_s}
    ledger.finished_task(task("t0"), 20.0, update(task("t0"), steps, **metrics), rejection=False)
    assert ledger.clients["a"].step_s_ewma == step_s
    assert ledger.clients["a"].task_s_ewma == 20.0
