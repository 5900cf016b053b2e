"""The bundle of a run, as its server offers it: a file, sent in pieces from any offset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from anabranch.core.errors import InvalidUpdate, Unavailable, disk_error
from anabranch.core.limits import BUNDLE_BYTES_MAX
from anabranch.identity.bundle import open_bundle
from anabranch.protos.frames import Chunk
from anabranch.server.job_folder import BUNDLE


@dataclass(frozen=True)
class OfferedBundle:
    """A bundle whose signature is good, whoever's it is: whom they trust is for the devices to say."""

    path: Path
    sha256: str
    size_bytes: int
    signer: str

    def chunks(self, offset: int, chunk_bytes: int) -> Iterator[Chunk]:
        """Its bytes from an offset on. Raises `InvalidUpdate` for one past its end, `Unavailable`."""
        if offset > self.size_bytes:
            raise InvalidUpdate(f"offset {offset} is past the bundle's {self.size_bytes} bytes")
        try:
            with self.path.open("rb", buffering=0) as source:
                while data := os.pread(source.fileno(), chunk_bytes, offset):
                    yield Chunk(offset, data)
                    offset += len(data)
        except OSError as error:
            raise Unavailable(f"the bundle cannot be read now: {error.strerror}") from error


def offered_in(job: Path) -> OfferedBundle | None:
    """The bundle of a job's folder, if it has one. Raises as `open_bundle`, and `StoreError`."""
    return offered_at(job / BUNDLE)


def offered_at(path: Path) -> OfferedBundle | None:
    """The bundle in a file; None where there is none. Raises as `open_bundle`, and `StoreError`."""
    try:
        with path.open("rb") as source:
            data = source.read(BUNDLE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(path, error) from error
    bundle = open_bundle(data)
    return OfferedBundle(path, bundle.sha256, len(data), bundle.signer)
