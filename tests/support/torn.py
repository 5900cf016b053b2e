"""A guarded server's folders as a kill leaves them, and what one flipped bit or one cut does to them."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from guarded import Federation, federation
from wire import Served

from anabranch.core.config.tables import Config
from anabranch.core.errors import AnabranchError, outcome_of
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import digest
from anabranch.identity.wallet import Wallet
from anabranch.server.manifest import Manifest
from anabranch.server.recovery import recover
from anabranch.server.store.factory import open_store
from anabranch.server.store.files import SQLITE_FILE
from anabranch.server.store.mark import FILE
from anabranch.server.verify import verify

VALUES = 20_000  # an update goes into the log, or is a file
SNAPSHOT_VERSIONS = 3
UPDATES = 5  # in each of the two lives of the server
DATABASE, WAL, MARK = (Path("data") / name for name in (SQLITE_FILE, f"{SQLITE_FILE}-wal", FILE))
SEGMENTS = Path("data") / "log"
BUGS = (1, None)  # exit codes that say nothing


@dataclass(frozen=True)
class Killed:
    """The folders `data` and `ca` of a killed server, and what it had acknowledged."""

    folder: Path
    config: Config
    manifest: Manifest
    model_sha256: str
    version: int
    update_ids: tuple[str, ...]

    @property
    def log(self) -> Path:
        """The newest segment of the log, relative to the folder."""
        return max((self.folder / SEGMENTS).iterdir()).relative_to(self.folder)

    @property
    def files(self) -> list[Path]:
        """All files, relative to the folder; the lock has nothing that counts, and an empty one no bit."""
        found = [p for p in sorted(self.folder.rglob("*")) if p.is_file() and p.name != "lock"]
        return [path.relative_to(self.folder) for path in found if path.stat().st_size]


@dataclass
class Trial:
    """What was damaged and how, and what `verify` and a start said: nothing where they found nothing."""

    damage: str
    verified: str = ""
    started: str = ""
    problems: list[str] = field(default_factory=list)


def killed_server(folder: Path) -> Killed:
    """A server that has lived twice, and was killed with its newest events in the log alone."""
    tensors = {"w": np.zeros(VALUES, np.float32)}
    server = {"snapshot_every_versions": SNAPSHOT_VERSIONS, "lease_min_s": 3600.0}
    left = folder / "killed"
    with federation(folder / "alive", tensors, server=server) as guarded:
        wallet = guarded.joined("device-1")
        ids = _work(guarded, wallet, "first")
        guarded.served.close()
        files = replace(DEFAULT_LIMITS, inline_bytes_max=1024)
        with Served(guarded.served.config, guarded.served.manifest, files) as guarded.served:
            ids += _work(guarded, wallet, "second")
            guarded.device(wallet).task()  # and a task is open
            for name in ("data", "ca"):  # nothing is under way: these are the bytes that a kill leaves
                shutil.copytree(guarded.folder / name, left / name)
        config, manifest = guarded.served.config, guarded.served.manifest
    assert (left / WAL).stat().st_size > 0
    sound = shutil.copytree(left, folder / "sound")
    found = verify(sound / "data")
    assert (found.problems, found.version) == ((), 2 * UPDATES)
    summed = np.full(VALUES, 2 * sum(range(1, UPDATES + 1)), np.float32)
    assert found.model_sha256 == digest(summed)
    return Killed(left, config, manifest, found.model_sha256, found.version, tuple(ids))


def _work(guarded: Federation, wallet: Wallet, life: str) -> list[str]:
    device, ids = guarded.device(wallet), [f"{life}-{number}" for number in range(UPDATES)]
    device.enrol()
    for number, update_id in enumerate(ids):
        delta = np.full(VALUES, number + 1, np.float32)
        assert device.push(device.task(), delta, update_id).decision.verdict == "published"
    return ids


def try_damage(killed: Killed, seed: int, folder: Path) -> Trial:
    """Damage one file, each in its turn, and look what `verify` and the server's start make of it."""
    chance = random.Random(seed)
    turn, file = divmod(seed, 3)  # every third time it is what has the log
    logs = (killed.log, DATABASE, WAL, MARK)
    name = killed.files[(2 * turn + file) % len(killed.files)] if file < 2 else logs[turn % len(logs)]
    data = bytearray((killed.folder / name).read_bytes())
    place = chance.randrange(len(data))
    if chance.random() < 0.5:
        data[place] ^= 1 << (bit := chance.randrange(8))
        trial = Trial(f"seed {seed}: {name}, bit {bit} of byte {place} of {len(data)} flipped")
    else:
        del data[place:]
        trial = Trial(f"seed {seed}: {name} cut to {place} bytes")
    for use, look in (("verified", _verified), ("started", _started)):
        here = shutil.copytree(killed.folder, folder / f"{seed}-{use}")
        (here / name).write_bytes(data)
        try:
            setattr(trial, use, look(killed, here, trial))
        except AnabranchError as error:
            setattr(trial, use, str(error))
            if not str(error) or outcome_of(error).exit_code in BUGS:
                trial.problems.append(f"{use}: no clear error: {error!r}")
        except Exception as error:  # noqa: BLE001 - a traceback is what must not be
            trial.problems.append(f"{use}: {error!r}")
        shutil.rmtree(here)
    return trial


def served(killed: Killed, here: Path, authority: bool = True) -> Served:
    """The server on folders of its own; without the authority it asks nobody for papers."""
    identity = replace(killed.config.identity, folder=str(here / "ca"))
    if not authority:
        identity = replace(identity, tls="auto", folder=str(here / "nobody"))
    server = replace(killed.config.server, data_dir=str(here / "data"))
    return Served(replace(killed.config, server=server, identity=identity), killed.manifest)


def _verified(killed: Killed, here: Path, trial: Trial) -> str:
    found = verify(here / "data")
    if not found.problems and (found.model_sha256, found.version) != (killed.model_sha256, killed.version):
        trial.problems.append(f"verify says that version {found.version} is sound")
    return "; ".join(found.problems)


def _started(killed: Killed, here: Path, trial: Trial) -> str:
    """Start the server. If it serves, all that was acknowledged must be there."""
    with served(killed, here) as server:
        pass
    store = open_store("", here / "data")
    try:
        engine = recover(store, server.config, killed.manifest).engine
        if (digest(engine.vector), engine.version) != (killed.model_sha256, killed.version):
            trial.problems.append(f"the server served another version {engine.version}")
        if lost := [i for i in killed.update_ids if i not in engine.ledger.receipts]:
            trial.problems.append(f"the server served without {lost}")
    finally:
        store.close()
    return ""
