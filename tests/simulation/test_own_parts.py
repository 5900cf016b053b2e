"""What a part of one's own raises in a simulation is one error: which part, which method, its own lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_parts import FOLDER, forgotten

import anabranch as ab
from anabranch.core.errors import AppError, ConfigError
from anabranch.support.code import load

# `look_up` breaks, in line 9.
FILE = f"""import sys
sys.path.insert(0, {str(FOLDER)!r})
from dataclasses import dataclass, replace
from typing import Any, ClassVar
import attack, planner, rule, scheduler, stage
from anabranch.core.engine.strategy import Refusal
from anabranch.core.model.updates import Reason, Verdict
from anabranch.strategies.mixing import MixingStrategy
def look_up(): return {{}}["word"]
@dataclass(frozen=True)
class Strategy(MixingStrategy):
    name: ClassVar[str] = "breaking"
    def weight(self, update, context): return look_up()
@dataclass(frozen=True)
class Leaving(MixingStrategy):
    name: ClassVar[str] = "leaving"
    def weight(self, update, context): sys.exit("no licence")
@dataclass(frozen=True)
class Weighing(MixingStrategy):
    name: ClassVar[str] = "weighing"
    def weight(self, update, context): return float("nan")
@dataclass(frozen=True)
class Answers(MixingStrategy):
    name: ClassVar[str] = "answers"
    how: str = "as it should"
    def weight(self, update, context): return 0.5
    def plan(self, *a): return None if self.how == "planless" else super().plan(*a)
    def step(self, state, vector, update, context):
        step = super().step(state, vector, update, context)
        if self.how == "none": return None
        if self.how == "short": return replace(step, vector=step.vector[:-1].copy())
        if self.how == "wide": return replace(step, vector=step.vector.astype("float64"))
        if self.how == "read-only": step.vector.flags.writeable = False
        if self.how == "without a version": return replace(step, vector=None)
        told = {{
            "without a word": {{"verdict": Verdict.HELD}},
            "early": {{"staleness": -5}},
            "weightless": {{"weight": float("nan")}},
        }}
        if self.how in told: return replace(step, decision=replace(step.decision, **told[self.how]))
        return replace(step, decision=None) if self.how == "undecided" else step
@dataclass(frozen=True)
class Scribbles(MixingStrategy):
    name: ClassVar[str] = "scribbles"
    needs_base: ClassVar[bool] = False
    verdict: str = "rejected"
    def weight(self, update, context): return 0.5
    def step(self, state, vector, update, context):
        step = super().step(state, vector.copy(), update, replace(context, base=vector.copy()))
        if self.verdict == "published": return step
        vector += 1
        verdict, why = Verdict(self.verdict), Reason.NOT_SELECTED
        return replace(step, vector=None, decision=replace(step.decision, verdict=verdict, reason=why))
@dataclass(frozen=True)
class Seen:
    devices: Any = None
@dataclass(frozen=True)
class Remembers(Answers):
    name: ClassVar[str] = "remembers"
    state_type: ClassVar[type[Any]] = Seen
    after: int = 1
    def init(self, vector): return Seen([])
    def step(self, state, vector, update, context):
        seen = [*(state.devices or ()), update.client_id]
        kept = set(seen) if len(seen) >= self.after else seen
        return replace(super().step(state, vector, update, context), state=Seen(kept))
@dataclass
class Counts(MixingStrategy):
    name: ClassVar[str] = "counts"
    count: int = 0
    def weight(self, update, context):
        self.count += 1
        return 1 / self.count
@dataclass(frozen=True)
class Scheduler(scheduler.Resting):
    name: ClassVar[str] = "breaking"
    def plan(self, state, ask, plan, context): return look_up()
@dataclass(frozen=True)
class Lax(scheduler.Resting):
    name: ClassVar[str] = "lax"
    how: str = ""
    def admit(self, state, ask, context):
        if self.how in ("AT_CAPACITY", "NOT_SELECTED"): return Refusal(Reason[self.how], "nobody is let in")
        return True if self.how == "true" else None
    def plan(self, state, ask, plan, context):
        told = {{
            "as it should": {{}}, "back": {{"steps": -3}}, "half": {{"steps": 2.5}},
            "huge": {{"steps": 2**32}}, "still": {{"steps": 0, "epochs": 0}}, "empty": {{"batch_size": 0}},
            "two": {{"steps": 2}}, "nan": {{"learning_rate": float("nan")}},
            "inf": {{"proximal_mu": float("inf")}},
        }}
        if self.how in told: return replace(plan, state=state, local=replace(plan.local, **told[self.how]))
        return None if self.how == "none" else plan
