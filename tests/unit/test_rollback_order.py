"""Which orders to roll back make sense, at the bounds; and what of a log is left out by several."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from machines import SPEC
from rollbacks import World, ask_of, seq_of_version

from anabranch.core import events as ev
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.strategy import Context
from anabranch.core.errors import ConfigError, StoreCorrupt, UnknownVersion
from anabranch.core.model.params import digest
from anabranch.core.model.updates import Task, TaskState
from anabranch.host.log import WholeLog
from anabranch.host.rollback import Folding, check_rollback
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.scheduled import Scheduled
from anabranch.strategies.schedulers.scheduler import OpenScheduler

TURNS = [("a", 0, 1.0), ("b", 0, 2.0), ("c", 0, 4.0), ("a", 0, 8.0), ("b", 0, 16.0)]


def played(strategy: str = "fedbuff", **params: Any) -> World:
    """Five versions of one update each: the model is the sum of what counts."""
    world = World(strategy, {"buffer_size": 1, "staleness": {"name": "constant"}, **params}, {})
    world.enrol()
    world.play(TURNS)
    assert world.engine.version == 5
    return world


def order(world: World, version: int, *without: str, everyone: bool = False) -> ev.RolledBack:
    seq = seq_of_version(world, version) if version else 0
    return ev.RolledBack(1e4, version, seq, without, everyone)


@pytest.mark.parametrize("version", [0, 5])
def test_any_version_that_there_is_can_be_gone_back_to(version: int) -> None:
    check_rollback(played().engine, ev.RolledBack(1.0, version, 0, ("a",)))
    check_rollback(played().engine, ev.RolledBack(1.0, version, 0, (), everyone=True))


@pytest.mark.parametrize(
    ("version", "without", "error", "words"),
    [
        (6, ("a",), UnknownVersion, "version 6 is not published: the newest is 5"),
        (-1, ("a",), UnknownVersion, "version -1 is not published"),
        (3, (), ConfigError, "without: name a client whose updates are left out, or set everyone"),
        (3, ("a", "ghost"), ConfigError, "without: client 'ghost' is not enrolled"),
    ],
)
def test_orders_that_make_no_sense(
    version: int, without: tuple[str, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        check_rollback(played().engine, ev.RolledBack(1.0, version, 0, without))


WAITS = {"phases": [{"strategy": "fedbuff", "until_updates": 2}, {"strategy": "fedcompass"}]}


@pytest.mark.parametrize(
    ("strategy", "table", "why"),
    [
        ("fedavg", {}, "works in rounds, whose cohorts were drawn: no update"),
        ("fedcompass", {}, "goes by who trained beside whom, which no update says: no update can"),
        ("waves", {}, "goes by who trained beside whom, which no update says: no update can"),
        ("phased", WAITS, "goes by who trained beside whom, which no update says: no update can"),
    ],
)
def test_who_waits_for_others_cannot_be_folded_anew_without_them(
    strategy: str, table: dict[str, Any], why: str
) -> None:
    world = World(strategy, table, {})
    world.enrol()
    with pytest.raises(ConfigError, match=f"strategy '{strategy}' {why}"):
        check_rollback(world.engine, ev.RolledBack(1.0, 0, 0, ("a",)))


@pytest.mark.parametrize(
    ("version", "without", "everyone", "kept"),
    [
        (0, ("a",), False, (2.0, 4.0, 16.0)),
        (1, ("a",), False, (1.0, 2.0, 4.0, 16.0)),
        (3, ("a",), False, (1.0, 2.0, 4.0, 16.0)),
        (4, ("a",), False, (1.0, 2.0, 4.0, 8.0, 16.0)),
        (0, ("a", "b"), False, (4.0,)),
        (2, (), True, (1.0, 2.0)),
        (5, (), True, (1.0, 2.0, 4.0, 8.0, 16.0)),
    ],
)
def test_the_model_is_the_sum_of_what_counts(
    version: int, without: tuple[str, ...], everyone: bool, kept: tuple[float, ...]
) -> None:
    world = played()
    whole = world.engine.vector.copy()
    assert whole[0] == 31.0
    event = order(world, version, *without, everyone=everyone)
    world.do(world.refold(event, len(world.log) + 1, world.engine))
    assert world.engine.vector[0] == sum(kept)
    assert world.engine.version == 6, "no number is used twice"


def test_rollbacks_add_up_and_what_comes_after_counts() -> None:
    world = played()
    world.do(world.refold(order(world, 3, "a"), len(world.log) + 1, world.engine))  # without 8
    world.play([("c", 0, 32.0), ("d", 0, 64.0)])
    assert world.engine.vector[0] == 1 + 2 + 4 + 16 + 32 + 64
    world.do(world.refold(order(world, 0, "c"), len(world.log) + 1, world.engine))  # without 4 and 32
    assert world.engine.vector[0] == 1 + 2 + 16 + 64


def test_a_fold_in_steps_takes_in_what_has_come_meanwhile() -> None:
    at_once, in_steps = played(), played()
    for world in (at_once, in_steps):
        event = order(world, 3, "a")
        folding = Folding(world.refold, event, len(world.log), world.engine)
        if world is in_steps:
            looked_at = 0
            while folding.advance(1):
                looked_at += 1
            assert looked_at == 2 * len(world.log), "once for what counts, once for the fold"
            assert not folding.advance(1)
        world.play([("d", 0, 64.0)])
        world.do(folding.finish(len(world.log) + 1, 1e4))
        assert world.engine.vector[0] == 1 + 2 + 4 + 16 + 64
    assert digest(at_once.engine.vector) == digest(in_steps.engine.vector)


@dataclass(frozen=True)
class LastLoss:
    at: float = 0.0


class LossClock(OpenScheduler):
    """Somebody's own: it remembers when a task was lost."""

    name: ClassVar[str] = "loss_clock"
    state_type: ClassVar[type[Any]] = LastLoss

    def lost(self, state: LastLoss, task: Task, context: Context) -> LastLoss:
        return LastLoss(context.now)


