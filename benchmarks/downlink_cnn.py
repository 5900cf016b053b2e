"""The downlink's goals on the Fashion-MNIST CNN: bytes of both ways to an accuracy that raw models come to.

    nice -n 19 python -m benchmarks.downlink_cnn run [--minutes 25] [--family half]
    python -m benchmarks.downlink_cnn table       # for docs/downlink.md, of what was run

As `benchmarks.downlink`, on 99,806 parameters. First TEASQ with models as they are, both ways: its learning
rate is chosen by the late accuracy on the validation split, and that accuracy, less a point, is everybody's
target. Then each family of rows (whole models, a quarter left out, a half left out) has the same budget: the
same learning rates and seeds, chosen by the seconds to the target on the validation split. Then fresh seeds
on the test split, each run to its first measurement at the target. A share is of the bytes that the same
exchanges have with whole models as they are, or of those of the raw run of the same seed, which takes fewer
updates. What has ended stays in
`benchmarks/downlink_cnn.jsonl`, and a kill loses the run in hand alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from anabranch.core.config.tables import merge
from benchmarks.arena.intervals import bootstrap
from benchmarks.arena.store import key_of
from benchmarks.arena.tuning import TEST, VALIDATION
from benchmarks.downlink import BASE, BUILT, EVERY_4TH, HALVES, OWN, QUARTERS, VALUE_BYTES
from benchmarks.studies import Tables, late_accuracy, one_thread, table

RESULTS = Path(__file__).with_suffix(".jsonl")
VALUES = 99_806
HORIZON_S = 240.0
LESS = 1.0  # points of accuracy by which the target is under what raw models come to
RATES = (0.05, 0.1, 0.2)
MORE = 2  # rates beyond, where the best one is the first or the last
SHOWN_FROM = 3  # seeds
TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)
CNN: Tables = {
    "run": {"workload": "fashion-mnist", "virtual_s_max": HORIZON_S, "evaluate_every_s": 4.0},
}
RAW_MODELS: Tables = {"uplink": {"codec": "raw"}, "downlink": {"codec": "raw"}}
OWN_4TH: Tables = {"downlink": {**OWN["downlink"], **EVERY_4TH["downlink"]}, **BUILT}


class Case(NamedTuple):
    """A row. `family`: whose rows are tuned together, by the first of them."""

    name: str
    family: str
    layers: tuple[Tables, ...]


RAW = Case("raw both ways", "raw", (RAW_MODELS,))
CASES = (
    Case("whole models, built, every 4th", "whole", (BUILT, EVERY_4TH)),
    Case("a half left out, own parts, built, every 4th", "half", (HALVES, OWN_4TH)),
    Case("a quarter left out, own parts, built, every 4th", "quarter", (QUARTERS, OWN_4TH)),
    Case("whole models", "whole", ()),
    Case("a half left out, versions whole, built, every 4th", "half", (HALVES, BUILT, EVERY_4TH)),
)
FAMILIES = ("raw", "whole", "half", "quarter")
GOALS = {"whole": (40.0, 20.0), "half": (30.0, 30.0), "quarter": (30.0, 30.0)}  # raw / bytes, up and down


@dataclass(frozen=True)
class Record:
    """What a run came to. `seconds`: to the target, None if it never was there; `late`: accuracy, in %."""

    key: str
    case: str
    rate: float
    seed: int
    part: str
    target: float
    seconds: float | None
    late: float
    updates: int
    up_mb: float
    down_mb: float
    up_share: float
    down_share: float


class Study:
    """What is known, and what is run where it is not. `may_run`: whether another run may begin."""

    def __init__(self, path: Path = RESULTS, may_run: Callable[[], bool] = lambda: False) -> None:
        self._path, self._may_run = path, may_run
        self._known = {record.key: record for record in _read(path)}

    def rows(self, families: Sequence[str] = FAMILIES) -> Iterator[tuple[Case, list[Record]]]:
        """Each case with its runs on the fresh seeds, in their order, raw first, as far as they go."""
        raw_rate = self._rate(RAW, 0.0)
        if raw_rate is None:
            return
        target = self._target(raw_rate)
        for case in (each for each in (RAW, *CASES) if each.family in families):
            first = next(other for other in (RAW, *CASES) if other.family == case.family)
            rate = raw_rate if case is RAW else self._rate(first, target)
            if rate is not None:
                yield case, list(self._all([(case, rate, seed, TEST, target) for seed in SEEDS]))

    def _target(self, raw_rate: float) -> float:
        tuned = self._all([(RAW, raw_rate, seed, VALIDATION, 0.0) for seed in TUNING_SEEDS])
        return math.floor(statistics.fmean(record.late for record in tuned) - LESS) / 100

    def _rate(self, case: Case, target: float) -> float | None:
        """The best learning rate of a case on the tuning seeds; None if not all has been run."""
        rates, scores = list(RATES), dict[float, float]()
        while True:
            for rate in rates:
                found = list(self._all([(case, rate, seed, VALIDATION, target) for seed in TUNING_SEEDS]))
                if len(found) < len(TUNING_SEEDS):
                    return None
                scores[rate] = statistics.fmean(_score(record) for record in found)
            best, known = min(rates, key=lambda rate: scores[rate]), sorted(rates)
            beyond = {known[0]: known[0] / 2, known[-1]: known[-1] * 2}.get(best)
            if beyond is None or len(rates) == len(RATES) + MORE:
                return best
            rates.append(beyond)

    def _all(self, runs: Sequence[tuple[Case, float, int, str, float]]) -> Iterator[Record]:
        for run in runs:
            layers = _layers(*run)
            key = key_of(layers)
            if key not in self._known and self._may_run():
                self._keep(_played(key, *run))
            if key in self._known:
                yield self._known[key]

    def _keep(self, record: Record) -> None:
        self._known[record.key] = record
        is_torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" * is_torn + json.dumps(asdict(record), allow_nan=False) + "\n")
        print(time.strftime("%H:%M:%S"), record, flush=True)


def _score(record: Record) -> float:
    """Lower is better: seconds to the target, and where there is none yet the accuracy."""
    if not record.target:
        return -record.late
    return 2 * HORIZON_S - record.late / 100 if record.seconds is None else record.seconds


def _layers(case: Case, rate: float, seed: int, part: str, target: float) -> tuple[Tables, ...]:
    asked = {"seed": seed, "evaluate_on": part, "target_accuracy": target, "stop_at_target": target > 0}
    return BASE, CNN, *case.layers, {"run": asked, "client": {"learning_rate": rate}}


def _played(key: str, case: Case, rate: float, seed: int, part: str, target: float) -> Record:
    from anabranch.simulation.run import simulate

    layers = _layers(case, rate, seed, part, target)
    result = simulate(merge([(f"layer {i}", layer) for i, layer in enumerate(layers)]))
    gc.collect()  # a run is a circle of objects, and holds every device's examples
    whole_up = result.updates_applied * VALUE_BYTES * VALUES
    return Record(
        key, case.name, rate, seed, part, target,
        result.time_to_target_s,
        late_accuracy(result),
        result.updates_applied,
        result.uplink_bytes / 1e6,
        result.downlink_bytes / 1e6,
        whole_up / result.uplink_bytes,
        result.downlink_bytes_full_equivalent / result.downlink_bytes,
    )  # fmt: skip


def _read(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield Record(**json.loads(line))
        except json.JSONDecodeError:
            continue  # torn by a kill: it is run again


# --- the table ---------------------------------------------------------------------------------


def text(rows: Sequence[tuple[Case, list[Record]]]) -> str:
    """The table: mean and 95 % interval of at least `SHOWN_FROM` seeds."""
    shares = "down", "up", "down, of the raw run's", "up, of the raw run's"
    head = "", "rate", "at the target", "virtual seconds", "MB down", "MB up", *shares, "goal"
    shown = [(case, found) for case, found in rows if len(found) >= SHOWN_FROM]
    raw = {record.seed: record for case, found in shown if case is RAW for record in found}
    return table(head, [_cells(case, found, raw) for case, found in shown])


def _cells(case: Case, found: Sequence[Record], raw: Mapping[int, Record]) -> list[str]:
    pairs = [(raw[record.seed], record) for record in found if record.seed in raw]
    there = [record.seconds for record in found if record.seconds is not None]
    downs, ups = [record.down_share for record in found], [record.up_share for record in found]
    return [
        case.name,
        f"{found[0].rate:g}",
        f"{len(there)} of {len(found)}",
        _interval(there, "{:.0f}") if there else "-",
        _interval([record.down_mb for record in found], "{:.2f}"),
        _interval([record.up_mb for record in found], "{:.2f}"),
        _interval(downs, "1/{:.1f}"),
        _interval(ups, "1/{:.1f}"),
        _interval([its.down_mb / record.down_mb for its, record in pairs], "1/{:.1f}") if pairs else "-",
        _interval([its.up_mb / record.up_mb for its, record in pairs], "1/{:.1f}") if pairs else "-",
        _goal(case, ups, downs),
    ]


def _goal(case: Case, ups: Sequence[float], downs: Sequence[float]) -> str:
    """What is asked of a row, and whether all of its intervals are there."""
    asked = GOALS.get(case.family)
    if asked is None:
        return ""
    missed = [
        f"missed {way}"
        for way, goal, shares in zip(("up", "down"), asked, (ups, downs), strict=True)
        if bootstrap(shares).low < goal
    ]
    return f"up 1/{asked[0]:.0f}, down 1/{asked[1]:.0f}: {' and '.join(missed) or 'met'}"


def _interval(values: Sequence[float], form: str) -> str:
    found = bootstrap(values)
    return f"{form.format(found.mean)} ({form.format(found.low)} to {form.format(found.high)})"


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--minutes", type=float, default=25.0, help="no run begins later")
    parser.add_argument("--family", choices=FAMILIES, help="this one alone, so that several may run")
    arguments = parser.parse_args()
    one_thread()
    end = time.monotonic() + 60 * arguments.minutes
    study = Study(may_run=lambda: arguments.what == "run" and time.monotonic() < end)
    families = FAMILIES if arguments.family is None else (arguments.family,)
    print(text(list(study.rows(families))))


if __name__ == "__main__":
    main()
