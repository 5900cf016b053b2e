"""The key of a private run's noise: where it is and where it is not, and what does not go without it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sqlite3
import stat
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import anabranch
from kept_state import Life, Tables
from private_bench import private_config
from wire import Served, server_config

from anabranch.api.configuration import load_config
from anabranch.api.live_result import report_of_data
from anabranch.client.operator import OperatorClient
from anabranch.core.config.secagg import SecaggTable
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError, DataError
from anabranch.core.journal import Record
from anabranch.core.model.params import digest
from anabranch.core.rules import NEWEST
from anabranch.identity.noise_key import NOISE_KEY, kept_key, new_key
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.reports.journal_files import JOURNAL
from anabranch.server.backup import back_up, put_back
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.restored import attest
from anabranch.server.store.factory import open_store
from anabranch.server.store.files import SQLITE_FILE
from anabranch.server.verify import verify
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate

ROOT = Path(__file__).parents[2]
PRIVACY = {"clip": 1.0, "epsilon": 8.0, "participations": 4, "separation": 2}
STRATEGY = {"name": "fedbuff", "buffer_size": 2}
SIMULATED = f"""
[run]
workload = "synthetic"
versions_max = 6
[fleet]
clients = 6
examples_per_client = 20
[strategy]
name = "fedbuff"
buffer_size = 2
[privacy]
{chr(10).join(f"{key} = {value}" for key, value in PRIVACY.items())}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros((8, 4), np.float32)})


@pytest.fixture
def settings(tmp_path: Path) -> Config:
    return server_config(
        tmp_path / "data",
        strategy=STRATEGY,
        privacy=PRIVACY,
        fleet={"clients": 4},
        server={"snapshot_every_versions": 2},
    )


def work(served: Served, turns: int, start: int = 0) -> None:
    """Every device gives an update a turn."""
    fleet = [served.device(f"device-{i}") for i in range(4)]
    for turn in range(turns):
        for i, device in enumerate(fleet):
            device.work(0.1 * (start + turn) + 0.01 * i)


def traces(key: bytes) -> list[bytes]:
    """The forms in which a key could lie about."""
    return [
        key,
        key.hex().encode(),
        key.hex().upper().encode(),
        base64.b64encode(key),
        repr(key)[2:-1].encode(),
    ]


def holding(key: bytes, *places: Path) -> Iterator[str]:
    """The files that have it; what is in archives too."""
    for path in (p for place in places for p in place.rglob("*") if p.is_file()):
        found = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                found += [archive.read(name) for name in archive.namelist()]
        if any(trace in data for data in found for trace in traces(key)):
            yield path.name


# --- a server's run ------------------------------------------------------------------------------------


def test_a_private_run_goes_on_after_a_restart_and_is_proved_with_its_key(
    settings: Config, manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0, "anabranch")
    data = tmp_path / "data"
    with Served(settings, manifest) as served:
        work(served, 2)
    key = bytes.fromhex((data / NOISE_KEY).read_text().split()[0])
    assert len(key) == 32
    assert stat.S_IMODE((data / NOISE_KEY).stat().st_mode) == 0o600
    with Served(settings, manifest) as served:
        work(served, 1, 2)
        with OperatorClient(served.info.admin_address if served.info else "") as admin:
            status = admin.status()
            assert status.version == 6
            admin_address = served.info.admin_address if served.info else ""
            shown = anabranch(tmp_path, "admin", "status", "--admin", admin_address).stdout
            assert "private: epsilon 8 (6.77 so far) at delta 1e-06 for each device: 4 updates" in shown
            with pytest.raises(ConfigError, match="a private run cannot be rolled back"):
                admin.rollback(1, ["device-0"])
            with pytest.raises(ConfigError, match=r"robust\.buffer_max cannot be changed in a private run"):
                admin.set_settings({"robust.buffer_max": 0})
        model = digest(served.model())
    found = verify(data, whole=True)
    assert (found.problems, found.model_sha256, found.version) == ((), model, 6)

    folder = tmp_path / "run"
    result = report_of_data(data, "", folder)
    assert result.model_sha256 == model
    assert result.privacy is not None
    assert 7.99 < result.privacy.epsilon <= 8.0
    assert result.privacy.epsilon_so_far < result.privacy.epsilon, "three of four updates may have been given"
    assert "Epsilon" in (folder / "report.html").read_text()
    with pytest.raises(DataError, match=rf"{NOISE_KEY} is missing"):
        replay_run(folder)
    (folder / NOISE_KEY).write_text(key.hex())
    assert replay_run(folder).matches
    assert stat.S_IMODE((folder / NOISE_KEY).stat().st_mode) & 0o077 == 0, "it was open to others"
    (folder / NOISE_KEY).unlink()

    back_up(data, tmp_path / "backup")
    assert list(holding(key, tmp_path)) == [NOISE_KEY]
    assert not any(trace.decode("latin-1") in caplog.text for trace in traces(key))


