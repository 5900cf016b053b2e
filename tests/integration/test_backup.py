"""`admin backup` and `admin restore`: what they refuse, what is in a copy, and what a cut leaves behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import anabranch, answer, serving
from nursery import COMMAND, PIPE, Process
from own_parts import FOLDER
from ports import free_port
from small_disks import own_disk
from wire import Served, server_config

from anabranch.core.errors import (
    OUTCOMES,
    ConfigError,
    DataError,
    FolderMissing,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreLocked,
)
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.identity.authority import Authority
from anabranch.identity.files import check_owner
from anabranch.server.backup import PARTIAL, RESTORING, back_up, put_back, read_backup
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.restored import BACKUP, attest
from anabranch.server.restored import FILE as ATTESTED
from anabranch.server.store.files import SQLITE_FILE
from anabranch.server.verify import verify

VALUES = 30_000  # 120 KB: too large for a row, so in a pack; and a file of its own where `inline` is less
UPDATES = 4


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros(VALUES, np.float32)})


@pytest.fixture(params=["log", "blobs"])
def served(request: pytest.FixtureRequest, tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    """A server that has taken some updates; its payloads lie in the log, or in files of their own."""
    inline = DEFAULT_LIMITS.inline_bytes_max if request.param == "log" else 1000
    table = {"snapshot_every_versions": 1}
    config = server_config(tmp_path / "data", server=table)
    with Served(config, manifest, replace(DEFAULT_LIMITS, inline_bytes_max=inline)) as server:
        device = server.device()
        for _ in range(UPDATES):
            device.work()
        assert list((tmp_path / "data" / request.param).rglob("*.log" if inline > 1000 else "??/*"))
        yield server


def test_a_copy_is_whole_and_goes_on_elsewhere(served: Served, tmp_path: Path, manifest: Manifest) -> None:
    told: list[tuple[str, int, int]] = []
    with Authority.create(tmp_path / "data/identity"):  # an image has it there
        pass
    (tmp_path / "data/lost").mkdir()  # as the error of `admin rebuild` says
    (tmp_path / "data/lost" / SQLITE_FILE).write_bytes(b"of a disk that failed")
    made = back_up(tmp_path / "data", tmp_path / "backup", tell=lambda *progress: told.append(progress))
    assert (made.version, made.proved) == (UPDATES, True)
    assert read_backup(tmp_path / "backup") == made
    begun = told.index(("proving it", 0, 0))
    assert list(dict.fromkeys(doing for doing, *_ in told[begun + 1 :])) == [
        f"proving it, event {seq} of {made.events}" for seq in range(1, made.events + 1)
    ]
    assert all(done <= total for _, done, total in told)
    assert told[begun - 1][1] == told[begun - 1][2] > 0
    assert not (tmp_path / f"backup{PARTIAL}").exists()
    assert {path.name for path in (tmp_path / "backup").iterdir()}.isdisjoint(
        {"spool", "models", "lock", "identity", "lost"}
    )
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "backup").rglob("*")}
    assert modes == {0}, "for its owner alone"
    copied = [path for path in (tmp_path / "backup").rglob("*") if path.is_file()]
    apart = {"backup.json", "acknowledged", "proved"}  # what is made there
    sizes = {str(p.relative_to(tmp_path / "backup")): p.stat().st_size for p in copied}
    assert made.size_bytes == sum(size for name, size in sizes.items() if name.split("/")[0] not in apart)
    served.device().work()
    before = served.model()
    with pytest.raises(StoreLocked):
        attest(tmp_path / "data", "", None)
    served.close()
    with Authority.create(tmp_path / "elsewhere/identity") as authority:
        _, word = put_back(tmp_path / "backup", tmp_path / "elsewhere", authority)
    assert 0 < word.version <= UPDATES  # the rows of versions follow the log
    assert json.loads((tmp_path / "elsewhere" / ATTESTED).read_text())["version"] == word.version
    again = Served(server_config(tmp_path / "elsewhere"), manifest)
    with again:
        again.device().work()
        assert again.model().tolist() == before.tolist()
    heard: list[int] = []
    found = verify(tmp_path / "elsewhere", whole=True, tell=heard.append)
    assert found.problems == ()
    assert list(dict.fromkeys(heard)) == list(range(1, found.events + 1))
    assert verify(tmp_path / "backup", whole=True).version == UPDATES


def test_models_of_versions_that_were_lost_are_none_of_those_that_come_instead(
    tmp_path: Path, manifest: Manifest
) -> None:
    """As where a database is put back by its own means, beside the folder that its server had."""
    data, early = tmp_path / "data", tmp_path / "early"
    config = server_config(data)

    def lived(updates: int, value: float) -> None:
        with Served(config, manifest) as served:
            for _ in range(updates):
                served.device().work(value)

    lived(3, 1.0)
    shutil.copytree(data, early, ignore=shutil.ignore_patterns("models"))
    lived(3, 2.0)
    shutil.move(data / "models", early / "models")
    shutil.rmtree(data)
    early.rename(data)
    attest(data, "", None)
    with Served(config, manifest) as served:
        for version in (4, 5, 6):
            served.device().work(1.0)
            header, model = served.device().fetch()
            assert header.version == version
            assert set(np.frombuffer(model, np.float32)) == {version}


@pytest.mark.parametrize("place", ["archive", "old/archive", "."])
def test_an_archive_below_the_data_is_in_no_copy(served: Served, tmp_path: Path, place: str) -> None:
    """Where data and working directory are one, as in an image, `server.archive = "archive"` is there."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    with closing(sqlite3.connect(data / SQLITE_FILE)) as database:
        ((run_id,),) = database.execute("SELECT run_id FROM runs").fetchall()
    (data / place / run_id).mkdir(parents=True)
    (data / place / run_id / "000000000001-000000000009.zip").write_bytes(b"x" * 1000)
    (data / "of-somebody").mkdir()
    (data / "of-somebody/note").write_text("a file beside it is")
    back_up(data, backup)
    assert not list(backup.rglob("*.zip"))
    assert (backup / "of-somebody/note").is_file()


