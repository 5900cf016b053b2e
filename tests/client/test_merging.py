"""The rules that merge the server's model into one in training, and when devices push: numbers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from merges import Live, Replacement, vector

from anabranch.core.config.tables import ClientTable, merge
from anabranch.core.errors import ConfigError
from anabranch.host.merging import (
    BLEND,
    DELTA,
    PAPER_INTERPOLATION,
    ElasticDelta,
    PaperInterpolation,
    WithBuffers,
    make_merge,
)
from anabranch.host.policies import Continuous, EverySteps, ExchangeState, OnAdvice, OnChange, make_policy


def test_three_exchanges_by_hand() -> None:
    """Each time 1 is learned before the snapshot and 2 after it; the server is at 10, at 11, at 12."""
    live, rule, seen = Live(0.0), ElasticDelta(0.5), []
    for center in (10.0, 11.0, 12.0):
        live.add(vector(1.0))
        snapshot = live.flat()
        live.add(vector(2.0))
        rule.apply(live, snapshot, vector(center))
        seen.append(float(live.vector[0]))
    # 0 + 1 + 2 + (10 - 1) / 2, then 7.5 + 3 + (11 - 8.5) / 2, then 11.75 + 3 + (12 - 12.75) / 2
    assert seen == [7.5, 11.75, 14.375]


@pytest.mark.parametrize(
    ("rule", "after"),
    [
        (ElasticDelta(0.5), 1 + 2 + 0.5 * (10 - 1)),
        (PaperInterpolation(0.5), 0.5 * (1 + 2) + 0.5 * 10),
        (Replacement(), 10),
        (ElasticDelta(1.0), 10 + 2),
    ],
)
def test_a_rule_is_its_equation(rule: Any, after: float) -> None:
    live = Live(3.0)
    rule.apply(live, vector(1.0), vector(10.0))
    assert live.vector.tolist() == [after]


@pytest.mark.parametrize(
    ("rule", "weight"), [(ElasticDelta(1.0), 10 + 2), (PaperInterpolation(0.5), 0.5 * 3 + 0.5 * 10)]
)
def test_a_buffer_goes_part_of_the_way_whatever_the_rule_makes_of_weights(rule: Any, weight: float) -> None:
    """A variance of 0.1 that was 0.9 when it was sent, and is 0.3 at the server, must not become negative."""
    live = Live(3.0, 0.1)
    WithBuffers(rule, np.array([1]), 0.5).apply(live, vector(1.0, 0.9), vector(10.0, 0.3))
    assert live.vector == pytest.approx([weight, 0.2])
    WithBuffers(rule, np.array([1]), 0.0).apply(live, vector(1.0, 0.9), vector(10.0, 0.3))
    assert live.vector[1] == pytest.approx(0.2), "a device's own stay what they are"


def test_rules_by_name() -> None:
    assert make_merge(DELTA, 0.25) == ElasticDelta(0.25)
    assert make_merge(PAPER_INTERPOLATION, 0.25) == make_merge(BLEND, 0.25) == PaperInterpolation(0.25)
    with pytest.raises(ConfigError, match=r"client\.merge must be delta, paper-interpolation or blend"):
        make_merge("average", 0.5)
    with pytest.raises(ConfigError, match="merge_weight"):
        make_merge(DELTA, 0.0)


# --- when to push --------------------------------------------------------------------------------


def since(steps: int, **more: Any) -> ExchangeState:
    return ExchangeState(**({"steps": steps, "seconds": 0.0, "exchange_s": 0.0} | more))


def test_nothing_is_due_while_an_exchange_is_in_flight() -> None:
    for policy in (EverySteps(1), Continuous(1.0), OnAdvice(1, 1), OnChange(0.1, 1, 1)):
        assert not policy.due(since(1000, ready=False, advised=True))


def test_an_interval_counts_steps() -> None:
    assert [EverySteps(5).due(since(n)) for n in (4, 5, 9)] == [False, True, True]


@pytest.mark.parametrize("duty", [0.1, 0.5, 1.0])
def test_the_link_is_busy_for_no_more_than_its_share(duty: float) -> None:
    """Exchanges of 2 s each, one local step every 0.25 s, for 1000 s."""
    policy, now, ended, busy, last = Continuous(duty), 0.0, 0.0, 0.0, 0.0
    while now < 1000.0:
        now += 0.25
        if now >= ended and policy.due(since(int((now - last) / 0.25), seconds=now - ended, exchange_s=2.0)):
            busy, last, ended = busy + 2.0, now, now + 2.0
    assert busy / now <= duty + 0.01
    assert busy / now >= 0.85 * duty


def test_continuous_pushes_wait_for_their_steps() -> None:
    assert [Continuous(1.0, 3).due(since(n)) for n in (0, 2, 3)] == [False, False, True]


@pytest.mark.parametrize("policy", [EverySteps(50), Continuous(0.01), OnChange(0.5, 1, 99), OnAdvice(1, 99)])
def test_the_servers_advice_counts_under_every_policy(policy: Any) -> None:
    quiet = since(20, exchange_s=10.0)
    assert not policy.due(quiet)
    assert policy.due(since(20, exchange_s=10.0, advised=True))


def silent_for(policy: Any, norms: list[float]) -> list[int]:
    """After which steps a policy pushed."""
    pushed, last = [], 0
    for step, norm2 in enumerate(norms, 1):
        if policy.due(since(step - last, step_norm2=norm2)):
            pushed.append(step)
            last = step
    return pushed


def test_the_gate_pushes_soon_after_the_regime_changes() -> None:
    pushed = silent_for(OnChange(0.3, 1, 1000), [1.0] * 100 + [4.0] * 100)
    assert pushed
    assert 101 <= pushed[0] <= 105
    assert pushed[-1] <= 110


def test_the_gate_is_never_silent_for_longer_than_it_may() -> None:
    assert silent_for(OnChange(0.3, 1, 40), [1.0] * 200) == [40, 80, 120, 160, 200]


def test_a_change_during_an_exchange_is_pushed_after_it() -> None:
    policy = OnChange(0.3, 1, 1000)
    for norm2 in (1.0, 1.0, 9.0):
        assert not policy.due(since(5, ready=False, step_norm2=norm2))
    assert policy.due(since(6, step_norm2=9.0))


def test_policies_by_name() -> None:
    table = ClientTable(push_steps=3, push_steps_max=7, push_duty=0.2, push_change=0.4)
    found = {
        name: make_policy(ClientTable(**{**vars(table), "push_when": name}))
        for name in ("interval", "continuous", "change", "advised")
    }
    assert found["interval"] == EverySteps(3)
    assert found["continuous"] == Continuous(0.2, 3)
    assert found["change"] == OnChange(0.4, 3, 7)
    assert found["advised"] == OnAdvice(3, 7)
    with pytest.raises(ConfigError, match="push_when"):
        make_policy(ClientTable(push_when="tomorrow"))


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"client": {"push": "never"}}, r"client\.push must be one of task, overlap, elastic"),
        ({"client": {"push": "overlap"}}, r"server\.tasks_per_client of at least 2"),
        ({"client": {"push_steps": 300}}, r"client\.push_steps_max must not be under push_steps, 300"),
        ({"client": {"push_duty": 1.5}}, r"client\.push_duty must be from 0 to 1"),
        ({"client": {"merge_weight": 0}}, r"client\.merge_weight must be greater than 0"),
        ({"client": {"push": "elastic"}, "submodel": {"name": "random"}}, r"submodel\.name = 'none'"),
    ],
)
def test_settings_that_cannot_be_are_refused(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        merge([("test", tables)])