def hashed(records: list[Record]) -> str:
    """SHA-256 of a journal's lines, written here anew."""
    lines = (json.dumps(record, sort_keys=True, separators=(",", ":")) + "\n" for record in records)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


TAKEN = "SELECT update_id FROM updates WHERE flawed AND state IN ('held', 'applied')"


@pytest.mark.parametrize("privacy", [{}, {**PRIVACY, "participations": 40, "separation": 1}])
def test_what_counts_as_zeros_is_no_damage_to_a_private_run(
    privacy: dict[str, float], tmp_path: Path
) -> None:
    """Two updates of the life are not finite. Of any other run one that is flawed and taken is a damage."""
    rounds = {"name": "fedavg", "clients_per_round": 3, "deadline_s": 20.0}
    tables: Tables = {"strategy": rounds, "privacy": privacy, "model": {"buffers": "local"}}
    life = Life("", tmp_path, {**tables, "server": {"data_dir": str(tmp_path)}})
    life.play(0, 70)
    life.close()
    assert verify(tmp_path, whole=True).problems == ()
    with closing(sqlite3.connect(tmp_path / SQLITE_FILE)) as database, database:
        assert [bool(privacy)] == [bool(database.execute(TAKEN).fetchall())]
        database.execute("UPDATE updates SET flawed = TRUE WHERE state = 'applied'")
        ((name,), *_) = database.execute(TAKEN)
    problems = verify(tmp_path, whole=True).problems
    assert any(f"{name!r} is taken, but has no weight or is flawed" in p for p in problems) != bool(privacy)


@pytest.mark.parametrize("rules", [NEWEST, 1])
def test_the_links_that_devices_are_given_tell_nothing_of_an_update(
    settings: Config, manifest: Manifest, tmp_path: Path, rules: int
) -> None:
    settings = replace(settings, run=replace(settings.run, rules=rules))
    with Served(settings, manifest) as served:
        work(served, 1)
        request = devices.GetLinksRequest(after_version=0, to_version=1)
        link = served.device().stub.GetLinks(request, timeout=10.0).links.hex()
    with closing(open_store("", tmp_path / "data")) as store:
        records = [record for _, record in store.records()]
    updates = [i for i, record in enumerate(records) if record["kind"] == "update"]
    assert len(updates) == 4
    known = records[: updates[1] + 1]  # two made the version
    assert hashed(known) == link, "else this is no test of what anybody could try out"
    salts = {records[i].pop("salt", None) for i in updates}
    assert (hashed(known) == link) == (rules == 1), "who knows all but the salts"
    if rules == 1:
        assert salts == {None}
    else:
        assert len(salts) == 4
        assert all(salt and len(bytes.fromhex(salt)) == 32 for salt in salts)
    assert verify(tmp_path / "data", whole=True).problems == ()