def test_a_copy_of_what_is_damaged_is_none(served: Served, tmp_path: Path) -> None:
    path, place = next((tmp_path / "data/log").glob("*.log")), 100
    with closing(sqlite3.connect(tmp_path / "data" / SQLITE_FILE)) as database:
        query = "SELECT pack_offset, sha256 FROM updates ORDER BY seq LIMIT 1"
        ((offset, sha256),) = database.execute(query).fetchall()
    if offset is None:
        path = tmp_path / "data/blobs" / sha256[:2] / sha256
    data = bytearray(path.read_bytes())
    data[place + (offset or 0)] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorrupt, match="has the digest"):
        back_up(tmp_path / "data", tmp_path / "backup", proved=False)
    assert not (tmp_path / "backup").exists()
    assert not (tmp_path / f"backup{PARTIAL}").exists()


def test_a_file_that_is_lost_is_named(served: Served, tmp_path: Path) -> None:
    """And no `server.keep` is blamed for it."""
    served.close()
    path = next((tmp_path / "data").glob("blobs/*/*"), None)
    if path is None:
        path = next((tmp_path / "data/snapshots").iterdir())
    path.unlink()
    with pytest.raises(StoreCorrupt, match=f"{re.escape(str(path))} is not there, though the database names"):
        back_up(tmp_path / "data", tmp_path / "backup", proved=False)
    assert not (tmp_path / "backup").exists()


def test_a_version_that_replays_to_another_model_is_no_word_against_the_log(
    served: Served, tmp_path: Path
) -> None:
    """As after a strategy of one's own was edited: nobody shall put back a log that is sound."""
    served.close()
    with closing(sqlite3.connect(tmp_path / "data" / SQLITE_FILE)) as database, database:
        database.execute("UPDATE model_versions SET sha256 = ? WHERE version = 2", ("0" * 64,))
    (problem,) = verify(tmp_path / "data", whole=True).problems
    assert problem.startswith("version 2 has the digest")


@pytest.mark.usefixtures("no_rows")  # they have what the log lacks
def test_a_copy_that_lacks_what_was_acknowledged_is_none(served: Served, tmp_path: Path) -> None:
    path = max((tmp_path / "data/log").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreCorrupt, match="acknowledged"):
        back_up(tmp_path / "data", tmp_path / "backup", proved=False)
    assert not (tmp_path / "backup").exists()


