"""Kill a server at random moments while writers push: what was acknowledged must count, exactly once.

Every delta has whole numbers, so the sum is exact in any order and one lost, doubled or invented
update shows in the final model. Where tasks are of sub-models, models are mixed instead, and a schedule-free
server goes by the order of updates: what was acknowledged is then done again by hand, and must come to the
same bits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from crash_writer import VALUES, Applied, StreamWriter, Writer
from server_logs import records_of
from server_process import NotServing, Plan, ServerProcess

from anabranch.core.config.tables import Config
from anabranch.core.model.params import ParamSpec, Vector, digest
from anabranch.core.model.units import Member, UnitGroup
from anabranch.core.privacy.mechanism import version_key
from anabranch.core.privacy.normals import normals
from anabranch.host.build import Blueprint
from anabranch.host.journal import Replay
from anabranch.server.manifest import write_manifest
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify

ROWS = 15  # of the one tensor: what has a single dimension is too small for a chain
WITHIN_S = 600.0  # a failpoint is reached much sooner


@dataclass
class Outcome:
    """What happened. `problems` in words: empty when every promise was kept."""

    problems: list[str] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    acknowledged: int = 0
    resent: int = 0
    retries: int = 0


def write_model(folder: Path, first: Vector, plan: Plan) -> ParamSpec:
    """What the server starts from."""
    groups = (UnitGroup("rows", ROWS, (Member("w", 0),)),) if plan.units else ()
    return write_manifest(folder / "model", "crash", {"w": first.reshape(ROWS, -1)}, groups).spec


def run(folder: Path, plan: Plan) -> Outcome:
    """Serve, write, kill and restart as planned; then check every promise."""
    first = np.random.default_rng(plan.seed).integers(-100, 101, VALUES).astype(np.float32)
    spec = write_model(folder, first, plan)
    server, outcome = ServerProcess(folder, replace(plan, saving=True)), Outcome()
    server.start()
    shares = [len(range(n, plan.updates, plan.writers)) for n in range(plan.writers)]
    kind = StreamWriter if plan.stream else Writer
    writers = [kind(n, share, server.address, spec, plan.seed) for n, share in enumerate(shares)]
    for number, writer in enumerate(writers):
        writer.blake3, writer.mixes = plan.blake3 and number % 2 == 1, plan.mixing
        writer.start()
    try:
        if plan.failpoints:
            _kill_at_failpoints(server, writers, plan, outcome)
        else:
            _kill_at_random(server, writers, plan, outcome)
        if plan.broken:  # who is refused because of what was lost would wait for the end of a lease
            for writer in writers:
                writer.enough()
    except NotServing as error:
        outcome.problems.append(str(error))
        abandon(writers)
        return outcome
    for writer in writers:
        writer.join()
        outcome.problems += writer.problems
    outcome.acknowledged = sum(len(w.acknowledged) for w in writers)
    outcome.resent, outcome.retries = sum(w.resent for w in writers), sum(w.retries for w in writers)
    if (code := server.drain()) != 0:
        outcome.problems.append(f"the drain ended with exit code {code}:\n{server.log_tail()}")
    applied = [update for w in writers for update in w.applied]
    expected = expected_model(server.data_dir, plan, spec, first, applied)
    outcome.problems += broken_promises(server.data_dir, plan, writers, expected)
    return outcome


def expected_model(
    data_dir: Path, plan: Plan, spec: ParamSpec, first: Vector, applied: list[Applied]
) -> Vector:
    """The model that a server of this plan comes to."""
    if plan.private:
        return _noised(first, applied, data_dir)
    if plan.remembering:
        return remembered(data_dir, spec, first, plan.database)
    if plan.averaged:
        return _averaged(first, applied)
    return _mixed(first, applied) if plan.units or plan.mixing else summed(first, applied)


def summed(first: Vector, applied: list[Applied]) -> Vector:
    """The model that adds deltas up."""
    return first + np.sum([update.delta for update in applied], axis=0, dtype=np.float32)


def _mixed(first: Vector, applied: list[Applied]) -> Vector:
    """A model that is mixed, by hand: of its part half of what is there and half of what the device made."""
    half, model = np.float32(0.5), first.copy()
    for update in sorted(applied, key=lambda update: update.version):
        if update.base is not None:
            where = slice(None) if update.where is None else update.where
            model[where] = half * model[where] + half * update.base + half * update.delta
    return model


def _averaged(first: Vector, applied: list[Applied]) -> Vector:
    """A schedule-free server's model, by hand: half of each step, half of their mean."""
    half, model, ahead = np.float32(0.5), first.copy(), np.zeros_like(first)
    for t, update in enumerate(sorted(applied, key=lambda update: update.version), start=1):
        ahead += update.delta
        model += half * update.delta
        model += np.float32(0.5 / t) * ahead
        ahead *= np.float32(1.0 - 1.0 / t)
    return model


