"""A backup of a server at work: SIGKILL, the backup put back elsewhere, and all goes on."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from crash import abandon, summed, write_model
from crash_writer import VALUES, Writer
from server_logs import records_of
from server_process import Plan, ServerProcess

from anabranch.core.model.params import ParamSpec, digest
from anabranch.server.backup import back_up, put_back
from anabranch.server.restored import BACKUP
from anabranch.server.store.base import VersionRow
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify

BEFORE, AFTER = 60, 40  # updates that are acknowledged before the backup, and after it is back


@pytest.mark.prove
def test_what_was_acknowledged_before_a_backup_is_in_it(tmp_path: Path) -> None:
    check(tmp_path, Plan(seed=1, updates=100_000))


def test_so_it_is_with_payloads_in_files(tmp_path: Path) -> None:
    check(tmp_path, Plan(seed=2, updates=100_000, inline_bytes_max=512))


def check(folder: Path, plan: Plan) -> None:
    """Back up under load, kill, restore, go on; every promise is looked at."""
    first = np.random.default_rng(plan.seed).integers(-100, 101, VALUES).astype(np.float32)
    spec = write_model(folder, first, plan)
    server = ServerProcess(folder, plan)
    server.start()
    lost = started(range(4), plan.updates, server, spec, plan)
    await_updates(lost, BEFORE)
    before = [update_id for w in lost for update_id in list(w.acknowledged)]
    made = back_up(server.data_dir, folder / "backup")
    await_more(lost)  # it serves on, and each device has heard of all that is in the backup
    assert [problem for w in lost for problem in w.problems] == []
    server.kill()
    abandon(lost)
    backup, word = put_back(folder / "backup", folder / "elsewhere", None)
    assert backup == made
    server.start()  # its rows were behind its log
    assert server.drain() == 0
    same = rows(server.data_dir, made.version)
    assert len(same) == made.version
    assert rows(folder / "elsewhere", word.version) == same[: word.version]
    again = ServerProcess(folder, plan, data_dir=folder / "elsewhere")
    again.start()
    fresh = started(range(4, 6), AFTER // 2, again, spec, plan)
    for writer in fresh:
        writer.join()
        assert writer.problems == []
    assert again.drain() == 0
    found = verify(folder / "elsewhere", whole=True)
    logged = {record["update_id"] for record in records_of(folder / "elsewhere", kind="update")}
    assert found.problems == ()
    assert found.version == made.version + AFTER == len(logged)
    assert set(before) | {update_id for w in fresh for update_id in w.acknowledged} <= logged
    assert rows(folder / "elsewhere", made.version) == same
    kept = [update for w in lost for update in w.applied if update.version <= made.version]
    assert len(kept) == made.version
    expected = summed(first, [*kept, *(update for w in fresh for update in w.applied)])
    assert found.model_sha256 == digest(expected)
    assert (folder / "backup" / BACKUP).is_file()


def started(numbers: range, share: int, server: ServerProcess, spec: ParamSpec, plan: Plan) -> list[Writer]:
    """Devices at work."""
    found = [Writer(n, share, server.address, spec, plan.seed) for n in numbers]
    for writer in found:
        writer.start()
    return found


def await_updates(writers: list[Writer], count: int) -> None:
    """Until so many are acknowledged."""
    while sum(len(w.acknowledged) for w in writers) < count:
        assert all(w.is_alive() for w in writers), [w.problems for w in writers]
        time.sleep(0.005)


def await_more(writers: list[Writer]) -> None:
    """Until each of them has been answered twice more: the second of these it has begun meanwhile."""
    for writer, count in [(w, len(w.acknowledged)) for w in writers]:
        while len(writer.acknowledged) < count + 2:
            assert writer.is_alive(), writer.problems
            time.sleep(0.005)


def rows(data_dir: Path, last: int) -> list[tuple[int, str | None, str | None]]:
    """The versions of a history up to one, by their heads and digests."""
    store = open_store("", data_dir)
    try:
        found: list[VersionRow] = store.versions(limit=last)
    finally:
        store.close()
    return [(row.version, row.head, row.link) for row in found]
