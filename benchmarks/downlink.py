"""What `run.initial = "built"`, fewer versions and `downlink.parts = "own"` save on the way to one accuracy.

    python -m benchmarks.downlink [--seeds N]

TEASQ-Fed with its delta log on `digits`, on whole models and on sub-models, 100 unequal devices, paired
seeds. Prints the tables of docs/downlink.md. A share is of the bytes that the same exchanges have with whole
models as they are.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from anabranch.core.config.tables import merge
from anabranch.reports.result import Result
from anabranch.simulation.run import simulate

TARGET = 0.85
VALUE_BYTES, DIGITS_VALUES = 4, 4810
BASE: dict[str, dict[str, Any]] = {
    "run": {
        "workload": "digits",
        "virtual_s_max": 120.0,
        "evaluate_every_s": 2.0,
        "evaluate_every_versions": 0,
        "target_accuracy": TARGET,
        "stop_at_target": True,
    },
    "fleet": {
        "clients": 100,
        "split": "draws",
        "dirichlet_alpha": 0.3,
        "examples_per_client": 50,
        "speed_ratio": 5.0,
        "up_mbps": 1.0,
        "down_mbps": 5.0,
    },
    "strategy": {"name": "teasq", "concurrency_fraction": 0.2, "cache_size": 5},
    "client": {"batch_size": 20, "epochs": 1, "learning_rate": 0.1},
}
EVERY_4TH: dict[str, dict[str, Any]] = {"downlink": {"publish_every_versions": 4}}
COARSE = {"codec": "log(2,128,6)"}
BUILT: dict[str, dict[str, Any]] = {"run": {"initial": "built"}}
WHOLE: dict[str, dict[str, dict[str, Any]]] = {
    "`log(2)`": {},
    "`log(2)`, every 2nd version": {"downlink": {"publish_every_versions": 2}},
    "`log(2)`, every 4th": EVERY_4TH,
    "`log(2)`, version 0 built": BUILT,
    "`log(2)`, version 0 built, every 4th": {**BUILT, **EVERY_4TH},
    "`log(2,128,6)`": {"downlink": COARSE},
    "`log(2,128,6)`, every 4th": {"downlink": {**COARSE, **EVERY_4TH["downlink"]}},
    "`log(2,128,6)`, version 0 built, every 4th": {"downlink": {**COARSE, **EVERY_4TH["downlink"]}, **BUILT},
}
OWN: dict[str, dict[str, Any]] = {"downlink": {"parts": "own"}}
HALVES: dict[str, dict[str, Any]] = {
    "strategy": {"name": "teasq_drop"},
    "submodel": {"name": "random", "drop": 0.5},
}
QUARTERS: dict[str, dict[str, Any]] = {
    "strategy": {"name": "teasq_drop"},
    "submodel": {"name": "random", "drop": 0.25},
}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    f"{size}, {what}": {**parts, **more}
    for size, parts in (("a quarter left out", QUARTERS), ("a half left out", HALVES))
    for what, more in (
        ("versions whole", {}),
        ("own parts", OWN),
        ("versions whole, version 0 built", BUILT),
        ("own parts, version 0 built", {**OWN, **BUILT}),
        ("own parts, built, every 4th", {"downlink": {**OWN["downlink"], **EVERY_4TH["downlink"]}, **BUILT}),
    )
}


def run(tables: dict[str, dict[str, Any]], seed: int) -> Result:
    """One simulation."""
    return simulate(merge([("base", BASE), ("case", tables), ("seed", {"run": {"seed": seed}})]))


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Mean and deviation; of one value itself."""
    deviation = f" ± {text(statistics.stdev(values))}" if len(values) > 1 else ""
    return text(statistics.mean(values)) + deviation


def row(name: str, results: Sequence[Result]) -> str:
    """A row of the table. The runs end at the target, or with their time."""
    last = [r.history[-1] for r in results]
    cells = [
        name,
        f"{sum(r.time_to_target_s is not None for r in results)} of {len(results)}",
        spread([p.time_s for p in last], lambda s: f"{s:.0f}"),
        spread([p.downlink_bytes / 1e6 for p in last], lambda mb: f"{mb:.2f}"),
        spread([p.uplink_bytes / 1e6 for p in last], lambda mb: f"{mb:.2f}"),
        f"1/{statistics.mean(r.downlink_bytes_full_equivalent / r.downlink_bytes for r in results):.1f}",
        f"1/{statistics.mean(_whole_up(r) / r.uplink_bytes for r in results):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _whole_up(result: Result) -> int:
    """Bytes of as many whole updates as came, uncompressed."""
    return result.updates_applied * VALUE_BYTES * DIGITS_VALUES


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(1, parser.parse_args().seeds + 1)
    heads = "downlink", f"at {TARGET:.0%}", "virtual seconds", "MB down", "MB up", "down", "up"
    for cases in (WHOLE, PARTS):
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        for name, tables in cases.items():
            print(row(name, [run(tables, seed) for seed in seeds]), flush=True)


if __name__ == "__main__":
    main()
