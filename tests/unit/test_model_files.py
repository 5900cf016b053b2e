"""The files of published models, and who waits for them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import threading
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pytest
from desks import LIMITS, TENSORS, Desk, settings

from anabranch.core import events as ev
from anabranch.core.config.tables import merge
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.model.params import ParamSpec
from anabranch.server.models import IN_MEMORY_BYTES_MAX, ModelFile, ModelRequest, Models
from anabranch.server.store.factory import open_store
from anabranch.server.store.files import PIECE_BYTES, write_all
from anabranch.server.store.memory import MemoryStore
from anabranch.strategies.registry import make_strategy

FIRST = ModelRequest(0, "exact")
MIXING = merge([("test", {"strategy": {"name": "fedasync", "alpha": 1.0}})])
START = TENSORS["w"].tobytes()


class Greedless(io.RawIOBase):
    """A file that takes at most so many bytes at a time, and remembers the most that it was offered."""

    def __init__(self, most: int) -> None:
        self.most, self.offered, self.data = most, 0, b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.offered = max(self.offered, len(data))
        self.data += data[: self.most]
        return min(len(data), self.most)


@pytest.mark.parametrize("most", [100_000, 10 * PIECE_BYTES])
def test_a_file_is_offered_no_more_than_a_piece_at_a_time_and_gets_all(most: int) -> None:
    data = random.Random(0).randbytes(3 * PIECE_BYTES + 17)
    file = Greedless(most)
    write_all(cast("IO[bytes]", file), data)
    assert file.data == data
    assert file.offered == PIECE_BYTES


def test_a_model_of_several_pieces_is_in_its_file(tmp_path: Path) -> None:
    vector = np.random.default_rng(0).standard_normal(200_001, np.float32)
    frozen = {"steps": np.arange(70_000)}
    spec = ParamSpec.of({"w": vector, **frozen})
    engine = Engine(spec, make_strategy("fedbuff", {}), EngineSettings(), vector)
    models = Models(tmp_path / "models", spec, frozen)
    models.keep(engine, FIRST)
    models.close()
    (path,) = (tmp_path / "models").iterdir()
    data = path.read_bytes()
    assert data[: vector.nbytes] == vector.tobytes()
    assert frozen["steps"].tobytes() in data
    assert hashlib.sha256(data).hexdigest() in path.name


@pytest.mark.parametrize(
    ("version", "frozen", "is_taken"), [(0, {}, True), (1, {}, False), (0, {"steps": np.arange(9)}, False)]
)
def test_a_digest_that_is_known_is_that_of_the_file_where_the_file_is_the_vector_alone(
    version: int, frozen: dict[str, Any], is_taken: bool, tmp_path: Path
) -> None:
    vector, known = np.ones(8, np.float32), "f" * 64  # by which it is told from one that was made
    spec = ParamSpec.of({"w": vector, **frozen})
    engine = Engine(spec, make_strategy("fedbuff", {}), EngineSettings(), vector)
    models = Models(tmp_path / "models", spec, frozen)
    models.published(version, 0.0, known)
    models.keep(engine, FIRST)
    models.close()
    (path,) = (tmp_path / "models").iterdir()
    made = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (known if is_taken else made) in path.name


def test_who_goes_while_a_file_is_made_leaves_it_to_the_others(tmp_path: Path) -> None:
    desk = Desk(MemoryStore(LIMITS), tmp_path, settings())
    begin = threading.Event()
    desk.models._executor.submit(begin.wait)  # what is asked for next is queued behind it

    async def waiting() -> int:
        desk.models.keep(desk.books.engine, FIRST)
        gone, stays = (asyncio.create_task(desk.models.get(FIRST)) for _ in range(2))
        await asyncio.sleep(0)  # both wait now
        gone.cancel()
        await asyncio.wait([gone])
        desk.models.keep(desk.books.engine, FIRST)  # as the writer does for the next who asks
        begin.set()
        assert gone.cancelled()
        return (await stays).size_bytes

    try:
        assert asyncio.run(waiting()) >= 8 * 4
    finally:
        begin.set()
        desk.drop()


# --- a version of each update --------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted((folder / "models").iterdir())


def got(desk: Desk, version: int) -> ModelFile:
    return asyncio.run(desk.models.get(ModelRequest(version, "exact")))


def test_a_version_that_tasks_need_is_in_no_file_where_the_engine_has_it_as_well(tmp_path: Path) -> None:
    """And stays as it was, whatever the engine does with its own."""
    desk = Desk(MemoryStore(LIMITS), tmp_path, MIXING)
    for client in ("a", "b", "c"):
        desk.enrol(client)
    one, two, three = (desk.ask(client, f"{client}1") for client in ("a", "b", "c"))
    first = got(desk, 0)
    desk.push(one, 3.0)
    desk.push(two, 5.0)
    later = desk.ask("a", "a2").base_version
    second = got(desk, later)
    desk.tell(ev.TaskDropped(desk.tick(), "a", "a2", "gone"))
    desk.push(three, 7.0)  # made of a version that no task needs, so of the engine's own
    data = [first.data(), second.data()]
    found, model = files(tmp_path), desk.books.engine.vector.tobytes()
    desk.drop()
    assert found == []
    assert data[0] == START
    assert hashlib.sha256(data[1]).hexdigest() == second.sha256 == desk.store.versions()[later - 1].sha256
    assert model not in data


def test_what_is_in_memory_is_read_in_pieces_frozen_tensors_as_well(tmp_path: Path) -> None:
    vector, frozen = np.arange(9, dtype=np.float32), {"steps": np.arange(5)}
    spec = ParamSpec.of({"w": vector, **frozen})
    engine = Engine(spec, make_strategy("fedasync", {}), EngineSettings(), vector)
    models = Models(tmp_path / "models", spec, frozen)
    models.published(0, 0.0, "f" * 64)  # of the vector alone
    models.keep(engine, FIRST)
    held = asyncio.run(models.get(FIRST))
    models.keep(engine, FIRST, for_long=True)
    models.close()
    (path,) = files(tmp_path)
    with held.open() as read:
        pieces = [bytes(piece) for at in range(held.size_bytes + 1) if (piece := read(1, at))]
        assert bytes(read(1_000, 30)) == vector.tobytes()[30:]
    assert b"".join(pieces) == held.data() == path.read_bytes()
    assert hashlib.sha256(held.data()).hexdigest() == held.sha256
    assert held.size_bytes == len(pieces) > vector.nbytes + 40 - 1


@pytest.mark.parametrize(("more", "is_in_file"), [(0, False), (1, True)])
def test_a_large_version_is_in_a_file(more: int, is_in_file: bool, tmp_path: Path) -> None:
    vector = np.zeros(IN_MEMORY_BYTES_MAX // 4 + more, np.float32)
    spec = ParamSpec.of({"w": vector})
    models = Models(tmp_path / "models", spec, {})
    models.keep(Engine(spec, make_strategy("fedasync", {}), EngineSettings(), vector), FIRST)
    models.close()
    assert bool(files(tmp_path)) is is_in_file


def test_a_task_has_its_version_after_a_restart(tmp_path: Path) -> None:
    desk = Desk(open_store("", tmp_path), tmp_path, MIXING)
    for client in ("a", "b"):
        desk.enrol(client)
    desk.push(desk.ask("a", "t1"), 3.0)
    old = desk.ask("a", "t2").base_version
    desk.push(desk.ask("b", "t3"), 5.0)
    before = got(desk, old)
    desk.drop()
    again = Desk(open_store("", tmp_path), tmp_path, MIXING)
    assert again.books.engine.version > old
    assert again.ask("a", "t2").base_version == old
    after = got(again, old)
    again.drop()
    assert (after.data(), after.sha256) == (before.data(), before.sha256)


@pytest.mark.parametrize("wanted_by", ["task", "observer", "measurement"])
def test_a_version_that_is_measured_is_there_after_a_restart(wanted_by: str, tmp_path: Path) -> None:
    vector, head = np.arange(9, dtype=np.float32), "a" * 64
    spec = ParamSpec.of({"w": vector})
    engine = Engine(spec, make_strategy("fedasync", {}), EngineSettings(), vector)
    models = Models(tmp_path / "models", spec, {}, head_of=lambda _: head)
    models.keep(engine, FIRST)
    if wanted_by == "observer":
        models.keep(engine, FIRST, for_long=True)
    if wanted_by == "measurement":
        models.rate(0, {"accuracy": 0.5})
        assert models.best is not None
    models.close()
    again = Models(tmp_path / "models", spec, {}, head_of=lambda _: head)
    assert again.exact() == (set() if wanted_by == "task" else {0})
    if again.exact():
        assert asyncio.run(again.get(FIRST)).data() == vector.tobytes()
    again.close()
