"""The study of the downlink's goals: what it runs, with runs that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from measuring import benchmark

study = benchmark("downlink_cnn")
RAW, CASES, RATES, Study = study.RAW, study.CASES, study.RATES, study.Study
BEST = 0.4  # beyond the grid
Run = tuple[str, float, int, str, float]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """What was run, in turn: raw models come to 70.5 %, and the nearer a rate is to `BEST` the better."""
    runs: list[Run] = []

    def play(key: str, case: Any, rate: float, seed: int, part: str, target: float) -> Any:
        runs.append((case.name, rate, seed, part, target))
        off = abs(rate - BEST)
        late = 70.5 - off if case is RAW else 60.0
        down = 100.0 if case is RAW else 4.0
        return study.Record(
            key, case.name, rate, seed, part, target, 50 + off, late, 9, 80.0, down, 41.0, 21.0
        )

    monkeypatch.setattr(study, "_played", play)
    return runs


def test_rows_have_one_target_and_one_budget(played: list[Run], tmp_path: Path) -> None:
    rows = list(Study(tmp_path / "runs.jsonl", lambda: True).rows())
    assert [case for case, _ in rows] == [RAW, *CASES]
    for case, found in rows:
        assert [(record.seed, record.rate, record.part) for record in found] == [
            (seed, BEST, "test") for seed in study.SEEDS
        ]
        tuned = [
            (rate, seed) for name, rate, seed, part, _ in played if (name, part) == (case.name, "validation")
        ]
        first = next(other for other in (RAW, *CASES) if other.family == case.family)
        budget = [*RATES, BEST, 2 * BEST] if case is first else []
        assert tuned == [(rate, seed) for rate in budget for seed in study.TUNING_SEEDS]
    targets = {(name == RAW.name and part == "validation", target) for name, _, _, part, target in played}
    assert targets == {(True, 0.0), (False, 0.69)}


def test_what_was_run_is_not_run_again(played: list[Run], tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    left = iter(range(7))
    list(Study(path, lambda: next(left, None) is not None).rows())
    assert len(played) == 7
    path.write_text(path.read_text() + '{"key": "torn')
    first = [record.key for _, found in Study(path).rows() for record in found]
    assert first == []
    everything = list(Study(path, lambda: True).rows())
    assert len(played) == len(set(played))
    assert list(Study(path).rows()) == everything


def test_the_goal_is_missed_where_an_interval_reaches_under_it(played: list[Run], tmp_path: Path) -> None:
    rows = list(Study(tmp_path / "runs.jsonl", lambda: True).rows())
    lines = study.text(rows).splitlines()[2:]
    assert [line.split(" | ")[-1] for line in lines] == [
        " |",
        "up 1/40, down 1/20: met |",
        "up 1/30, down 1/30: missed down |",
        "up 1/30, down 1/30: missed down |",
        "up 1/40, down 1/20: met |",
        "up 1/30, down 1/30: missed down |",
    ]
    assert "1/25.0 (1/25.0 to 1/25.0)" in lines[1]


def test_one_family_is_shown_without_the_raw_runs(played: list[Run], tmp_path: Path) -> None:
    rows = list(Study(tmp_path / "runs.jsonl", lambda: True).rows(["quarter"]))
    (shown,) = study.text(rows).splitlines()[2:]
    assert shown.split(" | ")[-3:] == ["-", "-", "up 1/30, down 1/30: missed down |"]