def test_without_its_key_nothing_goes_on_or_is_proved(
    settings: Config, manifest: Manifest, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with Served(settings, manifest) as served:
        work(served, 1)
    key = data / NOISE_KEY
    text = key.read_text()
    new_key(private_config(), tmp_path / "other", "another")
    others = (tmp_path / "other" / NOISE_KEY).read_text()
    for wrong, words in (
        (None, "is missing"),
        ("abc", "cannot be read"),
        ("00" * 31, "has 31 bytes"),
        (others, "is the key of run another"),  # the server ended in order: no version is made again
    ):
        key.unlink(missing_ok=True)
        if wrong is not None:
            key.write_text(wrong)
        for way in (lambda: verify(data), lambda: Served(settings, manifest).__enter__()):
            with pytest.raises(DataError, match=words):
                way()
    key.write_text("00" * 32)  # as releases before have it, without the run's id
    assert any("is not the one on record" in p or "digest" in p for p in verify(data, whole=True).problems)
    key.write_text(text)
    assert verify(data, whole=True).problems == ()


def test_a_backup_is_no_second_beginning(settings: Config, manifest: Manifest, tmp_path: Path) -> None:
    with Served(settings, manifest) as served:
        work(served, 1)
    assert back_up(tmp_path / "data", tmp_path / "backup").proved
    assert not (tmp_path / "backup" / NOISE_KEY).exists()
    for way in (
        lambda: put_back(tmp_path / "backup", tmp_path / "elsewhere", None),
        lambda: attest(tmp_path / "data", "", None),
    ):
        with pytest.raises(ConfigError, match="a private run cannot go on from a backup"):
            way()
    assert not (tmp_path / "elsewhere").exists(), "nothing for which a server would not start there"
    told = anabranch(tmp_path, "admin", "backup", "another", "--data-dir", "data")
    assert "cannot be put back: a private run" in told.stdout, "who makes it hears of that, not who needs it"
    assert "admin restore" not in told.stdout


def test_a_key_is_for_one_run(settings: Config, manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / NOISE_KEY).write_text("11" * 32)
    with pytest.raises(ConfigError, match="is the noise key of another run"):
        Served(settings, manifest).__enter__()
    config = private_config()
    keys = {new_key(config, tmp_path / name) for name in ("one", "two")} | {new_key(config, None)}
    assert len(keys) == 3
    assert kept_key(config, tmp_path / "one") in keys
    assert new_key(Config(), tmp_path / "plain") is None
    assert not (tmp_path / "plain").exists()


# --- a simulation --------------------------------------------------------------------------------------


def test_a_private_simulation_replays_to_its_digests(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SIMULATED)
    done = anabranch(tmp_path, "simulate", "run.toml", "--out", "run")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    key = bytes.fromhex((folder / NOISE_KEY).read_text())
    privacy = json.loads((folder / "result.json").read_text())["privacy"]
    assert privacy["mechanism"] == "correlated gaussian"
    assert privacy["participations_max"] == 4
    assert replay_run(folder).matches
    assert list(holding(key, tmp_path)) == [NOISE_KEY]
    assert key.hex() not in done.stdout + done.stderr
    clients = json.loads((folder / "result.json").read_text())["clients"].values()
    assert all(c["metrics"] == {} and c["updates"] <= 4 for c in clients)
    (folder / NOISE_KEY).unlink()
    done = anabranch(tmp_path, "replay", "run")
    assert done.returncode == 4
    assert f"{NOISE_KEY} is missing" in done.stderr


@pytest.mark.parametrize(("rules", "masked"), [(NEWEST, False), (1, False), (NEWEST, True)])
def test_a_simulations_journal_is_salted_by_its_key(tmp_path: Path, rules: int, masked: bool) -> None:
    """And comes out again where the run is simulated anew; masked sums have no key to make a secret of."""
    (tmp_path / "run.toml").write_text(SIMULATED)
    config = load_config(tmp_path / "run.toml")
    config = replace(config, run=replace(config.run, rules=rules, keep_payloads=False))
    if masked:
        secagg = SecaggTable("keeper", ["north"], cohort_min=2)
        config = replace(config, secagg=secagg, privacy=replace(config.privacy, bands=1))
    result = simulate(config, tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / JOURNAL).read_text().splitlines()]
    updates = [record for record in records if record["kind"] == "update"]
    assert hashed(records) == result.journal_sha256
    salts = {record.pop("salt", None) for record in updates}
    salted = rules == NEWEST and not masked
    assert (hashed(records) == result.journal_sha256) is not salted
    assert result.privacy is not None
    assert bool(result.privacy.caveat) == masked, "a key of the operating system's keeps the promise"
    assert len(salts) == (len(updates) if salted else 1)
    outcome = replay_run(tmp_path / "run")
    assert (outcome.way, outcome.matches) == ("simulation", True)


def test_two_private_simulations_have_noise_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SIMULATED)
    config = load_config(tmp_path / "run.toml")
    results = [simulate(config, tmp_path / name) for name in ("one", "two")]
    assert results[0].model_sha256 != results[1].model_sha256
    assert [r.updates_applied for r in results] == [12, 12]


# --- where noise may come from -------------------------------------------------------------------------


def test_no_draw_of_the_runs_seed_is_noise() -> None:
    """The seed of a run is in its configuration: noise that follows of it could be taken off again."""
    sources = [*(ROOT / "core" / "privacy").glob("*.py"), ROOT / "identity" / "noise_key.py"]
    assert len(sources) >= 5
    for path in sources:
        text = path.read_text()
        assert not re.search(r"core\.rng|np\.random|import random|seed", text), path
    assert "secrets.token_bytes(KEY_BYTES)" in sources[-1].read_text()
