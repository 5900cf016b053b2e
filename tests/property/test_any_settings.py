"""Whatever settings go together, at once: a run replays, and goes on to the same after it was cut off.

A simulation is looked at after each event, replayed from its payloads, and interrupted. A server is ordered
about, killed and opened again, and stands at last where one stands that nobody has killed; its data are
proved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from any_settings import Tables, served, simulated
from kept_state import Life, config_of

from anabranch.core import events as ev
from anabranch.core.engine.invariants import violations
from anabranch.core.engine.settable import typed, with_values
from anabranch.core.errors import AnabranchError
from anabranch.host.rollback import check_rollback
from anabranch.server.verify import verify
from anabranch.simulation.checkers import Checker
from anabranch.simulation.promises import Promises
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import RunProgress, open_simulation, simulate

SHORT, AT_ONCE = 8, 25
LONG = int(os.environ.get("ANABRANCH_PROVE_SEEDS", "500"))


# --- simulations -----------------------------------------------------------------------------


def prove_simulation(seed: int, folder: Path) -> None:
    """It replays, and goes on to the same after an interruption."""
    settings = simulated(seed)
    whole, broken = folder / "whole", folder / "broken"
    with open_simulation(settings, whole) as simulation:
        if settings.faults.on:
            Promises(simulation)
        else:
            simulation.world.observers.append(Checker(simulation.engine).observe)
        simulation.run()
        result = simulation.result(0.0)
        simulation.leave(result, whole)
    assert replay_run(whole).matches, f"seed {seed}"
    at = Random(seed).randint(0, max(0, result.versions - 1))
    comes = pytest.raises(KeyboardInterrupt) if result.versions else suppress(KeyboardInterrupt)
    with comes:  # without a version at last there may have been some that were lost
        simulate(settings, broken, progress=_interrupting(at), checkpoint_s=1.0, resume=True)
    again = simulate(settings, broken, checkpoint_s=1.0, resume=True)
    assert again.status == "finished"
    if not settings.privacy.on:  # whose noise is another in each folder
        assert (again.journal_sha256, again.model_sha256) == (result.journal_sha256, result.model_sha256)


def _interrupting(version: int) -> Callable[[RunProgress], None]:
    def tell(progress: RunProgress) -> None:
        if progress.version > version:
            raise KeyboardInterrupt

    return tell


# --- servers ---------------------------------------------------------------------------------

TURNS, ORDERED = 60, 0.25
TYPED: dict[str, list[Any]] = {
    "run.updates_max": [0, 500],
    "run.rejections_max": [0, 100],
    "server.staleness_max": [0, 2, 5],
    "server.tasks_per_client": [1, 2, 3],
    "server.upload_now_versions": [0, 1],
    "server.lease_s": [5.0, 60.0],
    "robust.clip": [0.0, 1.5, "auto"],
    "robust.buffer_max": [0, 1],
    "robust.window_max": [0, 2, 9],
    "robust.window_versions": [1, 3, 20],
    "robust.tasks_per_minute": [0.0, 20.0],
    "robust.flaws_max": [0, 1, 3],
    "client.steps": [0, 3],
    "client.learning_rate": [0.01, 0.5],
}


def prove_server(seed: int, folder: Path) -> None:
    """Where it was killed it stands where it would."""
    tables, random = served(seed), Random(seed)
    kills = sorted(random.sample(range(1, TURNS), 3))
    keeps = "keep" in tables.get("server", {})
    goes_back = not keeps or seed % 2 == 1
    unbroken = Ordered(seed, folder / "unbroken", tables, goes_back).lived([])
    killed = Ordered(seed, folder / "killed", tables, goes_back).lived(kills)
    same = ["version", "model_sha256", "state_sha256", "log_sha256"]
    if "privacy" in tables:  # the noise of which is another in each folder
        same = ["version"]
    if keeps:  # what a snapshot has let go cannot be gone back to, and is not in the log
        same = [] if goes_back else same[:3]
    assert [killed[key] for key in same] == [unbroken[key] for key in same], f"seed {seed}"
    for whole in (True, False):
        assert verify(folder / "killed", whole=whole).problems == (), f"seed {seed}"


class Ordered:
    """A server's life in which operators do what comes to their minds; what they may not do is refused."""

    def __init__(self, seed: int, folder: Path, tables: Tables, goes_back: bool) -> None:
        self._seed, self._folder, self._goes_back = seed, folder, goes_back
        self._tables = {**tables, "server": {**tables.get("server", {}), "data_dir": str(folder)}}
        self._settings = config_of("", self._tables)
        self._life = Life("", folder, self._tables)

    def lived(self, kills: Sequence[int]) -> dict[str, Any]:
        """Where it stands after all turns; before some of them it is killed."""
        for number in range(TURNS):
            random, rng = Random(f"{self._seed} {number}"), np.random.default_rng([self._seed, number])
            if number in kills:
                self._kill(Random(f"killed {self._seed} {number}"))  # the others' draws stay
            self._life.now += float(rng.integers(1, 8)) / 4.0
            if number == 0:
                self._life.order(0)  # all come
            elif random.random() < ORDERED:
                with suppress(AnabranchError):
                    random.choice(self._orders)(random)
            self._life.turn(f"device-{number % 7}", number, rng)
            self._life.now += 1.0
            assert not violations(self._life.books.engine)
        found = self._life.expected
        self._life.close()
        return found

    def _kill(self, random: Random) -> None:
        """After a snapshot, or without."""
        life = self._life
        if random.random() < 0.5:
            life.books.save(life.now)
        stood = life.expected
        life.close()
        self._life = Life("", self._folder, self._tables)
        self._life.now = life.now
        # It would form again, with others in front: who gets a free place then hangs on the kill.
        self._life.books.run.line = life.books.run.line
        assert self._life.expected == stood

    @property
    def _orders(self) -> list[Callable[[Random], None]]:
        go_back = [self._roll_back] if self._goes_back else []
        return [self._set, self._set, *go_back, self._bar, self._let, self._pause, self._wait, self._late]

    def _set(self, random: Random) -> None:
        values = {path: random.choice(TYPED[path]) for path in random.sample(sorted(TYPED), 2)}
        said = typed(self._settings, values)
        self._life.tell(ev.SettingsChanged(self._life.now, said, "operator"))
        self._settings = with_values(self._settings, said)

    def _roll_back(self, random: Random) -> None:
        engine = self._life.books.engine
        to = random.randint(max(0, engine.version - 6), engine.version)
        whose = tuple(f"device-{n}" for n in random.sample(range(7), random.randint(0, 2)))
        event = ev.RolledBack(self._life.now, to, 0, whose, everyone=not whose)
        check_rollback(engine, event)
        self._life.tell(event)

    def _bar(self, random: Random) -> None:
        self._life.tell(ev.Quarantined(self._life.now, f"device-{random.randint(0, 6)}", "odd"))

    def _let(self, random: Random) -> None:
        self._life.tell(ev.Released(self._life.now, f"device-{random.randint(0, 6)}"))

    def _pause(self, random: Random) -> None:
        self._life.tell(ev.Paused(self._life.now))
        self._life.turn(f"device-{random.randint(0, 6)}", random.randrange(10**6), np.random.default_rng(0))
        self._life.now += 1.0  # which a turn takes; in no log does time go back
        self._life.tell(ev.Resumed(self._life.now))

    def _wait(self, random: Random) -> None:
        """Leases end meanwhile."""
        self._life.now += random.choice([0.0, 20.0, 100.0])
        self._life.tell(ev.Ticked(self._life.now))

    def _late(self, random: Random) -> None:
        """An update of any task that there is, or was: it may be the second one of it."""
        tasks = list(self._life.books.engine.ledger.tasks.values())
        if tasks:
            number = random.randrange(TURNS, 10**6)
            self._life.push(random.choice(tasks), number, np.random.default_rng(number))
            self._life.now += 1.0


# --- both ------------------------------------------------------------------------------------

of_both = pytest.mark.parametrize("prove", [prove_simulation, prove_server])
Proof = Callable[[int, Path], None]


@of_both
@pytest.mark.parametrize("seed", range(SHORT))
def test_whatever_goes_together_holds(prove: Proof, seed: int, tmp_path: Path) -> None:
    prove(seed, tmp_path)


@pytest.mark.prove
@pytest.mark.timeout(1800)
@of_both
@pytest.mark.parametrize("first", range(1000, 1000 + LONG, AT_ONCE))
def test_hundreds_of_seeds(prove: Proof, first: int, tmp_path: Path) -> None:
    for seed in range(first, first + AT_ONCE):
        prove(seed, tmp_path / str(seed))
