"""The kits notice what is wrong in ways that a simulation and its replay do not show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import own_parts
import pytest
import wrong_parts as wrong
from _pytest.outcomes import Failed

from anabranch.client.local import LocalServer
from anabranch.compress.registry import CODEC_STAGES, make_codec
from anabranch.core.errors import AppError
from anabranch.reports.tracking.run import TrackedRun
from anabranch.testing import (
    RuleConformance,
    SchedulerConformance,
    StageConformance,
    StoreConformance,
    StrategyConformance,
    TrackerConformance,
    TransportConformance,
)
from anabranch.testing.federation import config, first_weights
from anabranch.testing.store import INFO
from anabranch.testing.transport import SETTINGS, Connect

KIT = StrategyConformance()
EQUAL, RESTART = KIT.test_equal_calls_give_equal_results, KIT.test_a_restart_changes_nothing
LET_IN, DATA = KIT.test_somebody_is_let_in_where_nobody_trains, KIT.test_the_state_is_data
ELSEWHERE, ZEROS = KIT.test_another_process_comes_to_the_same, KIT.test_an_update_of_zeros_is_no_obstacle
GROWS = KIT.test_what_is_remembered_does_not_grow_with_the_updates


@pytest.mark.parametrize(
    ("strategy", "law", "noticed", "says"),
    [
        (wrong.KeepsTheModel, RESTART, AssertionError, "remember nothing but in the state"),
        (wrong.NumbersAsKeys, DATA, AssertionError, None),
        (wrong.DenseAlone, EQUAL, TypeError, None),
        (wrong.WritesTheUpdate, EQUAL, ValueError, "read-only"),
        (wrong.Counting, LET_IN, AssertionError, "refused for ever"),
        (wrong.CountsInSelf, RESTART, AssertionError, "remember nothing but in the state"),
        (wrong.ByHash, ELSEWHERE, AssertionError, "differ by process"),
        (wrong.InTheOrderOfASet, ELSEWHERE, AssertionError, "differ by process"),
        (wrong.Normalises, ZEROS, ZeroDivisionError, None),
        (wrong.KeepsAll, GROWS, AssertionError, "after 256 updates"),
        (wrong.ChangesWhatItHolds, EQUAL, AssertionError, "has changed the model"),
        (wrong.GrowsBeyondNumbers, EQUAL, AssertionError, "not finite"),
        (wrong.AnothersNumber, EQUAL, AppError, r"weight of np.float32\(0.5\)"),
    ],
)
def test_a_wrong_strategy_is_noticed(
    strategy: type[wrong.Plain], law: Any, noticed: type[Exception], says: str | None
) -> None:
    with pytest.raises(noticed, match=says):
        law(strategy())
    for each in (EQUAL, RESTART, LET_IN, DATA, ELSEWHERE, ZEROS, GROWS):
        each(wrong.Plain())


OF_ASKS = SchedulerConformance()
PLANS, STEPS = (
    OF_ASKS.test_equal_calls_give_equal_results_and_the_state_is_data,
    OF_ASKS.test_plans_change_steps_and_chain_alone,
)
ADMITS, OPENS = (
    OF_ASKS.test_admitting_changes_nothing_and_refuses_with_a_reason,
    OF_ASKS.test_somebody_trains_where_nobody_does,
)
GOES_ON = OF_ASKS.test_nobody_waits_for_ever_for_who_has_left


@pytest.mark.parametrize(
    ("scheduler", "law", "says"),
    [
        (wrong.ChangesPaces, PLANS, "the state that was given has changed"),
        (wrong.OtherRates, STEPS, None),
        (wrong.EverySecondAsk, ADMITS, None),
        (wrong.LetsNobodyIn, OPENS, "a fleet that is all refused"),
        (wrong.WaitsForTheFirst, GOES_ON, None),
    ],
)
def test_a_wrong_scheduler_is_noticed(scheduler: type[Any], law: Any, says: str | None) -> None:
    with pytest.raises(AssertionError, match=says):
        law(scheduler())
    for each in (PLANS, STEPS, ADMITS, OPENS, GOES_ON):
        each(wrong.LetsAllIn())


@pytest.fixture
def stages() -> Iterator[None]:
    with own_parts.forgotten():
        for stage in (wrong.Halves, wrong.Unscaled, wrong.Nothing, wrong.Backwards):
            CODEC_STAGES.let_in(f"wrong_parts:{stage.__name__}", stage)
        yield


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("stage", [wrong.Unscaled, wrong.Nothing, wrong.Backwards])
def test_a_stage_by_which_something_else_arrives_is_noticed(stage: type[wrong.Halves]) -> None:
    law = StageConformance().test_what_arrives_is_of_the_direction_and_size_of_what_was_sent
    law(make_codec("halves"))
    with pytest.raises(AssertionError, match="another vector, or of another length"):
        law(make_codec(stage.name))


def test_a_rule_that_divides_by_the_length_of_a_row_is_noticed() -> None:
    with pytest.raises(AssertionError):
        RuleConformance().test_rows_of_zeros_are_no_error(wrong.UnitRows())


LAWS = TransportConformance()


def opened_by(kind: type[wrong.Local]) -> Connect:
    """How the kit has devices' transports of a class, all to one run."""
    server = LocalServer(first_weights(), config(**SETTINGS), time.time)
    opener: Any = TransportConformance.opened
    found: Connect = opener.__wrapped__(LAWS, partial(kind, server))
    return found


