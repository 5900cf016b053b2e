"""Background push against foreground push and against no server at all: real processes, a slow link.

    python -m benchmarks.study_shadow [--only speed | --only quality] [--quick | --render]

Fashion-MNIST; a server process, device processes of one thread each, and a proxy that adds a round trip of
50 ms (`delay_proxy.py`). Speed: one device, compared with what the same process does without a server right
before and after; the median of some repetitions, taken in turns. Quality: four devices, equal numbers of
local steps, paired seeds. Goals: in the background at least 0.85 of the steps a second of training alone and
3 times those of the foreground with an exchange every 5 steps; accuracy no more than a point below the
foreground's. Writes `docs/studies/shadow.md` and `.json`; what is in the `.json` is not run again.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from anabranch.client.operator import OperatorClient
from anabranch.server.manifest import write_manifest
from anabranch.workloads.app import Shard, load_app
from anabranch.workloads.trainer import trainer_for
from benchmarks.shadow_device import APP, ELASTIC_FOREGROUND, GAP, PLAN
from benchmarks.studies import STUDIES, mean, publish, study_parser, table

RUNS = Path(__file__).parents[1] / "runs"  # on a real disk, which the system's folder for such may not be
NAME = "shadow"

ROUND_TRIP_S = 0.05
REPEATS, ALONE_STEPS, SPEED_STEPS, FOREGROUND_STEPS = 3, 300, 1_000, 200
SEEDS, DEVICES, QUALITY_STEPS = (1, 2, 3), 4, 600
GOAL_ALONE, GOAL_FOREGROUND, GOAL_POINTS = 0.85, 3.0, 1.0
STOP_S = 60.0

MIXING = {"name": "fedasync", "alpha": 0.5, "rho": 0.0, "staleness": {"name": "constant"}}
TASK, OVERLAP, ELASTIC = "task by task", "overlap", "elastic"
FOREGROUND, BACKGROUND = (TASK, ELASTIC_FOREGROUND), (OVERLAP, ELASTIC)
TRAINING = {"batch_size": PLAN.batch_size, "learning_rate": PLAN.learning_rate}
MODES: Mapping[str, Mapping[str, Any]] = {
    TASK: {"client": {**TRAINING, "steps": GAP}},
    OVERLAP: {"client": {**TRAINING, "steps": GAP, "push": "overlap"}, "server": {"tasks_per_client": 2}},
    ELASTIC_FOREGROUND: {
        "client": {**TRAINING, "push": "elastic", "push_when": "interval", "push_steps": GAP}
    },
    ELASTIC: {"client": {**TRAINING, "push": "elastic", "push_duty": 1.0, "push_steps": GAP}},
}

SPLITS: Mapping[str, Mapping[str, Any]] = {
    "iid": {"split": "iid"},
    "Dirichlet 0.3": {"split": "dirichlet", "dirichlet_alpha": 0.3},
}

Found = dict[str, Any]
Job = tuple[dict[str, list[Found]], str, int, Callable[[], Found]]


@contextmanager
def served(mode: str, seed: int, folder: Path, split: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`anabranch server` behind the slow link: the address for devices, and the operators' own."""
    trainer = trainer_for(load_app(APP))
    write_manifest(folder / "model", APP, trainer.initial(seed), trainer.spec.groups)
    here = {"address": "127.0.0.1:0", "admin_address": "127.0.0.1:0", "data_dir": str(folder / "data")}
    tables = {
        "run": {"name": f"study-{NAME}", "workload": APP, "seed": seed},
        "fleet": {"clients": DEVICES, **split},
        "strategy": MIXING,
        **MODES[mode],
        "server": {**MODES[mode].get("server", {}), **here},
    }
    config = folder / "config.json"
    config.write_text(json.dumps(tables), encoding="utf-8")
    command = ["-m", "anabranch.cli.main", "server", str(config), "--json", "--model", str(folder / "model")]
    with _process(command) as server:
        assert server.stdout is not None
        said = next(json.loads(line) for line in server.stdout if '"serving"' in line)
        with _process(["-m", "benchmarks.delay_proxy", said["address"], str(ROUND_TRIP_S)]) as proxy:
            assert proxy.stdout is not None
            yield proxy.stdout.readline().strip(), said["admin_address"]


@contextmanager
def _process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(STOP_S)


