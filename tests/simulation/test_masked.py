"""Masked sums in the simulator: devices that mask, keepers that die, versions that are exact sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import Diverging, Ones, config, events, recorded
from rough import ALL

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import CohortLost, Effect, MaskSumWanted, Published
from anabranch.core.errors import ConfigError
from anabranch.core.secagg.ring import mask_of
from anabranch.core.secagg.terms import Terms
from anabranch.core.snapshot import state_digest
from anabranch.reports.html import report_html
from anabranch.simulation.checkers import Checker
from anabranch.simulation.keepers import SimulatedKeeper
from anabranch.simulation.masking import mask_seed
from anabranch.simulation.promises import Promises
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import open_simulation, simulate

SECAGG: dict[str, Any] = {"mode": "keeper", "keepers": ["north", "south"], "clip": 2.0, "cohort_min": 2}


def masked(secagg: dict[str, Any] | None = None, **tables: Any) -> Config:
    """A small fleet whose sums of three updates two keepers unmask."""
    return config("fedbuff", secagg={**SECAGG, **(secagg or {})}, **tables)


def of_updates(size: int, settings: Config) -> Config:
    """The same with sums of so many updates."""
    more = {"strategy": {"buffer_size": size}, "secagg": settings.to_json().get("secagg", {})}
    return merge([("base", settings.to_json()), ("sums", more)])


class Eavesdropper:
    """Hears of everything, and knows all seeds: what every version must be, in whole numbers."""

    def __init__(self, terms: Terms, seed: int, size: int) -> None:
        self.terms, self.seed = terms, seed
        self.model = np.zeros(size, np.float32)
        self.integers: dict[str, np.ndarray[Any, Any]] = {}
        self.weights: dict[str, int] = {}
        self.in_versions: list[str] = []
        self.lost: list[str] = []

    def observe(self, event: ev.Event, effects: Sequence[Effect]) -> None:
        """An event was handled."""
        ring = self.terms.ring
        if isinstance(event, ev.UpdateArrived):
            update, seeds = event.update, self.terms.keepers
            masks = [mask_of(mask_seed(self.seed, update.task_id, k), ring.size, ring.bits) for k in seeds]
            numbers: Any = update.delta
            self.integers[update.update_id] = ring.unmasked(numbers, masks)
        for effect in effects:
            match effect:
                case MaskSumWanted(members=members):
                    self.weights |= {m.update_id: m.weight for m in members}
                case CohortLost(update_ids=ids):
                    self.lost += ids
                case Published(_, vector, ids):
                    self.in_versions += ids
                    total = sum(self.weights[u] * self.integers[u] for u in ids)
                    moved = (np.asarray(total) / (ring.scale * self.terms.weight(0))).astype(np.float32)
                    self.model = self.model + moved / np.float32(self.terms.cohort)
                    assert np.array_equal(vector, self.model)


@pytest.mark.parametrize("ring", [{}, {"bits": 16, "value_bits": 9, "levels": 8}], ids=["32 bits", "16 bits"])
def test_every_version_is_the_exact_sum_of_what_its_devices_had(ring: dict[str, int]) -> None:
    settings = of_updates(4, masked(ring, fleet={"clients": 9}))  # halves of floats are exact
    with open_simulation(settings, app=Ones(50)) as simulation:
        cohorts = simulation.engine.cohorts
        assert cohorts is not None
        ears = Eavesdropper(cohorts.terms, settings.run.seed, 50)
        simulation.world.observers += [ears.observe, Checker(simulation.engine).observe]
        simulation.run()
        assert simulation.engine.version > 5
        top = max(int(np.abs(q).max()) for q in ears.integers.values())
        assert top <= cohorts.terms.ring.top
        # Each device adds one to every value: cut to length 2, that is 2 / sqrt(50).
        some = next(iter(ears.integers.values())) / cohorts.terms.ring.scale
        assert some == pytest.approx(np.full(50, 2 / math.sqrt(50)), abs=1.5 / cohorts.terms.ring.scale)
        assert not ears.lost


def test_a_run_with_masked_sums_repeats_itself_and_replays_either_way(tmp_path: Path) -> None:
    settings = masked()
    written, digest = recorded(settings, tmp_path / "a")
    again, _ = recorded(masked(run={"keep_payloads": False}), tmp_path / "b")
    assert written.model_sha256 == again.model_sha256
    assert written.versions > 5
    assert digest
    assert simulate(settings, workers=1).model_sha256 == written.model_sha256
    for folder in ("a", "b"):
        assert replay_run(tmp_path / folder).matches
    assert written.masked is not None
    assert written.masked.text() == "masked: 2 keepers took the masks off sums of 2 updates or more"
    assert len(events(tmp_path / "a", "sum_wanted")) >= written.versions
    other = simulate(masked(run={"seed": 1}))
    assert other.model_sha256 != written.model_sha256


@pytest.mark.parametrize(
    ("ring", "apart"), [({}, 0.001), ({"bits": 16, "value_bits": 9, "levels": 8}, 0.1)], ids=["32", "16"]
)
def test_where_keepers_answer_at_once_the_model_is_that_of_a_run_in_the_clear(
    ring: dict[str, int], apart: float
) -> None:
    """The same updates in the same versions: what is left is the rounding. Weights are whole either way."""
    models, versions = [], []
    for secagg in ({}, {**SECAGG, "clip": 2.0, **ring}):
        settings = config("fedbuff", robust={"buffer_max": 1}, fleet={"speed": "lognormal"}, secagg=secagg)
        constant = {"strategy": {"staleness": {"name": "constant"}}}
        with open_simulation(merge([("base", settings.to_json()), ("rule", constant)])) as simulation:
            start, seen = simulation.engine.vector.copy(), Seen()
            if simulation.keepers is not None:
                simulation.keepers.answer_s = 0.0
            simulation.world.observers.append(seen.observe)
            simulation.run()
            models.append(simulation.engine.vector - start)
            versions.append(seen.published)
    assert versions[0] == versions[1]
    assert len(versions[0]) > 60
    clear, masked_one = models
    assert 0 < np.linalg.norm(masked_one - clear) < apart * np.linalg.norm(clear)


class Seen:
    """The updates of all versions, and why cohorts were lost."""

    def __init__(self) -> None:
        self.published: list[str] = []
        self.lost: list[str] = []

    def observe(self, _: ev.Event, effects: Sequence[Effect]) -> None:
        """An event was handled."""
        for effect in effects:
            if isinstance(effect, Published):
                self.published += effect.update_ids
            elif isinstance(effect, CohortLost):
                self.lost.append(effect.why)


def test_keepers_that_die_hold_up_versions_and_lose_nothing() -> None:
    faults = {"keeper_crash_every_s": 15.0, "keeper_down_s": 15.0, "until_s": 100.0}
    settings = masked({"cohorts_waiting_max": 3}, run={"virtual_s_max": 160.0}, faults=faults)
    with open_simulation(settings) as simulation:
        cohorts = simulation.engine.cohorts
        assert cohorts is not None
        waited = [0]

        def look(_: ev.Event, __: Sequence[Effect]) -> None:
            assert simulation.engine.cohorts is not None
            waited[0] = max(waited[0], len(simulation.engine.cohorts.waiting))

        simulation.world.observers += [Checker(simulation.engine).observe, look]
        simulation.run()
        assert simulation.faults is not None
        assert simulation.faults.counts["keeper-crash"] > 3
        engine, keepers = simulation.engine, simulation.keepers
        assert engine.cohorts is not None
        assert keepers is not None
        most = 3 + settings.fleet.clients / 3  # whoever has a task may answer it
        assert 3 <= waited[0] <= most
        assert len(engine.cohorts.waiting) <= 1, "they went through in the end"
        for keeper in keepers.all:
            assert len(keeper.answered) >= engine.version
        waiting = sum(len(cohort.members) for cohort in engine.cohorts.waiting)
        held = len(engine.cohorts.members) + waiting
        assert engine.counters.applied == engine.version * 3 + held, "no update is lost or counts twice"


def test_everything_goes_wrong_and_each_update_is_in_one_version_at_most() -> None:
    faults = {**ALL, "keeper_crash_every_s": 10.0, "keeper_down_s": 8.0, "disk_full_every_s": 30.0}
    settings = masked(
        run={"seed": 2, "virtual_s_max": 155.0},
        fleet={"clients": 12, "dropout": 0.1, "availability_period_s": 15.0},
        server={"lease_s": 20.0, "lease_min_s": 8.0, "snapshot_every_updates": 10},
        client={"retry_cap_s": 8.0},
        faults=faults,
    )
    with open_simulation(settings) as simulation:
        promises, seen = Promises(simulation), Seen()
        simulation.world.observers.append(seen.observe)
        simulation.run()
        promises.check_end(quiet_s=simulation.clock.now - settings.faults.until_s)
        assert len(seen.published) == len(set(seen.published))
        assert simulation.engine.version > 5
        assert state_digest(simulation.engine)
        assert promises.restarts > 1


def test_where_the_disk_forgets_sums_its_keepers_refuse_others_and_the_run_goes_on() -> None:
    lost = 0
    for seed in range(2):
        faults = {
            "server_crash_every_s": 12.0,
            "server_down_s": 2.0,
            "lost_tail": 1.0,
            "until_s": 90.0,
            "commit_s": 0.05,
        }
        settings = masked(
            run={"seed": seed, "virtual_s_max": 150.0},
            server={"snapshot_every_updates": 10},
            faults=faults,
        )
        with open_simulation(settings) as simulation:
            seen = Seen()
            simulation.world.observers.append(seen.observe)
            simulation.run()
            lost += len(seen.lost)
            assert all("refuses it" in why for why in seen.lost)
            assert simulation.engine.version > 5
    assert lost, "a keeper was asked for another cohort of a number that it had answered"


def test_a_keeper_answers_alike_and_no_update_twice() -> None:
    settings = masked()
    with open_simulation(settings, app=Ones()) as simulation:
        cohorts = simulation.engine.cohorts
        assert cohorts is not None
        seen: list[Any] = []
        simulation.world.observers.append(
            lambda _, __: seen.extend(c for c in cohorts.waiting if c not in seen and not c.answered)
        )
        simulation.run()
        terms = cohorts.terms
    first, second = seen[:2]
    keeper, tasks = SimulatedKeeper("north", terms, 7), ["t0", "t1", "t2"]
    answer = keeper.unmask(first, tasks)
    assert answer is not None
    again = keeper.unmask(first, tasks)
    assert again is not None
    assert np.array_equal(answer, again)
    other = replace(second, members=(first.members[0], *second.members[1:]))
    assert keeper.unmask(other, tasks) is None, "an update of the first cohort is in it"
    assert keeper.unmask(replace(second, number=first.number), tasks) is None
    few = replace(second, members=second.members[:1])
    assert keeper.unmask(few, tasks[:1]) is None
    assert keeper.unmask(second, tasks) is not None


def test_a_training_that_diverges_sends_nothing() -> None:
    with open_simulation(masked(run={"virtual_s_max": 20.0}), app=Diverging()) as simulation:
        simulation.run()
        assert simulation.engine.counters.applied == 0
        assert simulation.engine.cohorts is not None
        assert simulation.engine.cohorts.members == ()


def test_a_private_run_has_its_noise_of_the_keepers() -> None:
    privacy = {"clip": 2.0, "noise": 0.5, "participations": 4, "bands": 1}
    settings = masked({"clip": 0.0}, privacy=privacy, run={"virtual_s_max": 100.0})
    quiet = masked({"clip": 2.0}, run={"virtual_s_max": 100.0})
    with open_simulation(settings, app=Ones(2000)) as simulation:
        simulation.run()
        version, cohorts = simulation.engine.version, simulation.engine.cohorts
        assert cohorts is not None
        most = {c.accepted for c in simulation.engine.ledger.clients.values()}
        assert max(most) == 4
        assert version == 8, "six devices, four updates each, of which three make a version"
        result = simulation.result(0.0)
    with open_simulation(quiet, app=Ones(2000)) as simulation:
        simulation.run()
        assert float(simulation.engine.vector.std()) < 1e-3
    assert result.privacy is not None
    assert result.masked is not None
    caveat = "as a live run would have it; here the noise follows from run.seed"
    assert result.privacy.text().endswith(f"updates of length 2 at most, {caveat}")
    assert result.privacy.mechanism == "gaussian of run.seed", "so it is on record too"
    assert caveat in report_html(result)
    # Of two keepers, in eight versions: each of deviation z max(W) (s C + sqrt(d)) / (s W K).
    ring = cohorts.terms.ring
    each = 0.5 * ring.length / ring.scale / 3
    with open_simulation(settings, app=Ones(2000)) as simulation:
        simulation.run()
        found = float(simulation.engine.vector.std())
    assert found == pytest.approx(each * math.sqrt(2 * version), rel=0.1)


def test_a_bad_table_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a buffer has 3 updates"):
        simulate(masked({"cohort_min": 8}), tmp_path / "out")
