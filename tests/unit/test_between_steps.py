"""What is done between two steps of a training that goes on: lists of moments, numbers by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
from merges import Live, vector

from anabranch.core.config.tables import ClientTable
from anabranch.core.engine.buffers import AVERAGE, LOCAL, DeviceBuffers
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec, TensorSpec
from anabranch.core.model.submodels import Coordinates, tensor_set
from anabranch.core.model.updates import LocalPlan, Task
from anabranch.host.elastic import (
    BetweenSteps,
    ElasticAnswer,
    Exchanges,
    TrainingMoment,
    merge_of,
    part_of,
)
from anabranch.host.merging import ElasticDelta
from anabranch.host.policies import EverySteps, ExchangeState


def told(moment: TrainingMoment | None) -> tuple[list[float], int, float] | None:
    return None if moment is None else (moment.vector.tolist(), moment.steps, moment.seconds)


@dataclass
class Watching:
    """A policy that notes what it is asked, and finds due what it is told to."""

    watches_steps: ClassVar[bool] = True
    due_at: tuple[int, ...] = ()
    asked: list[ExchangeState] = field(default_factory=list)

    def due(self, since: ExchangeState) -> bool:
        self.asked.append(since)
        return len(self.asked) in self.due_at


def test_a_snapshot_is_taken_when_it_is_wanted_and_due() -> None:
    live, between = Live(0.0), BetweenSteps(ElasticDelta(0.5), EverySteps(2), now=100.0)
    between.want()
    taken = []
    for now in (101.0, 102.0, 103.0, 104.0):  # before the first step, then after each
        taken.append((between.step(live, now), between.steps, told(between.take())))
        live.add(vector(1.0))
    assert taken == [(False, 0, None), (False, 1, None), (True, 2, ([2.0], 2, 3.0)), (False, 3, None)]

    between.want()  # the one in flight has arrived: the next counts from the snapshot before
    assert between.step(live, 105.0)
    assert told(between.take()) == ([4.0], 2, 2.0)
    assert between.take() is None


def test_a_snapshot_that_nobody_wants_any_more_is_not_taken() -> None:
    live, between = Live(3.0), BetweenSteps(ElasticDelta(0.5), EverySteps(1), now=0.0)
    between.want()
    between.forgo()
    assert [between.step(live, now) for now in (1.0, 2.0, 3.0)] == [False] * 3
    assert between.take() is None

    between.want()
    assert between.step(live, 4.0)
    between.forgo()  # it was there, and is not fetched
    assert between.take() is None


def test_a_wish_forgets_the_snapshot_before() -> None:
    live, between = Live(3.0), BetweenSteps(ElasticDelta(0.5), EverySteps(1), now=0.0)
    between.want()
    between.step(live, 1.0)
    assert between.step(live, 2.0)
    between.want()
    assert between.take() is None


def test_the_server_may_want_what_there_is_once() -> None:
    live, between = Live(0.0), BetweenSteps(ElasticDelta(0.5), EverySteps(10), now=0.0)
    between.want()
    between.step(live, 1.0)
    between.advise()
    assert between.step(live, 2.0)
    between.want()
    assert not between.step(live, 3.0)


def test_an_answer_is_merged_before_the_next_step_and_once() -> None:
    live, between = Live(4.0), BetweenSteps(ElasticDelta(0.5), EverySteps(100), now=0.0)
    between.answer(ElasticAnswer(vector(1.0), vector(11.0), exchange_s=3.0))
    between.step(live, 1.0)
    assert live.vector.tolist() == [9.0]  # 4 + (11 - 1) / 2
    between.step(live, 2.0)
    assert live.vector.tolist() == [9.0]


def test_what_a_policy_is_asked_by() -> None:
    live, policy = Live(0.0, 0.0), Watching(due_at=(3,))
    between = BetweenSteps(ElasticDelta(0.5), policy, now=10.0)
    between.step(live, 11.0)
    live.add(vector(3.0, 4.0))
    between.want()
    between.advise()
    between.step(live, 12.0)
    live.add(vector(0.0, 2.0))
    between.answer(ElasticAnswer(vector(0.0, 0.0), vector(8.0, 0.0), exchange_s=0.25))
    between.step(live, 14.0)  # due: the wish and the advice are met
    live.add(vector(1.0, 0.0))
    between.step(live, 15.0)
    assert policy.asked == [
        ExchangeState(0, 1.0, 0.0, ready=False, advised=False, step_norm2=None),
        ExchangeState(1, 2.0, 0.0, ready=True, advised=True, step_norm2=25.0),
        ExchangeState(2, 0.0, 0.25, ready=True, advised=True, step_norm2=4.0),
        # The merge is no step: its 4 do not count, and the exchange ended at 14.
        ExchangeState(1, 1.0, 0.25, ready=False, advised=False, step_norm2=1.0),
    ]


@pytest.mark.parametrize("follows", [True, False])
def test_a_task_is_met_with_the_answer_to_the_last_snapshot(follows: bool) -> None:
    exchanges = Exchanges(follows)
    assert exchanges.meet(vector(1.0), 1.0) is None
    exchanges.leave(TrainingMoment(vector(2.0), 5, 1.0), 3.0)
    answer = exchanges.meet(vector(7.0), 4.5)
    assert answer is not None
    assert (answer.snapshot.tolist(), answer.center.tolist(), answer.exchange_s) == ([2.0], [7.0], 1.5)

    lost = exchanges.meet(vector(9.0), 6.0)  # the task before came to nothing
    if not follows:
        assert lost is None
        return
    assert lost is not None
    assert (lost.snapshot.tolist(), lost.center.tolist(), lost.exchange_s) == ([7.0], [9.0], 0.0)


@pytest.mark.parametrize(("weight", "answers"), [(1.0, True), (0.5, False)])
def test_a_server_that_adds_up_is_followed(weight: float, answers: bool) -> None:
    exchanges = Exchanges.of(ClientTable(merge_weight=weight))
    exchanges.meet(vector(1.0), 0.0)
    assert (exchanges.meet(vector(2.0), 1.0) is not None) is answers


@pytest.mark.parametrize(
    ("rule", "policy", "after"),
    [
        ("delta", AVERAGE, [5.0, 30.0]),  # weights: 4 + (6 - 2) / 4; buffers: 20 + (60 - 20) / 4
        ("delta", LOCAL, [5.0, 20.0]),  # buffers are the device's own
        ("paper-interpolation", AVERAGE, [4.5, 30.0]),  # 4 + (6 - 4) / 4
    ],
)
def test_the_rule_of_a_run(rule: str, policy: str, after: list[float]) -> None:
    spec = ParamSpec(
        (TensorSpec("w", (1,), "float32"), TensorSpec("mean", (1,), "float32")), buffers=("mean",)
    )
    merge, live = (
        merge_of(ClientTable(merge=rule, merge_weight=0.25), DeviceBuffers(spec, policy)),
        Live(4, 20),
    )
    merge.apply(live, vector(2.0, 10.0), vector(6.0, 60.0))
    assert live.vector.tolist() == after


def test_a_smaller_model_is_refused_and_whole_tensors_are_not() -> None:
    task = Task("t", "a", 0, 0.0, 1.0, 1.0, 7, LocalPlan())
    assert part_of(task) is None
    assert part_of(replace(task, submodel=SECOND)) == SECOND
    with pytest.raises(ConfigError, match=r"trains the whole model: set submodel.name"):
        part_of(replace(task, submodel=Coordinates(np.arange(1))))


TWO = ParamSpec((TensorSpec("w", (1,), "float32"), TensorSpec("mean", (2,), "float32")), buffers=("mean",))
FIRST, SECOND = tensor_set(TWO, (0,)), tensor_set(TWO, (1,))


@pytest.mark.parametrize(("rule", "after"), [("delta", 3.0), ("blend", 2.5), ("paper-interpolation", 2.5)])
def test_golden_an_answer_of_a_part_touches_that_part_alone(rule: str, after: float) -> None:
    """The specification's: live 4, snapshot 3, centre 1."""
    for part, others in ((FIRST, [9.0, 8.0]), (None, [7.0, 6.5])):
        merge = merge_of(ClientTable(merge=rule, merge_weight=0.5), DeviceBuffers(TWO))
        between, live = BetweenSteps(merge, EverySteps(9), 0.0), Live(4.0, 9.0, 8.0)
        size = 1 if part else 3
        between.answer(ElasticAnswer(vector(3.0, 3.0, 3.0)[:size], vector(1.0, 5.0, 5.0)[:size], 0.0, part))
        between.merge(live, 1.0)
        assert live.vector.tolist() == [after, *others]