class Short(attack.Backwards):
    name = "short"
    def update(self, deltas, s): return deltas[0][:-1]
class Nothing(attack.Backwards):
    name = "nothing"
    def update(self, deltas, s): return None
@dataclass(frozen=True)
class Rule(rule.NormBound):
    name: ClassVar[str] = "breaking"
    def combine(self, rows, before): return look_up()
@dataclass(frozen=True)
class Stage(stage.Signs):
    name: ClassVar[str] = "breaking"
    number: ClassVar[int] = 201
    def encode(self, value, context): return look_up()
class Planner(planner.OddEven):
    name: ClassVar[str] = "breaking"
    def kept(self, state, vector, applicant): return look_up()
class Attack(attack.Backwards):
    name = "breaking"
    def update(self, deltas, s): return look_up()
@dataclass(frozen=True)
class OldRule(rule.NormBound):
    name: ClassVar[str] = "old"
    def combine(self, rows): return None
@dataclass(frozen=True)
class NoRule(rule.NormBound):
    name: ClassVar[str] = "norule"
    def combine(self, rows, before):
        how = {{
            0.1: None, 0.2: before[:-1], 0.3: [0.0] * rows.size, 0.4: before[None],
            0.35: before * float("nan"), 0.25: before,
        }}
        if self.attackers == 0.25: rows.hear([float("nan")] * len(rows))
        if self.attackers not in how: rows.hear([1.0])
        return how[self.attackers]
import numpy as np
from anabranch.core.errors import InvalidUpdate
@dataclass(frozen=True)
class Odd(stage.Signs):
    name: ClassVar[str] = "odd"
    number: ClassVar[int] = 202
    how: str = ""
    def raw_max(self, k, n):
        return {{"nomax": None, "small": 1}}.get(self.how, super().raw_max(k, n))
    def encode(self, value, context):
        for block in value.blocks():
            if self.how == "writes": block[0] = 0
        return None if self.how == "noencode" else super().encode(value, context)
    def decode(self, coded, context):
        if self.how == "refuses": raise InvalidUpdate("no such bytes")
        found = super().decode(coded, context)
        values = found.gather()
        other = {{
            "array": values, "short": stage.Dense.of(values[1:]),
            "nan": stage.Dense.of(values * np.nan), "far": stage.Dense.of(values * np.float32(1e20)),
        }}
        return other.get(self.how, found)
class Units(planner.OddEven):
    name: ClassVar[str] = "units"
    def kept(self, state, vector, applicant):
        sizes = [group.size for group in self.spec.groups]
        return self.odd([list(range(size)) for size in sizes])
class NoUnits(Units):
    def odd(self, whole): return None
class Fewer(Units):
    def odd(self, whole): return whole[1:]
class Mask(Units):
    def odd(self, whole): return [[u % 2 == 0 for u in units] for units in whole]
class Halves(Units):
    def odd(self, whole): return [[u / 2 for u in units] for units in whole]
class Beyond(Units):
    def odd(self, whole): return [[u + 1 for u in units] for units in whole]
class Twice(Units):
    def odd(self, whole): return [[0, 0] for _ in whole]
class Writes(planner.OddEven):
    name: ClassVar[str] = "writes"
    def kept(self, state, vector, applicant):
        vector *= 0
@dataclass(frozen=True)
class Staleness:
    name: ClassVar[str] = "breaking"
    def __call__(self, tau): return look_up()
@dataclass(frozen=True)
class Growing:
    name: ClassVar[str] = "growing"
    def __call__(self, tau): return 1.0 + tau
@dataclass(frozen=True)
class Half:
    name: ClassVar[str] = "half"
    def __call__(self, tau): return 0.5