def test_a_snapshot_that_goes_meanwhile_is_not_missed(served: Served, tmp_path: Path) -> None:
    """The database is copied, and before its files are a newer snapshot takes the place of an older one."""
    served.close()
    rounds, data = 0, tmp_path / "data"

    def replaced(doing: str, done: int, total: int) -> None:
        nonlocal rounds
        if doing == "the database" and done == total:
            rounds += 1
            if rounds == 1:
                with closing(sqlite3.connect(data / SQLITE_FILE)) as database:
                    query = "SELECT sha256 FROM snapshots ORDER BY applied_through_seq"
                    (oldest,) = database.execute(query).fetchone()
                    database.execute("DELETE FROM snapshots WHERE sha256 = ?", (oldest,))
                    database.commit()
                (data / "snapshots" / f"{oldest}.safetensors").unlink()

    back_up(data, tmp_path / "backup", tell=replaced)
    assert rounds == 2
    assert verify(tmp_path / "backup", whole=True).problems == ()


def test_a_server_that_starts_meanwhile_is_not_missed(
    served: Served, tmp_path: Path, manifest: Manifest
) -> None:
    """The rows were whole when the database was copied: the log goes on in a segment of after it."""
    served.close()
    data = tmp_path / "data"
    with ExitStack() as stack:

        def started(doing: str, done: int, total: int) -> None:
            if doing != "the database" and not list((data / "log").glob("000002.log")):
                stack.enter_context(_serving(data, manifest)).device().work()

        back_up(data, tmp_path / "backup", tell=started)
        assert list((data / "log").glob("000002.log"))
    found = verify(tmp_path / "backup", whole=True)
    assert (found.problems, found.version) == ((), UPDATES + 1)


