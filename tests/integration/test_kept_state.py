"""What older programs left on disks starts, replays and is written again, to the bit (`kept_state.py`)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_state import APPS, ARCHIVE, RUNS, SERVERS, SPEC, Life, entries
from safetensors.numpy import load_file

from anabranch.client.outbox import Outbox, UpdateEntry
from anabranch.core.config.tables import Config
from anabranch.core.journal import from_record, line, to_record
from anabranch.core.snapshot import Snapshot, SnapshotRows, state_digest, take_changes, take_snapshot
from anabranch.host.submission import loader
from anabranch.server.store.snapshots import META
from anabranch.server.verify import verify
from anabranch.simulation.replay import replay_run


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "state"


@pytest.fixture(scope="module")
def expected(kept: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((kept / "expected.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module", params=sorted(SERVERS))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def opened(name: str, folder: Path) -> Life:
    """A server that starts on a copy of the data of its name."""
    with tarfile.open(ARCHIVE) as archive:
        mine = [m for m in archive.getmembers() if m.name.startswith(f"state/servers/{name}/")]
        archive.extractall(folder, members=mine, filter="data")
    return Life(name, folder / "state" / "servers" / name)


@pytest.fixture(scope="module")
def life(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """A server of that name that has started, to be looked at."""
    found = opened(name, tmp_path_factory.mktemp(name))
    yield found
    found.close()


def test_a_server_starts_where_it_stood(name: str, life: Life, expected: dict[str, Any]) -> None:
    assert life.found.saved.seq > 0, "there is a snapshot"
    assert life.found.replayed > 0, "the log goes on after it"
    assert life.expected == expected["servers"][name]


def test_it_goes_on_from_there_and_starts_again(name: str, tmp_path: Path) -> None:
    life = opened(name, tmp_path)
    version = life.books.engine.version
    life.play(1000, 1020)
    life.books.save(life.now)
    after = life.expected
    assert after["version"] > version
    life.close()
    again = Life(name, life.folder)
    assert again.expected == after
    again.close()


def test_its_whole_log_replays_and_its_snapshots_are_what_it_replays_to(name: str, kept: Path) -> None:
    report = verify(kept / "servers" / name, whole=True)
    assert report.problems == ()


def test_every_record_of_a_log_is_written_as_it_was_read(life: Life) -> None:
    load = loader(life.store.payload, SPEC)
    kinds = set()
    for _, record in life.store.records(0):
        kinds.add(record["kind"])
        assert line(to_record(from_record(record, SPEC, load))) == line(record)
    assert kinds >= {"enrolled", "asked", "renewed", "update", "dropped", "ticked", "paused", "resumed"}
    assert kinds >= {"quarantined", "released", "settings_changed"}


def test_every_snapshot_is_written_as_it_was_read(name: str, life: Life, kept: Path) -> None:
    """But for clients and receipts, which are rows."""
    for path in kept.glob(f"servers/{name}/snapshots/*"):
        arrays = load_file(path)
        meta = json.loads(arrays.pop(META).tobytes())
        engine = life.begin(Snapshot(meta, arrays, SnapshotRows({}, ())))
        engine.ledger.track(saved=True)
        again = take_changes(engine)
        del meta["rows"], again.meta["rows"]
        assert json.dumps(again.meta) == json.dumps(meta)
        assert {n: a.tobytes() for n, a in again.arrays.items()} == {
            n: a.tobytes() for n, a in arrays.items()
        }


def test_a_snapshot_without_rows_comes_back(life: Life) -> None:
    """As simulated servers keep them: clients and receipts within."""
    whole = take_snapshot(life.books.engine)
    again = life.begin(whole)
    assert json.dumps(take_snapshot(again).meta) == json.dumps(whole.meta)
    assert state_digest(again) == state_digest(life.books.engine)


def test_the_settings_of_a_run_are_written_as_they_were_read(life: Life) -> None:
    stored = life.found.info.config
    assert json.dumps(Config.from_json(stored).to_json(), sort_keys=True) == json.dumps(stored)


@pytest.mark.parametrize("run", sorted(RUNS))
def test_the_folder_of_a_simulated_run_replays(run: str, kept: Path, expected: dict[str, Any]) -> None:
    outcome = replay_run(kept / "runs" / run, APPS[run])
    assert outcome.matches, outcome
    wanted = expected["runs"][run]
    assert (outcome.model_sha256, outcome.journal_sha256) == (
        wanted["model_sha256"],
        wanted["journal_sha256"],
    )


REPLAYS = """
import sys
from pathlib import Path
from anabranch.server.verify import verify
for name in sys.argv[2:]:
    print(name, *verify(Path(sys.argv[1], name)).problems)
"""
PRODUCTS = ("fedbuff", "qafel", "teasq_drop")  # of many numbers: a rule, a codec, a mix of parts


@pytest.mark.parametrize("names", [PRODUCTS, pytest.param(sorted(SERVERS), marks=pytest.mark.prove)])
def test_another_kind_of_processor_replays_the_same(names: Sequence[str], tmp_path: Path) -> None:
    """NumPy and its BLAS take the newest instructions that a processor has; others have other last bits."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    assert told(REPLAYS, str(tmp_path / "state" / "servers"), *names, env=another_processor()) == list(names)


SUMS = """
import numpy as np
from anabranch.core.model.arrays import inner
x, y = np.random.default_rng(5).integers(0, 2**24, (2, 20_001)).astype(np.float32)
for n in 7, 8_193, 20_001:
    print(inner(x[:n], x[:n]).hex(), inner(x[1:n], y[1:n]).hex())
"""
BITS = [  # of NumPy 1.26.4 and 2.4.6; in other orders of addition the longer ones have other last bits
    "0x1.5121ec16023a8p+49 0x1.f3a9ff12f7140p+48",
    "0x1.561f69d397a02p+59 0x1.ff0ff20090e9ap+58",
    "0x1.a06dda0243d6dp+60 0x1.39cb7e9bd4c29p+60",
]


@pytest.mark.parametrize("another", [False, True])
def test_sums_on_which_digests_rest_have_the_bits_that_they_had(another: bool) -> None:
    assert told(SUMS, env=another_processor() if another else {}) == BITS


def another_processor() -> dict[str, str]:
    """What has NumPy and its BLAS take the instructions that every x86-64 has."""
    built: Any = np.show_config("dicts")
    newer = " ".join(built["SIMD Extensions"].get("found", ()))
    return {"NPY_DISABLE_CPU_FEATURES": newer, "OPENBLAS_CORETYPE": "Prescott"}


def told(program: str, *arguments: str, env: Mapping[str, str]) -> list[str]:
    """The lines that a process of its own prints."""
    command = [sys.executable, "-c", program, *arguments]
    found = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_a_device_finds_its_outbox(kept: Path, expected: dict[str, Any]) -> None:
    outbox = Outbox(kept / "outbox")
    assert outbox.pending() == ["update-a", "update-b", "update-c"]
    for number, wanted in enumerate(entries(SPEC.layout_hash), 1):
        path = kept / "outbox" / f"{wanted.update_id}.update"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == expected["outbox"][wanted.update_id]
        found = UpdateEntry.from_bytes(path.read_bytes())
        assert found[1] == number
        assert b"".join(found[0].to_bytes(number)) == path.read_bytes()
        assert b"".join(wanted.to_bytes(number)) == path.read_bytes()