@pytest.mark.parametrize(
    ("transport", "law", "says"),
    [
        (wrong.AnswersNothing, "test_a_push_may_ask_for_nothing", "push must give PushAnswer, not None"),
        (wrong.Pickles, "test_a_push_may_ask_for_nothing", "cannot pickle .*memoryview"),
        (wrong.OneAnswer, "test_two_threads_may_call_at_a_time", "must give .*, not a"),
        (wrong.ItsOwnTasks, "test_a_repeated_ask_gets_the_same_task", "the task that was asked for, 't-1'"),
    ],
)
def test_a_wrong_transport_is_noticed(transport: type[wrong.Local], law: str, says: str) -> None:
    with pytest.raises(AppError, match=says):
        getattr(LAWS, law)(opened_by(transport))
    getattr(LAWS, law)(opened_by(wrong.Local))


def test_a_transport_that_drops_no_diverged_task_is_noticed() -> None:
    law = LAWS.test_a_task_that_was_given_back_is_cancelled
    law(opened_by(wrong.DropsShort), diverged=False)
    with pytest.raises(AppError, match="drop"):
        law(opened_by(wrong.DropsShort), diverged=True)


def test_a_transport_whose_heartbeats_say_nothing_is_noticed() -> None:
    law = LAWS.test_a_heartbeat_renews_the_lease
    law(opened_by(wrong.Local))
    with pytest.raises(AssertionError, match="the server has not heard of the progress"):
        law(opened_by(wrong.BeatsInVain))


def test_a_transport_that_keeps_a_dead_connection_is_noticed() -> None:
    class Cuts(TransportConformance):
        def cut(self) -> bool:
            wrong.OneConnection.dead = 1
            return True

    def after_a_cut(kind: type[wrong.Local]) -> None:
        wrong.OneConnection.dead = 0
        Cuts().test_after_a_cut_there_is_another_connection(opened_by(kind))

    after_a_cut(wrong.OneConnection)
    with pytest.raises(Failed, match="after a failure a call opens another connection"):
        after_a_cut(wrong.DeadConnection)


def test_a_tracker_that_leaves_a_thread_is_noticed(tmp_path: Path) -> None:
    kit, run = TrackerConformance(), TrackedRun("a run", "fedbuff", "digits", 3, "simulated", {}, tmp_path)
    kit.tracker = wrong.Sends
    try:
        with pytest.raises(AssertionError, match="the process would never end"):
            kit.test_nothing_of_it_goes_on_after_the_end(run)
    finally:
        wrong.Sends.over.set()


def test_a_store_that_writes_when_it_is_closed_is_noticed() -> None:
    law = StoreConformance().test_what_append_and_acknowledge_have_returned_for_is_read_by_others_at_once
    law(partial(wrong.Keeps, {}))
    with pytest.raises(AssertionError, match="a kill now would lose what append has returned for"):
        law(partial(wrong.KeepsAtItsEnd, {}))


def test_a_store_that_cannot_renew_is_noticed() -> None:
    law = StoreConformance().test_who_leads_goes_on
    store = wrong.Keeps({})
    store.start(INFO)
    law(store)
    with pytest.raises(NotImplementedError):
        law(wrong.NeverRenews({}))
