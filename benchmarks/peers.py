"""Beside other simulators: the same FedAvg by each, in its own process and environment, in turns.

    python -m benchmarks.peers [--environments FOLDER] [--turns 5]

The folder has an environment of each peer (FOLDER/pfl, FOLDER/fedjax); what is not there is installed. One
whose environment cannot be made is left out, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import anabranch
from anabranch.core.config.tables import FleetTable
from anabranch.workloads.digits import Digits
from anabranch.workloads.fashion_mnist import DEFAULT_PATH, FashionMnist

SCRIPTS = Path(__file__).with_name("peer_scripts")
ENVIRONMENTS = Path(tempfile.gettempdir()) / "anabranch-peers"
DEVICES, EXAMPLES, EPOCHS, BATCH = 100, 64, 4, 32
STEPS = EPOCHS * EXAMPLES // BATCH
TURNS = 5
LIGHT = "anabranch, light"
LIMIT_S = 540.0


@dataclass(frozen=True)
class OtherSimulator:
    """Another simulator: its script, and what pip installs for it, one command after the other."""

    name: str
    script: str
    installs: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Of its environment."""
        return self.name.lower()


@dataclass(frozen=True)
class PeerProblem:
    """What all of them train."""

    app: anabranch.App
    rounds: int
    learning_rate: float


@dataclass(frozen=True)
class PeerTurn:
    """One run by one simulator."""

    tasks: int
    wall_s: float
    cpu_s: float
    accuracy: float


PEERS = (
    OtherSimulator("pfl", "with_pfl.py", ("torch==2.13.0", "pfl==0.6.0")),
    OtherSimulator(
        "FedJAX",
        "with_fedjax.py",  # its last release wants a JAX that still has `jax.tree_map`
        ("fedjax==0.0.17 jax==0.4.25 jaxlib==0.4.25 dm-haiku==0.0.12 numpy<2 scipy<1.13",),
    ),
)


def problems() -> list[PeerProblem]:
    """Those whose data is here."""
    found = [PeerProblem(Digits(), 20, 0.2)]
    if Path(DEFAULT_PATH).is_dir():
        found.append(PeerProblem(FashionMnist(), 2, 0.1))
    return found


def write_task(path: Path, problem: PeerProblem) -> None:
    """The devices' examples and the test set, drawn here once, so that all have the same."""
    fleet = FleetTable(clients=DEVICES, split="draws", examples_per_client=EXAMPLES)
    parts = [problem.app.data(anabranch.Shard("train", i, DEVICES, fleet)) for i in range(DEVICES)]
    test = problem.app.data(anabranch.Shard("test"))
    np.savez(
        path,
        problem=problem.app.name,
        rounds=problem.rounds,
        epochs=EPOCHS,
        batch_size=BATCH,
        learning_rate=problem.learning_rate,
        x=np.stack([np.asarray(part.x) for part in parts]),
        y=np.stack([np.asarray(part.y) for part in parts]),
        test_x=np.asarray(test.x),
        test_y=np.asarray(test.y),
    )


def interpreter(peer: OtherSimulator, environments: Path) -> Path | None:
    """Of the peer's environment, made where it is not there; None where that fails, which is said."""
    folder = environments / peer.folder
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    venv.create(folder, clear=True)
    for wanted in peer.installs:
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        command = [*pip, "install", "-q", *wanted.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{peer.name} is left out: {wanted}: {done.stderr.strip()[-300:]}", file=sys.stderr)
            return None
    ready.touch()
    return python


def take_turn(command: Sequence[str]) -> PeerTurn:
    """A script's, with one thread. Raises `CalledProcessError` with what it said."""
    one_thread = {
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
        env={**os.environ, **one_thread},
    )
    return PeerTurn(**json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))


def in_turns(problem: PeerProblem, environments: Path, turns: int) -> dict[str, list[PeerTurn]]:
    """Each simulator's turns, one after the other and round again."""
    ours = [sys.executable, str(SCRIPTS / "with_anabranch.py"), "TASK"]
    commands = {"anabranch": ours, LIGHT: [*ours, "light"]}
    for peer in PEERS:
        if python := interpreter(peer, environments):
            commands[peer.name] = [str(python), str(SCRIPTS / peer.script), "TASK"]
    found: dict[str, list[PeerTurn]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.npz"
        write_task(task, problem)
        for _ in range(turns):
            for name, command in commands.items():
                found[name].append(take_turn([str(task) if word == "TASK" else word for word in command]))
    return found


def table(found: Mapping[str, Sequence[PeerTurn]]) -> str:
    """Medians; the last column is ours to this row's, turn by turn, of processor time."""
    lines = [
        "| simulator | tasks a second | of processor time | accuracy | anabranch to it, in turns |",
        "|---|---|---|---|---|",
    ]
    ours = next(iter(found.values()))
    for name, turns in found.items():
        wall = statistics.median(turn.tasks / turn.wall_s for turn in turns)
        cpu = statistics.median(turn.tasks / turn.cpu_s for turn in turns)
        ratios = sorted(theirs.cpu_s / own.cpu_s for own, theirs in zip(ours, turns, strict=True))
        accuracy = statistics.median(turn.accuracy for turn in turns)
        told = f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {name} | {wall:.0f} | {cpu:.0f} | {accuracy:.3f} | {told} |")
    return "\n".join(lines)


def section(environments: Path = ENVIRONMENTS, turns: int = TURNS) -> str:
    """The figures as a section of docs/benchmarks.md."""
    blocks = [INTRODUCTION]
    for problem in problems():
        title = f"### {problem.app.name}, {DEVICES} devices, rounds: {problem.rounds}"
        blocks.append(f"{title}\n\n{table(in_turns(problem, environments, turns))}")
    return "\n\n".join(blocks) + "\n"


INTRODUCTION = f"""## Beside other simulators

FedAvg by each simulator's own loop, model class and batching, as its documentation writes one: the same
examples on the same {DEVICES} devices, all of them in every round, {STEPS} steps of {BATCH} of a device's
{EXAMPLES} images, plain SGD, the same layers. Each in a process and an environment of its own, with one
thread, in turns ({TURNS} each, medians). A round before it counts, in which the peers compile; the accuracy,
of the test set, which each looks at once, in the end, shows that it has learned. The last column is of
processor time. The first row has the defaults but for what a round is; in the second devices sleep between
rounds where the first row's ask again (`fleet.waiting = "called"`), a stack takes all of them
(`fleet.batch_devices`), and updates are not hashed (`run.payload_digest`): the others do none of that."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, metavar="FOLDER")
    parser.add_argument("--turns", type=int, default=TURNS)
    given = parser.parse_args()
    print(section(given.environments, given.turns))


if __name__ == "__main__":
    main()