def remembered(data_dir: Path, spec: ParamSpec, first: Vector, database: str = "") -> Vector:
    """The model of the same log where everything is remembered in memory."""
    store = open_store(database, data_dir)
    try:
        info = store.info()
        assert info is not None, "a run was served"
        config = Config.from_json({**info.config, "strategy": {"name": "ace", "memory": "ram"}})
        begin = partial(Blueprint.of(config, spec).engine, spec.unflatten(first))
        replay = Replay(store, begin, store.first())
        for _ in replay:
            pass
        return replay.engine.vector
    finally:
        store.close()


def _noised(first: Vector, applied: list[Applied], data_dir: Path) -> Vector:
    """The sum, by hand, with the noise of each version: deviation 1, so on a grid of 2^-20."""
    key = bytes.fromhex((data_dir / "privacy.key").read_text().split()[0])
    model = first.copy()
    for update in sorted(applied, key=lambda update: update.version):
        noise = np.rint(normals(version_key(key, update.version), first.size) * 2**20) / 2**20
        model += (update.delta + noise).astype(np.float32)
    return model


def abandon(writers: Sequence[Writer]) -> None:
    """Let writers go whose server is gone."""
    for writer in writers:
        writer.abandoned = True
    for writer in writers:
        writer.join()


def _kill_at_random(server: ServerProcess, writers: list[Writer], plan: Plan, outcome: Outcome) -> None:
    chance = random.Random(f"{plan.seed} kills")
    moments = sorted(chance.sample(range(plan.updates * 19 // 20), plan.kills))
    for moment in moments:
        while sum(len(w.acknowledged) for w in writers) < moment and any(w.is_alive() for w in writers):
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.03))
        server.kill()
        outcome.restarts_s.append(server.start())


def _kill_at_failpoints(server: ServerProcess, writers: list[Writer], plan: Plan, outcome: Outcome) -> None:
    """Arm one failpoint after the other. A server may die of it before it serves: that is one life less."""
    server.kill()
    for name in plan.failpoints:
        try:
            server.start(f"{name}:{plan.nth}")
        except NotServing:
            if not server.died(0.0):
                raise
        if not server.died(WITHIN_S):
            outcome.problems.append(f"the failpoint {name} was not reached")
            server.kill()
    outcome.restarts_s.append(server.start())
    for writer in writers:
        writer.enough()


def broken_promises(data_dir: Path, plan: Plan, writers: Sequence[Writer], expected: Vector) -> list[str]:
    """Lost, doubled or altered updates, and whatever `verify` finds."""
    found = verify(data_dir, plan.database)
    problems = list(found.problems)
    if found.model_sha256 != digest(expected):
        problems.append("the model is not what the acknowledged updates come to")
    logged = [r["update_id"] for r in records_of(data_dir, plan.database, "update")]
    if doubled := len(logged) - len(set(logged)):
        problems.append(f"{doubled} updates are in the log twice")
    acknowledged = {update_id for w in writers for update_id in w.acknowledged}
    lost = acknowledged - set(logged)
    if plan.keeping:  # of what the log has dropped the last snapshot has the receipts
        with closing(open_store(plan.database, data_dir)) as store:
            snapshot = store.load().snapshot
        assert snapshot is not None
        assert snapshot.rows is not None
        lost -= {receipt.update_id for receipt, _ in snapshot.rows.receipts}
    if lost:
        problems.append(f"{len(lost)} acknowledged updates are lost")
    if found.version != len(acknowledged):
        problems.append(f"{len(acknowledged)} updates were acknowledged, {found.version} were applied")
    return problems
