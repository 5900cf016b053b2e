"""`tune`: real tiny simulations, tuned to the end, killed and carried on, alone and side by side."""

from __future__ import annotations

import json
import signal
import statistics
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import killed_tuning
import numpy as np
import orphaning
import pytest
from nursery import PIPE, Process

import anabranch as ab
from anabranch.api.tuning import PAGE, RECOMMENDED
from anabranch.core.errors import ConfigError, DataError
from anabranch.core.rng import seed_of
from anabranch.reports.folders import CHECKPOINT, TRIALS_FILE, locked
from anabranch.reports.result import Result
from anabranch.workloads.synthetic import Synthetic

RATE, SIZE, CODEC = "client.learning_rate", "strategy.buffer_size", "uplink.codec"
SMALL: dict[str, Any] = {
    "fleet": ab.Fleet(clients=3, examples_per_client=40),
    "strategy": ab.strategies.FedBuff(buffer_size=2),
    "until": ab.Until(updates=8),
    "trials": 2,
    "seeds": 1,
    "fresh_seeds": 2,
    "extensions": 0,
    "defaults": False,
    "progress": False,
}


def lines(folder: Path) -> list[dict[str, Any]]:
    """The legs on record."""
    return [json.loads(line) for line in (folder / TRIALS_FILE).read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[ab.Tuning, int]:
    """A tuning that nobody has broken off, and how many versions it has measured."""
    return killed_tuning.run(tmp_path_factory.mktemp("whole") / "tuned")


def test_what_is_recommended_is_the_best_of_what_was_carried_to_the_end(
    whole: tuple[ab.Tuning, int],
) -> None:
    tuned, _ = whole
    ends = [row for row in lines(tuned.folder) if row["kind"] == "trial" and row["rung"] == 2]
    best = max(ends, key=lambda row: (row["value"], -row["trial"]))
    assert tuned.report.best == best["trial"]
    assert {path: tuned.choice[path] for path in best["choice"]} == best["choice"]
    assert tuned.config.client.learning_rate == tuned.choice[RATE]
    assert set(tuned.trials.column("trial")) == {row["trial"] for row in lines(tuned.folder)}


def test_what_is_told_is_of_seeds_that_took_no_part(whole: tuple[ab.Tuning, int]) -> None:
    tuned, _ = whole
    rows = lines(tuned.folder)
    seeds = {kind: {row["seed"] for row in rows if row["kind"] == kind} for kind in ("trial", "fresh")}
    assert seeds == {"trial": {0}, "fresh": {1, 2}}
    config = tuned.config.to_json()
    values = []
    for seed in (1, 2):
        alone = ab.simulate(
            killed_tuning.Measured(),
            settings={f"{t}.{k}": v for t in ("client", "fleet", "strategy") for k, v in config[t].items()},
            until=ab.Until(updates=killed_tuning.UPDATES),
            seed=seed,
        )
        values.append(alone.result.final_value)
    told = [row["accuracy"] for row in tuned.fresh if row["settings"] == "recommended"]
    assert told == values, "the recommendation, run as it is, comes to what is told of it"
    assert f"accuracy {100 * statistics.fmean(told):.2f} %" in tuned.toml


def test_a_tuning_is_compared_by_its_runs_from_fresh_seeds(
    whole: tuple[ab.Tuning, int], tmp_path: Path
) -> None:
    """Beside other runs, as of `compare runs/*`: those of the trials were ended on their way."""
    tuned, _ = whole
    other = ab.simulate("synthetic", until=ab.Until(updates=20), out=tmp_path / "other")
    found = ab.compare([tuned.folder, other])
    told = sorted((row["seed"], row["accuracy"]) for row in tuned.fresh)
    measured = [result for result in found.results if result.seed]
    assert sorted((result.seed, result.final_value) for result in measured) == told
    assert not found.left_out


def test_a_tuned_setting_is_told_where_it_came_to_its_default(tmp_path: Path) -> None:
    usual = {**SMALL, "strategy": "fedbuff", "settings": {}}
    ab.tune("synthetic", {RATE: [1e-6, 0.05], SIZE: [8], "client.epochs": [1]}, **usual, out=tmp_path)
    said = tomllib.loads((tmp_path / RECOMMENDED).read_text())
    assert said["client"] == {"learning_rate": 0.05, "epochs": 1}
    assert said["strategy"] == {"name": "fedbuff", "buffer_size": 8}


def test_the_recommendation_runs_as_it_is(whole: tuple[ab.Tuning, int], tmp_path: Path) -> None:
    tuned, _ = whole
    text = (tuned.folder / RECOMMENDED).read_text()
    assert text == tuned.toml
    file = tmp_path / RECOMMENDED
    file.write_text(text.replace('workload = "killed_tuning:Measured"', 'workload = "synthetic"'))
    found = ab.configure(file)
    assert (found.client, found.strategy, found.fleet) == (
        tuned.config.client,
        tuned.config.strategy,
        tuned.config.fleet,
    )
    assert ab.simulate(file).result.updates_applied == killed_tuning.UPDATES


def test_the_front_is_what_nothing_else_is_preferable_to(whole: tuple[ab.Tuning, int]) -> None:
    tuned, _ = whole
    rows = [(row["accuracy"], -row["time_s"], -row["traffic_bytes"]) for row in tuned.trials]
    beaten = [
        any(other != row and all(a >= b for a, b in zip(other, row, strict=True)) for other in rows)
        for row in rows
    ]
    assert tuned.trials.column("on_front") == [not b for b in beaten]
    assert any(beaten) or len(rows) == len(tuned.front)


def test_a_choice_at_an_end_is_extended_and_said() -> None:
    ranges, given = {RATE: [0.001, 0.01]}, {**SMALL, "settings": {RATE: 0.001}, "until": ab.Until(updates=40)}
    tuned = ab.tune("synthetic", ranges, **{**given, "extensions": 2})
    assert set(tuned.trials.column(RATE)) == {0.001, 0.01, 0.1, 1.0}, "twice the next point, and no further"
    assert tuned.choice[RATE] == 1.0
    assert [f"{RATE} = 1.0 is the greatest that was tried" in said for said in tuned.report.said] == [True]
    left = ab.tune("synthetic", ranges, **given)
    assert set(left.trials.column(RATE)) == {0.001, 0.01}


@pytest.mark.parametrize("often", [{"run.evaluate_every_versions": 0}, {"run.evaluate_every_versions": 50}])
def test_trials_are_judged_by_their_versions_however_seldom_a_run_is_measured(
    often: dict[str, Any], tmp_path: Path
) -> None:
    given = {**SMALL, "strategy": "fedasync", "until": ab.Until(updates=40), "trials": 3}
    tuned = ab.tune(
        "synthetic", {RATE: [0.0001, 0.001, 0.3]}, **given, settings={RATE: 0.0001, **often}, out=tmp_path
    )
    first = {row["choice"].get(RATE, 0.0001): row for row in lines(tmp_path) if row["rung"] == 0}
    assert [row["updates"] for row in first.values()] == [10, 10, 10], "at the end of the first share"
    values = {rate: row["value"] for rate, row in first.items()}
    assert values.pop(0.3) > max(values.values()), "and not by the first weights, which are the same for all"
    assert tuned.choice[RATE] == 0.3
    assert tuned.config.run.evaluate_every_versions == often["run.evaluate_every_versions"]


def test_trials_are_measured_by_the_clock_where_that_is_often_enough(tmp_path: Path) -> None:
    for every_s, kept in ((2.0, (2.0, 0)), (2.1, (0.0, 1))):
        settings = {"run.evaluate_every_s": every_s, "run.evaluate_every_versions": 0}
        given = {**SMALL, "until": ab.Until(seconds=8.0), "out": tmp_path / f"{every_s}"}
        ab.tune("synthetic", {RATE: [0.01, 0.1]}, **given, settings=settings)
        runs = [Result.read(path.parent).config["run"] for path in given["out"].glob("*/*/result.json")]
        assert {(run["evaluate_every_s"], run["evaluate_every_versions"]) for run in runs} == {kept}


def test_a_buffer_that_is_not_full_at_a_shares_end_is_judged_by_its_first_version(tmp_path: Path) -> None:
    ab.tune("synthetic", {SIZE: [1, 6]}, **SMALL, settings={SIZE: 1, RATE: 0.5}, out=tmp_path)
    first = {row["choice"].get(SIZE, 1): row for row in lines(tmp_path) if row["rung"] == 0}
    assert {size: row["updates"] for size, row in first.items()} == {1: 2, 6: 6}
    assert first[6]["value"] != first[6]["first"]
    history = Result.read(tmp_path / "runs" / f"trial-{first[6]['trial']}-seed0").history
    assert [p.accuracy for p in history if p.version == 1] == [first[6]["value"]]


def test_a_budget_of_which_no_version_comes_is_said() -> None:
    given = {**SMALL, "until": ab.Until(updates=2), "settings": {"strategy.buffer_size": 8}}
    tuned = ab.tune("synthetic", {RATE: [0.01, 0.1]}, **given)
    assert any("nothing was learned" in said for said in tuned.report.said)


def test_a_target_that_the_first_weights_reach_is_said() -> None:
    until = ab.Until(metric="loss", mode="max", target=0.0, updates=8)
    tuned = ab.tune("synthetic", {RATE: [0.01, 0.1]}, **{**SMALL, "until": until})
    assert [said for said in tuned.report.said if "the first weights reach the target" in said]
    assert not any("nothing was learned" in said for said in tuned.report.said)


@pytest.mark.parametrize("kill_at", [2, 40])
def test_a_tuning_that_was_killed_goes_on_to_the_same(
    kill_at: int, whole: tuple[ab.Tuning, int], tmp_path: Path
) -> None:
    expected, measured = whole
    out = tmp_path / "tuned"
    with Process(killed_tuning.__file__, out, kill_at, stdout=PIPE) as process:
        assert process.wait(timeout=600) == -signal.SIGKILL
    before = (out / TRIALS_FILE).read_text()
    (out / TRIALS_FILE).write_text(before + '{"kind": "trial", "tri')  # as if it had been at a line
    tuned, again = killed_tuning.run(out)
    assert (out / TRIALS_FILE).read_bytes() == (expected.folder / TRIALS_FILE).read_bytes()
    assert (out / TRIALS_FILE).read_text().startswith(before)
    assert (out / RECOMMENDED).read_bytes() == (expected.folder / RECOMMENDED).read_bytes()
    assert again + kill_at <= measured + killed_tuning.UPDATES + 1, "but for the run that was in hand"
    assert tuned.report == expected.report


def test_nothing_is_run_twice(whole: tuple[ab.Tuning, int], tmp_path: Path) -> None:
    tuned, _ = whole
    legs = Counter((row["kind"], row["trial"], row["rung"], row["seed"]) for row in lines(tuned.folder))
    assert set(legs.values()) == {1}
    again, measured = killed_tuning.run(tuned.folder)
    assert measured == 0
    assert again.report == tuned.report
    assert not list(tuned.folder.rglob(CHECKPOINT)), "nothing is kept for runs that go on no more"


def test_a_trial_that_goes_on_is_the_same_run_as_one_without_a_stop(whole: tuple[ab.Tuning, int]) -> None:
    tuned, _ = whole
    last = next(row for row in lines(tuned.folder) if row["kind"] == "trial" and row["rung"] == 2)
    result = Result.read(tuned.folder / "runs" / f"trial-{last['trial']}-seed0")
    whole_run = ab.simulate(
        killed_tuning.Measured(),
        settings={
            f"{t}.{k}": v for t in ("run", "client", "fleet", "strategy") for k, v in result.config[t].items()
        },
    )
    assert whole_run.result.model_sha256 == result.model_sha256


def test_side_by_side_it_comes_to_the_same(tmp_path: Path) -> None:
    ranges = {RATE: [0.03, 0.3], SIZE: [1, 2]}
    alone = ab.tune("synthetic", ranges, **SMALL)
    beside = ab.tune("synthetic", ranges, **SMALL, parallel=2, out=tmp_path / "t")
    assert beside.report == alone.report


def test_processes_end_with_the_one_that_was_killed() -> None:
    with Process(orphaning.__file__, stdout=PIPE) as process:
        process.communicate(timeout=600)  # which ends when nobody has its other end any more
        assert process.returncode == -signal.SIGKILL


def test_for_a_target_the_soonest_is_the_best(tmp_path: Path) -> None:
    until = ab.Until(accuracy=0.4, updates=60)
    slow = {"settings": {RATE: 0.001}, "until": until}
    tuned = ab.tune("synthetic", {RATE: [0.001, 0.5]}, **{**SMALL, **slow}, out=tmp_path)
    assert tuned.report.aim == "time"
    assert tuned.choice[RATE] == 0.5
    rows = [row for row in lines(tmp_path) if row["kind"] == "trial" and row["trial"] == tuned.report.best]
    result = Result.read(tmp_path / "runs" / f"trial-{tuned.report.best}-seed0")
    assert result.time_to_target_s is not None
    assert rows[-1]["time_s"] == result.time_to_target_s
    assert result.updates_applied < 60, "a run ends at the target"
    shown = [(row["trial"], row["time_s"]) for row in tuned.trials]
    assert len(shown) == len(set(shown)), "and has one point from there on"


def test_for_the_value_a_target_ends_nothing(tmp_path: Path) -> None:
    """It is judged by what the whole budget came to, as one without a target is."""
    given = {**SMALL, "settings": {RATE: 0.02}}
    plain = ab.tune("synthetic", {RATE: [0.02, 0.5]}, **given, out=tmp_path / "plain")
    given["until"] = ab.Until(accuracy=0.05, updates=8)
    aimed = ab.tune("synthetic", {RATE: [0.02, 0.5]}, **given, aim="value", out=tmp_path / "aimed")
    told = [{**row, "reached": False} for row in lines(tmp_path / "aimed")]
    assert told == lines(tmp_path / "plain")
    assert aimed.choice == plain.choice
    assert all(aimed.fresh.column("reached"))


class Valley(Synthetic):
    """One weight, in a valley that is steeper from every run's seed but 0; a step: w <- (1 - rate c) w."""

    def model(self, seed: int = 0) -> dict[str, Any]:
        c = 1.0 if seed == seed_of(0, "initial") else 3.0
        return {"w": np.ones(1, np.float32), "c": np.full(1, c, np.float32)}

    def units(self, model: Any) -> list[Any]:
        return []

    def train(self, model: Any, examples: Any, plan: Any, seed: int) -> dict[str, float]:
        model["w"] *= 1 - plan.learning_rate * model["c"]
        return {"steps": 1.0}

    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        return {"loss": float(model["w"][0] ** 2)}


@pytest.mark.parametrize(("given", "other", "told"), [(0.3, 0.4, True), (0.2, 0.3, False)])
def test_where_fresh_seeds_prefer_the_settings_as_given_it_is_said(
    given: float, other: float, told: bool
) -> None:
    """From seed 0 the greater rate is the better one; from the others the nearer to a third is."""
    alone = {"fleet": ab.Fleet(clients=1), "settings": {RATE: given}}  # so that no update is stale
    tuned = ab.tune(Valley(), {RATE: [given, other]}, **{**SMALL, **alone})
    assert tuned.choice[RATE] == other
    means = {
        name: statistics.fmean(row["loss"] for row in tuned.fresh if row["settings"] == name)
        for name in ("as given", "recommended")
    }
    assert (means["as given"] < means["recommended"]) is told
    assert any("the settings as given did better" in said for said in tuned.report.said) is told


@pytest.mark.parametrize(
    ("rates", "chosen", "shown", "said"),
    [
        ([0.2, 0.6], 0.2, ["recommended", "passed over: trial 1"], "trial 1 is passed over: from 2 of 2"),
        ([0.6, 0.2], 0.2, ["recommended", "as given"], "trial 0 is passed over: from 2 of 2"),
        (
            [0.8, 0.6],
            0.8,
            ["recommended", "passed over: trial 1"],
            "from 2 of 2 fresh seeds the recommendation came to",
        ),
    ],
)
def test_what_collapses_from_fresh_seeds_is_passed_over_for_what_stands(
    rates: list[float], chosen: float, shown: list[str], said: str, tmp_path: Path
) -> None:
    given = {**SMALL, "settings": {RATE: rates[0]}, "out": tmp_path}
    tuned = ab.tune(Valley(), {RATE: rates}, **given)
    losses = {row["seed"]: row["loss"] for row in tuned.fresh if row["settings"] == "recommended"}
    assert tuned.choice[RATE] == chosen
    assert all(loss < 1 for loss in losses.values()) == (chosen == 0.2), "1 is what the first weights come to"
    assert list(dict.fromkeys(tuned.fresh.column("settings"))) == shown
    assert any(said in remark for remark in tuned.report.said)
    assert any("take it with care" in remark for remark in tuned.report.said) == (chosen == 0.8)
    assert ab.tune(Valley(), {RATE: rates}, **given).report == tuned.report


def test_without_a_budget_what_is_recommended_ends_at_the_target_as_its_trials_do(tmp_path: Path) -> None:
    fast = {"until": None, "settings": {RATE: 0.5, "run.target_accuracy": 0.2}}
    tuned = ab.tune("synthetic", {SIZE: [1, 2]}, **{**SMALL, **fast}, out=tmp_path)
    assert tuned.config.run.stop_at_target
    run = ab.simulate(tmp_path / RECOMMENDED, out=tmp_path / "run")
    assert run.result.time_to_target_s is not None
    assert run.result.updates_applied <= 2 * max(tuned.fresh.column("updates"))


def test_a_budget_of_bytes_ends_runs_and_becomes_updates(tmp_path: Path) -> None:
    until = {"until": None}
    tuned = ab.tune("synthetic", {RATE: [0.03, 0.3]}, **{**SMALL, **until}, bytes_max=40_000, out=tmp_path)
    assert all(row["traffic_bytes"] <= 40_000 for row in lines(tmp_path))
    most = max(row["updates"] for row in lines(tmp_path) if row["kind"] == "fresh")
    assert 0 < tuned.config.run.updates_max <= most


@pytest.mark.parametrize("given", [None, 60])
def test_a_target_on_the_way_makes_no_budget_of_bytes_smaller(given: int | None, tmp_path: Path) -> None:
    until = None if given is None else ab.Until(updates=given)
    target = {"run.target_accuracy": 0.2, RATE: 0.5}
    asked = {**SMALL, "until": until, "settings": target, "bytes_max": 2_000_000}
    tuned = ab.tune("synthetic", {SIZE: [1, 2]}, **asked, out=tmp_path)
    fresh = [row for row in lines(tmp_path) if row["kind"] == "fresh" and row["reached"]]
    assert fresh
    assert all(row["traffic_bytes"] < 1_000_000 for row in fresh), "the target is on the way"
    dearest = max(row["traffic_bytes"] / row["updates"] for row in fresh)
    least = 60 if given else 2_000_000 / dearest
    assert tuned.config.run.updates_max >= int(least)
    assert given is None or tuned.config.run.updates_max == given


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"until": ab.Until()},
            r"neither a target nor a budget .*run.target_accuracy.*run.updates_max.*--bytes",
        ),
        ({"until": ab.Until(versions=5)}, r"run.versions_max is none"),
        ({"aim": "time"}, "tune.aim = 'time' is what a target takes"),
        ({"ranges": {}}, "there is nothing to tune"),
        ({"ranges": RATE}, "tune.ranges must be a table of settings"),
        ({"ranges": {3: [1, 2]}}, "tune.ranges: 3 is no setting: write 'table.key'"),
        ({"ranges": {RATE: [0.1]}}, "there is nothing to tune"),
        ({"ranges": {"client.learning_rat": [0.1, 0.2]}}, "did you mean 'client.learning_rate'"),
        ({"ranges": {"client.lr": [0.1, 0.2]}}, "did you mean 'client.learning_rate'"),
        ({"ranges": {"clint.epochs": [1, 2]}}, "'clint.epochs' is no setting"),
        ({"ranges": {"strategy.alpha": [0.1, 0.2]}}, "no setting 'strategy.alpha'"),
        ({"ranges": {"run.seed": [1, 2]}}, "run.seed is what a tuning is for"),
        ({"ranges": {SIZE: [0, 2]}}, f"^tune.ranges: {SIZE} = 0: {SIZE} must be at least 1, not 0"),
        ({"ranges": {CODEC: ["int8", "nope"]}}, f"^tune.ranges: {CODEC} = 'nope': {CODEC} = 'nope': unknown"),
        ({"ranges": {RATE: [0.1, -1.0]}}, f"^tune.ranges: {RATE} = -1.0: {RATE} must be .*, not -1.0$"),
        ({"ranges": {RATE: [-1.0]}}, f"^tune.ranges: {RATE} = -1.0: {RATE} must be .*, not -1.0$"),
        ({"ranges": {RATE: []}}, f"{RATE} is empty"),
        ({"ranges": {RATE: [0.1, 0.2]}, "trials": 1}, "tune.trials = 1: give a whole number, at least 2"),
        ({"ranges": {RATE: [0.1, 0.2]}, "parallel": 10**30}, f"= {10**30}: .*at least 1 and at most 100000"),
        ({"ranges": {RATE: [0.1, 0.2]}, "parallel": 0}, "tune.parallel = 0"),
        ({"ranges": {RATE: [0.1, 0.2]}, "on": "clouds"}, "tune.on = 'clouds': give one of processes, ray"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_run(arguments: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ab.tune("synthetic", **{"ranges": {RATE: [0.1, 0.2]}, **SMALL, **arguments}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_setting_with_one_value_is_held_in_every_trial(tmp_path: Path) -> None:
    tuned = ab.tune("synthetic", {RATE: 0.2, SIZE: [1, 2]}, **SMALL, out=tmp_path / "tuned")
    assert {row["choice"].get(RATE, 0.2) for row in lines(tuned.folder)} == {0.2}
    runs = [Result.read(path.parent) for path in tuned.folder.glob("*/*/result.json")]
    assert {run.config["client"]["learning_rate"] for run in runs} == {0.2}
    assert len(runs) > 2
    assert tuned.config.client.learning_rate == 0.2


def test_ranges_and_counts_may_be_numpys(tmp_path: Path) -> None:
    small = {**SMALL, "seeds": np.int64(1), "trials": np.int64(2), "out": tmp_path / "tuned"}
    tuned = ab.tune("synthetic", {RATE: np.array([0.1, 0.2]), SIZE: [np.int64(2)]}, **small)
    assert {row["choice"].get(SIZE, 2) for row in lines(tuned.folder)} == {2}
    assert tuned.choice[RATE] in (0.1, 0.2)


def test_a_folder_is_of_one_tuning(whole: tuple[ab.Tuning, int], tmp_path: Path) -> None:
    tuned, _ = whole
    with pytest.raises(ConfigError, match=r"has another tuning.*--out"):
        ab.tune("synthetic", {RATE: [0.1, 0.2]}, **SMALL, out=tuned.folder)
    with pytest.raises(ConfigError, match="holds a run already"):
        ab.simulate("synthetic", until=ab.Until(updates=1), out=tuned.folder)
    torn = tmp_path / TRIALS_FILE
    whole_lines = (tuned.folder / TRIALS_FILE).read_text().splitlines(keepends=True)
    torn.write_text("".join([whole_lines[0], '{"kind": "trial"}\n', *whole_lines[2:]]))
    with pytest.raises(DataError, match="line 2 is damaged"):
        killed_tuning.run(tmp_path)


def test_a_folder_is_tuned_in_by_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path, "a tuning"), pytest.raises(ConfigError, match="a tuning is under way in"):
        ab.tune("synthetic", {RATE: [0.01, 0.1]}, **SMALL, out=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_tuning_of_an_app_that_was_changed_does_not_go_on(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "tuned"
    own = "from anabranch.workloads.synthetic import Synthetic\n\n\nclass App(Synthetic):\n    level = 1\n"
    file.write_text(own)
    tuned = ab.tune(f"{file}:App", {RATE: [0.1, 0.2]}, **SMALL, out=out)
    file.write_text(own.replace("= 1", "= 2"))
    with pytest.raises(ConfigError, match=r"another tuning, of other code, as that of .*mine\.py:App has ch"):
        ab.tune(f"{file}:App", {RATE: [0.1, 0.2]}, **SMALL, out=out)
    file.write_text(own)
    assert ab.tune(f"{file}:App", {RATE: [0.1, 0.2]}, **SMALL, out=out).choice == tuned.choice
    # One that an older release has begun says nothing of code, and goes on.
    first, *legs = (out / TRIALS_FILE).read_text().splitlines(keepends=True)
    plan = json.loads(first)
    del plan["code"]
    (out / TRIALS_FILE).write_text("".join([json.dumps(plan, sort_keys=True) + "\n", *legs]))
    assert ab.tune(f"{file}:App", {RATE: [0.1, 0.2]}, **SMALL, out=out).choice == tuned.choice


def test_a_tuning_of_an_older_release_goes_on_or_says_which_setting_differs(tmp_path: Path) -> None:
    """It has nothing of settings that came since, and what has another default now is told by its name."""
    ranges = {RATE: [0.1, 0.2]}
    tuned = ab.tune("synthetic", ranges, **SMALL, out=tmp_path)
    file = tmp_path / TRIALS_FILE
    first, *legs = file.read_text().splitlines(keepends=True)
    plan = json.loads(first)
    del plan["config"]["client"]["push_duty"]  # its default is what a run without it did
    file.write_text("".join([json.dumps(plan, sort_keys=True) + "\n", *legs]))
    assert ab.tune("synthetic", ranges, **SMALL, out=tmp_path).choice == tuned.choice
    plan["config"]["run"]["rules"] = 0
    file.write_text("".join([json.dumps(plan, sort_keys=True) + "\n", *legs]))
    with pytest.raises(
        ConfigError, match=r"other settings: run\.rules is 0 there and \d+ here; name another"
    ):
        ab.tune("synthetic", ranges, **SMALL, out=tmp_path)


def test_a_tuning_of_another_executor_does_not_go_on(tmp_path: Path) -> None:
    ab.tune("synthetic", {RATE: [0.1, 0.2]}, **SMALL, out=tmp_path)
    other = {**SMALL, "settings": {**SMALL.get("settings", {}), "fleet.executor": "serial"}}
    with pytest.raises(ConfigError, match=r'fleet\.executor is "auto" there and "serial" here'):
        ab.tune("synthetic", {RATE: [0.1, 0.2]}, **other, out=tmp_path)


def test_it_saves_what_the_name_ends_with(whole: tuple[ab.Tuning, int], tmp_path: Path) -> None:
    tuned, _ = whole
    page = (tuned.folder / PAGE).read_text()
    assert tuned.save(tmp_path / "page.html").read_text() == page
    assert "https://" not in page.replace("http://www.w3.org", ""), "it opens offline"
    assert page.count("<svg xmlns") == 2
    assert tuned.save(tmp_path / "front.svg").read_text().startswith("<svg")
    assert tuned.save(tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    assert tuned.save(tmp_path / "trials.csv").read_text().startswith("trial,share,")
    assert "<svg" not in tuned._repr_html_()
    assert "image/svg" in tuned._repr_html_()
    with pytest.raises(ConfigError, match=r"\.html, \.toml, \.csv"):
        tuned.save(tmp_path / "page.pdf")