def test_without_a_step_meanwhile_both_rules_agree() -> None:
    """Live and snapshot are the same 3, the centre is 1: half of the way, whichever rule."""
    for rule in ("delta", "blend"):
        merge = merge_of(ClientTable(merge=rule, merge_weight=0.5), DeviceBuffers(TWO))
        between, live = BetweenSteps(merge, EverySteps(9), 0.0), Live(3.0, 9.0, 8.0)
        between.answer(ElasticAnswer(vector(3.0), vector(1.0), 0.0, FIRST))
        between.merge(live, 1.0)
        assert live.vector.tolist() == [2.0, 9.0, 8.0], rule


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_what_is_met_of_parts_in_turn(weight: float) -> None:
    """Who follows takes over what others did to any part; who is pulled changes where it has sent alone."""
    exchanges = Exchanges.of(ClientTable(merge_weight=weight))
    live = Live(0.0, 0.0, 0.0)
    between = BetweenSteps(ElasticDelta(weight), EverySteps(9), 0.0)
    assert exchanges.meet(vector(0.0, 0.0, 0.0), 0.0, FIRST) is None
    live.add(vector(2.0, 2.0, 2.0))
    exchanges.leave(TrainingMoment(live.flat(), 1, 1.0), 1.0)
    live.add(vector(1.0, 1.0, 1.0))
    # The server has taken the first part's 2, others have put 4 on each.
    answer = exchanges.meet(vector(6.0, 4.0, 4.0), 2.0, SECOND)
    assert answer is not None
    between.answer(answer)
    between.merge(live, 2.0)
    assert live.vector.tolist() == ([5.0, 3.0, 3.0] if weight < 1 else [7.0, 7.0, 7.0])
    exchanges.leave(TrainingMoment(live.flat(), 1, 1.0), 3.0)
    answer = exchanges.meet(vector(8.0, 9.0, 9.0), 4.0, FIRST)
    assert answer is not None
    between.answer(answer)
    between.merge(live, 4.0)
    # Pulled: half way from what was sent (3) to 9. Following: what was learned and not sent stays, 1 on the
    # first part; of the second all was sent.
    assert live.vector.tolist() == ([5.0, 6.0, 6.0] if weight < 1 else [9.0, 9.0, 9.0])