def devices(
    mode: str, address: str, count: int, steps: int, folder: Path, steps_alone: int = 0
) -> list[Found]:
    """So many device processes at once: what each tells."""
    started = []
    for index in range(count):
        arguments = [mode, address, str(index), str(DEVICES), str(steps), str(folder), str(steps_alone)]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.shadow_device", *arguments],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        told = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "a device has failed"
    return [json.loads(text.splitlines()[-1]) for text in told]


def speed(mode: str, steps: int, steps_alone: int) -> Found:
    """One device in a mode, and nothing else."""
    with _folder() as folder, served(mode, 0, folder, {}) as (address, _):
        return devices(mode, address, 1, steps, folder, steps_alone)[0]


def quality(mode: str, seed: int, steps: int, split: Mapping[str, Any]) -> Found:
    """Four devices: the accuracy of the server's model after `steps` local steps of each, %."""
    with _folder() as folder:
        with served(mode, seed, folder, split) as (address, admin):
            began = time.monotonic()
            found = devices(mode, address, DEVICES, steps, folder)
            took_s = time.monotonic() - began
            with OperatorClient(admin) as operator:
                operator.export(folder / "model.safetensors")
        accuracy = _accuracy(folder / "model.safetensors")
    return {
        "accuracy": accuracy,
        "seconds": took_s,
        "gap": statistics.fmean(device["gap"] for device in found),
        "steps": statistics.fmean(device["steps"] for device in found),
    }


@contextmanager
def _folder() -> Iterator[Path]:
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RUNS) as folder:
        yield Path(folder)


def _accuracy(file: Path) -> float:
    from safetensors.numpy import load_file

    app = load_app(APP)
    trainer, tensors = trainer_for(app), load_file(file)
    spec = trainer.spec
    found = trainer.evaluate(spec.flatten(tensors), spec.frozen(tensors), app.data(Shard("test")))
    return 100.0 * found["accuracy"]


