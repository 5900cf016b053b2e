"""Published models as files: a version is encoded once and served many times.

The files are a cache, never synced: the page cache serves them, and a restart may find them again.
A file carries its digest in its name, so one that was cut short by a crash is found out.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt

from anabranch.compress.codec import make_codec
from anabranch.compress.model import encode_model
from anabranch.core.engine import Engine
from anabranch.core.errors import UnknownVersion
from anabranch.core.params import ParamSpec, Vector

_NAME = re.compile(r"v(\d+)-([0-9a-f]{64})\.bin\Z")
# Vectors up to this size get the digest of every version on record, larger ones that of snapshots only:
# it would hold the writer up.
DIGEST_BYTES_MAX = 1 << 20
NEWEST_KEPT = 2  # so that a fetch that began before a publication can be resumed after it


@dataclass(frozen=True)
class ModelFile:
    """An encoded model on disk."""

    version: int
    path: Path
    size_bytes: int
    sha256: str
    codec: str

    def open(self) -> IO[bytes]:
        """The file, without a buffer; it stays readable when it is removed. Raises `UnknownVersion`."""
        try:
            return self.path.open("rb", buffering=0)
        except FileNotFoundError:
            raise UnknownVersion(f"version {self.version} is not held any more: fetch the newest") from None


class Models:
    """The files of one run. `keep` and `retain` are for the writer's thread, `get` for the event loop."""

    def __init__(
        self,
        folder: Path,
        spec: ParamSpec,
        frozen: Mapping[str, npt.NDArray[Any]],
        codec: str = "raw",
    ) -> None:
        self.spec, self.frozen = spec, frozen
        self._folder, self._codec = folder, make_codec(codec)
        self._executor = ThreadPoolExecutor(1, "anabranch-models")
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, Future[ModelFile]] = {}
        self._published_at: dict[int, float] = {}
        for path in folder.iterdir():
            if found := _NAME.match(path.name):
                version = int(found[1])
                self._files[version] = self._executor.submit(self._check, version, path, found[2])
            else:
                path.unlink()

    def published(self, version: int, now: float) -> None:
        """Note when a version was published."""
        self._published_at[version] = now

    def published_at(self, version: int) -> float:
        """When a version was published, in seconds since 1970; 0 where that is not known any more."""
        return self._published_at.get(version, 0.0)

    def keep(self, engine: Engine, version: int) -> None:
        """Encode a version that the engine holds, unless that was done; others stay unknown."""
        held = self._files.get(version)
        if held is not None and not (held.done() and held.exception() is not None):
            return
        vector = engine.vector if version == engine.version else engine.history.get(version)
        if vector is not None:
            self._files[version] = self._encode(version, vector)

    def retain(self, needed: Collection[int]) -> None:
        """Remove the versions that no live task needs, but for the newest ones."""
        newest = sorted(self._files)[-NEWEST_KEPT:]
        for version in [v for v in self._files if v not in needed and v not in newest]:
            self._files.pop(version).add_done_callback(_remove)
        last = max(self._published_at, default=0)
        for version in [v for v in self._published_at if v not in self._files and v != last]:
            del self._published_at[version]

    async def get(self, version: int) -> ModelFile:
        """The file of a version. Raises `UnknownVersion`."""
        future = self._files.get(version)
        if future is None:
            raise UnknownVersion(f"version {version} is not held: ask for a task, or for the newest version")
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish what is being written."""
        self._executor.shutdown()

    def _encode(self, version: int, vector: Vector) -> Future[ModelFile]:
        # The bytes are a copy: the engine may write on its vector while they are hashed and written.
        data = encode_model(self._codec, self.spec, vector, self.frozen)
        return self._executor.submit(self._write, version, data)

    def _write(self, version: int, data: bytes) -> ModelFile:
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._folder / f"v{version}-{sha256}.bin"
        path.write_bytes(data)
        return ModelFile(version, path, len(data), sha256, self._codec.text)

    def _check(self, version: int, path: Path, sha256: str) -> ModelFile:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            path.unlink()
            raise UnknownVersion(f"version {version} is not held: its file was cut short by a crash")
        return ModelFile(version, path, path.stat().st_size, sha256, self._codec.text)


def _remove(future: Future[ModelFile]) -> None:
    if future.exception() is None:
        future.result().path.unlink(missing_ok=True)