class ClockedWorld(World):
    def fresh(self) -> Engine:
        strategy: Any = Scheduled(FedBuff(buffer_size=1), LossClock())
        return Engine(SPEC, strategy, self.settings, super().fresh().vector)


def test_a_fold_in_steps_goes_by_the_time_that_the_log_has() -> None:
    """The order came at 61, and a task that was open then has come to nothing when it is carried out."""
    world = ClockedWorld("fedbuff", {}, {})
    world.enrol()
    world.do(ev.TaskAsked(60.0, ask_of("d", "t-open")))
    folding = Folding(world.refold, ev.RolledBack(61.0, 0, 0, ("a",)), len(world.log), world.engine)
    while folding.advance(1):
        pass
    world.do(ev.TaskDropped(70.0, "d", "t-open", "no room"))
    found = folding.finish(len(world.log) + 1, 80.0)
    assert found.fold is not None
    assert (found.now, found.fold.state.schedule) == (80.0, LastLoss(80.0))


def test_settings_that_hold_go_on_and_bounds_of_tasks_do_not_bind_the_fold() -> None:
    world = played()
    world.do(ev.SettingsChanged(50.0, {"server.lease_s": 7.0, "client.epochs": 3}, "an operator"))
    world.do(world.refold(order(world, 3, "a"), len(world.log) + 1, world.engine))
    assert (world.engine.settings.lease_s, world.engine.settings.local.epochs) == (7.0, 3)
    (granted,) = world.do(ev.TaskAsked(60.0, ask_of("d", "t-new")))
    assert granted.task.lease_s == 7.0
    assert granted.task.local.epochs == 3


def test_a_task_that_is_open_can_be_answered_after_a_rollback() -> None:
    world = played()
    (granted,) = world.do(ev.TaskAsked(60.0, ask_of("d", "t-open")))
    world.do(world.refold(order(world, 3, "a"), len(world.log) + 1, world.engine))
    assert world.engine.ledger.tasks["t-open"].state is TaskState.LEASED
    world.push("t-open", "d", 64.0, 70.0)
    assert world.engine.vector[0] == 1 + 2 + 4 + 16 + 64
    assert granted.task.base_version == 5


def test_a_payload_that_is_gone_is_named_with_its_event() -> None:
    world = played()
    (place, record) = [(seq, r) for seq, r in world.log if r["kind"] == "update"][1]

    def payload(reference: ev.Payload) -> bytes:
        if reference.sha256 == record["payload"]["sha256"]:
            raise StoreCorrupt("no such file")
        return world.payloads[reference.sha256]

    refold = replace(world.refold, log=WholeLog(world.records, payload))
    words = f"event {place}: a rollback needs the payload of every update that counts, but that of "
    with pytest.raises(StoreCorrupt, match=re.escape(words + record["update_id"])):
        refold(order(world, 3, "a"), len(world.log) + 1, world.engine)
    refold(order(world, 0, "b"), len(world.log) + 1, world.engine)  # it does not count there
