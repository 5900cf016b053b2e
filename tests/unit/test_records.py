"""What a run's recorder is told of its effects: read back from the lines that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machines import Bench

from anabranch.compress.registry import STAGES
from anabranch.core import events as ev
from anabranch.core.config.goal import Goal
from anabranch.core.config.privacy import PrivacyTable
from anabranch.core.config.tables import merge
from anabranch.core.effects import Decided, Effect, Granted, LeaseEnded, Published
from anabranch.core.engine.engine import Engine
from anabranch.core.events import Payload
from anabranch.core.model.submodels import UnitMap
from anabranch.core.model.updates import Ask, Capability, Update
from anabranch.host.build import Blueprint
from anabranch.host.records import RunReporter
from anabranch.reports.recorder import EVENTS_FILE, Recorder
from anabranch.reports.result import ClientShare, Result
from anabranch.testing.models import SPEC as UNITS
from anabranch.testing.models import tensors

ABLE = Capability(codecs=STAGES)
FIVE = Payload("", 5)


class Told:
    """A recorder behind its teller, and what it has written."""

    def __init__(
        self, engine: Engine, recorder: Recorder, codec_at: Callable[[int], str] | None = None
    ) -> None:
        assert recorder.events_path is not None
        self._engine, self._recorder, self._path = engine, recorder, recorder.events_path
        self.teller = RunReporter(self._recorder, codec_at)

    def tell(self, now: float, effects: Iterable[Effect], *more: Any) -> list[dict[str, Any]]:
        """The lines that these effects come to."""
        before = len(self._lines())
        self.teller.tell(now, self._engine, effects, *more)
        return self._lines()[before:]

    def result(self) -> Result:
        """What was counted."""
        return self._recorder.result("", "", 0.0)

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with Recorder("fedasync", "digits", 1, Goal(), {}, "live", tmp_path / EVENTS_FILE) as made:
        yield made


def bench(capability: Capability = ABLE, **options: Any) -> Bench:
    made = Bench("fedasync", **options)
    made.do(ev.Enrolled(0.0, "a", capability))
    return made


def test_an_update_from_its_task_to_its_version(recorder: Recorder) -> None:
    run = bench()
    told = Told(run.engine, recorder)
    assert told.tell(1.0, run.ask("a", "t-1")) == [
        {"time_s": 1.0, "kind": "granted", "client": "a", "task": "t-1", "version": 0}
    ]
    effects = run.push("a", "t-1", examples=3, payload=FIVE)
    decided, published = told.tell(2.0, effects)
    row = {"client": "a", "version": 1, "verdict": "published", "uplink_bytes": 5, "examples": 3}
    assert {**decided, **row, "time_s": 2.0, "kind": "decided"} == decided
    assert published == {"time_s": 2.0, "kind": "published", "version": 1}
    again = told.tell(3.0, run.push("a", "t-1", examples=3))
    assert again == [{"time_s": 3.0, "kind": "resent", "client": "a", "update": "update-of-t-1"}]
    found = told.result()
    assert found.clients == {"a": ClientShare(1, 0, 3, 0.0, 5, 0)}, "what came again is not counted again"
    assert (found.versions, found.uplink_bytes, found.uplink_bytes_raw) == (1, 5, 4 * 4)


def test_the_bytes_of_a_part_of_the_model_are_compared_with_those_of_that_part_raw(
    recorder: Recorder,
) -> None:
    run = bench()
    told = Told(run.engine, recorder)
    run.ask("a", "t-1")
    told.tell(2.0, run.push("a", "t-1", payload=Payload("", 5, "int8", 3)))
    assert told.result().uplink_bytes_raw == 3 * 4


def test_a_task_that_is_granted_again_is_no_news(recorder: Recorder) -> None:
    run = bench()
    told = Told(run.engine, recorder, lambda _: "raw")
    (granted,) = run.ask("a", "t-1")
    (again,) = run.ask("a", "t-1")
    assert again == Granted(granted.task, again=True)
    assert told.tell(1.0, [again]) == []


@pytest.mark.parametrize(
    ("uplink", "capability", "is_told"),
    [
        ("int8", ABLE, True),
        ("raw", ABLE, True),
        ("int8", Capability(codecs=("int8:1",)), True),
        ("raw", Capability(codecs=STAGES[:-1]), False),  # raw may be all that it can do
    ],
)
def test_what_tasks_travel_by(uplink: str, capability: Capability, is_told: bool, recorder: Recorder) -> None:
    run = bench(capability, uplink=uplink)
    told = Told(run.engine, recorder, lambda version: f"log({version})")
    lines = told.tell(1.0, run.ask("a", "t-1"))
    travels = {"version": 0, "uplink": uplink, "downlink": "log(0)", "why": "start"}
    expected = [{"time_s": 1.0, "kind": "compression", **travels}] if is_told else []
    assert lines[1:] == expected
    assert len(Told(run.engine, recorder).tell(1.0, [Granted(run.engine.ledger.tasks["t-1"])])) == 1


def test_leases_settings_and_the_end(recorder: Recorder) -> None:
    run = bench(lease_s=60.0, versions_max=1)
    told = Told(run.engine, recorder)
    run.ask("a", "t-1")
    assert told.tell(61.0, run.tick(61.0)) == [
        {"time_s": 61.0, "kind": "lease_ended", "client": "a", "task": "t-1", "end": "expired"}
    ]
    run.ask("a", "t-2", now=62.0)
    (ended,) = [e for e in run.ask("a", "t-3", now=63.0) if isinstance(e, LeaseEnded)]
    assert told.tell(63.0, [ended])[0]["end"] == "superseded"
    why = "the run ended at version 1, its budget"
    assert told.tell(64.0, run.push("a", "t-3", now=64.0))[-1] == {
        "time_s": 64.0,
        "kind": "finished",
        "why": why,
    }
    assert (told.result().why, told.result().given_up) == (why, "")
    changed = run.do(ev.SettingsChanged(65.0, {"run.versions_max": 3}, "an operator"))
    change = {"path": "run.versions_max", "value": 3, "was": 1, "by": "an operator"}
    assert told.tell(65.0, changed) == [
        {"time_s": 65.0, "kind": "settings_changed", **change},
        {"time_s": 65.0, "kind": "reopened"},
    ]
    assert [(c.path, c.time_s) for c in told.result().settings_changed] == [("run.versions_max", 65.0)]
    assert told.result().why == ""


def test_a_run_that_is_given_up_says_so(recorder: Recorder) -> None:
    run = bench(rejections_max=1)
    told = Told(run.engine, recorder)
    run.ask("a", "t-1")
    told.tell(2.0, run.push("a", "t-1", flaw="no numbers"))
    assert told.result().given_up == told.result().why != ""


def test_what_was_trained_is_told_where_devices_train_parts(recorder: Recorder) -> None:
    planned = {"strategy": {"name": "fedasync"}, "submodel": {"name": "hetero", "drop": 0.5}}
    engine = Blueprint.of(merge([("test", planned)]), UNITS).engine(tensors())
    told = Told(engine, recorder)
    for client in "ab":
        engine.handle(ev.Enrolled(0.0, client, Capability()))
    (granted,) = engine.handle(ev.TaskAsked(0.0, Ask("a", "t-1")))
    assert isinstance(granted, Granted)
    part = granted.task.submodel
    assert isinstance(part, UnitMap)
    (line, *_) = told.tell(0.5, [granted])
    assert (line["kind"], line["share"]) == ("granted", round(part.size / UNITS.size, 4))
    assert 0 < line["share"] < 1
    delta = np.ones(part.size, np.float32)
    update = Update("u-1", "t-1", "a", 0, 1, delta, part)
    payload = Payload("00" * 32, 9, values=part.size)
    lines = told.tell(1.0, engine.handle(ev.UpdateArrived(1.0, update, payload)), part)
    assert [line["kind"] for line in lines] == ["decided", "trained", "published"]
    assert lines[1]["kept"] == [len(units) for units in part.kept]
    assert told.result().uplink_bytes_raw == 4 * part.size
    flawed = replace(update, update_id="u-2", task_id="t-2", client_id="b")
    engine.handle(ev.TaskAsked(1.0, Ask("b", "t-2")))
    effects = engine.handle(ev.UpdateArrived(2.0, flawed, payload, "no numbers"))
    lines = told.tell(2.0, effects, part)
    assert [line["kind"] for line in lines] == ["decided"], "nothing of it was taken"


def test_a_run_of_whole_models_trains_no_parts(recorder: Recorder) -> None:
    run = bench()
    run.ask("a", "t-1")
    effects = run.push("a", "t-1")
    assert [type(e) for e in effects] == [Decided, Published]
    told = Told(run.engine, recorder)
    assert [line["kind"] for line in told.tell(1.0, effects)] == ["decided", "published"]
    assert told.result().coverage == ()


def test_a_masked_sum_that_was_lost_was_seen_and_counts_for_epsilon() -> None:
    privacy = PrivacyTable(clip=1.0, noise=2.0, participations=4, bands=1)
    made = Recorder("fedbuff", "made", 1, Goal(), {"privacy": asdict(privacy)}, "live")
    made.published(1.0, 1)
    before = made.result("", "", 1.0).privacy
    made.cohort_lost(2.0, 2, 8, "no honest updates have such a sum")
    after = made.result("", "", 1.0).privacy
    assert before is not None
    assert after is not None
    # mu of one sum is 1/2, of two the root of that over 2: by the integral of the definition.
    assert before.epsilon_so_far == pytest.approx(2.254085, abs=1e-6)
    assert after.epsilon_so_far == pytest.approx(3.307601, abs=1e-6)
