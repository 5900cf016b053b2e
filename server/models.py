"""Published models as files: what leads to a version is encoded once and served many times.

The files are a cache, never synced: the page cache serves them. After a restart the raw ones are found
again, the others are made again from the engine. A file carries its digest in its name, so one that
was cut short by a crash is found out; and its version's head, as another history may have the number.

A small version that only tasks need is in no file where the engine has it as long as they do: those that mix
models make one of each update, for hardly more than one device, and have it again after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from anabranch.compress.broadcast import is_exact
from anabranch.compress.downloads import Download, Make, base_of
from anabranch.compress.downloads import Downloads as Payloads
from anabranch.compress.model import PART, frozen_apart, frozen_sha256, unknown_part
from anabranch.core.config.goal import AUTO_GOAL, Goal
from anabranch.core.config.ranges import SERVED
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import StoreError, UnknownVersion
from anabranch.core.model.chains import RAW, lacks
from anabranch.core.model.growing import needed_for
from anabranch.core.model.holdings import Holdings, since
from anabranch.core.model.params import ParamSpec, Tensors
from anabranch.core.model.submodels import Submodel, TensorSet, UnitMap
from anabranch.core.model.updates import Task
from anabranch.identity.files import make_private_folder, private, tighten
from anabranch.server.store.files import write_all

_APART = re.compile(r"frozen-[0-9a-f]{64}\.bin\Z")
_NAME = re.compile(r"v(\d+)-(exact|replica)-([0-9a-f]{64})-([0-9a-f]{64})\.bin\Z")
# Vectors up to this size get the digest of every version on record, larger ones that of snapshots only:
# it would hold the writer up.
DIGEST_BYTES_MAX = 1 << 20
IN_MEMORY_BYTES_MAX = DIGEST_BYTES_MAX  # larger ones of the newest would be missed by the engine

Read = Callable[[int, int], bytes | memoryview]  # so many bytes at most, from a place on

PARTS_SPARE = 16  # beside two for each task: so they are seldom looked through
LOOKED_AT_KEPT = 4  # by observers, who then say how good it is
NEWEST_KEPT = 2  # so that a fetch that began before a publication can be resumed after it


@dataclass(frozen=True)
class ModelRequest:
    """What somebody wants of a version.

    `form`: `exact` (the server's own vector), `replica` (what devices train from, raw) or `encoded` (the
    same, as cheap as can be; with `holds` from what the device has). Of a `submodel` that part of the exact
    vector, or of what is encoded.
    """

    version: int
    form: str
    holds: Holdings = None
    submodel: UnitMap | TensorSet | None = None

    @property
    def is_for_a_task(self) -> bool:
        """Whether it is of a part, or leads from parts: then hardly another device wants it."""
        return self.submodel is not None or isinstance(self.holds, tuple)


@dataclass(frozen=True)
class ModelFile:
    """A payload on disk, as `compress.downloads.Download` describes it; in memory where that is `made`."""

    version: int
    path: Path | None
    size_bytes: int
    sha256: str
    codec: str
    from_version: int | None = None
    vector_sha256: str = ""
    part_only: bool = False
    made: Download | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def open(self) -> Iterator[Read]:
        """How to read it, without a buffer; it stays readable when it is removed. Raises `UnknownVersion`."""
        if self.made is not None:
            yield self.made.read
            return
        assert self.path is not None, "it is in memory or in a file"
        with _cached(self.path):
            try:
                source = self.path.open("rb", buffering=0)
            except FileNotFoundError:
                gone = f"version {self.version} is not held any more: fetch the newest"
                raise UnknownVersion(gone) from None
            with source:
                yield partial(os.pread, source.fileno())

    def data(self) -> bytes:
        """All of it. Raises `UnknownVersion`."""
        with self.open() as read:
            pieces, offset = [], 0
            while piece := read(self.size_bytes - offset, offset):
                pieces.append(piece)
                offset += len(piece)
        return b"".join(pieces)


class Models:
    """The files of one run. `keep` and `retain` are for the writer's thread, `get` for the event loop."""

    def __init__(
        self,
        folder: Path,
        spec: ParamSpec,
        frozen: Tensors,
        codec_at: Callable[[int], str] = lambda _: RAW,
        goal: Goal = AUTO_GOAL,
        frozen_served: str = SERVED,
        own_parts: bool = False,
        head_of: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        """`head_of`: of a version of the run, for this thread and then the writer's; None: not known.

        Files of a version with another head are of a history that was lost, as to a backup, and are removed.
        """
        self.spec, self.frozen = spec, frozen
        self._folder, self._codec_at, self._head_of = folder, codec_at, head_of
        self._payloads = Payloads(spec, frozen, own_parts)
        self._executor = ThreadPoolExecutor(1, "anabranch-models")
        make_private_folder(folder)
        tighten(folder.parent, *folder.iterdir())
        self._files: dict[ModelRequest, Future[ModelFile]] = {}
        self._published_at: dict[int, float] = {}
        # The version published last, and the digest of its vector where there is one.
        self._published = (-1, "")
        # The best version that is here, and what was measured of it.
        self.best: tuple[int, Mapping[str, float]] | None = None
        self._goal = goal
        self._looked_at: deque[int] = deque(maxlen=LOOKED_AT_KEPT)
        # SHA-256 (hex) of what travels apart; empty where nothing does.
        self.frozen_sha256 = frozen_sha256(spec, frozen)
        self._frozen_served = frozen_served
        sends = spec.apart and frozen_served == SERVED
        self._apart = self._executor.submit(self._write_apart) if sends else None
        for path in folder.iterdir():
            if (found := _NAME.match(path.name)) and found[4] == head_of(int(found[1])):
                wanted = ModelRequest(int(found[1]), found[2])
                self._files[wanted] = self._executor.submit(self._check, wanted, path, found[3])
            elif not _APART.match(path.name):
                path.unlink()

    def published(self, version: int, now: float, vector_sha256: str = "") -> None:
        """Note when a version was published, and the digest of its vector if somebody has it already."""
        self._published_at[version] = now
        self._published = version, vector_sha256

    def published_at(self, version: int) -> float:
        """When a version was published, in seconds since 1970; 0 where that is not known any more."""
        return self._published_at.get(version, 0.0)

    def for_device(
        self, version: int, holds: Holdings, codecs: Collection[str], submodel: Submodel | None = None
    ) -> ModelRequest:
        """What a device gets that holds this, can decode these stages and trains `submodel`."""
        part = needed_for(submodel)
        if part is not None and is_exact(self._codec_at):
            return ModelRequest(version, "exact", submodel=part)
        text = self._codec_at(version)
        if text == RAW:
            return ModelRequest(version, "exact")
        if lacks(codecs, text):
            return ModelRequest(version, "replica")
        if self._payloads.takes_parts(codecs):
            return ModelRequest(version, "encoded", holds, part)
        return ModelRequest(version, "encoded", holds if isinstance(holds, int) else None)

    def keep(self, engine: Engine, wanted: ModelRequest, for_long: bool = False) -> None:
        """Have what the engine holds made, unless it is there; others stay unknown.

        `for_long`: in a file, which is there after a restart whether a task needs it or not.
        """
        held = self._files.get(wanted)
        if held is not None and not (held.done() and held.exception() is not None):
            if for_long:
                self._write_down(wanted)
            return
        same = self._same(engine, wanted)
        if same != wanted:
            self.keep(engine, same, for_long)
            if same in self._files:
                self._files[wanted] = self._files[same]
            return
        if (make := self._make(engine, wanted)) is not None:
            is_last = wanted == ModelRequest(engine.version, "exact") and self._published[0] == engine.version
            known = self._published[1] if is_last else ""
            if not for_long and self._is_small(engine, wanted):
                self._files[wanted] = _held(wanted, make(), known)
            else:
                self._submit(wanted, make, known)

    def rate(self, version: int, metrics: Mapping[str, float]) -> None:
        """A follower has measured a version: the best one that is here is kept, by the run's goal."""
        best = None if self.best is None else self.best[1]
        if ModelRequest(version, "exact") in self._files and self._goal.is_better(metrics, best):
            self.best = (version, metrics)
            self._write_down(ModelRequest(version, "exact"))

    @property
    def best_value(self) -> tuple[str, float]:
        """By which metric the best version is that, and its value; nothing and 0 where none was measured."""
        metrics = {} if self.best is None else self.best[1]
        value = self._goal.value(metrics)
        return ("", 0.0) if value is None else (self._goal.among(metrics).metric, value)

    def looked_at(self, version: int) -> None:
        """An observer fetches a version: it is kept until a measurement of it may have come."""
        self._looked_at.append(version)

    def exact(self) -> set[int]:
        """The versions whose own vectors are here."""
        return {wanted.version for wanted in self._files if wanted.form == "exact" and not wanted.submodel}

    def retain(self, needed: Collection[int]) -> None:
        """Remove the versions that no live task needs, but for the newest ones and the best."""
        spared = {*sorted({wanted.version for wanted in self._files})[-NEWEST_KEPT:], *self._looked_at}
        spared |= {self.best[0]} if self.best is not None else set()
        for wanted in [w for w in self._files if w.version not in needed and w.version not in spared]:
            self._files.pop(wanted).add_done_callback(_remove)
        last = max(self._published_at, default=0)
        known = {wanted.version for wanted in self._files}
        for version in [v for v in self._published_at if v not in known and v != last]:
            del self._published_at[version]

    def retain_parts(self, tasks: Mapping[str, Task]) -> None:
        """Remove the parts that no task is of any more, whenever there are many; then those made first."""
        parts = [wanted for wanted in self._files if wanted.is_for_a_task]
        most = 2 * len(tasks) + PARTS_SPARE
        if len(parts) <= most:
            return
        needed = {(task.base_version, needed_for(task.submodel)) for task in tasks.values()}
        kept = [wanted for wanted in parts if (wanted.version, wanted.submodel) in needed][-most:]
        gone = [self._files.pop(wanted) for wanted in set(parts).difference(kept)]
        shared = set(self._files.values())  # what leads from parts may be what leads from nothing
        for future in set(gone) - shared:
            future.add_done_callback(_remove)

    async def get(self, wanted: ModelRequest) -> ModelFile:
        """The file. Raises `UnknownVersion`."""
        future = self._files.get(wanted)
        if future is None:
            raise UnknownVersion(
                f"version {wanted.version} is not held: `anabranch admin export --list` names those that are"
            )
        return future.result() if future.done() else await _shared(future)

    async def part(self, part_id: int) -> ModelFile:
        """What travels apart, as a file for all versions. Raises `UnknownVersion` for any other part."""
        if part_id != PART or self._apart is None:
            raise unknown_part(part_id, self.spec, self._frozen_served)
        if self._apart.done() and self._apart.exception() is not None:
            self._apart = self._executor.submit(self._write_apart)
        return await _shared(self._apart)

    def close(self) -> None:
        """Finish what is being written."""
        self._executor.shutdown()

    def _same(self, engine: Engine, wanted: ModelRequest) -> ModelRequest:
        """The plainest wish that gets the same payload: no base that nothing leads from."""
        return replace(wanted, holds=base_of(engine, wanted.version, wanted.holds))

    def _make(self, engine: Engine, wanted: ModelRequest) -> Make | None:
        if wanted.submodel is not None:
            return self._payloads.offer(engine, wanted.version, wanted.holds, None, wanted.submodel)
        if wanted.form == "exact" and wanted.version == engine.version:
            return self._payloads.exact(engine)
        if wanted.form == "exact" and engine.broadcast is not None:
            return None  # its replica is another model
        codecs = () if wanted.form == "replica" else None
        return self._payloads.offer(engine, wanted.version, wanted.holds, codecs)

    def _is_small(self, engine: Engine, wanted: ModelRequest) -> bool:
        """Whether it is a whole version that the engine keeps for tasks, and need be in no file for them."""
        if wanted.form != "exact" or wanted.submodel is not None or not engine.keeps_history:
            return False
        return engine.vector.nbytes + self._payloads.tail_bytes <= IN_MEMORY_BYTES_MAX

    def _write_down(self, wanted: ModelRequest) -> None:
        """Have what is in memory written to a file."""
        held = self._files[wanted]
        if held.done() and held.exception() is None and (made := held.result().made) is not None:
            self._submit(wanted, lambda: made, held.result().sha256)

    def _submit(self, wanted: ModelRequest, make: Make, vector_sha256: str) -> None:
        head = self._head_of(wanted.version) or ""
        self._files[wanted] = self._executor.submit(self._write, wanted, make, head, vector_sha256)

    def _write(self, wanted: ModelRequest, make: Make, head: str, vector_sha256: str) -> ModelFile:
        """`head`: of the version. `vector_sha256`: see `_sha256`."""
        made = make()
        sha256 = _sha256(made, vector_sha256)
        start = "" if made.from_version is None else f"from{made.from_version}-"
        # Two wishes may get the same bytes, and each file is removed by itself.
        start += f"{_base_name(wanted.holds)}-" if wanted.is_for_a_task and wanted.holds is not None else ""
        form = wanted.form if wanted.submodel is None else f"part-{_part_name(wanted.submodel)}"
        path = self._folder / f"v{wanted.version}-{start}{form}-{sha256}-{head}.bin"
        with _cached(path), open(path, "wb", buffering=0, opener=private) as file:
            write_all(file, made.body)
            write_all(file, made.tail)
        return ModelFile(
            wanted.version,
            path,
            made.size_bytes,
            sha256,
            made.codec,
            made.from_version,
            made.vector_sha256,
            made.part_only,
        )

    def _write_apart(self) -> ModelFile:
        data, sha256 = frozen_apart(self.spec, self.frozen), self.frozen_sha256
        path = self._folder / f"frozen-{sha256}.bin"
        # Anew at each start: a crash may have cut it short.
        with _cached(path), open(path, "wb", buffering=0, opener=private) as file:
            write_all(file, data)
        return ModelFile(0, path, len(data), sha256, RAW)

    def _check(self, wanted: ModelRequest, path: Path, sha256: str) -> ModelFile:
        with suppress(OSError), path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return ModelFile(wanted.version, path, path.stat().st_size, sha256, RAW)
        with suppress(OSError):
            path.unlink()
        raise UnknownVersion(f"version {wanted.version} is not held: its file was cut short or is unreadable")


def _held(wanted: ModelRequest, made: Download, vector_sha256: str) -> Future[ModelFile]:
    """A payload that is in memory, at once."""
    sha256 = _sha256(made, vector_sha256)
    future: Future[ModelFile] = Future()
    future.set_result(ModelFile(wanted.version, None, made.size_bytes, sha256, made.codec, made=made))
    return future


def _sha256(made: Download, vector_sha256: str) -> str:
    """Of a payload; `vector_sha256`: of the vector that is its body, empty where that is not known."""
    if vector_sha256 and not made.tail:
        return vector_sha256
    hashed = hashlib.sha256(made.body)
    hashed.update(made.tail)
    return hashed.hexdigest()


async def _shared(future: Future[ModelFile]) -> ModelFile:
    """What comes of a future that is not this caller's alone: who goes does not cancel it for others."""
    return await asyncio.shield(asyncio.wrap_future(future))


def _base_name(holds: Holdings) -> str:
    """Of what is held, for a file that leads from it."""
    text = " ".join(f"{held.version}:{held.part and _part_name(held.part)}" for held in since(holds, 0))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _part_name(submodel: UnitMap | TensorSet) -> str:
    """Of a part, for a file of its own: two parts may have the same bytes."""
    bits = b"".join(submodel.bits) if isinstance(submodel, UnitMap) else submodel.bits
    return hashlib.sha256(bits).hexdigest()[:16]


def _remove(future: Future[ModelFile]) -> None:
    if future.exception() is None and (path := future.result().path) is not None:
        with suppress(OSError):  # the next start removes it
            path.unlink()


@contextmanager
def _cached(path: Path) -> Iterator[None]:
    """Inside, what the operating system says of a file of the cache is a `StoreError`: it can be made again.

    A full disk as well: `StoreFull` is what the log says, which may have room where no file can be made.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}, which devices fetch, cannot be used: {error.strerror}") from error
