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
from desks import LIMITS, Desk, settings

from anabranch.core.engine.engine import Engine
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.model.params import ParamSpec
from anabranch.server.models import ModelRequest, Models
from anabranch.server.store.files import PIECE_BYTES, write_all
from anabranch.server.store.memory import MemoryStore
from anabranch.strategies.registry import make_strategy

FIRST = ModelRequest(0, "exact")


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