def measure(data_file: Path, only: str, quick: bool) -> None:
    """What is not in the file yet; it is written after every run."""
    found: Found = {"speed": {}, "quality": {}, "minutes": 0.0}
    if data_file.exists():
        found = json.loads(data_file.read_text(encoding="utf-8"))
    for runs, mode, turn, run in _jobs(found, only, quick):
        if len(runs.setdefault(mode, [])) > turn:
            continue
        began, load = time.monotonic(), os.getloadavg()[0]
        runs[mode].append({**run(), "load": load})
        print(mode, runs[mode][-1], flush=True)
        found["minutes"] += (time.monotonic() - began) / 60
        data_file.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _jobs(found: Found, only: str, quick: bool) -> Iterator[Job]:
    """Where each figure goes, and how to get it; in turns, so that another's load hits all modes."""
    less = 4 if quick else 1
    for turn, mode in itertools.product(range(1 if quick else REPEATS), MODES):
        steps = (SPEED_STEPS if mode == ELASTIC else FOREGROUND_STEPS) // less
        if only != "quality":
            yield found["speed"], mode, turn, partial(speed, mode, steps, ALONE_STEPS // less)
    seeds = enumerate(SEEDS[: 1 if quick else None])
    for split, (turn, seed), mode in itertools.product(SPLITS, seeds, (*FOREGROUND, ELASTIC)):
        if only != "speed":
            run = partial(quality, mode, seed, QUALITY_STEPS // less, SPLITS[split])
            yield found["quality"].setdefault(split, {}), mode, turn, run


def goals(found: Found) -> list[str]:
    """What was to be shown, and whether it was."""
    lines, speeds = [], found["speed"]
    if speeds:
        share, rate = _median(speeds[ELASTIC], _share), _median(speeds[ELASTIC], _rate)
        lines.append(
            f"elastic, in the background: {share:.2f} of the steps a second of training alone; "
            f"goal {GOAL_ALONE:g}: {_met(share >= GOAL_ALONE)}"
        )
        for mode in FOREGROUND:
            times = rate / _median(speeds[mode], _rate)
            met = _met(times >= GOAL_FOREGROUND)
            lines.append(f"{times:.1f} times the steps a second of: {mode}; goal {GOAL_FOREGROUND:g}: {met}")
    for split, runs in found["quality"].items():
        for mode in FOREGROUND:
            pairs = list(zip(runs.get(ELASTIC, []), runs.get(mode, []), strict=False))
            if not pairs:
                continue
            gained = statistics.fmean(a["accuracy"] - b["accuracy"] for a, b in pairs)
            met = _met(gained >= -GOAL_POINTS)
            seeds = f"{len(pairs)} of {len(SEEDS)} seeds"
            lines.append(
                f"{split}, {seeds}: {gained:+.2f} points against: {mode}; goal -{GOAL_POINTS:g}: {met}"
            )
    return lines


def _rate(run: Found) -> float:
    return float(run["steps_per_s"])


def _share(run: Found) -> float:
    """Of what the same process does alone."""
    return float(run["steps_per_s"] / run["alone_per_s"])


def _median(runs: list[Found], of: Callable[[Found], float]) -> float:
    return statistics.median(map(of, runs))


def _met(holds: bool) -> str:
    return "**met**" if holds else "**missed**"


def _speeds(speeds: Mapping[str, list[Found]]) -> str:
    head = ("mode", "steps a second", "alone", "share (range)", "steps between exchanges", "load")
    rows = [
        (
            mode,
            f"{_median(runs, _rate):.0f}",
            f"{_median(runs, lambda run: run['alone_per_s']):.0f}",
            f"{_median(runs, _share):.2f} ({min(map(_share, runs)):.2f} to {max(map(_share, runs)):.2f})",
            f"{_median(runs, lambda run: run['gap']):.0f}",
            f"{_median(runs, lambda run: run['load']):.1f}",
        )
        for mode, runs in speeds.items()
    ]
    return table(head, rows)


def _qualities(qualities: Mapping[str, Mapping[str, list[Found]]]) -> str:
    head = ("split", "mode", "accuracy, %", "steps of a device", "between exchanges", "seconds", "load")
    rows = [
        (
            split,
            mode,
            mean((r["accuracy"] for r in runs), 2),
            mean((r["steps"] for r in runs), 0),
            mean((r["gap"] for r in runs), 0),
            mean((r["seconds"] for r in runs), 0),
            mean(r["load"] for r in runs),
        )
        for split, of in qualities.items()
        for mode, runs in of.items()
    ]
    return table(head, rows)


def document(found: Found) -> str:
    """The page."""
    speeds = found["speed"]
    return f"""# Study: background push

Made by `python -m benchmarks.study_shadow`; do not edit. This run took {found["minutes"]:.0f} minutes on
{os.cpu_count()} cores, which it shared with other work: the tables give the load average before each run.

Fashion-MNIST, a CNN of 99,806 parameters, updates and models as they are (0.4 MB each way); batch
{PLAN.batch_size}, learning rate {PLAN.learning_rate:g}, FedAsync with alpha = {MIXING["alpha"]}, no discount
for staleness. Real processes: the server, the devices with one thread each, and a proxy that adds a round
trip of {ROUND_TRIP_S * 1e3:.0f} ms. The foreground exchanges every {GAP} local steps: `task by task` (ask,
fetch, train, push), and the elastic exchange with steps that wait for its answer, ShadowSync's own
counterpart. The background exchanges one after the other (`push_duty = 1`).

{chr(10).join("- " + goal for goal in goals(found))}

## Local steps a second of one device

Medians of {min(map(len, speeds.values()), default=0)} to {REPEATS} runs, taken in turns. Alone: the same
process without a server, right before and after; a share above 1 says that others' load changed meanwhile.

{_speeds(speeds)}

## Accuracy of {DEVICES} devices after equal numbers of local steps

Mean ± standard deviation over the seeds.

{_qualities(found["quality"])}
"""


def main() -> None:
    """Measure, write."""
    parser = study_parser(__doc__, "little of everything, docs untouched")
    parser.add_argument("--only", default="", choices=["", "speed", "quality"], help="this part alone")
    arguments = parser.parse_args()
    folder = Path("/tmp") if arguments.quick else STUDIES
    data_file = folder / f"{NAME}.json"
    if arguments.quick:
        data_file.unlink(missing_ok=True)
    if not arguments.render:
        measure(data_file, arguments.only, arguments.quick)
    text = document(json.loads(data_file.read_text(encoding="utf-8")))
    publish(folder / f"{NAME}.md", text, __file__)


if __name__ == "__main__":
    main()