def test_where_no_copy_is_made(served: Served, tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    with pytest.raises(ConfigError, match="lies in"):
        back_up(data, data / "backup")
    other.mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        back_up(data, other)
    with pytest.raises(DataError, match="holds no run: name the data_dir"):
        back_up(other, tmp_path / "backup")
    for look in (partial(back_up, target=tmp_path / "backup"), verify):  # as a `Server`'s folder, or a job's
        with pytest.raises(DataError, match=f"holds no run: it is in {data}$"):
            look(tmp_path)
    (other / "manifest").mkdir()
    (other / "acknowledged").touch()  # as beside PostgreSQL
    with pytest.raises(ConfigError, match="pg_dump --format=custom"):
        back_up(other, tmp_path / "backup")
    with pytest.raises(FolderMissing):
        back_up(tmp_path / "nowhere", tmp_path / "backup")


@pytest.mark.parametrize("served", ["log"], indirect=True)
def test_a_disk_without_room_for_a_copy_is_said_with_what_to_do(served: Served, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    words = ["-m", "anabranch.cli.main", "admin", "backup", "disk/backup", "--data-dir", "data"]
    command = [*own_disk(tmp_path / "disk", "8k"), sys.executable, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == OUTCOMES[StoreFull].exit_code, done.stderr
    assert "are to be copied there: make room, or name another place" in done.stderr


def test_a_database_for_which_there_is_no_room_elsewhere_is_said_to_be_whole(tmp_path: Path) -> None:
    """Its newest pages lie in SQLite's own log, so its file is small. It was said to be full itself."""
    (data := tmp_path / "data").mkdir()
    (disk := tmp_path / "disk").mkdir()
    with closing(sqlite3.connect(data / SQLITE_FILE)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE things (value BLOB)")
        database.execute("INSERT INTO things VALUES (zeroblob(1000000))")
        database.commit()
        words = "import sys; from pathlib import Path; from anabranch.server.backup import _Copying"
        words += "; _Copying(*map(Path, sys.argv[1:]), lambda *_: None)._database()"
        command = [*own_disk(disk, "256k"), sys.executable, "-c", words, str(data), str(disk)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    said = f"StoreFull: {data / SQLITE_FILE} cannot be copied to {disk}: no space left on the disk: make room"
    assert said in done.stderr


@pytest.mark.parametrize("served", ["log"], indirect=True)
def test_one_that_is_ended_leaves_nothing(served: Served, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data" / "slow")  # a file that takes long to copy
    command = (COMMAND, "admin", "backup", "backup", "--data-dir", "data")
    with (
        Process(*command, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process,
        (tmp_path / "data" / "slow").open("wb"),  # once the other end is open
    ):
        assert (tmp_path / f"backup{PARTIAL}").exists()
        process.terminate()
        assert process.wait(600) == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == {"data", "model"}


def test_another_users_data_are_left_to_that_user(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As root, of a service that has a user of its own, which could open none of what root makes there."""
    data = tmp_path / "data"
    served.close()
    owner = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: owner + 1)
        with pytest.raises(ConfigError, match=f"acknowledged belongs to uid {owner}, .*do it as that user"):
            attest(data, "", None)
        assert verify(data).problems == ()
    assert "data were proved is not noted" in caplog.text
    assert not {ATTESTED, "proved"} & {path.name for path in data.iterdir()}


def test_root_makes_no_data_in_another_users_folder(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it could, and there is nothing yet; anybody else may where he is let, as by a volume's group."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    back_up(tmp_path / "data", tmp_path / "backup", proved=False)
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
    owner = theirs.stat().st_uid
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: 0)
        for place in (theirs, theirs / "data"):
            with pytest.raises(ConfigError, match=f"theirs belongs to uid {owner}, .*do it as that user"):
                put_back(tmp_path / "backup", place, None)
        assert list(theirs.iterdir()) == []
        patch.setattr("os.geteuid", lambda: owner + 1)
        check_owner(theirs, theirs / "data")


def test_a_place_that_cannot_be_looked_at_is_named(served: Served, tmp_path: Path) -> None:
    back_up(tmp_path / "data", tmp_path / "backup", proved=False)
    with pytest.raises(StoreError, match="cannot be used: File name too long"):
        put_back(tmp_path / "backup", tmp_path / ("a" * 300) / "data", None)


def test_where_none_is_put_back(served: Served, tmp_path: Path) -> None:
    back_up(tmp_path / "data", tmp_path / "backup", proved=False)
    with pytest.raises(StoreLocked, match="in use by process"):
        put_back(tmp_path / "backup", tmp_path / "data", None)
    served.close()
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data" / "mine").touch()
    with pytest.raises(ConfigError, match=r"is not empty: .* example: mv '.*/my data' '.*/my data\.before'$"):
        put_back(tmp_path / "backup", tmp_path / "my data", None)
    within = tmp_path / "backup" / "data"  # where the next one to be put back would have it in it
    with pytest.raises(ConfigError, match=r"lies in .*/backup, which stays as it is"):
        put_back(tmp_path / "backup", within, None)
    assert not within.exists()
    with pytest.raises(DataError, match=f"has no {BACKUP}"):
        put_back(tmp_path / "data", tmp_path / "new", None)
    with pytest.raises(FolderMissing):
        put_back(tmp_path / "nowhere", tmp_path / "new", None)
    (tmp_path / "backup" / BACKUP).write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        put_back(tmp_path / "backup", tmp_path / "new", None)


def test_a_damaged_backup_is_not_put_back(served: Served, tmp_path: Path, manifest: Manifest) -> None:
    back_up(tmp_path / "data", tmp_path / "backup", proved=False)
    whole = shutil.copytree(tmp_path / "backup", tmp_path / "whole")
    with closing(sqlite3.connect(tmp_path / "backup" / SQLITE_FILE)) as database:
        database.execute("UPDATE updates SET weight = 0.25, size_bytes = size_bytes WHERE seq = 3")
        database.execute("DELETE FROM events WHERE seq = 3")
        database.commit()
    new = tmp_path / "new"
    with pytest.raises(StoreError):
        put_back(tmp_path / "backup", new, None)
    with pytest.raises(DataError, match="run `anabranch admin restore` again"), _serving(new, manifest):
        pass
    put_back(whole, new, None)  # what the cut one has left goes
    assert not (new / RESTORING).exists()
    with _serving(new, manifest) as again:
        again.device().work()


def test_a_backup_is_not_served_by_mistake(served: Served, tmp_path: Path, manifest: Manifest) -> None:
    backup = tmp_path / "backup"
    made = back_up(tmp_path / "data", backup, proved=False)
    said = f"is a backup.*`anabranch admin restore {backup} "
    with pytest.raises(DataError, match=said), _serving(backup, manifest):
        pass
    assert back_up(backup, tmp_path / "copy", proved=False).events == made.events  # it is what it was
    put_back(backup, tmp_path / "new", None)
    back_up(tmp_path / "new", tmp_path / "next", proved=False)  # which has the word of the one before
    with pytest.raises(DataError, match="is a backup"), _serving(tmp_path / "next", manifest):
        pass
    attest(backup, "", None)  # by an operator's own word
    for data_dir in (tmp_path / "new", backup):
        with _serving(data_dir, manifest) as again:
            again.device().work()


def _serving(data_dir: Path, manifest: Manifest) -> Served:
    return Served(server_config(data_dir), manifest)


# --- as its users see it --------------------------------------------------------------------------------

RUN = """
[run]
workload = "synthetic"
updates_max = 40
[fleet]
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = 1
"""


@pytest.mark.parametrize("own", [False, True])
def test_the_command_that_is_printed_puts_it_back(own: bool, tmp_path: Path) -> None:
    """A federation without an authority; one with a strategy of its own cannot be proved without a word."""
    shutil.copy(FOLDER / "strategy.py", tmp_path)
    strategy = ("--set", f"strategy.name={'./strategy.py:WarmUp' if own else 'fedasync'}")
    ports = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    with serving(tmp_path, "--model", "model", *ports, *strategy) as said:
        device = ("--server", said["address"], "--id", "device-0", "--tasks-max", 2)
        answer(anabranch(tmp_path, "client", "synthetic", *device, "--json"))
        folder = "a backup"
        done = anabranch(tmp_path, "admin", "backup", folder, *(["--load-code"] if own else []))
    assert done.returncode == 0, done.stderr
    command, *words = shlex.split(done.stdout.partition("put it back with:\n")[2])
    assert (command, words[-1]) == ("anabranch", "--insecure")
    assert ("--load-code" in words) == own
    back = anabranch(tmp_path, *("restored" if word == "DIR" else word for word in words))
    assert back.returncode == 0, back.stderr


def test_a_device_goes_on_with_a_server_from_a_backup(tmp_path: Path) -> None:
    """The server is guarded, at work, and killed; the device hears of it, and ends the run."""
    (tmp_path / "run.toml").write_text(RUN)
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    sha256 = answer(anabranch(tmp_path, "admin", "ca", "init", "--json"))["ca_sha256"]
    ports = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    settings = ["--set", f"identity.join_address={ports[2]}", "--set", "identity.tls=always"]
    start = ["run.toml", "--model", "model", "--address", ports[0], "--admin-address", ports[1], *settings]
    token = answer(anabranch(tmp_path, "admin", "enrol", "device-1", "--json"))["token"]
    joining = ["--join", ports[2], "--ca-sha256", sha256, "--token", token]
    device = ["client", "synthetic", "--server", ports[0], "--state-dir", "device", *joining, "--json"]
    server = Process(COMMAND, "server", *start, "--json", cwd=tmp_path, stdout=PIPE)
    with server, (tmp_path / "device.log").open("w") as log:
        assert server.stdout is not None
        assert '"serving"' in server.stdout.readline()
        process = Process(COMMAND, *device, cwd=tmp_path, stdout=PIPE, stderr=log)
        with process:
            _await_push(process, 3)
            printed = anabranch(tmp_path, "admin", "backup", "printed").stdout
            assert printed.endswith("  anabranch admin restore printed --data-dir DIR\n")
            made = answer(anabranch(tmp_path, "admin", "backup", "backup", "--json"))
            assert made["version"] >= 3
            _await_push(process, made["version"] + 2)
            server.kill()
            server.wait()
            back = anabranch(tmp_path, "admin", "restore", "backup", "--data-dir", "new", "--json")
            assert answer(back)["version"] == made["version"]
            with serving(tmp_path, *start, "--data-dir", "new") as said:
                assert said["version"] == made["version"]
                rest = process.stdout.read() if process.stdout is not None else ""
                assert process.wait(600) == 0, (tmp_path / "device.log").read_text() + rest
    assert "discarded, and the device goes on" in (tmp_path / "device.log").read_text()
    found = answer(anabranch(tmp_path, "verify", "new", "--ca-sha256", sha256, "--json"))
    assert (found["problems"], found["version"]) == ([], 40)


def _await_push(process: Process, version: int) -> None:
    """Until the device has been answered with this version or a later one."""
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        if said["kind"] == "pushed" and said["version"] >= version:
            return
    raise AssertionError("the device has ended")


def test_a_data_directory_may_be_a_link_to_another_disk(
    tmp_path: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("data", "again"):
        (tmp_path / f"disk-{name}").mkdir()
        (tmp_path / name).symlink_to(f"disk-{name}")
    with Served(server_config(tmp_path / "data"), manifest) as served:
        served.device().work()
    assert verify(tmp_path / "data").problems == ()
    assert (tmp_path / "disk-data" / "proved").is_dir(), caplog.text
    back_up(tmp_path / "data", tmp_path / "backup")
    put_back(tmp_path / "backup", tmp_path / "again", None)
    with Served(server_config(tmp_path / "again"), manifest) as served:
        served.device().work()
    assert verify(tmp_path / "again").problems == ()