"""
BUFFER = {"strategy.buffer_size": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "strategy Strategy.weight": {"strategy": "FILE:Strategy"},
    "scheduler Scheduler.plan": {"strategy.scheduler": {"name": "FILE:Scheduler"}},
    "robust rule Rule.combine": {**BUFFER, "robust.rule": "FILE:Rule"},
    "codec stage Stage.encode": {"uplink.codec": "breaking", "uplink.stages": ["FILE:Stage"]},
    "planner Planner.kept": {"strategy": "asyncdrop", "submodel.name": "FILE:Planner"},
    "attack Attack.update": {"fleet.attackers": 0.5, "fleet.attack": "FILE:Attack"},
    "staleness function Staleness.__call__": {"strategy.staleness": {"name": "FILE:Staleness"}},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    with forgotten():
        yield tmp_path


def simulated(settings: dict[str, Any], **more: Any) -> ab.Run:
    filled = {k: _filled(v) for k, v in settings.items()}
    more |= {"strategy": filled.pop("strategy")} if "strategy" in filled else {}
    return ab.simulate(
        "synthetic", fleet=ab.Fleet(clients=4), until=ab.Until(updates=8), settings=filled, **more
    )


def _filled(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("FILE", "mine.py")
    if isinstance(value, dict):
        return {k: _filled(v) for k, v in value.items()}
    return [_filled(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("start", "settings"), SETTINGS.items(), ids=str)
def test_an_error_of_a_part_names_its_method_and_shows_its_lines_alone(
    here: Path, start: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(AppError) as raised:
        simulated(settings)
    text = str(raised.value)
    assert text.startswith(f"{start} (mine.py:9): KeyError: 'word'\n")
    assert text.count("\n") == 4  # two frames of two lines each
    assert text.endswith('  mine.py:9 in look_up\n    def look_up(): return {}["word"]')


def test_an_error_in_a_worker_process_is_told_alike(here: Path) -> None:
    with pytest.raises(AppError, match=r"codec stage Stage\.encode \(mine\.py:9\): KeyError"):
        simulated(SETTINGS["codec stage Stage.encode"], workers=1)


def test_a_part_at_hand_is_known_as_well(here: Path) -> None:
    with pytest.raises(AppError, match=r"strategy Strategy\.weight \(mine\.py:9\)"):
        simulated({}, strategy=load("mine.py:Strategy")())


def test_a_part_that_leaves_the_process_is_named_too(here: Path) -> None:
    with pytest.raises(AppError, match=r"strategy Leaving\.weight \(mine\.py:\d+\): SystemExit: no licence"):
        simulated({"strategy": "FILE:Leaving"})


def test_what_a_callback_raises_stays_what_it_is(here: Path) -> None:
    """It is no part, though the run has one, and the caller may wait for just that error."""

    def broken(_: Any) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        simulated({"strategy.staleness": {"name": f"{FOLDER}/staleness.py:HalfLife"}}, callbacks=[broken])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Growing", r"Growing is 2\.0 at a staleness of 1: it has to be from 0 to 1\.0, as it must not grow"),
        ("Half", r"Half is 0\.5 at a staleness of 0: it has to be 1"),
    ],
)
def test_a_staleness_function_keeps_to_what_strategies_count_on(here: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        simulated({"strategy.staleness": {"name": f"mine.py:{name}"}})


def test_a_weight_that_is_no_number_is_named(here: Path) -> None:
    with pytest.raises(AppError, match=r"strategy Weighing: an update of staleness 0 weighs nan"):
        simulated({"strategy": "FILE:Weighing"})


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("none", "step must return a Step with a decision, not None"),
        ("undecided", "step must return a Step with a decision, not one without"),
        (
            "short",
            r"step must give a vector of \d+ values .* not an array of shape \(\d+,\) and float32",
        ),
        (
            "read-only",
            "step must give a vector of .* that can be written to, such as a copy by numpy.array: ",
        ),
        ("without a version", "step says 'published' and gives no vector: give the new model, or say 'held'"),
        ("without a word", "step gives a vector, which is a new version, and says 'held': say 'published'"),
        ("early", "step decides with a staleness of -5: give a whole number from 0 on"),
        ("weightless", "step decides with a weight of nan: give a finite number"),
        ("wide", r"step must give a vector of .* not an array of shape \(\d+,\) and float64"),
    ],
)
def test_a_step_that_no_device_could_read_ends_the_run_at_once(here: Path, how: str, told: str) -> None:
    """On a server such a version would be in the log, and every device would refuse it for ever.

    And a decision that is not what was done would be told of as if it were, in every report.
    """
    with pytest.raises(AppError, match=f"^strategy 'answers': {told}"):
        simulated({"strategy": "FILE:Answers", "strategy.how": how})


@pytest.mark.parametrize("verdict", ["rejected", "held"])
def test_a_step_that_changes_the_model_without_a_version_ends_the_run(here: Path, verdict: str) -> None:
    """Who fetched that version before would have another model than who fetches it after."""
    told = (
        r"^strategy 'scribbles': a step changed `vector` and gave no version: devices that fetch version 0 "
    )
    with pytest.raises(AppError, match=told):
        simulated({"strategy": "FILE:Scribbles", "strategy.verdict": verdict})


def test_a_step_that_publishes_may_change_the_model_as_it_likes(here: Path) -> None:
    simulated({"strategy": "FILE:Scribbles", "strategy.verdict": "published"})


PARTS: dict[str, dict[str, Any]] = {
    "scheduled": {"strategy": "FILE:Answers", "strategy.scheduler": {"name": "capped"}},
    "phased": {
        "strategy": "phased",
        "strategy.phases": [
            {"strategy": "FILE:Answers", "until_updates": 4},
            {"strategy": "fedasync"},
        ],
    },
}


@pytest.mark.parametrize(
    ("how", "told"), [("none", "step must return a Step"), ("planless", "plan must return")]
)
@pytest.mark.parametrize("within", PARTS)
def test_what_a_strategy_within_another_part_answers_is_looked_at(
    here: Path, within: str, how: str, told: str
) -> None:
    settings = dict(PARTS[within])
    if within == "phased":
        first, then = settings["strategy.phases"]
        settings["strategy.phases"] = [{**first, "how": how}, then]
    else:
        settings["strategy.how"] = how
    with pytest.raises(AppError, match=f"^strategy 'answers': {told}"):
        simulated(settings)


@pytest.mark.parametrize("after", [1, 4])
def test_a_state_that_is_no_data_ends_the_run_soon(here: Path, after: int) -> None:
    """And not at the first snapshot of a server, which a simulation does not have."""
    told = "^strategy 'remembers': the state would not outlive a restart: state/devices is of type set"
    with pytest.raises(AppError, match=told):
        simulated({"strategy": "FILE:Remembers", "strategy.after": after})


def test_a_part_that_remembers_in_itself_is_refused(here: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"mine\.py:Counts: a strategy is .*: write @dataclass\(frozen=True\)"
    ):
        simulated({"strategy": "FILE:Counts"})


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("true", "admit must return None or a Refusal, not a bool"),
        ("none", "plan must return a Plan, not None"),
        ("strategys", "plan must return its own state, a LastTasks, not a "),
    ],
)
def test_what_a_scheduler_answers_is_looked_at(here: Path, how: str, told: str) -> None:
    with pytest.raises(AppError, match=f"^scheduler 'lax': {told}"):
        simulated({"strategy.scheduler": {"name": "FILE:Lax", "how": how}})


NO_TASKS = ("back", "half", "huge", "still", "empty", "nan", "inf")


def test_a_plan_by_which_nobody_can_train_is_the_strategys_own(here: Path) -> None:
    """What a scheduler has learned of devices may bring it there, and no word of theirs stops a run."""

    def digest(how: str) -> str:
        scheduler = {"name": "FILE:Lax", "how": how}
        run = simulated({"strategy": "fedasync", "strategy.scheduler": scheduler})
        return run.replay().model_sha256

    own = digest("as it should")
    assert {how: digest(how) for how in NO_TASKS} == dict.fromkeys(NO_TASKS, own)
    assert digest("two") != own


@pytest.mark.parametrize("reason", ["AT_CAPACITY", "NOT_SELECTED"])
def test_a_scheduler_that_lets_nobody_in_is_said(
    here: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """Where only updates end it, it would go on for ever, and tell of 0 updates."""
    part = {"strategy.scheduler": {"name": "FILE:Lax", "how": reason}, "fleet.waiting": "ask"}
    simulated({**part, "run.virtual_s_max": 9000.0})
    said = [r.message for r in caplog.records if "no device has had a task" in r.message]
    assert len(said) == 2  # after an hour, and two
    assert all(f"{reason.lower()}: nobody is let in" in line for line in said)


@pytest.mark.parametrize("every_s", [0.0, 10.0])
def test_devices_that_nobody_calls_are_said(
    here: Path, caplog: pytest.LogCaptureFixture, every_s: float
) -> None:
    """Though versions are to be measured by time: there will be none, and the run would go on for ever."""
    part = {"strategy.scheduler": {"name": "FILE:Lax", "how": "AT_CAPACITY"}, "fleet.waiting": "called"}
    simulated({**part, "run.evaluate_every_s": every_s})
    assert "no device has a task, and 4 devices that asked were never called" in caplog.text


@pytest.mark.parametrize(("name", "shape"), [("Short", r"\(\d+,\)"), ("Nothing", r"\(\)")])
def test_an_attack_that_no_server_would_take_ends_the_run(here: Path, name: str, shape: str) -> None:
    """All of its updates would be refused, which would look like a defence that holds."""
    with pytest.raises(AppError, match=f"^attack '{name.lower()}': update must give an array .* not {shape}"):
        simulated({"fleet.attackers": 0.5, "fleet.attack": f"FILE:{name}"})


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (0.1, "robust rule 'norule': combine must give an array of 1002 numbers, not None"),
        (0.2, r"combine must give an array of 1002 numbers, not one of shape \(1001,\) and float64"),
        (0.3, "combine must give an array of 1002 numbers, not a list"),
        (0.4, r"combine must give an array of 1002 numbers, not one of shape \(1, 1002\) and float64"),
        (0.35, "strategy 'fedbuff' with robust rule 'norule': version 1 has values that are not finite"),
        (0.25, r"robust rule NoRule\.combine .* ValueError: rows\.hear takes shares of 0 to 1, not nan"),
        (0.45, r"robust rule NoRule\.combine .* ValueError: rows\.hear takes 2 shares, one for each row"),
    ],
)
def test_what_a_rule_answers_is_looked_at(here: Path, how: float, told: str) -> None:
    with pytest.raises(AppError, match=told):
        simulated({**BUFFER, "robust.rule": "FILE:NoRule", "robust.attackers": how})


def test_a_method_of_other_arguments_is_named(here: Path) -> None:
    """It is called by the platform, so no frame of the part is in the error."""
    told = r"^robust rule OldRule\.combine: TypeError: OldRule\.combine\(\) takes 2"
    with pytest.raises(AppError, match=told):
        simulated({**BUFFER, "robust.rule": "FILE:OldRule"})


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("writes", r"^codec stage Odd\.encode .*ValueError: .*read-only"),
        ("noencode", "codec stage 'odd': encode must return Dense, Sparse or Coded, not None"),
        ("array", "codec stage 'odd': decode must return Dense, Sparse or Coded, not a ndarray"),
        (
            "refuses",
            r"codec stage 'odd': what 'odd\(refuses\)' encodes it decodes to nothing of use: no ",
        ),
        ("short", "encodes it decodes to nothing of use: payload has 959 values, the manifest needs 960"),
        ("nan", r"decodes to nothing of use: values that are not finite, or over 1e\+12"),
        ("far", r"decodes to nothing of use: values that are not finite, or over 1e\+12"),
        ("nomax", "codec stage 'odd': raw_max must return a whole number, not None"),
        ("small", r"codec odd makes \d+ bytes of \d+ values, and it says at most 1: raw_max of a stage"),
    ],
)
def test_what_a_stage_answers_is_looked_at(here: Path, how: str, told: str) -> None:
    """Bytes beyond the least that a server allows were given up in silence, and asked for again for ever.

    Updates that no server can decode ended the run after 100 of them, which it took for a rate too large.
    """
    with pytest.raises(AppError, match=told):
        simulated({"uplink.codec": f"odd({how})", "uplink.stages": ["FILE:Odd"]})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NoUnits", "the units of each of 1 groups, not None"),
        ("Fewer", "the units of each of 1 groups, not 0"),
        ("Mask", r"numbers of units .* not an array of shape \(\d+,\) and bool"),
        ("Halves", r"numbers of units .* not an array of shape \(\d+,\) and float64"),
        (
            "Beyond",
            r"numbers of units of group 'hidden', at least one, each once, from 0 to \d+, not \[1, 2, 3",
        ),
        ("Twice", r".* each once, from 0 to \d+, not \[0, 0\]"),
    ],
)
def test_what_a_planner_keeps_is_looked_at(here: Path, name: str, told: str) -> None:
    """A mask, or units beyond the last, were the whole model: a sub-model that costs nothing."""
    with pytest.raises(AppError, match=f"^planner 'units': kept must give {told}"):
        simulated({"strategy": "asyncdrop", "submodel.name": f"FILE:{name}"})


def test_a_planner_does_not_change_the_model(here: Path) -> None:
    with pytest.raises(AppError, match=r"^planner Writes\.kept \(mine\.py:\d+\): ValueError: .*read-only"):
        simulated({"strategy": "asyncdrop", "submodel.name": "FILE:Writes"})
