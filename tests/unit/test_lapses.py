"""Places that come to nothing, as lists of events: they cost their device its turn, and others nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rooms import Room, contest

from anabranch.core.config.ranges import LOT, TURNS
from anabranch.core.effects import Granted, Refused
from anabranch.core.engine.lapses import WAIT_S_MAX, Lapses
from anabranch.core.model.updates import Ask, Reason

LEASE_S, SHORT_S = 60.0, 16.0
HONEST = tuple(f"honest-{n}" for n in range(10))
HOSTILE = tuple(f"hostile-{n}" for n in range(5))


def reason(answer: Granted | Refused) -> Reason | None:
    return answer.reason if isinstance(answer, Refused) else None


def lapse(room: Room, client: str, times: int, now: float) -> None:
    """So many tasks of this client come to nothing; nobody waits meanwhile."""
    for n in range(times):
        assert room.is_granted(client, now + 0.001 * n)
        room.drop(client, now + 0.001 * n)


# --- whole fleets --------------------------------------------------------------------------------


@pytest.mark.parametrize("every_s", [4.0, 1.25 * SHORT_S], ids=["crash loops", "leases that run out"])
def test_devices_that_never_push_do_not_stop_the_others(every_s: float) -> None:
    room = Room(places=5, lease_s=SHORT_S, names=(*HONEST, *HOSTILE))
    done = contest(room, HONEST, dict.fromkeys(HOSTILE, every_s), until=120.0)
    alone = contest(Room(places=5, lease_s=SHORT_S, names=HONEST), HONEST, {}, until=120.0)
    assert sum(done.values()) > 0.6 * sum(alone.values())
    assert min(done.values()) > 0.9 * max(done.values())


def test_teasq_as_it_comes_goes_on_beside_a_device_that_crashes() -> None:
    room = Room(places=0, strategy="teasq", names=(*HONEST[:8], "crashing"))
    done = contest(room, HONEST[:8], {"crashing": 2.0}, until=60.0)
    assert room.bench.engine.version > 100
    assert min(done.values()) > 10


def test_a_tenth_of_hostile_devices_starves_nobody() -> None:
    honest = [f"honest-{n}" for n in range(50)]
    hostile = {f"hostile-{n}": 1.25 * SHORT_S for n in range(6)}
    room = Room(places=6, lease_s=SHORT_S, names=(*honest, *hostile))
    done = contest(room, honest, hostile, until=150.0)
    alone = contest(Room(places=6, lease_s=SHORT_S, names=honest), honest, {}, until=150.0)
    assert sum(done.values()) > 0.7 * sum(alone.values())
    jain = sum(done.values()) ** 2 / (len(done) * sum(n * n for n in done.values()))
    assert jain > 0.98


# --- one device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "leases"), [(1, 0), (2, 1), (3, 3), (4, 3), (50, 3)])
def test_a_device_waits_longer_each_time_its_task_comes_to_nothing(times: int, leases: int) -> None:
    room = Room(places=2, lease_s=LEASE_S)
    lapse(room, "a", times, 0.0)
    room.ask("b", 1.0)
    room.ask("c", 1.0)
    ends = 0.001 * (times - 1) + leases * LEASE_S
    at = max(ends - 0.5, 1.1)
    room.ask("d", at)  # somebody waits
    if leases:
        answer = room.ask("a", at)
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.LAPSED
        assert answer.detail.startswith(f"{times} of its tasks in a row came to nothing, and others wait")
        assert 0 < answer.retry_after_s[0] < answer.retry_after_s[1] <= 60.0
    room.ask("d", ends + 1.2)
    assert reason(room.ask("a", ends + 1.2)) is Reason.AT_CAPACITY, "it stands in the line like the others"


def test_the_longest_wait_is_bounded() -> None:
    room = Room(places=1, lease_s=3000.0)
    lapse(room, "a", 100, 0.0)
    lapses = room.line._lapses
    assert lapses.refusal(room.bench.engine, Ask("a", "next"), WAIT_S_MAX) is not None
    assert lapses.refusal(room.bench.engine, Ask("a", "next"), WAIT_S_MAX + 1.0) is None


def test_a_device_that_has_lapsed_gets_a_place_that_nobody_else_wants() -> None:
    room = Room(places=1)
    lapse(room, "a", 9, 0.0)
    assert room.is_granted("a", 1.0)
    room.drop("a", 2.0)
    lapse(room, "b", 9, 3.0)
    assert room.is_granted("b", 4.0)
    assert reason(room.ask("a", 5.0)) is Reason.AT_CAPACITY, "devices of a kind stand in the line"
    room.drop("b", 6.0)
    assert room.is_granted("a", 6.0)


BAD, GOOD = tuple(f"bad-{n}" for n in range(8)), tuple(f"good-{n}" for n in range(20))


def crowded(lapses: int, lapsed: str = TURNS) -> Room:
    """Eight places, which the good devices have; twelve of them wait. The bad ones have no wait left."""
    room = Room(places=8, names=(*BAD, *GOOD), lapsed=lapsed)
    for client in BAD:
        lapse(room, client, lapses, 0.0)
    for client in GOOD:
        room.ask(client, 4 * LEASE_S)
    return room


def rounds(room: Room, first_s: float, times: int) -> Iterator[list[str]]:
    """Every device asks, and the good ones push, again and again: which of the bad ones have a place."""
    for now in (first_s + 0.4 * n for n in range(times)):
        for client in [c for c in GOOD if c in room.tasks]:
            room.push(client, now)
        for client in [c for c in (*BAD, *GOOD) if c not in room.tasks]:
            room.ask(client, now)
        for client in [c for c in GOOD if c not in room.tasks]:
            room.ask(client, now)
        yield [client for client in BAD if client in room.tasks]


def test_devices_that_have_lapsed_again_have_a_few_of_the_places_while_others_wait() -> None:
    room = crowded(2)
    for bad in rounds(room, 4 * LEASE_S + 0.4, 6):
        assert len(bad) <= 1
        assert len(room.tasks) == 8, "no place stays empty"
    assert bad == [BAD[0]]


def had_a_place(room: Room, first_s: float, times: int) -> list[str]:
    """The bad devices that had one in so many rounds, in their order; each pushes in the next."""
    had = []
    for n, bad in enumerate(rounds(room, first_s, times)):
        for client in bad:
            had.append(client)
            room.push(client, first_s + 0.4 * n + 0.2)
    return had


def test_one_fault_that_many_devices_share_costs_them_no_place() -> None:
    """The share is for who lapses again and again. As it was once, the last of them waited for all."""
    now = 4 * LEASE_S + 0.4
    assert set(had_a_place(crowded(1), now, 6)) == {*BAD}
    assert len({*had_a_place(crowded(1, LOT), now, 6)}) < len(BAD)


def in_the_line(lapsed: str) -> Room:
    """One of two places is free; c, b and a, which lapsed again, wait in this order, and g after them."""
    room = Room(places=2, names="abcdefg", lapsed=lapsed)
    for client in "abc":
        lapse(room, client, 2, 0.0)
    for client in "defcba":
        room.ask(client, LEASE_S + 2.0)
    room.push("d", LEASE_S + 2.2)
    assert room.is_granted("f", LEASE_S + 2.2)
    room.ask("g", LEASE_S + 2.2)
    room.push("e", LEASE_S + 2.3)
    return room


@pytest.mark.parametrize(("lapsed", "order"), [(TURNS, "cba"), (LOT, "cab")])
def test_devices_that_have_lapsed_again_have_their_places_in_turns(lapsed: str, order: str) -> None:
    room, had = in_the_line(lapsed), ""
    for n in range(3):
        now = LEASE_S + 2.4 + 0.2 * n
        granted = [c for c in "abc" if c not in had and room.is_granted(c, now)]
        assert len(granted) == 1, "one has the place that they share"
        had += granted[0]
        assert not any(room.is_granted(c, now) for c in "abcg" if c not in had)
        room.drop(granted[0], now + 0.1)
    assert had == order


def test_a_device_that_has_lapsed_again_and_is_gone_is_not_waited_for() -> None:
    room = in_the_line(TURNS)
    assert not room.is_granted("a", LEASE_S + 2.4)
    assert not room.is_granted("a", LEASE_S + 4.4), "b may come yet"
    assert room.is_granted("a", LEASE_S + 4.6)


@pytest.mark.parametrize("late", [False, True], ids=["in time", "after its lease"])
def test_an_update_ends_the_row(late: bool) -> None:
    room = Room(places=1, lease_s=10.0)
    lapse(room, "a", 4, 0.0)
    assert room.is_granted("a", 1.0)
    task_id = room.tasks["a"]
    if late:
        room.tick(20.0)
    room.line.heard(21.0, room.bench.push("a", task_id, now=21.0))
    assert "a" not in room.line._lapses


def test_an_update_of_before_that_is_sent_again_does_not() -> None:
    room = Room(places=1)
    assert room.is_granted("a", 0.0)
    task_id = room.tasks.pop("a")
    room.line.heard(0.5, room.bench.push("a", task_id, now=0.5))
    lapse(room, "a", 3, 1.0)
    assert "a" in room.line._lapses
    (again,) = room.bench.push("a", task_id, base=0, now=2.0)
    assert again.duplicate
    room.line.heard(2.0, [again])
    assert "a" in room.line._lapses


def test_a_flawed_update_does_not() -> None:
    room = Room(places=1)
    lapse(room, "a", 2, 0.0)
    room.ask("a", 1.0)
    room.line.heard(2.0, room.bench.push("a", room.tasks.pop("a"), flaw="not finite", now=2.0))
    assert "a" in room.line._lapses


def test_a_device_that_lost_its_answer_is_given_the_same_task() -> None:
    room = Room(places=1)
    lapse(room, "a", 3, 0.0)
    granted = room.ask("a", 1.0)
    assert isinstance(granted, Granted)
    room.ask("b", 2.0)  # somebody waits
    again = Ask("a", granted.task.task_id)
    assert room.line.refusal(room.bench.engine, again, 3.0) is None
    assert room.bench.ask("a", granted.task.task_id, 3.0) == [Granted(granted.task, again=True)]


def test_a_round_that_ends_is_no_fault_of_those_who_were_in_it() -> None:
    room = Room(places=0, strategy="fedavg", clients_per_round=1, over_selection=2.0, deadline_s=60.0)
    clients = [c for c in "abcdef" if room.is_granted(c, 0.0)]
    assert len(clients) == 2
    room.push(clients[0], 1.0)
    assert room.bench.engine.version == 1
    assert clients[1] not in room.line._lapses


def test_what_is_kept_of_devices_is_bounded() -> None:
    room = Room(places=1)
    room.line._lapses = lapses = Lapses(3)
    for client in "abcdef":
        lapse(room, client, 2, 0.0)
    assert [c in lapses for c in "abcdef"] == [False] * 3 + [True] * 3
    lapse(room, "d", 1, 1.0)
    lapse(room, "a", 2, 2.0)
    assert [c in lapses for c in "abcdef"] == [True, False, False, True, False, True], "the newest three"


# --- tenure --------------------------------------------------------------------------------------


def beaten(tenure_leases: float, somebody_waits: bool) -> float:
    """When the place is free of a device that beats every three seconds, a thousand at most."""
    room: Any = Room(places=1, lease_s=10.0, tenure_leases=tenure_leases)
    room.ask("a", 0.0)
    for n in range(1, 334):
        now = 3.0 * n
        room.tick(now)
        if "a" not in room.tasks:
            return now
        room.beat("a", float(n), now)
        if somebody_waits:
            room.ask("b", now)
    return 1000.0


def test_a_place_is_not_held_by_heartbeats_for_ever() -> None:
    assert 50.0 < beaten(5.0, somebody_waits=True) <= 63.0
    assert beaten(5.0, somebody_waits=False) == 1000.0
    assert beaten(0.0, somebody_waits=True) == 1000.0


def test_a_round_does_not_wait_for_who_only_beats() -> None:
    """Nobody else wants the place, so the lease goes on; the round ends by its deadline all the same."""
    room: Any = Room(strategy="fedavg", places=0, names="ab", lease_s=10.0, clients_per_round=2)
    room.ask("a", 0.0)
    room.ask("b", 0.0)
    room.push("b", 1.0)
    for n in range(1, 40):
        now = 3.0 * n
        room.tick(now)
        if "a" not in room.tasks:
            break
        room.beat("a", float(n), now)
    assert now == 60.0
    assert room.bench.engine.version == 1
    assert room.is_granted("b", 61.0)
